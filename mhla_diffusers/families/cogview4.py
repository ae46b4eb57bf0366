"""CogView4: ``CogView4Transformer2DModel``.

Joint attention with the same projections for all tokens: text, then image. RoPE rotates the image alone and pairs the
halves of a head; its tables are on the CPU. Text is padded on the left with tokens that take part, so there is no mask.
The model also takes the size of the picture and its crop. Default blocks are those of all images.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.rope import Rotary
from .adapters import Arguments, JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import image_model, tiny_image

_CLASS = "CogView4Transformer2DModel"
_TEXT_TOKENS = 224
"""Tokens of texts in files: the number that the pipeline documents; its call takes up to 1024."""
_STRIDE = 8
"""Pixels per latent of its autoencoder."""
_TINY = {"in_channels": 4, "out_channels": 4, "text_embed_dim": 16, "time_embed_dim": 8, "condition_dim": 8}


class CogView4Adapter(JointAdapter):
    """RoPE pairs halves; no mask."""

    pairs_halves = True

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Refuse a mask with ValueError."""
        if "attention_mask" in arguments:
            raise ValueError(
                "CogView4's own attention adds its attention_mask to the scores, 1 or 0, and so hides no token; MHLA "
                "does not repeat that. Leave attention_mask out, as CogView4Pipeline does."
            )
        return None

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return the tables on the device of the tokens."""
        if (rotary := arguments.get("rotary_emb")) is not None:
            device = arguments["hidden_states"].device
            arguments = {**arguments, "rotary_emb": tuple(table.to(device) for table in rotary)}
        return super().rotary(attn, arguments)


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from the latents; ValueError for samples of several sizes in one row, or masks."""
        others = sorted((arguments.get("attention_kwargs") or {}).keys() - {"scale"})
        if others or isinstance(arguments.get("image_rotary_emb"), list):
            raise ValueError(
                f"attention_kwargs={others} and lists of RoPE tables pack and mask samples of several sizes, as "
                "CogView4TrainingAttnProcessor does: MHLA takes one size for a batch, without masks. Run samples of "
                "other sizes one after another, or remove_mhla(transformer)."
            )
        return super().grid_of_arguments(transformer, arguments)

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the size of the picture, which is not cropped."""
        size = latents.new_tensor([[_STRIDE * side for side in latents.shape[2:]]]).expand(len(latents), -1)
        sizes = {"original_size": size, "target_size": size, "crop_coords": torch.zeros_like(size)}
        return {**super().arguments(transformer, latents, timestep, conditioning), **sizes}


class _Training(Training):
    def needs_pictures(self, config: Any) -> bool:
        """Whether it is CogView4-Control, which takes the latents of a picture beside the noised ones."""
        return bool(config.in_channels != config.out_channels)

    def encode_text(self, pipe: Any, prompt: str | list[str], settings: Mapping[str, Any]) -> Any:
        """Encode text of one length, padded as the pipeline pads a prompt among longer ones: on the left, unmasked."""
        count, tokenizer = settings["max_sequence_length"], pipe.tokenizer
        ids = tokenizer(prompt, max_length=count, truncation=True, return_tensors="pt").input_ids.long()
        ids = torch.nn.functional.pad(ids.view(1, -1), (count - ids.numel(), 0), value=tokenizer.pad_token_id)
        return (pipe.text_encoder(ids.to(pipe.text_encoder.device), output_hidden_states=True).hidden_states[-2],)


COGVIEW4 = Family(
    name="cogview4",
    transformers=(_CLASS,),
    attention=Attention(
        adapter=CogView4Adapter(context_first=True),
        processor="diffusers.models.transformers.transformer_cogview4.CogView4AttnProcessor",
        extra=(None, 0),
        rows_alike=True,
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=_Forward(
        # GLM's
        conditions=(Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_embed_dim")),)
    ),
    trained=_Training(),
    models=(image_model("cogview4-6b", _CLASS, 32, 128, 28), tiny_image("cogview4", _CLASS, _TINY)),
)
