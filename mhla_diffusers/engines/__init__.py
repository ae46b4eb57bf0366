"""Plug-ins that bring sparse attention to ComfyUI, vLLM-Omni and SGLang; MHLA needs diffusers.

An engine hands over query, key and value after RoPE, and :func:`mhla_diffusers.patching.route.attend` attends.
"""
