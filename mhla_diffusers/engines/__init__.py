"""Plug-ins that bring sparse attention to inference engines: ComfyUI, vLLM-Omni and SGLang.

An engine hands over query, key and value after RoPE, and :class:`.attend.EngineAttention` attends. Nothing here is
imported unless the engine does it.
"""
