"""LongCat-Image: ``LongCatImageTransformer2DModel``.

Flux's layout, RoPE and default blocks without pooled text and embedded guidance. Text is padded and not masked. The ids
of text count its tokens; those of the image begin where the longest text ends.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .family import Condition, Family, Kwargs, Training
from .flux import FLUX, FluxForward
from .models import image_model, tiny_image

_CLASS = "LongCatImageTransformer2DModel"
_TEXT_TOKENS = 512
_TINY = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 16, "pooled_projection_dim": 16}


class _Forward(FluxForward):
    def ids(self, latents: Tensor, grid: tuple[int, ...], text_tokens: int) -> tuple[Tensor, Tensor]:
        """Return kind, row and column of the grid's tokens, (N, 3), and kind and place of the text's."""
        first, text = torch.tensor([1.0, _TEXT_TOKENS, _TEXT_TOKENS]), torch.arange(text_tokens).float()
        places = torch.cartesian_prod(torch.zeros(1), *(torch.arange(size).float() for size in grid)) + first
        return places.to(latents.device), torch.stack([torch.zeros_like(text), text, text], 1).to(latents.device)


class _Training(Training):
    def prompt_arguments(self, pipe: Any, prompts: Sequence[str]) -> Kwargs:
        """Return the prompts, which the pipeline would else rewrite by its language model."""
        return {"prompt": list(prompts), "enable_prompt_rewrite": False}


LONGCAT_IMAGE = Family(
    name="longcat_image",
    transformers=(_CLASS,),
    attention=replace(FLUX.attention, class_path="LongCatImageAttention"),
    forward=_Forward(
        # Qwen2.5-VL's
        conditions=(Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),)
    ),
    trained=_Training(),
    models=(
        image_model("longcat-image", _CLASS, 24, 128, 10, more_layers={"num_single_layers": 20}),
        tiny_image("longcat_image", _CLASS, _TINY, head_dim=16, layers=2, more_layers={"num_single_layers": 1}),
    ),
)
