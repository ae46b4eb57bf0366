"""Custom node of ComfyUI: link or copy this folder into ComfyUI's custom_nodes, where mhla_diffusers is installed."""

from mhla_diffusers.engines.comfyui import comfy_entrypoint

__all__ = ["comfy_entrypoint"]
