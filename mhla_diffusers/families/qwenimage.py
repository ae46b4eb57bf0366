"""Qwen-Image: ``QwenImageTransformer2DModel``.

Joint attention in every block with the text before the image, each with its own RoPE as complex numbers; padded text is
masked. The transformer takes packed latents, 2x2 to a token, and the token grid of every picture.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..attention.rope import Rotary, rotary_of_complex
from .adapters import Arguments, JointAdapter
from .family import Condition, Sample, of_unit_scale
from .models import Clip, image_model, tiny_image
from .styles import PackedImageFamily, PaddedTextFamily

_CLASS = "QwenImageTransformer2DModel"
_TEXT_TOKENS = 512
"""Default of the pipeline's call, which pads text to the longest of a batch and masks the padding."""
_NO_PROMPT = " "
"""Negative prompt of the pipeline's documentation."""
_TINY = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "in_channels": 16, "out_channels": 4}


class QwenImageAdapter(JointAdapter):
    """The text has its own mask and RoPE table."""

    def key_mask(self, arguments: Arguments) -> torch.Tensor | None:
        """(B, N): all tokens of the grid take part.

        Raises:
            ValueError: a mask of another kind.
        """
        if "attention_mask" in arguments:
            raise ValueError(
                "Qwen-Image masks its text with encoder_hidden_states_mask and takes no attention_mask; leave it out."
            )
        return self.mask_of_context(arguments, arguments.get("encoder_hidden_states_mask"))

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """RoPE of image and text."""
        if "rotary_emb" not in arguments:
            return None
        of_grid, of_text = (rotary_of_complex(numbers) for numbers in arguments["rotary_emb"])
        cos, sin = (self.joined(own, text) for own, text in zip(of_grid, of_text, strict=True))
        return cos, sin


class QwenImageFamily(PaddedTextFamily, PackedImageFamily):
    """Text-to-image transformers with a (height, width) token grid."""

    name = "qwenimage"
    transformers = (_CLASS,)
    adapter = QwenImageAdapter(context_first=True)
    processor = "diffusers.models.transformers.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0"
    extra_tokens = _TEXT_TOKENS
    feed_forwards = ("img_mlp", "txt_mlp")
    forward_names = (
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        "timestep",
        "img_shapes",
        "guidance",
    )
    conditions = (
        Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),
        Condition("encoder_hidden_states_mask", (_TEXT_TOKENS,), output=1, dtype=torch.int64),
    )
    models = (
        image_model("qwen-image", _CLASS, 24, 128, 60),
        tiny_image("qwenimage", _CLASS, head_dim=16, settings=_TINY),
    )

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """From ``img_shapes`` of the first sample, which the model uses for the whole batch.

        Raises:
            ValueError: more than one picture, or frames of a video.
        """
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

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """With the shape of one picture for every sample."""
        shape = (1, *self.token_grid(transformer, latents))
        arguments = super().forward_arguments(transformer, latents, timestep, conditioning)
        return {"img_shapes": [[shape]] * len(latents), **arguments}

    def encode_pixels(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """(B, 16, H, W): a video autoencoder, for which an image is one frame."""
        return of_unit_scale(pipe.vae, pipe.vae.encode(pixels).latent_dist.mode().float())[:, :, 0]

    def latent_shape(self, transformer: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """(C, H, W), halved once per entry of the autoencoder's ``temperal_downsample``."""
        stride, (height, width) = 2 ** len(vae["temperal_downsample"]), clip.sizes[0]
        return self.channels(transformer), height // stride, width // stride

    def guidance_arguments(self, guidance: float) -> dict[str, Any]:
        """Classifier-free guidance, which the pipeline runs if it is given a negative prompt."""
        return {"true_cfg_scale": guidance, **({"negative_prompt": _NO_PROMPT} if guidance > 1 else {})}
