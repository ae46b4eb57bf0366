"""Describe what a patch runs in every self-attention, and the token grid of a size in pixels."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..attention.costs import AttentionSizes
from ..attention.layout import block_count, block_sizes, check_grid
from ..config import PROFILES, USUAL_STEPS, CausalConfig, LinearConfig, PatchConfig, SparseConfig
from ..families import Clip, Family, get_family
from ..reporting import scaled, text_table, times
from .finding import find_patched, find_transformers
from .patched import NOT_SEEN, Patched
from .processor import MHLAProcessor
from .residual import residual_bytes
from .weights import inactive_lora


@dataclass(frozen=True)
class LayerDescription:
    """One self-attention."""

    name: str
    processor: str
    config: PatchConfig | None
    """None for a layer that was kept."""
    runs_mhla: bool
    """False also for a patched layer whose patch is switched off, or whose processor something else has set."""
    grid: tuple[int, ...] | None
    """Token grid of the latest forward, or the one given; None before the first forward."""
    sizes: AttentionSizes | None
    """What its cost on the grid is counted from; None while the grid is unknown."""
    extra_parameters: int
    density: float | None
    """Part of all pairs of uniform blocks that is listed; of causal MHLA part of the pairs of tokens in own blocks,
    among those that the attention before the patch sees; None where nothing is attended to with softmax."""

    @property
    def blocks(self) -> tuple[int, ...] | None:
        """MHLA block counts on the grid; None for a layer that was kept or runs sparse attention."""
        if not isinstance(self.config, LinearConfig):
            return None
        return self.config.blocks if self.grid is None else self.config.layout_on(self.grid)[1]

    @property
    def tokens_per_block(self) -> tuple[int, int] | None:
        """Smallest and largest MHLA block; None where there are none, and while the grid is unknown."""
        if self.grid is None or not isinstance(self.config, LinearConfig):
            return None
        sizes = block_sizes(*self.config.layout_on(self.grid))
        return min(sizes), max(sizes)

    @property
    def residual_bytes(self) -> int:
        """Bytes of its residual for one sample and guidance branch; 0 without one, or without a known grid."""
        config, sizes = self.config, self.sizes
        if sizes is None or not isinstance(config, SparseConfig) or not (config.has_dense_steps and config.correct):
            return 0
        return residual_bytes(sizes.tokens + sizes.extra, sizes.heads * sizes.head_dim)

    def summary(self) -> str:
        """Describe in one line which attention runs and how; empty for a layer that was kept."""
        config = self.config
        if isinstance(config, SparseConfig):
            assert self.density is not None
            size = "blocks"
            if self.grid is not None:
                rule = config.rule_on(self.grid)
                queries, keys = (block_count(self.grid, n) for n in rule.sizes)
                size = f"{queries} blocks of {rule.block_size} queries and {keys} of {rule.key_block_size} keys"
            return config.summary(self.density, size)
        if isinstance(config, CausalConfig):
            own = (
                f"softmax within the own block, {self.density:.1%} of the pairs" if self.density else "MHLA throughout"
            )
            return f"causal MHLA: {own}, earlier blocks through mixed states"
        return "" if config is None else "MHLA: every block of queries reads mixed states, nothing with softmax"


class Description(list[LayerDescription]):
    """The layers of a model; printed, it begins with the attention that runs and has a table."""

    notes: tuple[str, ...] = ()
    """What dense steps have measured, why the patch's LoRA does not run, and what is known of a model without layers.
    """

    def __repr__(self) -> str:
        return str(self)  # at a prompt and in a notebook too

    def __str__(self) -> str:
        if not self:
            return "\n".join(self.notes)
        patched = [layer for layer in self if layer.config is not None]
        off = sum(not layer.runs_mhla for layer in patched)
        added = sum(layer.extra_parameters for layer in self)
        end = f"; the patch does not run in {off} of them now" if off else ""
        lines = [  # what all layers have in common stands outside of the table, so that this fits a terminal
            *filter(None, dict.fromkeys(layer.summary() for layer in self)),
            self._table(),
            *dict.fromkeys(dense_in_words(one.config) for one in patched if one.config and one.config.has_dense_steps),
            *self._residuals(),
            *self.notes,
            f"{len(patched)} of {len(self)} self-attentions replaced, {added:,} extra parameters{end}",
        ]
        return "\n".join(lines)

    def _table(self) -> str:
        rows = []
        for layer in self:
            kind = "kept" if layer.config is None else layer.config.short_name
            if layer.config is not None and not layer.runs_mhla:
                kind = f"off: {layer.processor}"
            blocks = f"{times(layer.blocks)} = {math.prod(layer.blocks)}" if layer.blocks else "-"
            density = "-" if layer.density is None else f"{layer.density:.1%}"
            extra = f"{layer.extra_parameters:,}"
            ends = " to ".join(map(str, sorted({*(layer.tokens_per_block or ())}))) or "-"
            rows.append((layer.name, kind, times(layer.grid), blocks, ends, density, extra))
        header = "layer", "attention", "grid", "MHLA blocks", "tokens per block", "density", "extra parameters"
        columns = list(zip(header, zip(*rows, strict=True), strict=True))
        shown = columns[:3] + [one for one in columns[3:] if any(cell not in ("-", "0") for cell in one[1])]
        return text_table([name for name, _ in shown], list(zip(*(cells for _, cells in shown), strict=True)))

    def _residuals(self) -> list[str]:
        held = sum(layer.residual_bytes for layer in self)
        one, both = (scaled(count * held, 1024, "B") for count in (1, 2))
        said = f"residuals of these take {one} per sample, {both} with both branches of the guidance"
        return [said] if held else []


def steps_in_words(indices: Sequence[int], count: int) -> str:
    """Format step indices, counted from 1: "steps 1-10, 20, 30, 40, 50 of 50"; empty for none."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts = [f"{run[0] + 1}" if len(run) == 1 else f"{run[0] + 1}-{run[-1] + 1}" for run in runs]
    return f"{'step' if len(indices) == 1 else 'steps'} {', '.join(parts)} of {count}" if parts else ""


def dense_in_words(config: PatchConfig, count: int = USUAL_STEPS) -> str:
    """Say which steps and layers of a call are dense: "dense in steps 1-10, 20 of 20 and in layer 0"."""
    layers = getattr(config, "dense_layers", 0)
    of_layers = "" if not layers else "layer 0" if layers == 1 else f"layers 0-{layers - 1}"
    places = [part for part in (steps_in_words(config.dense_steps(count), count), of_layers) if part]
    return f"dense in {' and in '.join(places)}" if places else "dense in no step"


def applied_in_words(patched: Patched, pipe: Any) -> str:
    """Describe a new sparse patch in a line: effect, most it can save at the usual size, residual bytes."""
    config, family = patched.config, patched.family
    assert isinstance(config, SparseConfig)
    runs = next((name for name, profile in PROFILES.items() if profile == config), config.attention)
    words = f"{runs}: {100 * config.density:g} % of block pairs; {dense_in_words(config)}"
    if getattr(pipe, "vae", None) is None or not family.knows_layers:
        return words
    try:
        grid = family.calling.grid(pipe, patched.transformer, family.default_clip)
    except ValueError:  # an autoencoder that does not say its strides, or a size that the model does not take
        return words
    plain = sum(forward_flops(patched.transformer, family, grid).values())
    left = sum(forward_flops(patched.transformer, family, grid, config, patched.chosen).values())
    (height, width), frames = family.default_clip.sizes[0], family.default_clip.frames
    size = f"{height}x{width}" + (f"x{frames}" if family.makes_videos else "")
    words += f"; at {size} at most {config.call_speedup(plain, left, USUAL_STEPS):.1f}x"
    held = sum(_describe_layer(name, attn, patched, grid).residual_bytes for name, attn in patched.attentions.items())
    return words + (f", {scaled(2 * held, 1024, 'B')} for corrections with guidance" if held else "")


def describe(
    model: Any,
    grid: Sequence[int] | None = None,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
) -> Description:
    """Describe what is replaced and what is kept, layer by layer.

    Args:
        model: a pipeline or a transformer, patched or not.
        grid: token grid to describe; None for that of the latest forward.
        height: in pixels, with ``width``: of a pipeline, the grid of this size, before any run.
        width: in pixels.
        num_frames: of a video; None for the family's default.

    Raises:
        ValueError: unsupported model, or a grid or size that it or the blocks do not fit.
    """
    handles, layers = find_patched(model), Description()
    without_layers = [patched for patched in handles.values() if not patched.family.knows_layers]
    if without_layers:
        if (grid, height, width, num_frames) != (None, None, None, None):
            raise ValueError(f"{type(model).__name__} has no family, so only its latest forward can be described.")
        layers.notes = tuple(map(_describe_by_grid, without_layers))
        return layers
    transformers = find_transformers(model)
    grids = dict.fromkeys(transformers, None if grid is None else check_grid(grid, "grid"))
    for component, given in grids.items():
        axes = get_family(transformers[component]).axes
        if given is not None and len(given) != axes:
            kind = type(transformers[component]).__name__
            raise ValueError(f"grid={given} has {len(given)} axes, but the token grid of {kind} has {axes}.")
    if (height, width, num_frames) != (None, None, None):
        if grid is not None:
            raise ValueError(f"Give either grid={tuple(grid)} or a size in pixels, not both.")
        grids.update(grids_of_size(model, height, width, num_frames))
    for component, transformer in transformers.items():
        prefix = f"{component}." if len(transformers) > 1 else ""
        patched = handles.get(component) or Patched(transformer, SparseConfig(), get_family(transformer))
        lora = "" if patched.lora is None else inactive_lora(transformer, patched.lora)
        layers.notes += tuple(filter(None, (str(patched.tally), patched.error_words(), lora)))
        for name, attn in patched.attentions.items():
            layers.append(_describe_layer(name, attn, patched, grids[component], prefix))
    return layers


def _describe_by_grid(patched: Patched) -> str:
    config: Any = patched.config
    latest = str(patched.tally) or NOT_SEEN
    if patched.latest_grid is None:
        latest = "no forward so far: what attends sparsely is known after one"
    return f"{type(patched.transformer).__name__}: {config.summary(config.density)}\n{latest}"


def _describe_layer(
    name: str, attn: Any, patched: Patched, wanted: tuple[int, ...] | None, prefix: str = ""
) -> LayerDescription:
    layer, family = getattr(attn, "mhla", None), patched.family
    processor: Any = getattr(attn, "processor", None)
    is_patched = name in patched.chosen
    running = is_patched and not patched.is_off and (layer is None or isinstance(processor, MHLAProcessor))
    kind = type(processor if processor is not None else attn).__name__
    grid = wanted or getattr(processor, "grid", None) or patched.latest_grid
    config: PatchConfig | None = patched.config if is_patched else None
    extra = 0 if layer is None else sum(parameter.numel() for parameter in layer.parameters())
    if wanted is not None and isinstance(config, LinearConfig):
        config.layout_on(wanted)  # raises if the blocks cannot cut the grid
    sizes, density = None, None
    if grid is not None:
        sizes = sizes_of(attn, family, config if running else None, grid, family.extra_tokens)
    if isinstance(config, CausalConfig) and config.own == "softmax":
        longest = config.blocks[0] * config.block_length, *config.blocks[1:]
        own = config.sizes_on(grid or longest, 1, 1)
        density = own.listed_pairs / own.pairs
    elif isinstance(config, SparseConfig):
        density = config.density if grid is None else config.rule_on(grid).listed_on(grid)
    return LayerDescription(prefix + name, kind, config, running, grid, sizes, extra, density)


def forward_flops(
    transformer: Any,
    family: Family,
    grid: tuple[int, ...],
    config: PatchConfig | None = None,
    chosen: Collection[str] = (),
) -> dict[str, int]:
    """Return the FLOPs of a forward of one sample by part, with a patch in the chosen self-attentions.

    Self-attention is counted without its projections; embeddings, norms and modulation, under 1 %, are not counted.
    """
    flops = 0
    for name, attn in family.self_attentions(transformer).items():
        flops += sizes_of(attn, family, config if name in chosen else None, grid, family.extra_tokens).flops
    return {"self-attention": flops, **family.other_flops(transformer, grid)}


def sizes_of(
    attn: Any, family: Family, config: PatchConfig | None, grid: tuple[int, ...], extra: int = 0
) -> AttentionSizes:
    """Return what the cost of a model's self-attention depends on; its family's own without ``config`` of a patch."""
    heads, head_dim = family.heads(attn)
    if config is not None:
        return config.sizes_on(grid, heads, head_dim, extra)
    if family.computes != "softmax":
        return AttentionSizes(math.prod(grid), heads, head_dim, extra=extra)
    return AttentionSizes.of_sparse(math.prod(grid), heads, head_dim, 1, 1, 0, 1.0, extra)


def grids_of_size(
    pipe: Any, height: int | None, width: int | None, num_frames: int | None
) -> Mapping[str, tuple[int, ...]]:
    """Return the token grid at a size in pixels by component name, of a pipeline; ValueError for a size without one."""
    transformers = find_transformers(pipe)
    if isinstance(pipe, nn.Module):
        raise ValueError(
            "A size in pixels needs the pipeline, because its autoencoder sets the latents' size. For a transformer "
            "give grid=(frames, height, width) or (height, width), in tokens."
        )
    if height is None or width is None:
        raise ValueError(f"height={height} and width={width} belong together; give both, in pixels.")
    grids = {}
    for name, transformer in transformers.items():
        family = get_family(transformer)
        if family.squares_only and height != width:
            raise ValueError(f"{type(transformer).__name__} takes squares only; got height={height}, width={width}.")
        frames = num_frames if num_frames is not None else family.default_clip.frames
        clip = Clip(frames=frames, fps=family.default_clip.fps, sizes=((height, width),))
        grids[name] = check_grid(family.calling.grid(pipe, transformer, clip), f"grid of {height}x{width} pixels")
    return grids
