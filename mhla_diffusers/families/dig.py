"""DiG: ``DiGTransformer2DModel`` of :mod:`mhla_diffusers.models.dig`, DiT with gated linear attention.

MHLA takes the place of the gated sum over the tokens before (paper, Sec. 5.2), and what else DiG's attention has stays:
projections, the norm over each head, and the gate of the output. Only the gate of the state has nothing to do then.
DiG's queries and keys are half as wide as its values; MHLA's are as wide, so a model that is to be patched is made with
``expand_k=1.0``.
"""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..config import MHLAConfig
from .adapters import AttentionAdapter, AttentionInput, finite
from .dit import DiTFamily
from .sizes import Model


def _model(name: str, heads: int, layers: int, **more: Any) -> Model:
    settings = {"num_attention_heads": heads, "attention_head_dim": 64, "expand_k": 1.0}
    sizes = tuple((side, side) for side in (256, 512, 1024, 2048))
    kind = "DiGTransformer2DModel"
    return Model(name, kind, settings, heads, 64, layers, (4, 4), stride=8, patch=2, sizes=sizes, **more)


_TINY = Model(
    "tiny-dig",
    "DiGTransformer2DModel",
    {"num_attention_heads": 2, "attention_head_dim": 12, "expand_k": 1.0},
    2,
    12,
    3,
    blocks=(2, 2),
    stride=8,
    patch=2,
    sizes=((64, 64),),
)


class DiGAdapter(AttentionAdapter):
    """The adapter of attention beside which DiG has a norm over each head and a gate of the output."""

    idle = ("to_decay",)

    def project_output(self, attn: Any, output: torch.Tensor, given: AttentionInput) -> Any:
        """Norm, gate and output projection of the attention."""
        return finite(attn.project_output(output, given.hidden_states))

    def projections(self, attn: Any) -> list[nn.Module]:
        """All linear layers that the attention runs, those of the gate of the state too, which a patch does not."""
        return [*super().projections(attn), attn.to_gate, *attn.to_decay]


class _SoftmaxProcessor:
    """Softmax attention over all tokens in the place of gated linear attention, to be measured beside it."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor) -> Any:
        adapter, given = DiGFamily.adapter, AttentionInput(hidden_states)
        query, key, value = (x.transpose(1, 2) for x in adapter.project(attn, given))
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return adapter.project_output(attn, attended.transpose(1, 2), given)


class DiGFamily(DiTFamily):
    """Class-conditional image transformers whose own attention reads tokens in turns along rows and columns."""

    name = "dig"
    library = "mhla_diffusers.models.dig"
    transformers = ("DiGTransformer2DModel",)
    adapter = DiGAdapter()
    default_config = MHLAConfig(blocks=(4, 4))
    own_attention = "gated linear"
    lacks_processor_methods = False
    measured_unasked = False
    models = (_model("dig-s-2", 6, 12), _model("dig-xl-2", 18, 28), _TINY)

    def self_attention_processor(self) -> Any:
        """``GatedLinearAttnProcessor``."""
        return import_module(self.library).GatedLinearAttnProcessor()

    def softmax_processor(self) -> Any:
        """Softmax with DiG's norm and gate behind it."""
        return _SoftmaxProcessor()

    def recognises_self_attention(self, attn: Any) -> bool:
        """By its class, of which no other model has any."""
        return type(attn).__name__ == "DiGAttention"

    def why_not_patched(self, transformer: Any, config: MHLAConfig) -> str | None:
        """Queries and keys are as wide as values."""
        expand = transformer.config.expand_k
        if expand == 1:
            return None
        return (
            f"This DiG has queries and keys of {expand} of the width of its values (expand_k={expand}), and MHLA's are "
            "as wide as them. Make a model with DiGTransformer2DModel(expand_k=1.0, ...) and train it, as the paper "
            "does; weights of one width do not fit the other."
        )
