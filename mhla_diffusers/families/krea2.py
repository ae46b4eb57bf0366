"""Krea 2: ``Krea2Transformer2DModel``.

Single-stream blocks over 512 tokens of padded and masked text, then the image, both with RoPE. Groups of heads share
keys, and a gate weighs every channel of the heads. Text comes as the states of several layers of its encoder; the
attention that fuses these is not patched. Default blocks are those of all images.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .adapters import ONE_SEQUENCE, Arguments, AttentionInputs, JointAdapter, Projected
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .flux import grid_of_ids
from .models import image_model, tiny_image
from .values import keep_with

_CLASS = "Krea2Transformer2DModel"
_TEXT_TOKENS = 512
_TINY: dict[str, Any] = {"in_channels": 16, "num_key_value_heads": 1, "intermediate_size": 32, "text_hidden_dim": 16}
_TINY |= {"timestep_embed_dim": 8, "num_text_layers": 2, "text_num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}
_TINY |= {"text_num_key_value_heads": 2, "text_intermediate_size": 16}


class Krea2Adapter(JointAdapter):
    """All tokens come in one argument, heads share keys, and a gate of the input weighs the output."""

    places = ONE_SEQUENCE

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of the queries' heads and head dim."""
        return int(attn.num_heads), int(attn.head_dim)

    def projections(self, attn: Any) -> list[torch.nn.Module]:
        """Add the gate."""
        return [*super().projections(attn), attn.to_gate]

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query, key and value of all tokens, keys and values repeated for the heads that share them."""
        projected = (getattr(attn, name)(arguments["hidden_states"]) for name in self.inputs[:3])
        query, key, value = (x.unflatten(-1, (-1, attn.head_dim)) for x in projected)
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (attn.norm_k(key), value))
        return attn.norm_q(query), key, value

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Gate the channels of the heads, then project them."""
        gate = attn.to_gate(inputs.hidden_states).sigmoid()
        return super().project_output(attn, output * gate.unflatten(-1, output.shape[2:]), inputs)


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from the places behind the text, once per tensor."""
        return grid_of_ids(arguments["position_ids"], arguments["encoder_hidden_states"].shape[1])

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add picture, row and column of text, all 0, and of the grid's tokens."""
        grid, tokens = self.token_grid(transformer, latents), conditioning["encoder_hidden_states"].shape[1]
        places = torch.cartesian_prod(*(torch.arange(size).float() for size in (1, *grid)))
        ids = torch.cat([torch.zeros(tokens, 3), places]).to(latents.device)
        keep_with(ids, grid)  # known here, and the ids may be on the meta device
        return {"position_ids": ids, **super().arguments(transformer, latents, timestep, conditioning)}


KREA2 = Family(
    name="krea2",
    transformers=(_CLASS,),
    attention=Attention(
        adapter=Krea2Adapter(context_first=True), dispatches=True, extra=(None, 0), extra_tokens=_TEXT_TOKENS
    ),
    forward=_Forward(
        fixed_patch=(2, 2),
        packs_latents=True,
        takes_sigma=True,
        # Qwen3-VL's
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "num_text_layers", "text_hidden_dim")),
            Condition("encoder_attention_mask", (_TEXT_TOKENS,), output=1, dtype=torch.bool),
        ),
    ),
    trained=Training(encodes_frames=True),
    models=(image_model("krea-2", _CLASS, 48, 128, 28), tiny_image("krea2", _CLASS, _TINY, head_dim=16)),
)
