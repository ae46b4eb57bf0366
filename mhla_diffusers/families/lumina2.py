"""Lumina 2: ``Lumina2Transformer2DModel`` (Lumina-Image 2.0).

Two blocks refine the image alone, two the text alone, and the others see both in one sequence per sample: its own text,
up to 256 tokens, the image, padding. So images of a batch begin at different tokens. RoPE rotates both. Keys and values
are shared by groups of heads. The text's refiners are not patched. Default blocks are those of all images.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.layout import Shape
from ..attention.rope import Rotary
from .adapters import Arguments, AttentionInputs, JointAdapter, without
from .family import Attention, Family, Forward, Training, masked_text
from .models import image_model, tiny_image
from .values import WithoutValues

_CLASS = "Lumina2Transformer2DModel"
_TEXT_TOKENS = 256
"""Default of the pipeline's call, which pads text to it; the transformer leaves the padding out."""
_REAL = {"cap_feat_dim": 2304}
_TINY: dict[str, Any] = {"in_channels": 4, "hidden_size": 48, "num_kv_heads": 2, "multiple_of": 8, "cap_feat_dim": 8}
_TINY["axes_dim_rope"] = (4, 4, 4)


class Lumina2Adapter(JointAdapter):
    """Moves the padding of shorter samples to the front, so that every image is at the end, and its output back."""

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Leave out ``encoder_hidden_states``, which are the same tokens again."""
        return without(super().arguments(args, kwargs), "encoder_hidden_states")

    def read(self, attn: Any, arguments: Arguments, grid: Shape, tokens: int) -> AttentionInputs:
        """Move the padding."""
        if (mask := self.key_mask(arguments)) is not None:
            padding = _padding(mask)
            raw = arguments["attention_mask"].reshape(mask.shape)
            rolled: dict[str, Any] = {
                "hidden_states": _rolled(arguments["hidden_states"], padding),
                "attention_mask": _rolled(raw, padding),
            }
            if "tables" not in arguments:
                rolled["tables"] = self.tables(attn, arguments)
            arguments = {**arguments, **rolled}
        return super().read(attn, arguments, grid, tokens)

    def tables(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Move the padding."""
        tables, mask = super().tables(attn, arguments), self.key_mask(arguments)
        if tables is None or mask is None:
            return tables
        padding = _padding(mask)
        return _rolled(tables[0], padding), _rolled(tables[1], padding)

    def run(self, processor: Any, attn: Any, arguments: Arguments) -> Any:
        """Give ``encoder_hidden_states`` back, from which the model's processor takes keys and values."""
        return super().run(processor, attn, {**arguments, "encoder_hidden_states": arguments["hidden_states"]})

    def ordered(self, arguments: Arguments, output: Tensor) -> Tensor:
        """Move the padding to the front."""
        mask = self.key_mask(arguments)
        return output if mask is None else _rolled(output, _padding(mask))

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Move the padding back to the end, as the model has it."""
        if inputs.key_mask is not None:
            output = _rolled(output, -_padding(inputs.key_mask))
        return super().project_output(attn, output, inputs)


def _padding(key_mask: Tensor) -> Tensor:
    """Return the tokens of each sample that take no part: (B,)."""
    return (key_mask == 0).sum(dim=1)


def _rolled(x: Tensor, by: Tensor) -> Tensor:
    """Return the tokens (B, N, ...) of each sample moved to later places, those at the end to the front."""
    places = torch.arange(x.shape[1], device=x.device) - by[:, None]
    return x[torch.arange(len(by), device=x.device)[:, None], places % x.shape[1]]


class _Training(Training):
    def encode_text(self, pipe: Any, prompt: str | list[str], settings: Mapping[str, Any]) -> Any:
        """Return the empty prompt without the pipeline's instruction, as its negative prompt is."""
        if prompt:
            return super().encode_text(pipe, prompt, settings)
        return pipe.encode_prompt(prompt, True, max_sequence_length=settings["max_sequence_length"])[2:]


LUMINA2 = Family(
    name="lumina2",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("noise_refiner", "layers"),
        feed_forwards=("feed_forward",),
        adapter=Lumina2Adapter(context_first=True),
        processor="diffusers.models.transformers.transformer_lumina2.Lumina2AttnProcessor2_0",
        extra=(None, 0),
        pads_behind_grid=True,
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=Forward(
        takes_sigma=True,
        time_is_reversed=True,
        # Gemma 2's
        conditions=masked_text(_TEXT_TOKENS, "cap_feat_dim", torch.int64),
        without_values=WithoutValues,  # the transformer reads the lengths of texts
    ),
    trained=_Training(),
    # the class's defaults, with the width of Gemma 2 2B
    models=(
        image_model("lumina-image-2.0", _CLASS, 24, 96, 26, settings=_REAL, more_layers={"num_refiner_layers": 2}),
        tiny_image("lumina2", _CLASS, _TINY, heads=4, more_layers={"num_refiner_layers": 1}),
    ),
)
