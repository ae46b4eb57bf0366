"""Qwen-Image: ``QwenImageTransformer2DModel``.

Joint attention in every block, the text before the image, each with RoPE of its own as complex numbers; padded text is
masked. The transformer takes packed latents, 2x2 to a token, and is told the token grid of every picture.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..attention.rope import Rotary, rotary_of_complex
from ..config import MHLAConfig
from .adapters import AttentionArguments, JointAdapter
from .encoding import of_unit_scale, padded_text
from .packed import PackedFamily
from .sizes import GRIDS_OF_LARGE_SQUARES, LARGE_SQUARES, Clip, Model
from .structure import Sample

_TEXT_TOKENS = 512
"""Default of the pipeline's call, which fills text up to the longest of a batch and masks what it added."""
_NO_PROMPT = " "
"""What the pipeline's documentation gives as the negative prompt."""


class QwenImageAdapter(JointAdapter):
    """Text first, with a mask and a table of RoPE of its own."""

    def key_mask(self, arguments: AttentionArguments) -> torch.Tensor | None:
        """(B, N): the tokens of the grid all take part.

        Raises:
            ValueError: a mask of another kind.
        """
        if arguments.attention_mask is not None:
            raise ValueError(
                "Qwen-Image masks its text with encoder_hidden_states_mask; an attention_mask beside it has no place."
            )
        return self.mask_of_context(arguments, arguments.encoder_hidden_states_mask)

    def rotary(self, attn: Any, arguments: AttentionArguments) -> Rotary | None:
        """RoPE of image and text."""
        if arguments.rotary_emb is None:
            return None
        of_grid, of_text = (rotary_of_complex(numbers) for numbers in arguments.rotary_emb)
        cos, sin = (self.joined(own, text) for own, text in zip(of_grid, of_text, strict=True))
        return cos, sin


_QWEN_IMAGE = Model(
    "qwen-image",
    "QwenImageTransformer2DModel",
    {},
    24,
    128,
    60,
    (4, 4),
    stride=8,
    patch=2,
    sizes=LARGE_SQUARES,
    grids=GRIDS_OF_LARGE_SQUARES,
)
_TINY = Model(
    "tiny-qwenimage",
    "QwenImageTransformer2DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "axes_dims_rope": (4, 6, 6),
        "joint_attention_dim": 32,
        "in_channels": 16,
        "out_channels": 4,
    },
    2,
    16,
    3,
    blocks=(2, 2),
    stride=8,
    patch=2,
    sizes=((64, 64),),
)


class QwenImageFamily(PackedFamily):
    """Text-to-image transformers with a (height, width) token grid."""

    name = "qwenimage"
    transformers = ("QwenImageTransformer2DModel",)
    block_lists = ("transformer_blocks",)
    attentions = ("attn",)
    adapter = QwenImageAdapter(context_first=True)
    extra_tokens = _TEXT_TOKENS
    feed_forwards = ("img_mlp", "txt_mlp")
    # at 1024 px 16 tokens a side of a block
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content")
    dispatches_attention = True
    forward_names = (
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        "timestep",
        "img_shapes",
        "guidance",
    )
    models = (_QWEN_IMAGE, _TINY)

    def self_attention_processor(self) -> Any:
        """``QwenDoubleStreamAttnProcessor2_0``."""
        from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0

        return QwenDoubleStreamAttnProcessor2_0()

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """As ``img_shapes`` tells it of the first sample, by which the model lays out the whole batch.

        Raises:
            ValueError: more than one picture, or frames of a video.
        """
        first = arguments["img_shapes"][0]
        pictures = first if isinstance(first, list) else [first]
        (frames, height, width), *others = pictures
        if others or frames != 1:
            raise ValueError(
                f"img_shapes={pictures} are {len(pictures)} pictures of {frames} frame(s): MHLA takes one picture, not "
                "one with others as its context, as in Qwen-Image-Edit and Qwen-Image-Layered. Run these without the "
                "patch: remove_mhla(pipe)."
            )
        return height, width

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """Packed latents and the shape of one picture for every sample."""
        shape = (1, *self.token_grid(transformer, latents))
        return {
            "hidden_states": self.packed(latents),
            "timestep": timestep,
            "img_shapes": [[shape]] * len(latents),
            **conditioning,
        }

    def encode_pixels(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """(B, 16, H, W): the autoencoder is one of videos, of which an image is one frame."""
        return of_unit_scale(pipe.vae, pipe.vae.encode(pixels).latent_dist.mode().float())[:, :, 0]

    def latent_shape(self, transformer: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """(C, H, W), halved as often as the autoencoder has entries of ``temperal_downsample``."""
        stride, (height, width) = 2 ** len(vae["temperal_downsample"]), clip.sizes[0]
        return self.channels(transformer), height // stride, width // stride

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (512, channels) of Qwen2.5-VL, and ``encoder_hidden_states_mask`` (512,)."""
        chosen = {"max_sequence_length": _TEXT_TOKENS, **(settings or {})}
        embeddings, mask = self.encode_text(pipe, prompt, chosen)
        text = embeddings[0] if mask is None else embeddings[0][mask[0].bool()]
        filled, own = padded_text(text, chosen["max_sequence_length"])
        return {"encoder_hidden_states": filled, "encoder_hidden_states_mask": own}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``encoder_hidden_states`` (512, channels) and ``encoder_hidden_states_mask`` (512,)."""
        return {
            "encoder_hidden_states": torch.empty(_TEXT_TOKENS, transformer.joint_attention_dim, device="meta"),
            "encoder_hidden_states_mask": torch.empty(_TEXT_TOKENS, dtype=torch.int64, device="meta"),
        }

    def guidance_arguments(self, guidance: float) -> dict[str, Any]:
        """Classifier-free guidance, which the pipeline runs if it is given a negative prompt."""
        return {"true_cfg_scale": guidance, **({"negative_prompt": _NO_PROMPT} if guidance > 1 else {})}
