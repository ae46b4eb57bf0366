"""Transformers of diffusers without a family, by name: the grid of their tokens, or why they cannot be patched."""

from collections.abc import Mapping
from typing import Any

REFUSED = {
    "AnyFlowFARTransformer3DModel": (
        "it generates chunk by chunk and mixes frames of two resolutions, so its tokens are not one grid. Patch "
        "AnyFlowTransformer3DModel of AnyFlowPipeline"
    ),
    "Kandinsky6SRTransformer3DModel": (
        "its attention (nabla) is already sparse. Patch Kandinsky6Transformer3DModel, which makes the video that it "
        "enlarges"
    ),
    "WanAnimate2Transformer3DModel": (
        "each frame attends to reference keys that no other frame may see, and all queries see extra tokens. Patch "
        "WanAnimateTransformer3DModel of WanAnimatePipeline"
    ),
}
"""Class → why, as the end of a sentence."""
BY_GRID = {
    "Cosmos3OmniTransformer": "grid=lambda vision_token_shapes, **_: vision_token_shapes[0], extra=(None, 0)",
    "HiDreamImageTransformer2DModel": (
        "grid=lambda hidden_states, **_: [n // 2 for n in hidden_states.shape[2:]], extra=(0, None)"
    ),
    "QwenImage21Transformer2DModel": "grid=lambda img_shapes, **_: img_shapes[0][-1], extra=(None, 0)",
}
"""Class → arguments with which ``apply_mhla(pipe, ...)`` patches it."""


def why_refused(kind: Any) -> str | None:
    """Return why a class of diffusers, one derived from it, or one of this name cannot be patched."""
    return _found(kind, REFUSED)


def by_grid(kind: Any) -> str | None:
    """Return the arguments that patch a class of diffusers, or one derived from it, by its grid; None if unknown."""
    return _found(kind, BY_GRID)


def _found(kind: Any, known: Mapping[str, str]) -> str | None:
    if isinstance(kind, str):
        return known.get(kind)
    named = (cls.__name__ for cls in kind.__mro__ if cls.__module__.startswith("diffusers."))
    return next((known[name] for name in named if name in known), None)
