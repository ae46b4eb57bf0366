"""Qwen-Image: ``QwenImageTransformer2DModel``.

Joint attention in every block over 512 tokens of text, then the image, each with its own RoPE as complex numbers;
padded text is masked. The transformer takes packed latents, 2x2 to a token, and the token grid of every picture.
Default blocks are those of all images.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.rope import Rotary, rotary_of_complex
from .adapters import Arguments, JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import image_model, tiny_image

_CLASS = "QwenImageTransformer2DModel"
_TEXT_TOKENS = 512
"""Default of the pipeline's call, which pads text to the longest of a batch and masks the padding."""
_NO_PROMPT = " "
"""Negative prompt of the pipeline's documentation."""
_TINY = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "in_channels": 16, "out_channels": 4}


class QwenImageAdapter(JointAdapter):
    """The text has its own mask and RoPE table."""

    text_mask = "encoder_hidden_states_mask"

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Return (B, N) of all tokens; ValueError for a mask of another kind."""
        if "attention_mask" in arguments:
            raise ValueError(
                "Qwen-Image masks its text with encoder_hidden_states_mask and takes no attention_mask; leave it out."
            )
        return super().key_mask(arguments)

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of image and text."""
        if "rotary_emb" not in arguments:
            return None
        of_grid, of_text = (rotary_of_complex(numbers) for numbers in arguments["rotary_emb"])
        cos, sin = (self.joined(own, text) for own, text in zip(of_grid, of_text, strict=True))
        return cos, sin


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read ``img_shapes`` of the first sample, for the whole batch; ValueError unless they are one picture."""
        first = arguments["img_shapes"][0]
        pictures = first if isinstance(first, list) else [first]
        (frames, height, width), *others = pictures
        if others or frames != 1:
            raise ValueError(
                f"img_shapes={pictures} are {len(pictures)} pictures of {frames} frame(s): MHLA takes one picture, not "
                "one with others as its context, as in Qwen-Image-Edit and Qwen-Image-Layered. Run this pipeline "
                "without the patch: remove_mhla(pipe)."
            )
        return height, width

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the shape of one picture for every sample."""
        shape = (1, *self.token_grid(transformer, latents))
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {"img_shapes": [[shape]] * len(latents), **arguments}


class _Training(Training):
    def guidance_arguments(self, guidance: float) -> Kwargs:
        """Ask for classifier-free guidance, which the pipeline runs if it is given a negative prompt."""
        return {"true_cfg_scale": guidance, **({"negative_prompt": _NO_PROMPT} if guidance > 1 else {})}


QWENIMAGE = Family(
    name="qwenimage",
    transformers=(_CLASS,),
    attention=Attention(
        feed_forwards=("img_mlp", "txt_mlp"),
        adapter=QwenImageAdapter(context_first=True),
        processor="diffusers.models.transformers.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0",
        dispatches=True,
        extra=(None, 0),
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=_Forward(
        fixed_patch=(2, 2),
        packs_latents=True,
        takes_sigma=True,
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),
            Condition("encoder_hidden_states_mask", (_TEXT_TOKENS,), output=1, dtype=torch.int64),
        ),
    ),
    trained=_Training(encodes_frames=True, pads_text=True),
    models=(image_model("qwen-image", _CLASS, 24, 128, 60), tiny_image("qwenimage", _CLASS, _TINY, head_dim=16)),
)
