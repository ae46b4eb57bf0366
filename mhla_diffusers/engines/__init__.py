"""Plug-ins that bring sparse attention to inference engines: ComfyUI, vLLM-Omni and SGLang.

An engine hands over query, key and value after RoPE, and :func:`mhla_diffusers.patching.route.attend` attends. MHLA's
mixing matrices are weights of a patched diffusers model, so MHLA runs there alone. Nothing here is imported unless the
engine does it.
"""
