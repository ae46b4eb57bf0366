"""What language and vision models of transformers have in common, beside diffusion models of diffusers."""

from importlib.metadata import version
from typing import Any

from torch import nn

from ..config import MHLAConfig
from .adapters import AttentionAdapter
from .attention_classes import OwnAttention
from .base import Family

_NEEDED = (5, 23)
"""Of transformers, whose attentions, masks and caches were others before; the version that is tested."""


class TransformersAdapter(AttentionAdapter):
    """Attentions with ``q_proj``, ``k_proj``, ``v_proj``, and ``o_proj`` or ``out_proj``."""

    def query_projection(self, attn: Any) -> Any:
        """Of all these models."""
        return attn.q_proj

    def output_projection(self, attn: Any) -> Any:
        """``o_proj``, or SigLIP's ``out_proj``."""
        return attn.o_proj if hasattr(attn, "o_proj") else attn.out_proj

    def projections(self, attn: Any) -> list[nn.Module]:
        """All linear layers that the attention runs."""
        return [attn.q_proj, attn.k_proj, attn.v_proj, self.output_projection(attn)]


class TransformersFamily(Family):
    """Models of transformers, which know no denoising steps, and whose attentions get a place for a processor."""

    library = "transformers"

    def self_attention_processor(self) -> Any:
        """What stands for the attention implementation that the model's configuration names."""
        return OwnAttention()

    def why_not_patched(self, transformer: Any, config: MHLAConfig) -> str | None:
        """An older transformers, what :meth:`why_not_fitting` tells, and denoising steps."""
        kind = type(transformer).__name__
        if (why := _why_too_old(kind) or self.why_not_fitting(kind, config)) is not None:
            return why
        if config.softmax_steps:
            return (
                f"softmax_steps={config.softmax_steps!r} counts denoising steps, which {kind} does not have; leave it "
                "at 0."
            )
        return None

    def why_not_fitting(self, kind: str, config: MHLAConfig) -> str | None:
        """Why models of this family cannot have these settings, and the way out; None, if they can.

        Args:
            kind: class of the model.
            config: settings that no other check refuses.
        """
        return None


def _why_too_old(kind: str) -> str | None:
    """Why the transformers that is installed is too old for a patch of a model; None if it is not."""
    major, minor, *_ = version("transformers").split(".")
    if (int(major), int(minor)) >= _NEEDED:
        return None
    return (
        f"A patch of {kind} needs the attentions, masks and caches of transformers {'.'.join(map(str, _NEEDED))} or "
        f"newer, and {major}.{minor} is installed: pip install --upgrade transformers."
    )
