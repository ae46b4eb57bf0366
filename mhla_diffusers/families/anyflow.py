"""AnyFlow: ``AnyFlowTransformer3DModel``, Wan distilled to steps of any length.

Wan's self-attention and default blocks. Latents have frames before channels, every frame has its own time, and the
model also takes the time at which a step ends.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..attention.rope import Rotary
from .adapters import Arguments, AttentionAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import Clip
from .wan import tiny_wan, wan_model

_CLASS = "AnyFlowTransformer3DModel"


class AnyFlowAdapter(AttentionAdapter):
    """RoPE comes as complex numbers (1, 1, N, D / 2), one table for the query and one for the key."""

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of the query, which is that of the key."""
        return super().rotary(attn, {**arguments, "rotary_emb": arguments["rotary_emb"]["query"][0]})


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from ``hidden_states`` (B, F, C, H, W)."""
        return self.token_grid(transformer, arguments["hidden_states"].transpose(1, 2))

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Put frames before channels; the velocity is the output for steps of no length, which end where they begin."""
        times = timestep if timestep.ndim == 2 else timestep[:, None].expand(-1, latents.shape[2])
        arguments = super().arguments(transformer, latents.transpose(1, 2), times, conditioning)
        return {**arguments, "r_timestep": times}


class _Training(Training):
    def prediction(self, transformer: Any, output: Any, latents: Tensor) -> Tensor:
        """Put channels before frames."""
        return super().prediction(transformer, output, latents).transpose(1, 2)


ANYFLOW = Family(
    name="anyflow",
    transformers=(_CLASS,),
    attention=Attention(block_lists=("blocks",), attentions=("attn1",), adapter=AnyFlowAdapter(), dispatches=True),
    forward=_Forward(axes=3, conditions=(Condition("encoder_hidden_states", (512, "text_dim")),)),
    trained=_Training(),
    mhla_blocks=(7, 3, 5),
    default_clip=Clip(frames=81, fps=16.0, sizes=((480, 832),)),
    models=(wan_model("anyflow-14b", 40, 13824, 40, transformer=_CLASS), tiny_wan("anyflow", _CLASS)),
)
