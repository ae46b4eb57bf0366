"""DiG: ``DiGTransformer2DModel`` of :mod:`mhla_diffusers.models.dig`, DiT with gated linear attention.

Tokens are the image alone; there is no RoPE. MHLA replaces the gated sum over earlier tokens (paper, Sec. 5.2), with
the paper's 16 blocks by default. The rest of DiG's attention stays: projections, the norm over each head, and the
output gate. Only the gate of the state is unused. DiG's queries and keys are half as wide as its values; MHLA's are as
wide, so create a model that you want to patch with ``expand_k=1.0``.
"""

from typing import Any

from torch import Tensor, nn

from ..config import PatchConfig
from .adapters import AttentionAdapter, AttentionInputs, finite
from .dit import DIT
from .family import Attention, Family
from .models import Model, squares, tiny_image

_CLASS = "DiGTransformer2DModel"
_WIDE = {"expand_k": 1.0}


class DiGAdapter(AttentionAdapter):
    """Between the heads and the output projection are a norm over each head and an output gate."""

    idle = ("to_decay",)

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Norm, gate and output projection of the attention."""
        return finite(attn.project_output(output, inputs.hidden_states))

    def projections(self, attn: Any) -> list[nn.Module]:
        """Return all linear layers of the attention, including the gate of the state, which a patch does not run."""
        return [*super().projections(attn), attn.to_gate, *attn.to_decay]


class SoftmaxProcessor:
    """Softmax attention over all tokens instead of gated linear attention, as a baseline for benchmarks."""

    def __call__(self, attn: Any, hidden_states: Tensor) -> Any:
        """Attend: (B, N, hidden size) to the same."""
        tokens = hidden_states.shape[1]
        inputs = DIG.attention.adapter.read(attn, {"hidden_states": hidden_states}, (tokens,), tokens)
        query, key, value = (x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value))
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return DIG.attention.adapter.project_output(attn, attended.transpose(1, 2), inputs)


def _model(name: str, heads: int, layers: int, **different: Any) -> Model:
    return Model(
        name, _CLASS, heads, 64, layers, (4, 4), squares(256, 512, 1024, 2048), _WIDE, **different, has_rope=False
    )


class _Attention(Attention):
    def why_not_patched(self, transformer: Any, config: PatchConfig) -> str | None:
        """Refuse queries and keys that are not as wide as the values."""
        expand = transformer.config.expand_k
        if expand == 1:
            return None
        return (
            f"This DiG has queries and keys of {expand} of the width of its values (expand_k={expand}), and MHLA's are "
            "as wide as them. Make a model with DiGTransformer2DModel(expand_k=1.0, ...) and train it, as the paper "
            "does; weights of one width do not fit the other."
        )


DIG = Family(
    name="dig",
    transformers=(_CLASS,),
    attention=_Attention(
        adapter=DiGAdapter(),
        class_path="DiGAttention",
        processor="mhla_diffusers.models.dig.GatedLinearAttnProcessor",
        softmax_processor="mhla_diffusers.families.dig.SoftmaxProcessor",
        computes="gated linear",
    ),
    forward=DIT.forward,
    trained=DIT.trained,
    library="mhla_diffusers.models.dig",
    squares_only=True,
    default_clip=DIT.default_clip,
    models=(_model("dig-s-2", 6, 12), _model("dig-xl-2", 18, 28), tiny_image("dig", _CLASS, _WIDE, has_rope=False)),
)
