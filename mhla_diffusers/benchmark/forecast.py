"""Forecast the time of denoising without patching or downloading: costs counted on the meta device, over speeds.

``mhla info --model`` prints a forecast, ``mhla bench ceilings`` what a patch can save at most.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from ..config import AUTOMATIC, DEFAULT_DENSITY, MHLAConfig, is_automatic
from ..devices import FLOAT_TYPES
from ..families import Model
from ..generation.names import parse_steps
from ..patching import apply_mhla
from ..patching.patch import choose_layers
from ..patching.steps import Step
from ..reporting import scaled, text_table, times
from .models import Size, build_transformer, choose_sizes, family_of_model, find_models, make_forward_inputs
from .parts import ATTENTION, PARTS, count_parts
from .results import CONTENT, PLAIN, read_run
from .shapes import Cost
from .speeds import Speeds, find_card, held_against, measured_speeds, read_card, stated_speeds

Costs = Mapping[str, Cost]
"""Part → cost."""


@dataclass(frozen=True)
class Question:
    """The question: denoising of one call of a pipeline.

    Raises:
        ValueError: a number of steps or passes that is not allowed.
    """

    model: Model
    size: Size
    config: MHLAConfig
    """Of the patch."""
    steps: int = 50
    """Of the sampler."""
    passes: int = 2
    """Forwards per step: two with classifier-free guidance, with and without the prompt."""

    def __post_init__(self) -> None:
        for name in ("steps", "passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    @property
    def grid(self) -> tuple[int, ...]:
        """Token grid, of a single frame where frames attend by themselves."""
        model, size = self.model, self.size
        step = model.stride * model.patch
        frames = []
        if size.frames is not None:
            config = SimpleNamespace(patch_size_t=model.temporal_patch)  # all that a family asks of it
            latents = family_of_model(model).latent_frames(config, size.frames, model.temporal_stride)
            frames.append(latents // model.temporal_patch)
        return (*frames, size.height // step, size.width // step)[-len(model.blocks) :]

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.grid)

    @property
    def kind(self) -> str:
        """Of the patch, as ``mhla bench`` names it."""
        if self.config.sparse != "none":
            return CONTENT if self.config.sparse == "content" else "MHLA, sparse, own blocks"
        return PLAIN if math.prod(self.config.blocks) == 1 else "MHLA"

    @property
    def layers(self) -> int:
        """How many are replaced."""
        return len(choose_layers(self.config.layers, self.model.layers))

    @property
    def softmax_steps(self) -> int:
        """First steps in which the patch is disabled."""
        steps = [Step(index, self.steps) for index in range(self.steps)]
        return sum(step.is_among_first(self.config.softmax_steps) for step in steps)

    @property
    def patched(self) -> float:
        """Part of all layers of all steps that are patched."""
        return self.layers / self.model.layers * (1 - self.softmax_steps / self.steps)


def count_forwards(question: Question, dtype: torch.dtype, layers: int | None = None) -> tuple[Costs, Costs]:
    """Count one forward of one sample without the patch, and with it in every layer.

    Of one layer and of two, since all are alike.

    The type is that of the weights.
    """
    model, size, meta = question.model, question.size, torch.device("meta")
    more = (layers or model.layers) - 1
    found: list[tuple[Costs, Costs]] = []
    for built in (1, 2) if more else (1,):
        transformer = build_transformer(model, size, built, meta, dtype)
        inputs = make_forward_inputs(model, transformer, size, meta, dtype)
        unpatched = count_parts(transformer, inputs)
        apply_mhla(transformer, question.config.replace(layers="all", softmax_steps=0))
        found.append((unpatched, count_parts(transformer, inputs)))
    one, two = found[0], found[-1]
    unpatched, patched = (
        {part: first[part].times(1 - more) + second[part].times(more) for part in first}
        for first, second in zip(one, two, strict=True)
    )
    return unpatched, patched


def total(costs: Costs) -> Cost:
    """Of all parts."""
    return sum(costs.values(), Cost(0, 0))


def forward_seconds(
    counts: tuple[Costs, Costs], layers: int, speeds: Speeds
) -> tuple[dict[str, float], dict[str, float]]:
    """Of one forward of so many layers without and with the patch."""
    return speeds.seconds(counts[0], layers, patched=False), speeds.seconds(counts[1], layers, patched=True)


@dataclass(frozen=True)
class Forecast:
    """The answer: of a whole call's denoising, without text encoder and VAE."""

    question: Question
    unpatched: Costs
    patched: Costs
    unpatched_seconds: dict[str, float] | None = None
    """None if speeds are unknown."""
    patched_seconds: dict[str, float] | None = None
    break_even: Question | None = None
    """The same at the smallest size of this aspect ratio and length from which the patch is faster; None for none."""

    @property
    def speed_up(self) -> float | None:
        """How many times less time the patched call takes."""
        if self.unpatched_seconds is None or self.patched_seconds is None:
            return None
        return sum(self.unpatched_seconds.values()) / sum(self.patched_seconds.values())


def make_forecast(question: Question, dtype: torch.dtype, speeds: Speeds | None = None) -> Forecast:
    """Count costs, and compute times if speeds are known.

    Raises:
        ValueError: a patch that does not fit the model or the size.
    """
    counts = count_forwards(question, dtype)
    forwards, part_patched = question.steps * question.passes, question.patched
    costs = {
        part: cost.times(forwards * part_patched) + counts[0][part].times(forwards * (1 - part_patched))
        for part, cost in counts[1].items()
    }
    found = Forecast(question, {part: cost.times(forwards) for part, cost in counts[0].items()}, costs)
    if speeds is None:
        return found
    one, other = forward_seconds(counts, question.model.layers, speeds)
    mixed = {part: forwards * (part_patched * other[part] + (1 - part_patched) * one[part]) for part in PARTS}
    return replace(
        found,
        unpatched_seconds={part: forwards * one[part] for part in PARTS},
        patched_seconds=mixed,
        break_even=_break_even(question, dtype, speeds),
    )


def _break_even(question: Question, dtype: torch.dtype, speeds: Speeds) -> Question | None:
    """By halving up to a million tokens: once the patched forward is the faster one, it is so at every larger size."""
    step, (*frames, height, width) = question.model.stride * question.model.patch, question.grid

    def at(rows: int) -> Question:
        columns = max(1, round(rows * width / height))
        return replace(question, size=replace(question.size, height=rows * step, width=columns * step))

    def gains(rows: int) -> bool:
        one, other = forward_seconds(count_forwards(at(rows), dtype, 1), 1, speeds)
        return sum(other.values()) < sum(one.values())

    def fits(rows: int) -> bool:
        grid = at(rows).grid
        return all(count <= size for count, size in zip(question.config.blocks_on(grid), grid, strict=True))

    most = math.isqrt(int(2**20 / math.prod(frames) * height / width))
    tried = range(bisect_left(range(height), True, key=fits), max(most, height) + 1)
    rows = bisect_left(tried, True, key=gains)
    return at(tried[rows]) if rows < len(tried) else None


# ---- mhla info --model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """As they were given on the command line; None for those that were not.

    Raises:
        ValueError: options that do not go together.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    density: float | None = None
    """Of the block lists, with the family's patch."""
    steps: int | None = None
    passes: int | None = None
    softmax_steps: str | None = None
    """As :func:`mhla_diffusers.generation.names.parse_steps` takes it, in place of the patch's."""
    device: Path | None = None
    """A file of ``mhla bench``, or a card that is known, such as h100."""
    matmul_rate: float | None = None
    """FLOP/s."""
    copy_rate: float | None = None
    """Bytes/s."""

    def __post_init__(self) -> None:
        if (self.height is None) != (self.width is None):
            raise ValueError(
                f"--height {self.height} and --width {self.width} belong together; give both, in pixels, or neither."
            )
        if (self.matmul_rate is None) != (self.copy_rate is None):
            raise ValueError(
                "--matmul-rate and --copy-rate belong together: the slower of arithmetic and memory decides. Give both."
            )
        if self.device is not None and self.matmul_rate is not None:
            raise ValueError(
                "--device holds rates that were measured, --matmul-rate and --copy-rate state others; give one of both."
            )


def forecast_text(name: str, patch: tuple[str, MHLAConfig] | None, options: Options) -> str:
    """What denoising will take, without and with a patch.

    Args:
        name: of a model that ``mhla bench transformer`` knows.
        patch: name of the family that it is for, and its settings; None for the family's with ``density``.
        options: of the command line.

    Raises:
        ValueError: an unknown model, a size, a patch or a density that it does not take, or results without what is
            needed.
        OSError: no such results.
    """
    (model,) = find_models([name], "cpu")
    if not family_of_model(model).is_diffusion:
        raise ValueError(
            f"{name} has no denoising to forecast: mhla bench ceilings --model {name} counts one forward, and "
            f"mhla bench transformer --model {name} times it."
        )
    if options.frames is not None and not model.is_video:
        raise ValueError(f"--frames {options.frames} was given, but {name} makes images; leave it out.")
    sides = None if options.height is None else [f"{options.height}x{options.width}"]
    (size,) = choose_sizes(model, sides, None if options.frames is None else [options.frames], "cpu")
    config = _config(model, patch, options.density)
    if options.softmax_steps is not None:
        config = config.replace(softmax_steps=parse_steps(options.softmax_steps))
    steps, passes = options.steps, options.passes
    question = Question(model, size, config, 50 if steps is None else steps, model.passes if passes is None else passes)
    speeds, dtype = _speeds(question, options)
    forecast = make_forecast(question, FLOAT_TYPES[dtype], speeds)
    lines = [*_heading(question), "", _table(forecast, dtype), "", "Not in it: text encoder, VAE, and the sampler."]
    if speeds is not None:
        return "\n".join([*lines, *_findings(forecast, speeds)])
    lines += [
        "No times, because no device is given. Measure one and give --device the JSON that this writes:",
        f"  mhla bench transformer --model {model.name}",
        "or state --matmul-rate (FLOP/s) and --copy-rate (bytes/s) for a bound.",
    ]
    return "\n".join(lines)


def _config(model: Model, patch: tuple[str, MHLAConfig] | None, density: float | None) -> MHLAConfig:
    """Settings of the patch, with which layers an automatic choice takes left open: all cost the same."""
    family = family_of_model(model)
    if patch is None:
        config = family.default_config.replace(blocks=model.blocks)
        if density is not None and family.own_attention != "softmax":
            raise ValueError(
                f"--density {density} is of a sparse branch, and the own attention of {model.name} is "
                f"{family.own_attention}, whose patch has none; leave it out."
            )
        return config if density is None else config.replace(density=density)
    name, config = patch
    if density is not None:
        raise ValueError(f"--density {density} and --patch both give a density; give one of them.")
    if name != family.name:
        raise ValueError(f"The patch is for the {name!r} family, but {model.name} belongs to {family.name!r}.")
    return config.replace(layers=str(config.layers).removeprefix(AUTOMATIC)) if is_automatic(config.layers) else config


def _speeds(question: Question, options: Options) -> tuple[Speeds | None, str]:
    """Speeds, if there are any, and the type that bytes are counted in."""
    if options.matmul_rate is not None and options.copy_rate is not None:
        return stated_speeds(options.matmul_rate, options.copy_rate), "bfloat16"
    if options.device is None:
        return None, "bfloat16"
    card = None if options.device.is_file() else find_card(options.device)
    runs = [read_run(options.device)] if card is None else read_card(card)
    speeds = measured_speeds(runs, question.model, question.tokens, question.kind)
    if card is not None:
        speeds = replace(speeds, source=f"{speeds.source}\n{held_against(card)}")
    return speeds, runs[0].rates.matmul_dtype


def _heading(question: Question) -> list[str]:
    """Model, size, call and patch."""
    model, config = question.model, question.config
    family = family_of_model(model)
    patch = f"MHLA of {times(config.blocks_on(question.grid))} blocks"
    if config.sparse != "none":
        in_order = family.own_attention_is_causal
        of_model = (model.heads, model.head_dim, family.extra_tokens)
        sizes = config.sizes_on(question.grid, *of_model, in_order=in_order)
        where = f"in blocks of {config.block_size} chosen by content" if config.sparse == "content" else "in own blocks"
        with_text = ", those of the text among them" if family.extra_tokens else ""
        patch += f" and softmax over {sizes.listed_pairs / sizes.pairs:.1%} of all pairs {where}{with_text}"
    share = question.layers / model.layers
    layers = f"{share:.0%} of all layers" if model.more_layers else f"{question.layers} of {model.layers} layers"
    softmax = f", the first {question.softmax_steps} of them unpatched" if question.softmax_steps else ""
    return [
        f"{model.name} at {question.size}: {times(question.grid)} = {question.tokens:,} tokens",
        f"{question.steps} steps{softmax}, {question.passes} forward{'s' if question.passes > 1 else ''} each",
        f"unpatched: {family.own_attention} attention; patched: {patch}, in {layers}",
    ]


def _table(forecast: Forecast, dtype: str) -> str:
    """A line per part that the model has, and one for all of them."""
    costs = [{**one, "denoising": total(one)} for one in (forecast.unpatched, forecast.patched)]
    shown = [part for part in (*PARTS, "denoising") if costs[0][part] != Cost(0, 0)]
    header = ["part", "FLOP unpatched", "patched", f"bytes unpatched, {dtype}", "patched"]
    columns = [[scaled(of[part].flops, 1000, "") for part in shown] for of in costs]
    columns += [[scaled(of[part].bytes, 1000, "B") for part in shown] for of in costs]
    if forecast.unpatched_seconds is not None and forecast.patched_seconds is not None:
        header += ["time unpatched", "patched"]
        for seconds in (forecast.unpatched_seconds, forecast.patched_seconds):
            columns.append([_time({**seconds, "denoising": sum(seconds.values())}[part]) for part in shown])
    return text_table(header, list(zip(shown, *columns, strict=True)), right=True)


def _findings(forecast: Forecast, speeds: Speeds) -> list[str]:
    """Speed-up, why it is no more, break-even, and what the times are worth."""
    one, other, speed_up = forecast.unpatched_seconds, forecast.patched_seconds, forecast.speed_up
    if one is None or other is None or speed_up is None:
        return []
    question, share, lines = forecast.question, one[ATTENTION] / sum(one.values()), []
    if speeds.of_earlier_branch:
        lines.append(
            "The patched time is that of the sparse branch before this one (exact tiles): the present one, by content "
            "over uniform blocks, has not been timed on this device."
        )
    attention = f"self-attention is {share:.0%} of the unpatched time"
    if speed_up > 1:
        most = f"{1 / (1 - share):.2f}" if share < 1 else "any"
        lines.append(f"Speed-up {speed_up:.2f}; {attention}, so one that cost nothing would bring {most}.")
    else:
        took, takes = _time(one[ATTENTION]), _time(other[ATTENTION])
        lines.append(f"No gain at this size: {attention}, {took}, and the patch takes {takes} for it.")
    is_scaled = question.config.sparse == "content" and question.config.listed != DEFAULT_DENSITY
    is_scaled &= speeds.is_measured
    # what was not timed as it is asked about tells the size at which two lines cross worst of all
    if not is_scaled and not speeds.of_earlier_branch:
        length, found = "" if question.size.frames is None else " and length", forecast.break_even
        lines.append(
            f"At no size of this aspect ratio{length} up to a million tokens is the patch faster."
            if found is None
            else f"The patch is faster from about {found.tokens:,} tokens, {found.size} at this aspect ratio{length}."
        )
    lines.append(f"Times {speeds.source}")
    if speeds.is_measured:
        lines.append("Other sizes meet other caches and clocks.")
        if not any(pace.fixed for pace in speeds.patched.values()):
            lines.append("Time that does not depend on size is not separated; that needs results of two sizes.")
    if is_scaled:
        lines.append(
            f"The sparse branch was timed at a density of {DEFAULT_DENSITY:.0%}. At other densities the time is "
            "scaled, so no size is named from which on the patch is faster."
        )
    return lines


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


# ---- mhla bench ceilings --------------------------------------------------------------------------------------------

CEILINGS = ("model", "size", "tokens", "forward, TFLOP", "attention", "patched, TFLOP", "at most")
"""Header of the table."""


def ceilings(models: Iterable[Model]) -> list[Forecast]:
    """Count a forward of every model at all of its sizes, with the patch of ``apply_mhla(pipe)`` in every layer.

    Models whose own attention is linear are left out, since a patch saves nothing there.
    """
    found = []
    for model in models:
        if family_of_model(model).own_attention == "softmax":
            config = family_of_model(model).default_config.replace(blocks=model.blocks, layers="all", softmax_steps=0)
            sizes = choose_sizes(model, None, None, "cuda")
            found += [make_forecast(Question(model, size, config, 1, 1), torch.bfloat16) for size in sizes]
    return found


def ceiling_cells(found: Forecast) -> tuple[str, ...]:
    """A row of ``CEILINGS``; times less arithmetic is the speed-up where arithmetic is all that takes time."""
    flops, patched = total(found.unpatched).flops, total(found.patched).flops
    whole, left = (f"{one / 1e12:,.0f}" if one >= 1e14 else f"{one / 1e12:.3g}" for one in (flops, patched))
    tokens, share = f"{found.question.tokens:,}", f"{found.unpatched[ATTENTION].flops / flops:.0%}"
    model, size = found.question.model.name, str(found.question.size)
    return model, size, tokens, whole, share, left, f"{flops / patched:.2f} x"
