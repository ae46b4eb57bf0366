"""Kandinsky 5.0: ``Kandinsky5Transformer3DModel``, of videos and images.

Softmax self-attention over the video alone, whose latents have channels last. RoPE rounds query and key to bfloat16, so
the adapter applies it as the model does. Default blocks cut 31x32x48 tokens, 121 frames of 512x768, into about three
latent frames by ten tokens each way.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.rope import Rotary
from .adapters import Arguments, AttentionAdapter, AttentionInputs, Projected, finite
from .family import Attention, Condition, Family, Forward, Kwargs, Sample
from .models import Clip, Model, tiny_video

_CLASS = "Kandinsky5Transformer3DModel"
_TEXT_TOKENS = 512
_TINY: dict[str, Any] = {"in_text_dim": 16, "in_text_dim2": 12, "time_dim": 16, "model_dim": 24, "ff_dim": 32}
_TINY |= {"axes_dims": (4, 4, 4)}
_LITE = {"in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 1792, "ff_dim": 7168, "visual_cond": True}
_LAYERS: dict[str, Any] = {"layers_argument": "num_visual_blocks"}
_FRAMES: dict[str, Any] = {"frames": 121, "temporal_stride": 4, "more_layers": {"num_text_blocks": 2}}


class Kandinsky5Adapter(AttentionAdapter):
    """Names of its own, and RoPE as matrices, which rounds what it rotates."""

    rope_by_head = True
    inputs = ("to_query", "to_key", "to_value")
    outputs = ("out_layer",)

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of heads and head dim."""
        return int(attn.num_heads), int(attn.to_query.out_features) // int(attn.num_heads)

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return None, since :meth:`project` rotates."""
        return None

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query and key after RoPE, given as (1 or B, N, 1, D / 2, 2, 2)."""
        head_dim, matrices = self.heads(attn)[1], arguments.get("rotary_emb")

        def rotated(x: Tensor, norm: Any) -> Tensor:
            normed = norm(x.float()).type_as(x)
            if matrices is None:
                return normed
            turned = (matrices * normed.unflatten(-1, (-1, 1, 2)).float()).sum(dim=-1).flatten(-2)
            return turned.bfloat16().type_as(x)

        projected = (getattr(attn, name)(arguments["hidden_states"]) for name in self.inputs)
        query, key, value = (x.unflatten(-1, (-1, head_dim)) for x in projected)
        return rotated(query, attn.query_norm), rotated(key, attn.key_norm), value

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Run the output layer."""
        return finite(attn.out_layer(output.flatten(2)))


class Kandinsky5Forward(Forward):
    """Kandinsky 5.0's forward, whose latents have channels last."""

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read latents (B, F, H, W, C); ValueError for attention in another order of the tokens."""
        if arguments.get("sparse_params") is not None:
            raise ValueError(
                "sparse_params reorder the tokens for attention that is sparse already (nabla), as models of 10 "
                "seconds have it. Run this pipeline without the patch: remove_mhla(pipe)."
            )
        return self.token_grid(transformer, arguments["hidden_states"].movedim(-1, 1))

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Move channels last, add an empty picture and mask where the model takes them, and places for RoPE."""
        grid, tokens = self.token_grid(transformer, latents), conditioning["encoder_hidden_states"].shape[1]
        others = latents.shape[1] + 1 if transformer.config.visual_cond else 0
        taken = torch.cat([latents, torch.zeros_like(latents[:, :1]).expand(-1, others, -1, -1, -1)], dim=1)
        *places, text = (torch.arange(size, device=latents.device) for size in (*grid, tokens))
        arguments = super().arguments(transformer, taken.movedim(1, -1), timestep, conditioning)
        return {**arguments, "visual_rope_pos": places, "text_rope_pos": text}


KANDINSKY5 = Family(
    name="kandinsky5",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("visual_transformer_blocks",),
        attentions=("self_attention",),
        feed_forwards=("feed_forward",),
        adapter=Kandinsky5Adapter(),
        dispatches=True,
    ),
    forward=Kandinsky5Forward(
        axes=3,
        channels_name="in_visual_dim",
        # Qwen2.5-VL's tokens, and CLIP's pooled text
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "in_text_dim")),
            Condition("pooled_projections", ("in_text_dim2",), output=1),
        ),
    ),
    trained=(
        "Kandinsky 5.0 takes latents with channels last beside those of a picture and a mask, which mhla encode does "
        "not make. apply_mhla(pipe, calibration=...) fits a patch without training."
    ),
    mhla_blocks=(10, 3, 5),
    default_clip=Clip(frames=121, fps=24.0, sizes=((512, 768),)),
    models=(
        Model("kandinsky-5.0-lite", _CLASS, 28, 64, 32, (10, 3, 5), ((512, 768),), _LITE, **_LAYERS, **_FRAMES),
        tiny_video("kandinsky5", _CLASS, _TINY, **_LAYERS, more_layers={"num_text_blocks": 1}),
    ),
)
