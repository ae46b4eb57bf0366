"""The paper's classifiers with MHLA built in, VLT, measured as transformers are that a patch gives it.

Their attention is a setting of the model, so every variant is a model of its own, which shares the other weights.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .candidates import CONTENT, PLAIN, Choice, softmax_choices
from .cases import Case, Counts
from .correctness import check_patched
from .models import Size, cast_weights, parse_size
from .shapes import Cost

if TYPE_CHECKING:
    from ..models import VLTConfig, VLTForImageClassification

_LEAST = 32
"""Pixels along a side of which the last stage makes one token."""
_SMALL = Size(64, 64, None)
"""16 x 16 and 8 x 8 tokens in the stages with MHLA, to check correctness on."""


@dataclass(frozen=True)
class Classifier:
    """A configuration of VLT, and the sizes at which it is measured."""

    name: str
    preset: str
    """Method of ``VLTConfig`` that makes it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of it."""
    sides: tuple[int, ...] = (224, 384, 512, 1024, 2048)
    """Of squares, in pixels; the first alone on a CPU."""

    def config(self, **settings: Any) -> "VLTConfig":
        """Its configuration, with other settings where some are given."""
        from ..models import VLTConfig

        config: VLTConfig = getattr(VLTConfig, self.preset)(**(dict(self.settings) | settings))
        return config

    def choose_sizes(self, sizes: Collection[str] | None, device_type: str, batch: int = 1) -> list[Size]:
        """Sizes to measure it at.

        Args:
            sizes: "384x512", or "512" for a square; its own for None, on a CPU the smallest of them.
            device_type: cpu, cuda, …
            batch: pictures per forward.

        Raises:
            ValueError: a size that cannot be read or is too small, or no pictures.
        """
        own = self.sides[:1] if device_type == "cpu" else self.sides
        found = [Size(*parse_size(text), None, batch) for text in sizes or map(str, own)]
        for size in found:
            if min(size.height, size.width) < _LEAST:
                raise ValueError(f"size={size.height}x{size.width} must be at least {_LEAST} pixels for {self.name}.")
        return found


_TINY = {
    "hidden_sizes": (8, 16, 16, 24),
    "depths": (1, 1, 1, 1),
    "num_attention_heads": (1, 2, 2, 3),
    "mhla": ({"blocks": [2, 2]}, {"blocks": [2, 2]}, None, None),
    "head_size": 32,
    "num_labels": 5,
}
CLASSIFIERS = {
    model.name: model
    for model in (
        Classifier("vlt-t", "vlt_t"),
        Classifier("vlt-s", "vlt_s"),
        Classifier("tiny-vlt", "vlt_t", _TINY, sides=(64,)),
    )
}
"""By name."""


@dataclass(frozen=True)
class ClassifierCase(Case):
    """VLT at one size of pictures; parts of its forward are not told apart."""

    model: Classifier
    can_be_cut: ClassVar[bool] = False

    @property
    def all_layers(self) -> int:
        """Layers of all stages."""
        return sum(self.model.config().depths)

    def build(self, device: torch.device | None = None) -> "VLTForImageClassification":
        """The model with its own MHLA."""
        return self._build("MHLA", device or self.device)

    def inputs(self, model: Any, size: Size | None = None) -> dict[str, Any]:
        """Pictures, on the model's device."""
        chosen = size or self.size
        shape = chosen.batch, model.config.num_channels, chosen.height, chosen.width
        return {"pixel_values": torch.randn(shape, device=model.device, dtype=self.dtype), "return_dict": False}

    def count(self, only: Collection[str] | None = None) -> Counts:
        """Count the FLOPs of a forward, see :func:`mhla_diffusers.models.counts.count`; tokens are the first stage's.

        Bytes are not counted.
        """
        from ..models.counts import count

        choices = [choice for choice in self._choices() if only is None or choice.name in only]
        costs = {}
        for kind in dict.fromkeys(choice.kind for choice in choices if choice.absent is None):
            counts = count(self._build(kind, torch.device("meta")), self.size.height, self.size.width)
            costs[kind] = {"all": Cost(2 * self.size.batch * (counts.weight_macs + counts.attention_macs), 0)}
        weights = sum(one.numel() * one.itemsize for one in self.build(torch.device("meta")).parameters())
        return Counts(math.prod(self._first_grid), weights, choices, costs)

    def check(self, model: Any) -> None:
        """Compare MHLA of a fresh model with the reference."""
        check_patched(self.variant(model, Choice("MHLA", "MHLA", baseline=False)), self.inputs(model, _SMALL))

    def variant(self, model: Any, choice: Choice) -> "VLTForImageClassification":
        """A model with another attention, which shares the weights that both have."""
        variant = self._build(choice.kind, model.device)
        own = variant.state_dict()
        shared = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if name in own and tensor.shape == own[name].shape
        }
        variant.load_state_dict(shared, strict=False, assign=True)
        return variant

    def repeated(self, variant: Any) -> Iterable[Any]:
        """The layers of all stages."""
        return chain.from_iterable(stage.layers for stage in variant.vlt.stages)

    def _build(self, kind: str, device: torch.device) -> "VLTForImageClassification":
        """A model with seeded random weights and a kind of attention, in eval mode.

        Mixing matrices stay float32, as where ``from_pretrained`` casts.
        """
        from ..models import VLTForImageClassification

        torch.manual_seed(0)
        with device:
            model = VLTForImageClassification(self.model.config(mhla=self._mhla(kind)))
        kept = model._keep_in_fp32_modules_strict
        cast_weights(chain(model.named_parameters(), model.named_buffers()), self.dtype, kept)
        return model.eval()

    def _mhla(self, kind: str) -> list[dict[str, Any] | None]:
        """The setting of every stage with which the model has a kind of attention."""
        if kind == "softmax":
            return [None for _ in self.model.config().mhla]
        settings: dict[str, dict[str, Any]] = {PLAIN: {"blocks": [1, 1]}, CONTENT: {"sparse": "content"}}
        more = settings.get(kind, {})
        return [None if own is None else dict(own) | more for own in self.model.config().mhla]

    @property
    def _first_grid(self) -> tuple[int, int]:
        """Rows and columns of tokens of the first stage: a quarter of the pixels."""
        return math.ceil(self.size.height / 4), math.ceil(self.size.width / 4)

    def _choices(self) -> list[Choice]:
        """All attentions; the blocks of linear ones are the first stage's."""
        config, tokens = self.model.config(), math.prod(self._first_grid)
        counts = [math.prod(own["blocks"]) for own in config.mhla if own is not None]
        softmax = softmax_choices(tokens, config.num_attention_heads[0] * self.size.batch, self.device)
        others = f"{' and '.join(map(str, counts))} blocks in the first stages, softmax in the others"
        return [
            *softmax,
            Choice(PLAIN, PLAIN, baseline=False, blocks=1, note="in the stages that have MHLA, softmax in the others"),
            Choice("MHLA", "MHLA", baseline=False, blocks=counts[0], note=others),
            Choice(CONTENT, CONTENT, baseline=False, blocks=counts[0], note="lists chosen at every call"),
        ]
