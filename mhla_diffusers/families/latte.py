"""Latte: ``LatteTransformer3DModel``.

Spatial blocks, in which every frame attends to itself, alternate with temporal blocks, in which every position attends
to itself in other frames. The patch covers the spatial blocks, ``transformer_blocks``: they see the frames as a batch,
each a (height, width) token grid. A temporal attention has only as many tokens as there are frames. Positions are added
to the tokens; there is no RoPE. Costs and sizes are for one frame. Default blocks have 8x8 tokens at 512 px.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .family import Attention, Condition, Family, Forward, Sample, Training, scaled_latents
from .models import Clip, Model, squares, tiny_image
from .processes import LearnedVarianceDDPM

_CLASS = "LatteTransformer3DModel"
# changes the class's defaults to the model that the pipeline takes
_USUAL = {"in_channels": 4, "out_channels": 8, "patch_size": 2, "attention_bias": True, "norm_type": "ada_norm_single"}
_USUAL |= {"norm_elementwise_affine": False, "norm_eps": 1e-6, "num_embeds_ada_norm": 1000}
_USUAL |= {"activation_fn": "gelu-approximate"}
_REAL = {**_USUAL, "cross_attention_dim": 1152, "caption_channels": 4096}


class _Forward(Forward):
    @property
    def makes_videos(self) -> bool:
        """Whether a sample has frames: True, although frames are no axis of the grid."""
        return True

    def token_grid(self, transformer: Any, latents: Tensor) -> tuple[int, ...]:
        """Return the grid of every frame, (height, width)."""
        return super().token_grid(transformer, latents[:, :, 0])


class _Training(Training):
    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode every frame separately, to (B, C, F, H, W)."""
        latents = pipe.vae.encode(pixels.transpose(1, 2).flatten(0, 1)).latent_dist.mode().float()
        return scaled_latents(pipe.vae, latents).unflatten(0, (len(pixels), -1)).transpose(1, 2)

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Encode to ``encoder_hidden_states`` (120, channels) of T5, 0 after the text."""
        # two prompts, because the pipeline cuts a single one to its length, and a batch needs equal lengths
        text, _ = self.encode_text(pipe, [prompt, prompt], {"clean_caption": True, **(settings or {})})
        return {"encoder_hidden_states": text[0]}


LATTE = Family(
    name="latte",
    transformers=(_CLASS,),
    attention=Attention(),
    forward=_Forward(
        # the pipeline pads several prompts to 120 tokens, with 0
        conditions=(Condition("encoder_hidden_states", (120, "caption_channels")),)
    ),
    trained=_Training(ddpm=LearnedVarianceDDPM),
    default_clip=Clip(frames=16, fps=8.0, sizes=((512, 512),)),
    models=(
        Model("latte-1", _CLASS, 16, 72, 28, (4, 4), squares(512, 1024), _REAL, frames=16, has_rope=False),
        tiny_image(
            "latte", _CLASS, {**_USUAL, "cross_attention_dim": 24, "caption_channels": 32}, frames=3, has_rope=False
        ),
    ),
)
