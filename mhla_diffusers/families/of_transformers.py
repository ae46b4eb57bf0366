"""What models of transformers share: no denoising steps, and attentions that get a processor while patched."""

from importlib.metadata import version
from typing import Any

from ..config import PatchConfig
from .adapters import AttentionAdapter

PROCESSOR = "mhla_diffusers.families.patched_classes.OwnAttention"
_OLDEST = (5, 23)
"""Oldest version of transformers whose attentions, masks and caches are these; the version that is tested."""


class TransformersAdapter(AttentionAdapter):
    """Attentions of transformers."""

    inputs = ("q_proj", "k_proj", "v_proj")
    outputs = ("o_proj",)

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of the queries' heads and head dim."""
        return int(attn.config.num_attention_heads), int(attn.head_dim)


def why_not_here(transformer: Any, config: PatchConfig) -> str | None:
    """Return why no patch fits an old transformers version, or settings for denoising steps a model without them."""
    kind, installed = type(transformer).__name__, version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < _OLDEST:
        return (
            f"A patch of {kind} needs the attentions, masks and caches of transformers {'.'.join(map(str, _OLDEST))} "
            f"or newer, and {installed} is installed: pip install --upgrade transformers."
        )
    if config.asks_for_dense_steps:
        return f"{config.dense_words} counts denoising steps, which {kind} does not have; leave it out."
    return None
