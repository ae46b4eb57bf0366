"""Flux.2: ``Flux2Transformer2DModel``, dev and Klein.

Flux's layout and default blocks, with RoPE for the text too. In single-stream blocks one layer makes query, key, value
and the hidden channels of the feed-forward, and another projects heads and feed-forward together. The autoencoder norms
its latents packed, 2x2 to a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .adapters import AttentionAdapter, JointAdapter, ParallelAdapter
from .family import Attention, Condition, Family, Training
from .flux import FluxForward
from .models import Clip, image_model, tiny_image

_CLASS = "Flux2Transformer2DModel"
_TEXT_TOKENS = 512
_KLEIN = {"joint_attention_dim": 7680, "guidance_embeds": False}
_TINY = {"axes_dims_rope": (4, 4, 4, 4), "joint_attention_dim": 48, "in_channels": 16, "timestep_guidance_channels": 8}


@dataclass(kw_only=True, eq=False)
class _Attention(Attention):
    single_adapter: AttentionAdapter = ParallelAdapter(context_first=True)
    """Adapter of single-stream blocks, whose attentions also run the feed-forward."""

    def adapter_of(self, attn: Any) -> AttentionAdapter:
        """Return the adapter of the kind of block."""
        return self.single_adapter if hasattr(attn, "to_qkv_mlp_proj") else self.adapter


class _Forward(FluxForward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid as Flux; ValueError for more than one picture, or cached ones."""
        if arguments.get("kv_cache_mode") is not None:
            raise ValueError(
                f"kv_cache_mode={arguments['kv_cache_mode']!r} caches reference pictures, which MHLA does not take. "
                "Run this pipeline without the patch: remove_mhla(pipe)."
            )
        return super().grid_of_arguments(transformer, arguments)

    def ids(self, latents: Tensor, grid: tuple[int, ...], text_tokens: int) -> tuple[Tensor, Tensor]:
        """Return picture, row, column and place in the text of tokens and of text, (B, N, 4)."""
        of_grid, of_text = (1, *grid, 1), (1, 1, 1, text_tokens)
        places = (torch.cartesian_prod(*map(torch.arange, sizes)) for sizes in (of_grid, of_text))
        ids, text_ids = (one.to(latents.device).expand(len(latents), -1, -1) for one in places)
        return ids, text_ids


class _Training(Training):
    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode, and norm each channel of a token."""
        return _normed(pipe.vae, super().encode_pixels(pipe, pixels))

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> Tensor:
        """Generate latents, and norm Klein's, whose pipeline returns what the autoencoder takes."""
        latents = super().generate_latents(pipe, prompt, clip, steps, guidance, generator)
        return _normed(pipe.vae, latents[None])[0] if "is_distilled" in pipe.config else latents


FLUX2 = Family(
    name="flux2",
    transformers=(_CLASS,),
    attention=_Attention(
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        adapter=JointAdapter(context_first=True),
        dispatches=True,
        feed_forwards=("ff", "ff_context"),
        extra=(None, 0),
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=_Forward(
        # Mistral's tokens, or Qwen3's for Klein
        conditions=(Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),),
        guidance=4.0,  # the pipeline's default
    ),
    trained=_Training(),
    models=(
        image_model("flux.2-dev", _CLASS, 48, 128, 8, more_layers={"num_single_layers": 48}),
        image_model("flux.2-klein-4b", _CLASS, 24, 128, 5, settings=_KLEIN, more_layers={"num_single_layers": 20}),
        tiny_image("flux2", _CLASS, _TINY, head_dim=16, layers=2, more_layers={"num_single_layers": 1}),
    ),
)


def _normed(vae: Any, latents: Tensor) -> Tensor:
    """Norm latents (B, C, H, W) by the autoencoder's statistics of each channel of a token."""
    packed, norm = functional.pixel_unshuffle(latents.float(), 2), vae.bn
    mean, variance = norm.running_mean.float(), norm.running_var.float()
    return functional.pixel_shuffle(functional.batch_norm(packed, mean, variance, eps=vae.config.batch_norm_eps), 2)
