"""Flux.3: ``Flux3Transformer2DModel``.

First blocks of image and text each by itself, then single-stream blocks over text and image, both with RoPE. The
attention of text by itself is not patched. Default blocks are those of all images.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .adapters import ONE_SEQUENCE, JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample
from .flux import grid_of_ids
from .models import image_model, tiny_image
from .values import keep_with

_CLASS = "Flux3Transformer2DModel"
_TEXT_TOKENS = 512
_TINY = {"axes_dims_rope": (4, 4, 4, 4), "joint_attention_dim": 16, "in_channels": 16, "cond_in_channels": 16}


class Flux3Adapter(JointAdapter):
    """All tokens come in one argument."""

    places = ONE_SEQUENCE


class _Attention(Attention):
    def blocks_of(self, transformer: Any) -> dict[str, Any]:
        """Take of the blocks of single modes those of the image."""
        modes = {f"mode_blocks.image.{index}": block for index, block in enumerate(transformer.mode_blocks["image"])}
        single = enumerate(transformer.single_transformer_blocks)
        return modes | {f"single_transformer_blocks.{index}": block for index, block in single}


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from the ids, once per tensor; ValueError for reference pictures."""
        if arguments.get("image_cond_hidden_states") is not None:
            raise ValueError(
                "image_cond_hidden_states are reference pictures: MHLA takes none as its context. Run this pipeline "
                "without the patch: remove_mhla(pipe)."
            )
        return grid_of_ids(arguments["img_ids"])

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add ids, rows and columns halved as in training, and for a flow map a step to the end."""
        grid, tokens = self.token_grid(transformer, latents), conditioning["encoder_hidden_states"].shape[1]
        scale = torch.tensor([1, 0.5, 0.5, 1])
        ids, text_ids = (
            (torch.cartesian_prod(*map(torch.arange, sizes)) * scale).to(latents.device)
            for sizes in ((1, *grid, 1), (1, 1, 1, tokens))
        )
        keep_with(ids, grid)  # known here, and the ids may be on the meta device
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        end = {"target_timestep": torch.zeros_like(timestep)} if transformer.config.flow_map else {}
        return {"img_ids": ids, "txt_ids": text_ids, **arguments, **end}


FLUX3 = Family(
    name="flux3",
    transformers=(_CLASS,),
    attention=_Attention(
        block_lists=("mode_blocks", "single_transformer_blocks"),
        adapter=Flux3Adapter(context_first=True),
        class_path="Flux3Attention",
        dispatches=True,
        extra=(None, 0),
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=_Forward(
        fixed_patch=(2, 2),
        packs_latents=True,
        takes_sigma=True,
        # Qwen3-VL's
        conditions=(Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),),
    ),
    trained=(
        "diffusers has no pipeline of Flux.3 but a modular one, which mhla does not call. "
        "apply_mhla(pipe, calibration=...) fits a patch without training."
    ),
    models=(
        image_model("flux.3", _CLASS, 24, 128, 5, more_layers={"num_single_layers": 28}),
        tiny_image("flux3", _CLASS, _TINY, head_dim=16, layers=2, more_layers={"num_single_layers": 1}),
    ),
)
