"""Transformers of diffusers that cannot be patched, by name, with the reason and what to do instead."""

from typing import Any

REFUSED = {
    "AnyFlowFARTransformer3DModel": (
        "it generates chunk by chunk, by a flex_attention mask or a cache of keys over frames of two resolutions, "
        "which are no token grid. Patch AnyFlowTransformer3DModel of AnyFlowPipeline"
    ),
    "Cosmos3OmniTransformer": (
        "its attention takes text and generated tokens apart and without a batch axis, and the text's is causal. A "
        "family would have to run that one beside sparse attention over all; run this pipeline without a patch"
    ),
    "Kandinsky6SRTransformer3DModel": (
        "its attention is sparse already: every layer chooses blocks of keys by their content (nabla). Patch "
        "Kandinsky6Transformer3DModel, which makes the video that it enlarges"
    ),
    "QwenImage21Transformer2DModel": (
        "its attention is block-causal, and after the first step the prompt's keys come from a cache. A family would "
        "have to run the prompt's attention beside the picture's, which sees keys without queries. Patch "
        "QwenImageTransformer2DModel of QwenImagePipeline"
    ),
    "WanAnimate2Transformer3DModel": (
        "every frame also attends to the reference's keys of that frame alone, by a flex_attention mask, and extra "
        "tokens would be seen by all frames. Patch WanAnimateTransformer3DModel of WanAnimatePipeline"
    ),
}
"""Class → why, as the end of a sentence."""


def why_refused(kind: Any) -> str | None:
    """Return why a class of diffusers, or one derived from it, cannot be patched; None if nothing is known against it.

    Args:
        kind: the class, or its name.
    """
    if isinstance(kind, str):
        return REFUSED.get(kind)
    named = (cls.__name__ for cls in kind.__mro__ if cls.__module__.startswith("diffusers."))
    return next((REFUSED[name] for name in named if name in REFUSED), None)
