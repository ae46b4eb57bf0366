"""What a patch did to every self-attention, and token grids and block counts of sizes in pixels."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import nn

from ..attention.layout import block_count, check_blocks, check_layout, smallest_and_largest
from ..config import MHLAConfig
from ..families import Clip, Family, get_family
from ..reporting import from_to, text_table, times
from .costs import AttentionCost, attention_cost, own_block_density
from .few_steps import FewSteps
from .finding import find_patched, find_transformers
from .handle import Patched
from .layer import layer_of
from .processor import MHLAProcessor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SparseDescription:
    """The sparse branch of one self-attention."""

    kind: str
    """"content", or "own" of a causal patch."""
    block_size: int | None
    """Tokens of a uniform block; None of "own", whose blocks are MHLA's along the first axis."""
    blocks: int | None
    """T, how many there are on the grid; None while it is unknown, and of "own"."""
    density: float
    """Part of all pairs of blocks that is listed; of "own", part of the pairs of tokens that the attention before the
    patch sees."""
    pooled: bool
    """Whether the other blocks take part through their pooled keys."""

    def __str__(self) -> str:
        if self.kind == "own":
            return f"sparse branch: the query's own block of the first axis, {self.density:.1%} of the pairs"
        if self.density == 1:
            return "sparse branch: all pairs listed, which is softmax attention"
        count = "" if self.blocks is None else f"{self.blocks} "
        others = "others as pooled keys" if self.pooled else "others left out"
        size = f"{count}blocks of {self.block_size} tokens along a curve"
        return f"sparse branch: {size}, {self.density:.1%} of their pairs listed, {others}"


@dataclass(frozen=True)
class LayerDescription:
    """One self-attention."""

    name: str
    replaced: bool
    """Whether it is patched."""
    grid: tuple[int, ...] | None
    """Token grid of the latest forward, or the one given; None before the first forward."""
    blocks: tuple[int, ...] | None
    """Block counts; None for a layer that was kept."""
    tokens_per_block: tuple[int, int] | None
    """Smallest and largest; None while the grid is unknown."""
    extra_parameters: int
    """Parameters that MHLA adds."""
    sparse: SparseDescription | None = None
    """None without a sparse branch."""
    processor: str = ""
    """Class of the processor that runs."""
    cost: AttentionCost | None = None
    """Of the attention on the grid; None while the grid is unknown."""
    softmax_steps: int | float = 0
    """First denoising steps in which it attends as before the patch, see :class:`mhla_diffusers.MHLAConfig`."""
    runs_mhla: bool = False
    """False also for a patched layer whose patch is switched off, or whose processor something else has set."""

    @property
    def is_off(self) -> bool:
        """Whether it is patched and runs something else."""
        return self.replaced and not self.runs_mhla


class Description(list[LayerDescription]):
    """The layers of a model; printed, it is a table."""

    few_steps: FewSteps | None = None
    """How the model samples, if its patch was distilled to a few steps."""

    def __str__(self) -> str:
        header = ["layer", "attention", "grid", "MHLA blocks", "tokens per block", "density", "extra parameters"]
        rows = []
        for layer in self:
            kind = f"off: {layer.processor}" if layer.is_off else "MHLA" if layer.replaced else "kept"
            blocks = f"{times(layer.blocks)} = {math.prod(layer.blocks)}" if layer.blocks else "-"
            density = "-" if layer.sparse is None else f"{layer.sparse.density:.1%}"
            tokens, extra = from_to(layer.tokens_per_block), f"{layer.extra_parameters:,}"
            rows.append([layer.name, kind, times(layer.grid), blocks, tokens, density, extra])
        if all(layer.sparse is None for layer in self):
            for row in (header, *rows):
                del row[-2]
        lines = [text_table(header, rows)]
        # what all layers have in common stands below, so that the table fits a terminal
        lines += dict.fromkeys(str(layer.sparse) for layer in self if layer.sparse is not None)
        for steps in {layer.softmax_steps for layer in self if layer.softmax_steps}:
            first = f"{steps:.0%} of the denoising steps" if isinstance(steps, float) else f"{steps} steps"
            lines.append(f"as before the patch in the first {first}")
        if self.few_steps is not None:
            lines.append(str(self.few_steps))
        grids = {layer.grid for layer in self if layer.grid is not None}
        if self.cost is not None and len(grids) == 1:
            lines.append(f"attention of {math.prod(grids.pop()):,} tokens: {self.cost}")
        replaced, off = sum(layer.replaced for layer in self), sum(layer.is_off for layer in self)
        added = sum(layer.extra_parameters for layer in self)
        end = f"; MHLA does not run in {off} of them now" if off else ""
        lines.append(f"{replaced} of {len(self)} self-attentions replaced, {added:,} extra parameters{end}")
        return "\n".join(lines)

    @property
    def cost(self) -> AttentionCost | None:
        """Of all self-attentions of one forward and sample; None while a grid is unknown."""
        costs = [layer.cost for layer in self if layer.cost is not None]
        return sum(costs, AttentionCost()) if costs and len(costs) == len(self) else None


def describe(
    model: Any,
    grid: Sequence[int] | None = None,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
) -> Description:
    """What is replaced and what is kept, layer by layer, and what attention costs beside softmax's.

    Args:
        model: a pipeline or a transformer, patched or not.
        grid: token grid to describe; None for that of the latest forward.
        height: in pixels, for the grid of a size; of a pipeline or a vision model, before any run.
        width: in pixels.
        num_frames: of a video; None for the family's default.

    Raises:
        ValueError: unsupported model, a grid that the blocks do not fit, both a grid and a size, or a size that the
            model does not take.
    """
    transformers = find_transformers(model)
    grids = dict.fromkeys(transformers, None if grid is None else check_blocks(grid, "grid"))
    for component, given in grids.items():
        axes = get_family(transformers[component]).axes
        if given is not None and len(given) != axes:
            kind = type(transformers[component]).__name__
            raise ValueError(f"grid={given} has {len(given)} axes, but the token grid of {kind} has {axes}.")
    if (height, width, num_frames) != (None, None, None):
        if grid is not None:
            raise ValueError(f"Give either grid={tuple(grid)} or a size in pixels, not both.")
        grids.update(grids_of_size(model, height, width, num_frames))
    layers, handles = Description(), find_patched(model)
    for component, transformer in transformers.items():
        prefix = f"{component}." if len(transformers) > 1 else ""
        patched = handles[component] if component in handles else Patched(transformer, None)
        layers.few_steps = layers.few_steps or patched.few_steps
        for name, attn in patched.attentions.items():
            layers.append(_describe_layer(prefix + name, attn, patched, grids[component]))
    return layers


def _describe_layer(name: str, attn: Any, patched: Patched, wanted: tuple[int, ...] | None) -> LayerDescription:
    layer, family = layer_of(attn), patched.family
    processor: Any = getattr(attn, "processor", None)
    running, kind = isinstance(processor, MHLAProcessor), type(processor if processor is not None else attn).__name__
    grid = wanted or getattr(processor, "grid", None) or patched.latest_grid
    if layer is None and not running:
        cost = None if grid is None else attention_cost(attn, family, None, grid, family.extra_tokens)
        return LayerDescription(name, False, grid, None, None, 0, None, kind, cost)
    config: MHLAConfig = layer.config if layer is not None else processor.config
    if wanted is not None:
        config.check_whole(wanted)
        check_layout(config.grid_from(wanted), config.blocks_on(wanted), is_causal=config.causal is not None)
    extra = 0 if layer is None else sum(parameter.numel() for parameter in layer.parameters())
    blocks, tokens, cost = config.blocks, None, None
    if grid is not None:
        blocks = config.blocks_on(grid)
        tokens = smallest_and_largest(config.grid_from(grid), blocks)
        cost = attention_cost(attn, family, config if running else None, grid, family.extra_tokens)
    sparse = _describe_sparse(config, family, grid)
    return LayerDescription(name, True, grid, blocks, tokens, extra, sparse, kind, cost, config.softmax_steps, running)


def _describe_sparse(config: MHLAConfig, family: Family, grid: tuple[int, ...] | None) -> SparseDescription | None:
    if config.sparse == "none":
        return None
    if config.sparse == "own":
        return SparseDescription("own", None, None, own_block_density(config, family, grid), False)
    if grid is None:
        return SparseDescription("content", config.block_size, None, config.listed, config.pooled)
    blocks = block_count(grid, config.block_size)
    return SparseDescription("content", config.block_size, blocks, config.listed_on(grid), config.pooled)


def grids_of_size(
    pipe: Any, height: int | None, width: int | None, num_frames: int | None
) -> Mapping[str, tuple[int, ...]]:
    """Component name of every transformer of a pipeline, or of a vision model → its token grid at a size in pixels.

    Raises:
        ValueError: a transformer alone, which does not know the strides of an autoencoder; half a size, or one of no
            whole numbers; frames of an image; sides that differ where the model takes squares only; or a size without
            a token.
    """
    for side, value in (("height", height), ("width", width), ("num_frames", num_frames)):
        _check_whole(side, value)
    transformers = find_transformers(pipe)
    if isinstance(pipe, nn.Module) and get_family(pipe).kind != "vision":
        raise ValueError(
            "A size in pixels needs the pipeline, whose autoencoder makes the latents of it. Of a transformer alone "
            "describe() takes the token grid, grid=(frames, height, width) or (height, width)."
        )
    if height is None or width is None:
        raise ValueError(f"height={height} and width={width} belong together; give both, in pixels.")
    return {
        name: _grid(pipe, transformer, height, width, num_frames, get_family(transformer))
        for name, transformer in transformers.items()
    }


def _check_whole(name: str, value: Any) -> None:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (is_whole and value > 0):
        unit = "frames" if name == "num_frames" else "pixels"
        raise ValueError(f"{name}={value!r} must be a whole number of {unit}, at least 1.")


def _grid(
    pipe: Any, transformer: Any, height: int, width: int, num_frames: int | None, family: Family
) -> tuple[int, ...]:
    if num_frames is not None and not family.makes_videos:
        raise ValueError(f"num_frames={num_frames} was given, but {type(transformer).__name__} makes images.")
    if family.squares_only and height != width:
        raise ValueError(f"{type(transformer).__name__} takes squares only; got height={height}, width={width}.")
    frames = num_frames if num_frames is not None else family.default_clip.frames
    grid = family.grid_of_clip(pipe, transformer, Clip(frames, family.default_clip.fps, ((height, width),)))
    if not all(grid):
        raise ValueError(f"height={height}, width={width} is too small: its token grid is {grid}.")
    return grid


def suggest_blocks(pipe: Any, height: int, width: int, num_frames: int | None = None) -> tuple[int, ...]:
    """Block counts for a size in pixels.

    Blocks as long along every axis as those of the family's default at its default size, since how far a block reaches
    is what its KV state has to hold: three latent frames and ten tokens each way for Wan. But no more than about √(2 N)
    blocks of N tokens, where mixing M² pairs of blocks costs as much as making and reading the KV states; beyond it
    the cost would no longer be linear. Start from it, and look at a layer's attention or the loss for more. A warning
    says where a size is too small for more than one block, with which MHLA is plain linear attention.

    Args:
        pipe: pipeline, or vision model of transformers, patched or not; of several transformers the first counts.
        height: in pixels.
        width: in pixels.
        num_frames: of a video; None for the family's default.

    Returns:
        For example (7, 3, 5), for ``apply_mhla(pipe, blocks=…)``.

    Raises:
        ValueError: what :func:`describe` raises for a size.
    """
    name, grid = next(iter(grids_of_size(pipe, height, width, num_frames).items()))
    transformer = find_transformers(pipe)[name]
    family = get_family(transformer)
    usual = family.grid_of_clip(pipe, transformer, family.default_clip)
    wanted = [
        size * count / max(size_then, 1)
        for size, count, size_then in zip(grid, family.default_config.blocks_on(usual), usual, strict=True)
    ]
    shrink = min(1.0, (math.sqrt(2 * math.prod(grid)) / math.prod(wanted)) ** (1 / len(grid)))
    blocks = tuple(min(size, max(1, round(shrink * count))) for size, count in zip(grid, wanted, strict=True))
    if math.prod(blocks) == 1:
        logger.warning(
            "height=%s, width=%s has a token grid of %s, too small for more than one block: MHLA is plain linear "
            "attention there. Softmax attention of %s tokens costs little; leave the model as it is, or ask for a "
            "larger size.",
            height,
            width,
            times(grid),
            math.prod(grid),
        )
    return blocks
