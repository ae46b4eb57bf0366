"""``mhla info --model``: the options of a forecast, checked, and the forecast as text."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..config import AUTOMATIC, DEFAULT_DENSITY, MHLAConfig, is_automatic
from ..devices import FLOAT_TYPES
from ..families import Model
from ..generation.names import parse_steps
from ..patching.costs import attention_sizes
from ..reporting import scaled, text_table, times
from .cards import find_card, held_against
from .forecast import Forecast, Question, make_forecast
from .models import choose_sizes, family_of_model, find_models
from .parts import ATTENTION, PARTS
from .results import read_run
from .shapes import Cost
from .speeds import Speeds, measured_speeds, stated_speeds

_COUNTED_IN = "bfloat16"
"""Bytes where no results say of which type."""
_WHOLE = "denoising"


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

    @property
    def calls(self) -> dict[str, int]:
        """Those of :class:`Question` that were given."""
        asked = {"steps": self.steps, "passes": self.passes}
        return {name: value for name, value in asked.items() if value is not None}


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
    config = _config(model, patch, options)
    if options.softmax_steps is not None:
        config = config.replace(softmax_steps=parse_steps(options.softmax_steps))
    question = Question(model, size, config, **{"passes": model.passes, **options.calls})
    speeds, dtype = _speeds(question, options)
    forecast = make_forecast(question, FLOAT_TYPES[dtype], speeds)
    lines = [*_heading(question), "", _table(forecast, dtype), "", "Not in it: text encoder, VAE, and the sampler."]
    return "\n".join([*lines, *(_no_times(model) if speeds is None else _findings(forecast, speeds))])


def _config(model: Model, patch: tuple[str, MHLAConfig] | None, options: Options) -> MHLAConfig:
    """Settings of the patch, with which layers an automatic choice takes left open: all cost the same."""
    family = family_of_model(model)
    if patch is None:
        config = family.default_config.replace(blocks=model.blocks)
        if options.density is None:
            return config
        if family.own_attention != "softmax":
            raise ValueError(
                f"--density {options.density} is of a sparse branch, and the own attention of {model.name} is "
                f"{family.own_attention}, whose patch has none; leave it out."
            )
        return config.replace(density=options.density)
    name, config = patch
    if options.density is not None:
        raise ValueError(f"--density {options.density} and --patch both give a density; give one of them.")
    if name != family.name:
        raise ValueError(f"The patch is for the {name!r} family, but {model.name} belongs to {family.name!r}.")
    return config.replace(layers=str(config.layers).removeprefix(AUTOMATIC)) if is_automatic(config.layers) else config


def _speeds(question: Question, options: Options) -> tuple[Speeds | None, str]:
    """Speeds, if there are any, and the type that bytes are counted in."""
    if options.matmul_rate is not None and options.copy_rate is not None:
        return stated_speeds(options.matmul_rate, options.copy_rate), _COUNTED_IN
    if options.device is None:
        return None, _COUNTED_IN
    is_card = not options.device.is_file()
    folder = find_card(options.device) if is_card else options.device
    runs = (
        [read_run(folder / f"{command}.json") for command in ("transformer", "op")] if is_card else [read_run(folder)]
    )
    speeds = measured_speeds(runs, question.model, question.tokens, question.kind)
    if is_card:
        speeds = replace(speeds, source=f"{speeds.source}\n{held_against(folder)}")
    return speeds, runs[0].rates.matmul_dtype


def _heading(question: Question) -> list[str]:
    """Model, size, call and patch."""
    model, size, config = question.model, question.size, question.config
    family = family_of_model(model)
    patch = f"MHLA of {times(config.blocks_on(question.grid))} blocks"
    if config.sparse != "none":
        sizes = attention_sizes(
            config,
            question.grid,
            model.heads,
            model.head_dim,
            family.extra_tokens,
            in_order=family.own_attention_is_causal,
        )
        where = f"in blocks of {config.block_size} chosen by content" if config.sparse == "content" else "in own blocks"
        with_text = ", those of the text among them" if family.extra_tokens else ""
        patch += f" and softmax over {sizes.listed_pairs / sizes.pairs:.1%} of all pairs {where}{with_text}"
    share = question.layers / model.layers
    layers = f"{share:.0%} of all layers" if model.more_layers else f"{question.layers} of {model.layers} layers"
    softmax = f", the first {question.softmax_steps} of them unpatched" if question.softmax_steps else ""
    return [
        f"{model.name} at {size}: {times(question.grid)} = {question.tokens:,} tokens",
        f"{question.steps} steps{softmax}, {question.passes} forward{'s' if question.passes > 1 else ''} each",
        f"unpatched: {family.own_attention} attention; patched: {patch}, in {layers}",
    ]


def _table(forecast: Forecast, dtype: str) -> str:
    """A line per part that the model has, and one for all of them."""
    header = ["part", "FLOP unpatched", "patched", f"bytes unpatched, {dtype}", "patched"]
    costs = [{**counts, _WHOLE: sum(counts.values(), Cost(0, 0))} for counts in (forecast.unpatched, forecast.patched)]
    shown = [part for part in (*PARTS, _WHOLE) if costs[0][part] != Cost(0, 0)]
    columns = [[scaled(of[part].flops, 1000, "") for part in shown] for of in costs]
    columns += [[scaled(of[part].bytes, 1000, "B") for part in shown] for of in costs]
    for seconds in (forecast.unpatched_seconds, forecast.patched_seconds):
        if seconds is not None:
            header.append("patched" if "time unpatched" in header else "time unpatched")
            columns.append([_time({**seconds, _WHOLE: sum(seconds.values())}[part]) for part in shown])
    return text_table(header, list(zip(shown, *columns, strict=True)), right=True)


def _findings(forecast: Forecast, speeds: Speeds) -> list[str]:
    """Speed-up, why it is no more, break-even, and what the times are worth."""
    one, other = forecast.unpatched_seconds, forecast.patched_seconds
    if one is None or other is None or forecast.speed_up is None:
        return []
    question, share = forecast.question, one[ATTENTION] / sum(one.values())
    attention = f"self-attention is {share:.0%} of the unpatched time"
    if forecast.speed_up > 1:
        lines = [f"Speed-up {forecast.speed_up:.2f}; {attention}, so one that cost nothing would bring {_most(share)}."]
    else:
        took, takes = _time(one[ATTENTION]), _time(other[ATTENTION])
        lines = [f"No gain at this size: {attention}, {took}, and the patch takes {takes} for it."]
    if speeds.of_earlier_branch:
        lines.insert(
            0,
            "The patched time is that of the sparse branch before this one (exact tiles): the present one, by content "
            "over uniform blocks, has not been timed on this device.",
        )
    sparse = question.config.sparse == "content"
    is_scaled = speeds.is_measured and sparse and question.config.listed != DEFAULT_DENSITY
    # what was not timed as it is asked about tells the size at which two lines cross worst of all
    if not is_scaled and not speeds.of_earlier_branch:
        lines.append(_break_even(forecast.break_even, question))
    lines.append(f"Times {speeds.source}")
    if speeds.is_measured:
        lines.append("Other sizes meet other caches and clocks.")
        if not any(pace.fixed for pace in speeds.patched.values()):
            lines.append("What a forward takes whatever its size is not told apart: results of two sizes would tell.")
    if is_scaled:
        lines.append(
            f"The sparse branch was timed at a density of {DEFAULT_DENSITY:.0%}. At other densities the time is "
            "scaled, so no size is named from which on the patch is faster."
        )
    return lines


def _break_even(found: Question | None, question: Question) -> str:
    length = "" if question.size.frames is None else " and length"
    if found is None:
        return f"At no size of this aspect ratio{length} up to a million tokens is the patch faster."
    return f"The patch is faster from about {found.tokens:,} tokens, {found.size} at this aspect ratio{length}."


def _no_times(model: Model) -> list[str]:
    return [
        "No times, as nothing is known of a device. Measure one and give --device the JSON that this writes:",
        f"  mhla bench transformer --model {model.name}",
        "or state --matmul-rate (FLOP/s) and --copy-rate (bytes/s) for a bound.",
    ]


def _most(share: float) -> str:
    """The speed-up of an attention that costs nothing."""
    return f"{1 / (1 - share):.2f}" if share < 1 else "any"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
