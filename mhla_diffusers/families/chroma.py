"""Chroma: ``ChromaTransformer2DModel``.

Flux's layout, RoPE and default blocks without pooled text and embedded guidance: text, then image. Padded text but for
its first token is masked. diffusers' pipeline makes this mask of floating-point ones and zeros, which diffusers then
adds to the scores: a padded token weighs 1/e of another. A patch adds it for every query, diffusers for all but those
of padded tokens. A bool mask, which training here uses, leaves padding out in both.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .adapters import Arguments, JointAdapter
from .family import Condition, Family, Kwargs, Sample, Training
from .flux import FLUX, FluxForward
from .models import image_model, tiny_image

_CLASS = "ChromaTransformer2DModel"
_TEXT_TOKENS = 512
_TINY = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "in_channels": 16, "approximator_num_channels": 16}
_TINY |= {"approximator_hidden_dim": 16, "approximator_layers": 1}


class ChromaAdapter(JointAdapter):
    """Blocks make a mask of pairs, (B, 1, N, N), of one of tokens."""

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Take (B, N) of the last query, which is of the image."""
        if (mask := arguments.get("attention_mask")) is not None:
            arguments = {**arguments, "attention_mask": mask[:, :, -1:]}
        return super().key_mask(arguments)


class _Forward(FluxForward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid as Flux; ValueError for a mask under gradient checkpointing, or more than one picture."""
        is_checkpointed = transformer.gradient_checkpointing and torch.is_grad_enabled()
        if is_checkpointed and arguments.get("attention_mask") is not None:
            raise ValueError(
                "Under gradient checkpointing diffusers does not pass Chroma's attention_mask to its single-stream "
                "blocks, so padding would take part in them. Train with batch_size: 1, which needs no mask, or with "
                "gradient_checkpointing: false."
            )
        return super().grid_of_arguments(transformer, arguments)

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Cut texts where the longest ends, and mask text and image where one is shorter."""
        text, mask = conditioning["encoder_hidden_states"], conditioning["attention_mask"].bool()
        longest = text.shape[1] if mask.is_meta else int(mask.sum(dim=1).max())
        text, mask = text[:, :longest], mask[:, :longest]
        arguments = super().arguments(transformer, latents, timestep, {"encoder_hidden_states": text})
        if mask.is_meta or bool(mask.all()):  # without values there are no lengths
            return arguments
        of_image = mask.new_ones(arguments["hidden_states"].shape[:2])
        return {**arguments, "attention_mask": torch.cat([mask, of_image], dim=1)}


CHROMA = Family(
    name="chroma",
    transformers=(_CLASS,),
    attention=replace(FLUX.attention, adapter=ChromaAdapter(context_first=True), class_path=None, rows_alike=True),
    forward=_Forward(
        # T5's
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),
            Condition("attention_mask", (_TEXT_TOKENS,), output=2, dtype=torch.bool),
        )
    ),
    trained=Training(),
    models=(
        image_model("chroma1-hd", _CLASS, 24, 128, 19, more_layers={"num_single_layers": 38}),
        tiny_image("chroma", _CLASS, _TINY, head_dim=16, layers=2, more_layers={"num_single_layers": 1}),
    ),
)
