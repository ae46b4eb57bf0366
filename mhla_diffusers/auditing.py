"""The error of a patch: every patched self-attention compared with the original on the same input, in one run."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from .attention import SparseCall
from .attention.reference import weight_held
from .config import SparseConfig
from .families import get_family, named_arguments
from .files import write_json
from .patching.call import Call, Seen, held, in_every_step
from .patching.finding import require_patched
from .patching.patched import Patched
from .reporting import require_matplotlib, text_table

Item = TypeVar("Item")

_CALLS = 4
"""Most calls that are repeated with one layer patched at a time."""
_QUERIES = 512
"""Queries per head whose N softmax weights each are computed."""
_MOST_ROWS = 12
"""Maximum rows of the table of steps; more steps share rows."""


@dataclass(frozen=True)
class LayerAudit:
    """One patched self-attention. S steps, H heads."""

    name: str
    """Its name in the transformer; the component's before it if a pipeline has two transformers."""
    errors: torch.Tensor
    """Squared error of every head's input to the output projection, float64 (S, H); 0 where the patch is disabled."""
    squares: torch.Tensor
    """Squared norm of the same without the patch, float64 (S, H)."""
    moves: float
    """Relative squared change of the transformer's output if only this layer is patched."""
    density: float | None = None
    """Fraction of all pairs of blocks in its lists; None unless it runs sparse attention."""
    mass_kept: float | None = None
    """Fraction of the softmax weight on these pairs, averaged over heads, queries and calls; None without such."""

    @property
    def error(self) -> float:
        """Relative error over the run, ‖patched − original‖ / ‖original‖."""
        return float((self.errors.sum() / self.squares.sum()).sqrt())

    @property
    def errors_of_heads(self) -> torch.Tensor:
        """(H,), relative, over the run."""
        return (self.errors.sum(dim=0) / self.squares.sum(dim=0)).sqrt()

    @property
    def errors_of_steps(self) -> torch.Tensor:
        """(S,), relative, over the heads; NaN where the layer does not run."""
        return (self.errors.sum(dim=1) / self.squares.sum(dim=1)).sqrt()


@dataclass(frozen=True)
class Audit:
    """The error of a patch per layer, head and step; prints as a table."""

    layers: tuple[LayerAudit, ...]
    """Patched self-attentions of all transformers."""
    disabled: tuple[bool, ...]
    """Whether the patch was disabled, for every step."""
    knows_steps: bool
    """Whether the steps of the pipeline are known; otherwise every forward counts as one."""
    moves: float
    """Relative squared change of the transformer's output by the whole patch, where it is enabled."""

    def __str__(self) -> str:
        has_lists = any(layer.density is not None for layer in self.layers)
        header = ["layer", "error", "worst head", *(("density", "mass kept") if has_lists else ()), "moves"]
        rows = []
        for layer in self.layers:
            worst = int(layer.errors_of_heads.argmax())
            kept = ["-" if part is None else f"{part:.1%}" for part in (layer.density, layer.mass_kept)]
            row = [layer.name, "dense", "-"]
            if not math.isnan(layer.error):
                row[1:] = f"{layer.error:.1%}", f"{worst}: {layer.errors_of_heads[worst]:.1%}"
            rows.append([*row, *(kept if has_lists else ()), f"{math.sqrt(layer.moves):.1%}"])

        errors, squares = (
            torch.stack([values.sum(dim=1) for values in parts]).sum(dim=0)
            for parts in ([layer.errors for layer in self.layers], [layer.squares for layer in self.layers])
        )
        width = math.ceil(len(errors) / _MOST_ROWS)
        steps = []
        for start in range(0, len(errors), width):
            here = slice(start, min(start + width, len(errors)))
            name = str(here.stop) if here.stop - start == 1 else f"{start + 1} to {here.stop}"
            error = f"{(errors[here].sum() / squares[here].sum()).sqrt():.1%}"
            steps.append((name, "dense" if all(self.disabled[here]) else error))

        never = " where enabled, but it is disabled in every step" if all(self.disabled) else ""
        parts = [
            text_table(header, rows, right=True),
            text_table(("step" if self.knows_steps else "forward", "error"), steps),
            f"together the patch moves the output by {math.sqrt(self.moves):.1%}{never}",
        ]
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; errors are relative, None where nothing ran."""

        def numbers(values: torch.Tensor) -> list[float | None]:
            return [None if math.isnan(value) else value for value in values.tolist()]

        layers = [
            {
                "name": layer.name,
                "error": layer.error,
                "errors_of_heads": numbers(layer.errors_of_heads),
                "errors_of_steps": numbers(layer.errors_of_steps),
                "moves": math.sqrt(layer.moves),
                "density": layer.density,
                "mass_kept": layer.mass_kept,
            }
            for layer in self.layers
        ]
        steps = {"knows_steps": self.knows_steps, "disabled": list(self.disabled)}
        return {"layers": layers, **steps, "moves": math.sqrt(self.moves)}


@torch.no_grad()
def audit(model: Any, run: Callable[[], object]) -> Audit:
    """Measure the error of a patch per layer, head and step, and how much softmax weight its block lists cover.

    ``run`` is called once on typical inputs: ``lambda: pipe("a cat", num_inference_steps=4)``. Every patched
    self-attention and its original are evaluated on the same input; then some forwards are repeated with one layer
    patched at a time. A causal patch is compared with attention that also sees later frames, which adds to its error.
    ValueError if the model is not patched, its patch is disabled, or ``run`` did not reach every layer.
    """
    running = {name: patched for name, patched in require_patched(model).items() if not patched.is_off}
    if not running:
        raise ValueError("The patch of this model is switched off; leave mhla_disabled() first.")
    transformers = {name: patched.transformer for name, patched in running.items()}
    forwards: list[Call] = []
    always_dense: dict[str, bool] = {}
    watches = {(component, name): _Watch() for component, patched in running.items() for name in patched.chosen}

    def look(component: str, patched: Patched) -> Callable[[Seen], torch.Tensor]:
        def compare(seen: Seen) -> torch.Tensor:
            if not forwards or forwards[-1] is not held().call:
                forwards.append(held().call or Call())
            watches[component, seen.layer].compare(seen, len(forwards) - 1, patched)
            return seen.output

        return compare

    with ExitStack() as stack:
        for component, patched in running.items():
            stack.enter_context(patched.watched(look(component, patched)))

            def begin(*_: object, component: str = component) -> None:
                forwards.append(held().call or Call())
                always_dense[component] = always_dense.get(component, True) and forwards[-1].is_dense

            handle = patched.transformer.register_forward_pre_hook(begin)
            stack.callback(handle.remove)
        recorded = record_calls(transformers, run)
    names = {key: ".".join(key) if len(transformers) > 1 else key[1] for key in watches}
    sparse = [key for key in watches if not always_dense.get(key[0])]  # a transformer of early steps may never be
    _check_reached([names[key] for key in sparse], [names[key] for key in sparse if watches[key].forwards])

    knows_steps = all(call.step is not None for call in forwards)
    steps = [call.step.index if knows_steps and call.step else place for place, call in enumerate(forwards)]
    count = max(1 + max(steps), *(call.step.count for call in forwards if knows_steps and call.step), 0)
    measured = {name: _measure_moves(patched, _spread(recorded[name])) for name, patched in running.items()}
    layers = []
    for (component, name), watch in watches.items():
        heads = watch.errors[0].shape[0] if watch.errors else 1
        errors, squares = torch.zeros(2, count, heads, dtype=torch.float64)
        if watch.errors:
            where = torch.tensor([steps[forward] for forward in watch.forwards])
            errors.index_add_(0, where, torch.stack(watch.errors))
            squares.index_add_(0, where, torch.stack(watch.squares))
        density, mass = (sum(x) / len(x) if x else None for x in (watch.densities, watch.masses))
        layers.append(LayerAudit(names[component, name], errors, squares, measured[component][0][name], density, mass))
    disabled = {step for step, call in zip(steps, forwards, strict=True) if call.is_dense}
    flags = tuple(step in disabled for step in range(count))
    changes = [change for _, change in measured.values()]
    return Audit(tuple(layers), flags, knows_steps, sum(changes) / len(changes))


class _Watch:
    """Compares one patched self-attention with the model's own, forward by forward."""

    def __init__(self) -> None:
        self.forwards: list[int] = []
        """Index of the transformer's forward."""
        self.errors: list[torch.Tensor] = []
        self.squares: list[torch.Tensor] = []
        self.densities: list[float] = []
        self.masses: list[float] = []

    def compare(self, seen: Seen, forward: int, patched: Patched) -> None:
        """Look at the tokens of the grid in one call of attention."""
        here = slice(seen.extra[0], seen.extra[0] + math.prod(seen.grid))
        found, exact = (x[:, here].float() for x in (seen.output, seen.exact()))
        self.forwards.append(forward)
        self.errors.append((found - exact).square().sum(dim=(0, 1, 3)).double().cpu())
        self.squares.append(exact.square().sum(dim=(0, 1, 3)).double().cpu())
        if not bool((self.errors[-1] + self.squares[-1]).isfinite().all()):
            raise ValueError(_not_finite(seen.layer))
        if isinstance(patched.config, SparseConfig):
            rule = patched.config.rule_on(seen.grid)
            given: dict[str, Any] = {"query": seen.query, "key": seen.key, "value": seen.value, "grid": seen.grid}
            call = SparseCall(**given, sparse=rule, key_mask=seen.key_mask, extra=seen.extra)
            self.densities.append(rule.listed_on(seen.grid))
            self.masses.append(float(weight_held(call, _QUERIES, len(self.masses))))


# Calls of a transformer, recorded and run again


@dataclass(frozen=True)
class TransformerCall:
    """One forward of a transformer, to be run again."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def grid(self, transformer: nn.Module) -> tuple[int, ...]:
        """Return the token grid that the transformer makes of it."""
        family = get_family(transformer)
        return tuple(map(int, family.grid(transformer, named_arguments(transformer, self.args, self.kwargs))))

    def predict(self, transformer: nn.Module) -> torch.Tensor:
        """Run it; return the output (B, output channels, ...), as the transformer's family has it."""
        with in_every_step():  # outside of the loop that it was recorded in
            prediction = transformer(*self.args, **{**self.kwargs, "return_dict": False})[0]
        return prediction if isinstance(prediction, torch.Tensor) else torch.stack(list(prediction))


def record_calls(transformers: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, list[TransformerCall]]:
    """Run something and keep the inputs of every forward of the transformers; ValueError if it does not reach one."""
    if not callable(run):
        raise ValueError(
            f"run={run!r} must be a function without arguments that runs the model on typical inputs, such as "
            'lambda: pipe("a cat", num_inference_steps=4) for a pipeline.'
        )
    for transformer in transformers.values():
        if getattr(transformer, "is_cache_enabled", False) or getattr(transformer, "_is_cached", False):
            raise ValueError(
                f"A step cache is enabled on this {type(transformer).__name__} and skips attentions that the audit "
                "needs. Call transformer.disable_cache() first, or cache_dit.disable_cache(pipe) for cache-dit."
            )
    calls: dict[str, list[TransformerCall]] = {name: [] for name in transformers}

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(one) for one in value]
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {key: copied(value) for key, value in kwargs.items()}
        calls[name].append(TransformerCall(tuple(map(copied, args)), named))

    with ExitStack() as hooks, torch.no_grad():
        for name, transformer in transformers.items():
            hooks.enter_context(transformer.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        run()
    _check_reached(transformers, [name for name in transformers if calls[name]])
    return calls


def _spread(calls: list[Item]) -> list[Item]:
    count = min(len(calls), _CALLS)
    return [calls[(2 * index + 1) * len(calls) // (2 * count)] for index in range(count)]


def _check_reached(parts: Collection[str], reached: Collection[str]) -> None:
    missed = [name for name in parts if name not in reached]
    if missed:
        raise ValueError(
            f"run() did not call {missed[0]} ({len(missed)} of {len(parts)} were not called); it must call the "
            "pipeline or model given to audit()."
        )


def _not_finite(layer: str) -> str:
    return (
        f"{layer} gets or returns NaN or infinity in this run, so nothing can be compared there. Run typical inputs in "
        "a precision that the model can take, such as bfloat16 in place of float16."
    )


def _measure_moves(patched: Patched, calls: Sequence[TransformerCall]) -> tuple[dict[str, float], float]:
    """Return ‖patched − unpatched‖² / ‖unpatched‖² of the output, averaged over calls, per layer and for all."""

    def output(call: TransformerCall) -> torch.Tensor:
        return call.predict(patched.transformer).float()

    def running_only(*names: str) -> AbstractContextManager[None]:
        return patched.watched(lambda seen: seen.output if seen.layer in names else seen.exact())

    with running_only():
        expected = [output(call) for call in calls]

    def change() -> float:
        pairs = zip(map(output, calls), expected, strict=True)
        changes = [float((found - wanted).square().sum() / wanted.square().sum()) for found, wanted in pairs]
        return sum(changes) / len(changes)

    moves = {}
    for name in patched.chosen:
        with running_only(name):
            moves[name] = change()
        if not math.isfinite(moves[name]):
            raise ValueError(_not_finite(name))
    return moves, change()


# Pictures and files


def write_audit(audit: Audit, folder: str | Path) -> list[Path]:
    """Write ``audit.json`` and ``audit.png``, and return the files."""
    folder = Path(folder)
    write_json(audit.to_dict(), folder / "audit.json")
    return [folder / "audit.json", draw_audit(audit, folder / "audit.png")]


def draw_audit(audit: Audit, file: Path) -> Path:
    """Draw heat maps of the relative error to ``file``: layers by steps, layers by heads; grey did not run."""
    plt = require_matplotlib()
    names = [layer.name for layer in audit.layers]
    maps = {
        "step" if audit.knows_steps else "forward": torch.stack([layer.errors_of_steps for layer in audit.layers]),
        "head": torch.stack([layer.errors_of_heads for layer in audit.layers]),
    }
    worst = max(1e-9, *(float(values.nan_to_num().max()) for values in maps.values()))
    width = 4 + sum(0.22 * values.shape[1] for values in maps.values())
    size = (min(20.0, max(8.0, width)), min(20.0, 1.5 + 0.25 * len(names)))
    figure, axes = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)

    def ticks(count: int, most: int) -> range:
        return range(0, count, -(-count // most))

    for axis, (name, values) in zip(axes, maps.items(), strict=True):
        axis.set_facecolor("0.8")
        image = axis.imshow(values.numpy(), cmap="magma", vmin=0, vmax=worst, aspect="auto", interpolation="nearest")
        axis.set_xlabel(name)
        axis.set_xticks(ticks(values.shape[1], 12))
    rows = ticks(len(names), 40)
    axes[0].set_yticks(rows, [names[row] for row in rows], fontsize=7)
    figure.colorbar(image, ax=axes, label="relative error", format=lambda x, _: f"{x:.0%}")
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file
