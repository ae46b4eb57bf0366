"""Z-Image: ``ZImageTransformer2DModel``.

Single-stream blocks over the image, then up to 512 tokens of text. Learned tokens pad each to a multiple of 32 and take
part as text does. Before these blocks two layers refine the image and two the text; they keep softmax attention. Images
and texts are lists, because the texts of a batch have different lengths. RoPE rotates both and is passed as complex
numbers. Default blocks are those of all images.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .adapters import JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import image_model, tiny_image

_CLASS = "ZImageTransformer2DModel"
_TEXT_TOKENS = 512
"""Default of the pipeline's call, which cuts text there."""
_PATCH = 2
"""Latents per token along height and width, by default of the transformer's forward."""
_LAYERS: dict[str, Any] = {"layers_argument": "n_layers"}
_TINY = {"dim": 32, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 32, "axes_dims": [4, 6, 6]}


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from a list of images (C, F, H, W).

        Raises:
            ValueError: several images for one sample, images of several sizes, or frames of a video.
        """
        images, patch = arguments["x"], arguments.get("patch_size", _PATCH)
        if isinstance(images[0], list):
            raise ValueError(
                f"x holds {len(images[0])} pictures for a sample: MHLA takes one, not one with others as its context, "
                "as in Z-Image-Omni. Run this pipeline without the patch: remove_mhla(pipe)."
            )
        sizes = {tuple(image.shape[1:]) for image in images}
        (frames, height, width), *others = sizes
        if others or frames != 1:
            raise ValueError(
                f"x holds images of the sizes {sorted(sizes)}, (frames, height, width) of latents: MHLA takes one size "
                "for a batch, of one frame. Run images of other sizes one after another."
            )
        return height // patch, width // patch

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Pass lists of images with one frame and of texts without their padding."""
        texts = list(conditioning["cap_feats"])
        if not conditioning["cap_feats"].is_meta:  # which has no lengths to read
            masks = conditioning["cap_feats_mask"].bool()
            texts = [text[mask] for text, mask in zip(texts, masks, strict=True)]
        return {"x": list(latents[:, :, None]), "t": timestep, "cap_feats": texts}


class _Training(Training):
    def prediction(self, transformer: Any, output: Any, latents: Tensor) -> Tensor:
        """Stack the list of images of one frame."""
        return super().prediction(transformer, torch.stack(list(output))[:, :, 0], latents)


Z_IMAGE = Family(
    name="z_image",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("layers",),
        attentions=("attention",),
        feed_forwards=("feed_forward",),
        adapter=JointAdapter(rotary_argument="freqs_cis"),
        processor="diffusers.models.transformers.transformer_z_image.ZSingleStreamAttnProcessor",
        dispatches=True,
        extra=(0, None),
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=_Forward(
        fixed_patch=(_PATCH, _PATCH),
        latents_name="x",
        timestep_name="t",
        takes_sigma=True,
        time_is_reversed=True,
        # Qwen3's
        conditions=(
            Condition("cap_feats", (_TEXT_TOKENS, "cap_feat_dim")),
            Condition("cap_feats_mask", (_TEXT_TOKENS,), dtype=torch.int64),
        ),
    ),
    trained=_Training(pads_text=True),
    models=(
        image_model("z-image", _CLASS, 30, 128, 30, **_LAYERS, more_layers={"n_refiner_layers": 2}),
        tiny_image("z_image", _CLASS, _TINY, head_dim=16, **_LAYERS, more_layers={"n_refiner_layers": 1}),
    ),
)
