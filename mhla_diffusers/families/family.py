"""What is known of a family of models.

Outside of this folder a family's name is compared with that of a patch file or a command alone; nothing else depends on
it.
"""

import inspect
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from ..config import LinearConfig, MHLAConfig, PatchConfig, SparseConfig, kind_of
from .attentions import Attention
from .forward import Condition, Forward, Kwargs, Sample, masked_text
from .models import Clip, Model
from .training import Training, first_picture, scaled_latents

# what the file of a family takes from here
__all__ = ["Attention", "Condition", "Family", "Forward", "Kwargs", "Sample", "Training"]
__all__ += ["first_picture", "masked_text", "scaled_latents"]


@dataclass(kw_only=True, eq=False)
class Family:
    """A family of transformers that can be patched: facts, and three parts that say how its models work.

    To add a model, make one and pass it to :func:`register_family`. ``docs/add-a-model.md`` has an example.

    Raises:
        ValueError: ``mhla_blocks`` has another number of axes than the token grid.
    """

    name: str
    """Name in patch files, on the command line and in messages."""
    transformers: tuple[str, ...]
    """Class names of the transformers, for example ``("WanTransformer3DModel",)``."""
    attention: Attention = Attention()
    """Where the self-attentions are, how they are called and what they compute."""
    forward: Forward = Forward()
    """What the transformer's forward takes, and the token grid, time and RoPE that its arguments say."""
    trained: Training | str = (
        "This family can be patched, but it does not say how its models are encoded, trained and called by a pipeline; "
        "give it trained=Training()."
    )
    """How its models are encoded, trained and called by a pipeline, or why they are not and what to do instead."""
    library: str = "diffusers"
    """Module that has the transformers' classes, imported when one is asked for."""
    mhla_blocks: tuple[int, ...] = (4, 4)
    """MHLA block counts of a patch that gives none, at the family's default size; these have 16x16 tokens at 1024 px.
    """
    squares_only: bool = False
    """Whether height and width must be equal."""
    default_clip: Clip = Clip(frames=1, fps=1.0, sizes=((1024, 1024),))
    """Frames, rate and size that are generated or encoded by default."""
    models: tuple[Model, ...] = ()
    """Configurations that ``mhla bench`` builds with random weights."""

    def __post_init__(self) -> None:
        if len(self.mhla_blocks) != self.axes:
            raise ValueError(
                f"mhla_blocks={self.mhla_blocks} of {self.name!r} has {len(self.mhla_blocks)} axes, and its token grid "
                f"{self.axes}; give a count for each, and the axes of the grid as forward=Forward(axes=...)."
            )

    @property
    def axes(self) -> int:
        """Axes of the token grid: 3 for (frames, height, width), 2 for (height, width)."""
        return self.forward.axes

    @cached_property
    def training(self) -> Training:
        """:attr:`trained` with this family's forward; ValueError with the reason if its models are not trained."""
        if isinstance(self.trained, str):
            raise ValueError(f"{self.name!r}: {self.trained}")
        training = copy(self.trained)
        training.forward = self.forward
        return training

    def transformer_class(self, name: str) -> Any:
        """Return one of :attr:`transformers`; AttributeError if the library lacks it."""
        return getattr(import_module(self.library), name)

    def build(self, name: str, settings: Mapping[str, Any]) -> Any:
        """Make a transformer with fresh weights; AttributeError if the library lacks its class.

        Args:
            name: one of :attr:`transformers`.
            settings: arguments of the class, or of its configuration where that is an object, as in transformers.
        """
        cls = self.transformer_class(name)
        return cls(cls.config_class(**settings)) if hasattr(cls, "config_class") else cls(**settings)

    def class_settings(
        self, model: Model, height: int, frames: int | None = None, layers: int | None = None
    ) -> dict[str, Any]:
        """Return the settings with which :meth:`build` makes a model.

        Args:
            model: which.
            height: in pixels, which some transformers must know.
            frames: of a video, too.
            layers: build only so many, at least one; None for all.
        """
        built = layers or model.layers
        others = {name: max(1, count * built // model.layers) for name, count in model.more_layers.items()}
        known = inspect.signature(self.transformer_class(model.transformer)).parameters
        shape = {
            "num_attention_heads": model.heads,
            "attention_head_dim": model.head_dim,
            "sample_size": height // model.stride,
            "video_length": frames,
        }
        taken = {name: value for name, value in shape.items() if name in known}
        return {**taken, **model.settings, model.layers_argument: built, **others}

    @property
    def default_config(self) -> PatchConfig:
        """Settings of ``apply_mhla(pipe)``: sparse attention in the place of softmax attention, else MHLA."""
        return self.complete({})

    def complete(self, settings: Mapping[str, Any]) -> PatchConfig:
        """Return the settings of a patch: those given, whose names decide which attention it runs, and the family's.

        Blocks that are not given are the family's, and are fitted to the grid of every call.

        Raises:
            ValueError: unknown fields, those of two attentions or of one that the family cannot have, or values that
                are not allowed.
        """
        kind = kind_of(settings, SparseConfig if self.attention.computes == "softmax" else MHLAConfig, MHLAConfig)
        usual: dict[str, Any] = {}
        if issubclass(kind, LinearConfig):
            usual = {"blocks": self.mhla_blocks}
            usual |= {"rope": "before"} if self.attention.adapter.rope_by_head else {}
            usual |= {"clamp_blocks": "blocks" not in settings} if kind is MHLAConfig else {}
        return kind(**(usual | dict(settings)))
