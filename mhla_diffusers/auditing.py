"""The error of a patch: every patched self-attention compared with the original on the same input, in one run."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import recursively_apply
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

_CALLS = 4
"""Most calls that are repeated with one layer patched at a time."""
_QUERIES = 512
"""Queries per head whose N softmax weights each are computed."""


@dataclass(frozen=True)
class LayerAudit:
    """One patched self-attention. S steps, H heads."""

    name: str
    """Its name in the transformer; the component's before it if a pipeline has two transformers."""
    errors: torch.Tensor
    """Squared error of every head's input to the output projection, float64 (S, H); 0 in dense steps."""
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
    knows_steps: bool
    """Whether the steps of the pipeline are known; otherwise every forward counts as one."""
    moves: float
    """Relative squared change of the transformer's output by the whole patch, where it is enabled."""

    def __str__(self) -> str:
        header = ["layer", "error", "worst head", "density", "mass kept", "moves"]
        rows = []
        for layer in self.layers:
            worst = int(layer.errors_of_heads.argmax())
            kept = ["-" if part is None else f"{part:.1%}" for part in (layer.density, layer.mass_kept)]
            row = [layer.name, "dense", "-"]
            if not math.isnan(layer.error):
                row[1:] = f"{layer.error:.1%}", f"{worst}: {layer.errors_of_heads[worst]:.1%}"
            rows.append([*row, *kept, f"{math.sqrt(layer.moves):.1%}"])
        errors = torch.stack([layer.errors.sum(dim=1) for layer in self.layers]).sum(dim=0)
        squares = torch.stack([layer.squares.sum(dim=1) for layer in self.layers]).sum(dim=0)
        relative = enumerate((errors / squares).sqrt().tolist(), 1)
        steps = [(str(step), f"{error:.1%}" if error > 0 else "dense") for step, error in relative]
        parts = [
            text_table(header, rows, right=True),
            text_table(("step" if self.knows_steps else "forward", "error"), steps),
            f"together the patch moves the output by {math.sqrt(self.moves):.1%}",
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
        return {"layers": layers, "knows_steps": self.knows_steps, "moves": math.sqrt(self.moves)}


class _Compared(NamedTuple):
    """One call of a patched attention beside the model's own."""

    call: Call | None
    """The forward that it is part of."""
    errors: torch.Tensor
    squares: torch.Tensor
    density: float | None
    mass: float | None


@torch.no_grad()
def audit(model: Any, run: Callable[[], object]) -> Audit:
    """Measure the error of a patch per layer, head and step, and how much softmax weight its block lists cover.

    ``run`` is called once on typical inputs: ``lambda: pipe("a cat", num_inference_steps=4)``. Every patched
    self-attention and its original are evaluated on the same input; then some forwards are repeated with one layer
    patched at a time. A causal patch is compared with attention that also sees later frames, which adds to its error.
    ValueError if the model is not patched, its patch is disabled, ``run`` did not reach every layer, or
    all its steps are dense.
    """
    running = {name: patched for name, patched in require_patched(model).items() if not patched.is_off}
    if not running:
        raise ValueError("The patch of this model is disabled; exit mhla_disabled() first.")
    if not all(patched.family.knows_layers for patched in running.values()):
        raise ValueError(f"{type(model).__name__} has no family, so the names of its attentions are unknown.")
    transformers = {name: patched.transformer for name, patched in running.items()}
    found: dict[tuple[str, str], list[_Compared]] = {
        (component, layer): [] for component, patched in running.items() for layer in patched.chosen
    }

    def look(component: str, patched: Patched, seen: Seen) -> torch.Tensor:
        calls = found[component, seen.layer]
        calls.append(_compare(seen, patched, seed=len(calls)))
        return seen.output

    with ExitStack() as stack:
        for component, patched in running.items():
            stack.enter_context(patched.watched(partial(look, component, patched)))
        recorded = record_calls(transformers, run)
    names = {key: ".".join(key) if len(transformers) > 1 else key[1] for key in found}
    # a transformer of early steps may never be sparse
    sparse = [key for key in found if not all(one.call and one.call.is_dense for one in recorded[key[0]])]
    if not sparse:
        raise ValueError("Every step of this run is dense, so the patch does not run in it; take more steps.")
    _check_reached([names[key] for key in sparse], [names[key] for key in sparse if found[key]])

    forwards = [(place, one.call) for calls in recorded.values() for place, one in enumerate(calls)]
    knows_steps = all(call is not None and call.step is not None for _, call in forwards)
    steps = {id(call): call.step.index if knows_steps and call and call.step else place for place, call in forwards}
    count = max(1 + max(steps.values()), *(call.step.count for _, call in forwards if call and call.step), 0)
    moves = {name: _measure_moves(patched, recorded[name]) for name, patched in running.items()}
    layers = []
    for (component, layer), calls in found.items():
        errors, squares = torch.zeros(2, count, len(calls[0].errors) if calls else 1, dtype=torch.float64)
        for one in calls:
            errors[steps[id(one.call)]] += one.errors
            squares[steps[id(one.call)]] += one.squares
        masses = [one.mass for one in calls if one.mass is not None]
        kept = (calls[0].density, sum(masses) / len(masses)) if masses else (None, None)
        layers.append(LayerAudit(names[component, layer], errors, squares, moves[component][0][layer], *kept))
    changes = [change for _, change in moves.values()]
    return Audit(tuple(layers), knows_steps, sum(changes) / len(changes))


def _compare(seen: Seen, patched: Patched, seed: int) -> _Compared:
    """Compare one call of attention over the tokens of the grid."""
    here = slice(seen.extra[0], seen.extra[0] + math.prod(seen.grid))
    found, exact = (x[:, here].float() for x in (seen.output, seen.exact()))
    errors, squares = (x.square().sum(dim=(0, 1, 3)).double().cpu() for x in (found - exact, exact))
    if not bool((errors + squares).isfinite().all()):
        raise ValueError(
            f"The inputs or outputs of {seen.layer} are NaN or infinite in this run, so its error is undefined. Run "
            "typical inputs in a dtype that the model supports, such as bfloat16 instead of float16."
        )
    if not isinstance(patched.config, SparseConfig):
        return _Compared(held().call, errors, squares, None, None)
    rule = patched.config.rule_on(seen.grid)
    given: dict[str, Any] = {"query": seen.query, "key": seen.key, "value": seen.value, "grid": seen.grid}
    call = SparseCall(**given, sparse=rule, far=patched.config.far, key_mask=seen.key_mask, extra=seen.extra)
    return _Compared(held().call, errors, squares, rule.listed_on(seen.grid), float(weight_held(call, _QUERIES, seed)))


@dataclass(frozen=True)
class TransformerCall:
    """One forward of a transformer, to be run again."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: Call | None = None
    """What the patch knows of it; None if unpatched."""

    def grid(self, transformer: nn.Module) -> tuple[int, ...]:
        """Return the call's token grid."""
        family = get_family(transformer)
        return tuple(map(int, family.grid(transformer, named_arguments(transformer, self.args, self.kwargs))))

    def predict(self, transformer: nn.Module) -> torch.Tensor:
        """Run it; return the output (B, output channels, ...), as the transformer's family has it."""
        with in_every_step():  # outside of the loop that it was recorded in
            prediction = transformer(*self.args, **{**self.kwargs, "return_dict": False})[0]
        return prediction if isinstance(prediction, torch.Tensor) else torch.stack(list(prediction))


def record_calls(transformers: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, list[TransformerCall]]:
    """Run a function and record the inputs of every forward; ValueError if a transformer is not called."""
    for transformer in transformers.values():
        if getattr(transformer, "is_cache_enabled", False) or getattr(transformer, "_is_cached", False):
            raise ValueError(
                f"A step cache is enabled on this {type(transformer).__name__} and skips attentions that the audit "
                "needs. Call transformer.disable_cache() first, or cache_dit.disable_cache(pipe) for cache-dit."
            )
    calls: dict[str, list[TransformerCall]] = {name: [] for name in transformers}

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = recursively_apply(lambda x: x.detach().clone(), (args, kwargs))
        calls[name].append(TransformerCall(args, kwargs, held().call))

    with ExitStack() as hooks, torch.no_grad():
        for name, transformer in transformers.items():
            hooks.enter_context(transformer.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        run()
    _check_reached(transformers, [name for name in transformers if calls[name]])
    return calls


def _check_reached(parts: Collection[str], reached: Collection[str]) -> None:
    missed = [name for name in parts if name not in reached]
    if missed:
        raise ValueError(
            f"run() did not call {missed[0]} ({len(missed)} of {len(parts)} were not called); it must call the "
            "pipeline or model given to audit()."
        )


def _measure_moves(patched: Patched, calls: Sequence[TransformerCall]) -> tuple[dict[str, float], float]:
    """Return ‖patched − unpatched‖² / ‖unpatched‖² of the output, averaged over calls, per layer and for all."""

    def output(call: TransformerCall) -> torch.Tensor:
        return call.predict(patched.transformer).float()

    def running_only(*names: str) -> AbstractContextManager[None]:
        return patched.watched(lambda seen: seen.output if seen.layer in names else seen.exact())

    count = min(len(calls), _CALLS)
    calls = [calls[(2 * index + 1) * len(calls) // (2 * count)] for index in range(count)]
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
    return moves, change()


def write_audit(audit: Audit, folder: Path) -> None:
    """Write ``audit.json``, and as ``audit.png`` heat maps of the relative error: grey did not run."""
    write_json(audit.to_dict(), folder / "audit.json")
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

    for axis, (name, values) in zip(axes, maps.items(), strict=True):
        axis.set_facecolor("0.8")
        first = float(name != "head")  # steps are counted from 1, heads from 0
        edges = (first - 0.5, first + values.shape[1] - 0.5, len(names) - 0.5, -0.5)
        image = axis.imshow(values.numpy(), cmap="magma", vmin=0, vmax=worst, aspect="auto", extent=edges)
        axis.set_xlabel(name)
        axis.xaxis.get_major_locator().set_params(integer=True)
    rows = range(0, len(names), math.ceil(len(names) / 40))
    axes[0].set_yticks(rows, [names[row] for row in rows], fontsize=7)
    figure.colorbar(image, ax=axes, label="relative error", format=lambda x, _: f"{x:.0%}")
    figure.savefig(folder / "audit.png", dpi=110)
    plt.close(figure)
