"""What is known of a family of models, as data; nothing outside of this folder depends on a family's name."""

import inspect
import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial, reduce
from importlib import import_module
from typing import Any, Literal

from torch import Tensor, nn

from ..attention.layout import check_grid
from ..config import LinearConfig, MHLAConfig, PatchConfig, SparseConfig, kind_of
from . import grids
from .calling import Calling
from .inputs import Inputs
from .mhla import AttentionAdapter
from .models import Clip, Model
from .training import Training

Counts = tuple[int | None, int | None]
"""Extra tokens before and after those of the grid; None for as many as the sequence holds."""
Reader = Callable[[Any, Mapping[str, Any]], tuple[int, ...]]
"""Returns the token grid, given the transformer and the arguments of its forward by name."""


_OF_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff_context", "txt_mlp")
"""Parts of the names of linear layers that see the text alone, as cross-attention's keys and values do."""


def usual_latent_frames(config: Any, frames: int, stride: int) -> int:
    """Return the number of latent frames of a video, whose first frame is encoded by itself."""
    return (frames - 1) // stride + 1


@dataclass(kw_only=True, eq=False)
class Family:
    """Facts about a family of transformers, for :func:`register_family`; sparse attention needs only the first few."""

    name: str
    """Name in patch files, on the command line and in messages."""
    transformers: tuple[str, ...]
    """Class names of the transformers, for example ``("WanTransformer3DModel",)``."""
    library: str = "diffusers"
    """Module that has the transformers' classes, imported when one is asked for."""

    # What sparse attention needs

    block_lists: tuple[str, ...] = ("transformer_blocks",)
    """Attributes of the transformer, or dotted paths, that hold blocks; absent ones are skipped."""
    attentions: tuple[str, ...] = ("attn1", "attn")
    """Attributes of a block, or dotted paths, that are self-attentions over the grid; absent ones are skipped."""
    axes: int = 2
    grid: Reader = grids.latents
    extra: Counts | Callable[[Mapping[str, Any]], Counts] = (0, 0)
    """Extra tokens before and after the grid's, or a function of the forward's named arguments that counts them."""
    rows_alike: bool = False
    """Whether a mask with a row per query has the same row for all queries of the grid, like a mask of keys."""
    pads_behind_grid: bool = False
    """Whether the padding of shorter samples stands behind the grid: with a mask, grids begin at different tokens."""
    refuses: tuple[str, ...] = ()
    """Arguments of the forward that a patch does not take, such as those of reference images."""
    dispatches: bool = False
    """Whether the attentions follow diffusers' ``set_attention_backend``; others call PyTorch's attention."""
    computes: Literal["softmax", "linear"] = "softmax"
    """What the self-attentions compute without a patch."""

    # Sizes and costs

    patch: tuple[int, ...] | None = None
    """Latents per token along each axis, where ``patch_size`` of the configuration does not say."""
    latents_name: str = "hidden_states"
    """Name of the forward's argument for the latents."""
    latent_frames: Callable[[Any, int, int], int] = usual_latent_frames
    """Returns the latent frames of a video, given configuration, frames and the autoencoder's stride of frames."""
    extra_tokens: int = 0
    """Extra tokens of the longest text that the pipeline takes by default; costs are computed for this many."""
    feed_forwards: tuple[str, ...] = ("ff", "ffn", "ff_context")
    squares_only: bool = False
    default_clip: Clip = Clip(frames=1, fps=1.0, sizes=((1024, 1024),))
    """Frames, rate and size that are generated or encoded by default."""
    calling: Calling = Calling()

    # MHLA, measuring and training

    mhla: AttentionAdapter | None = None
    """How MHLA reads the call of an attention; None for families that it is not trained for."""
    mhla_blocks: tuple[int, ...] = ()
    """MHLA block counts of a patch that gives none; by default (4, 4), or the paper's (7, 3, 5) for Wan at 480p."""
    softmax_processor: str = ""
    """Import path of a processor that computes softmax attention, if the model's own computes another."""
    eps: float = 0.0
    """Added to the normaliser by attention that is linear with φ = ReLU."""
    times_per_frame: tuple[str, ...] = ()
    """Classes of transformers in which every frame may have its own time, as causal patches are trained."""
    inputs: Inputs = Inputs()
    """What its forwards take, to be measured and trained."""
    trained: Training | None = None
    """How its models are encoded for and trained; None if they are not."""
    models: tuple[Model, ...] = ()

    def __post_init__(self) -> None:
        self.mhla_blocks = self.mhla_blocks or ((4, 4) if self.axes == 2 else (7, 3, 5))
        if len(self.mhla_blocks) != self.axes:
            raise ValueError(
                f"mhla_blocks={self.mhla_blocks} of {self.name!r} has {len(self.mhla_blocks)} axes, but its token grid "
                f"has axes={self.axes}; give one count per axis."
            )
        for name in ("calling", "inputs", "trained"):
            if (part := copy(getattr(self, name))) is not None:
                part.family = self
                setattr(self, name, part)

    @classmethod
    def by_hand(
        cls, kind: str, grid: grids.Grid | Callable[..., Any], extra: Counts | Callable[..., Any] = (0, 0)
    ) -> "Family":
        """Make a family from a user's grid and extra tokens, which may be functions of the forward's arguments."""
        read = partial(_grid_given, grid if callable(grid) else check_grid(grid))
        count = partial(_extra_given, extra) if callable(extra) else check_counts(extra)
        return cls(
            name="", transformers=(kind,), block_lists=(), attentions=(), grid=read, extra=count, latents_name=""
        )

    @property
    def knows_layers(self) -> bool:
        """Whether it says which modules are self-attentions."""
        return bool(self.attentions)

    @property
    def makes_videos(self) -> bool:
        """Whether samples have frames, even if frames are not an axis of the grid."""
        return self.axes == 3 or self.default_clip.frames > 1

    @property
    def training(self) -> Training:
        """:attr:`trained`; ValueError if its models are not trained."""
        if self.trained is None:
            raise ValueError(
                f"{self.name!r}: this family can be patched but not trained; give it inputs=Inputs(...) and "
                "trained=Training()."
            )
        return self.trained

    # The transformer

    def blocks_of(self, transformer: Any) -> dict[str, Any]:
        """Name and module of every transformer block that has a self-attention, in the order of the layer indices."""
        return {
            f"{path}.{index}": block
            for path in self.block_lists
            for index, block in enumerate(part_of(transformer, path) or ())
        }

    def self_attentions(self, transformer: Any) -> dict[str, Any]:
        """Name and module of every self-attention, in the order of the layer indices."""
        return {
            f"{name}.{path}": found
            for name, block in self.blocks_of(transformer).items()
            for path in self.attentions
            if (found := part_of(block, path)) is not None
        }

    def parts_of(self, block: Any) -> dict[str, tuple[str, Any]]:
        """Return path in a block → part of the forward's cost, and module."""
        paths = dict.fromkeys(self.attentions, "self-attention")
        paths |= {path: "cross-attention" for path in ("attn2",) if path not in paths}
        paths |= dict.fromkeys(self.feed_forwards, "feed-forward")
        found = {path: (part, part_of(block, path)) for path, part in paths.items()}
        return {path: (part, module) for path, (part, module) in found.items() if isinstance(module, nn.Module)}

    def other_flops(self, transformer: Any, grid: tuple[int, ...]) -> dict[str, int]:
        """Return the FLOPs of a forward of one sample and its longest text by part, beside those of self-attention."""
        tokens, flops = math.prod(grid), {"projections": 0, "cross-attention": 0, "feed-forward": 0}
        sizes = [one.sizes(transformer.config) for one in self.inputs.conditions_of(transformer.config)]
        text = self.extra_tokens or next((size[0] for size in sizes if len(size) == 2), 0)
        for block in self.blocks_of(transformer).values():
            layers = [  # convolutions of feed-forwards keep the grid
                (part if part in flops else "projections", f"{path}.{name}", layer.weight.numel())
                for path, (part, module) in self.parts_of(block).items()
                for name, layer in module.named_modules()
                if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)
            ]
            of_text = {name for _, name, _ in layers if any(mark in name for mark in _OF_TEXT)}
            others = tokens + (0 if of_text else self.extra_tokens)  # in one stream with the text
            of_text |= {name for part, name, _ in layers if part == "cross-attention" and name[-4:] in ("to_k", "to_v")}
            for part, name, weights in layers:
                flops[part] += 2 * (text if name in of_text else others) * weights
            for part, module in self.parts_of(block).values():
                if part == "cross-attention":
                    flops[part] += 4 * tokens * text * math.prod(self.heads(module))
        return flops

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of heads and head dim of a self-attention."""
        heads = int(attn.heads if hasattr(attn, "heads") else attn.num_heads)
        if hasattr(attn, "head_dim"):
            return heads, int(attn.head_dim)
        return heads, int(attn.inner_dim if hasattr(attn, "inner_dim") else attn.to_query.out_features) // heads

    def patch_of(self, transformer: Any) -> tuple[int, ...]:
        """Return latents per token along each axis."""
        return self.patch or grids.patch_of(transformer, self.axes)

    def token_grid(self, transformer: Any, latents: Tensor) -> tuple[int, ...]:
        """Return the token grid of latents (B, C, ...); ValueError for frames that do not fill the last token."""
        return grids.grid_of_size(transformer, tuple(latents.shape[-self.axes :]), self.patch)

    def tokens_of(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[tuple[int, ...], Counts]:
        """Return token grid and extra tokens of a forward with these arguments; ValueError without a token."""
        name, kind = self.latents_name, type(transformer).__name__
        if name and arguments.get(name) is None:
            raise ValueError(f"{kind} was called without {name}, whose shape gives the token grid.")
        if refused := [one for one in self.refuses if arguments.get(one) is not None]:
            raise ValueError(
                f"{kind} was called with {refused[0]}, which a patch does not support, such as reference images. Run "
                "this pipeline without the patch: remove_mhla(pipe)."
            )
        grid = tuple(map(int, self.grid(transformer, arguments)))
        if 0 in grid:
            raise ValueError(f"{name} of {kind} are too small for one token: the token grid is {grid}.")
        return grid, self.extra(arguments) if callable(self.extra) else self.extra

    # Building

    def transformer_class(self, name: str) -> Any:
        """Return one of :attr:`transformers`; AttributeError if the library lacks it."""
        return getattr(import_module(self.library), name)

    def class_settings(self, model: Model, height: int, frames: int | None = None) -> dict[str, Any]:
        """Return the arguments of the class that build a model for a height in pixels."""
        known = inspect.signature(self.transformer_class(model.transformer)).parameters
        shape = {
            "num_attention_heads": model.heads,
            "attention_head_dim": model.head_dim,
            "sample_size": height // model.stride,
            "video_length": frames,
        }
        taken = {name: value for name, value in shape.items() if name in known}
        return {**taken, **model.settings, model.layers_argument: model.layers, **model.more_layers}

    # The patch

    @property
    def default_config(self) -> PatchConfig:
        """Settings of ``apply_mhla(pipe)``: sparse attention in the place of softmax attention, else MHLA."""
        return self.complete({})

    def complete(self, settings: Mapping[str, Any]) -> PatchConfig:
        """Return the settings of a patch: those given, whose names decide which attention it runs, and the family's."""
        kind = kind_of(settings, SparseConfig if self.computes == "softmax" else MHLAConfig)
        usual: dict[str, Any] = {}
        if issubclass(kind, LinearConfig):
            usual = {"blocks": self.mhla_blocks}
            usual |= {"clamp_blocks": "blocks" not in settings} if kind is MHLAConfig else {}
        return kind(**(usual | dict(settings)))


def part_of(module: Any, path: str) -> Any:
    """Return the attribute of a module at a dotted path; None if it is absent."""
    return reduce(lambda found, name: getattr(found, name, None), path.split("."), module)


def check_counts(extra: Any) -> Counts:
    """Return counts of extra tokens before and after the grid; ValueError unless they are two, at most one None."""
    counts = tuple(extra) if isinstance(extra, tuple | list) else ()
    if len(counts) != 2 or counts.count(None) == 2 or not all(n is None or (type(n) is int and n >= 0) for n in counts):
        raise ValueError(
            f"extra={extra!r} must be two counts of tokens before and after the grid, such as (0, 77), or (0, None) "
            "for any number."
        )
    return counts


def _grid_given(grid: Any, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    return check_grid(grid(**arguments) if callable(grid) else grid)


def _extra_given(extra: Callable[..., Any], arguments: Mapping[str, Any]) -> Counts:
    return check_counts(extra(**arguments))
