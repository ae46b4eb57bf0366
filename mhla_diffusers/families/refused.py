"""Transformers of diffusers that cannot be patched, by name, and why."""

from typing import Any

REFUSED = {
    "AnyFlowFARTransformer3DModel": (
        "it generates chunk by chunk and mixes frames of two resolutions, so its tokens are not one grid. Patch "
        "AnyFlowTransformer3DModel of AnyFlowPipeline"
    ),
    "Kandinsky6SRTransformer3DModel": (
        "its attention (nabla) is already sparse. Patch Kandinsky6Transformer3DModel, whose video it upscales"
    ),
    "WanAnimate2Transformer3DModel": (
        "each frame attends to reference keys that no other frame may see, and all queries see extra tokens. Patch "
        "WanAnimateTransformer3DModel of WanAnimatePipeline"
    ),
}
"""Class → why, as the end of a sentence."""


def why_refused(kind: Any) -> str | None:
    """Return why a class of diffusers, one derived from it, or one of this name cannot be patched."""
    if isinstance(kind, str):
        return REFUSED.get(kind)
    names = (cls.__name__ for cls in kind.__mro__ if cls.__module__.startswith("diffusers."))
    return next((REFUSED[name] for name in names if name in REFUSED), None)
