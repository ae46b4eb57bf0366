"""What a patch costs: every patched self-attention compared with the original on the same input, in one run."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.calibrate import weight_held
from ..attention.precision import without_autocast
from ..files import write_json
from ..patching.calibrate import check_reached, spread_calls
from ..patching.calls import check_run, measure_change, measure_sensitivity, record_calls
from ..patching.finding import require_diffusion, require_layers, require_patched
from ..patching.handle import Patched
from ..patching.layer import layer_of
from ..patching.processor import adapter_of, layer_input, tokens_of_grid
from ..patching.runtime import call_context, current
from ..patching.steps import Step
from ..reporting import require_matplotlib, text_table

DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""Densities at which the softmax weight of the lists is measured."""
_QUERIES = 512
"""Queries per head whose N softmax weights each are computed."""
_MOST_ROWS = 12
"""Maximum rows of the table of steps; more steps share rows."""


@dataclass(frozen=True)
class LayerAudit:
    """One patched self-attention. S steps, H heads."""

    component: str
    """Its transformer, such as ``transformer_2``."""
    attention: str
    """Its name in the transformer."""
    name: str
    """Displayed name; prefixed with the component if a pipeline has two transformers."""
    errors: torch.Tensor
    """Squared error of every head's input to the output projection, float64 (S, H); in steps in which the patch is
    disabled, the error that it would have.
    """
    squares: torch.Tensor
    """Squared norm of the same without the patch, float64 (S, H)."""
    rests: tuple[bool, ...]
    """Of every step, whether the patch was disabled in it."""
    moves: float
    """Relative squared change of the transformer's output if only this layer is patched."""
    density: float | None = None
    """Fraction of all block pairs that its lists hold; None without content-chosen lists."""
    mass_kept: float | None = None
    """Fraction of the softmax weight on these pairs, averaged over heads, queries and calls; else None."""
    mass_at: tuple[float, ...] = ()
    """The same at each of :data:`DENSITIES`; empty without lists."""

    @property
    def acting(self) -> torch.Tensor:
        """:attr:`errors` of the steps in which the patch was enabled, 0 in the others: (S, H)."""
        return self.errors * ~torch.tensor(self.rests)[:, None]

    @property
    def error(self) -> float:
        """Relative error over the run, ‖patched − original‖ / ‖original‖."""
        return float(_relative(self.acting.sum(), self.squares.sum()))

    @property
    def errors_of_heads(self) -> torch.Tensor:
        """The same for every head: (H,)."""
        return _relative(self.acting.sum(dim=0), self.squares.sum(dim=0))

    @property
    def worst_head(self) -> int:
        """Index of the head with the largest error."""
        return int(self.errors_of_heads.argmax())

    @property
    def change(self) -> float:
        """Relative change of the transformer's output if only this layer is patched, √ :attr:`moves`."""
        return math.sqrt(self.moves)


@dataclass(frozen=True)
class Audit:
    """What a patch costs, layer by layer, head by head and step by step; printed, it is a table."""

    layers: tuple[LayerAudit, ...]
    """Of all transformers."""
    rests: tuple[bool, ...]
    """Of every step, whether the patch was disabled in it."""
    knows_steps: bool
    """Whether the steps of the pipeline are known; otherwise every forward counts as one."""
    moves: float
    """Relative squared change of the transformer's output by the whole patch, where it is enabled."""

    @property
    def errors_of_steps(self) -> torch.Tensor:
        """Relative error of every layer and step: (layers, S); NaN where a layer does not run."""
        found = [_relative(layer.acting.sum(dim=1), layer.squares.sum(dim=1)) for layer in self.layers]
        return torch.stack(found)

    @property
    def errors_of_heads(self) -> torch.Tensor:
        """Relative error of every layer and head: (layers, H)."""
        return torch.stack([layer.errors_of_heads for layer in self.layers])

    def __str__(self) -> str:
        has_lists = any(layer.density is not None for layer in self.layers)
        header = ["layer", "error", "worst head", *(("density", "mass kept") if has_lists else ()), "moves"]
        rows = []
        for layer in self.layers:
            worst = layer.worst_head
            kept = ["-" if part is None else f"{part:.1%}" for part in (layer.density, layer.mass_kept)]
            row = [layer.name, f"{layer.error:.1%}", f"{worst}: {layer.errors_of_heads[worst]:.1%}"]
            rows.append([*row, *(kept if has_lists else ()), f"{layer.change:.1%}"])

        errors = torch.stack([layer.acting.sum(dim=1) for layer in self.layers]).sum(dim=0)
        squares = torch.stack([layer.squares.sum(dim=1) for layer in self.layers]).sum(dim=0)
        width = math.ceil(len(errors) / _MOST_ROWS)
        steps = []
        for start in range(0, len(errors), width):
            here = slice(start, min(start + width, len(errors)))
            name = str(start) if here.stop - start == 1 else f"{start} to {here.stop - 1}"
            resting = "  as before the patch" if all(self.rests[here]) else ""
            steps.append((name, f"{_relative(errors[here].sum(), squares[here].sum()):.1%}{resting}"))

        at_rest = " where enabled, but it is disabled in every step" if all(self.rests) else ""
        parts = [
            text_table(header, rows, right=True),
            text_table(("step" if self.knows_steps else "forward", "error"), steps),
            f"together the patch moves the output by {math.sqrt(self.moves):.1%}{at_rest}",
        ]
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; errors are relative, None where nothing ran."""
        by_steps = self.errors_of_steps

        def numbers(values: torch.Tensor) -> list[float | None]:
            return [None if math.isnan(value) else value for value in values.tolist()]

        return {
            "layers": [
                {
                    "name": layer.name,
                    "error": layer.error,
                    "errors_of_heads": numbers(layer.errors_of_heads),
                    "errors_of_steps": numbers(by_steps[index]),
                    "moves": layer.change,
                    "density": layer.density,
                    "mass_kept": layer.mass_kept,
                }
                for index, layer in enumerate(self.layers)
            ],
            "knows_steps": self.knows_steps,
            "rests": list(self.rests),
            "moves": math.sqrt(self.moves),
        }


def _relative(errors: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """NaN where there is nothing to compare with."""
    return (errors / squares).sqrt()


@torch.no_grad()
def audit(model: Any, run: Callable[[], object]) -> Audit:
    """What a patch costs, layer by layer, head by head and step by step, and how much its block lists hold.

    ``run`` is called once with the patch enabled. Every patched self-attention and its original, with the same weights
    and LoRA, are evaluated on the same input, and their inputs to the output projection are compared. The softmax
    weight that block lists hold is measured on some queries. Then some of the calls are repeated with one layer patched
    at a time, to measure how much it moves the transformer's output. The model is unchanged afterwards. A causal patch
    is compared with attention that also sees later frames, which adds to its error.

    Args:
        model: a patched pipeline or transformer.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``.

    Returns:
        The audit; print it, or pass it to :func:`densify`.

    Raises:
        ValueError: if the model is a language model or not patched, its patch is disabled, or ``run`` did not reach
            every layer.
    """
    check_run(run)
    require_diffusion(model, "audit()")
    require_layers(model)
    running = {name: patched for name, patched in require_patched(model).items() if patched.running_pairs()}
    if not running:
        raise ValueError("No attention of this model runs MHLA now; leave mhla_disabled(), or call change_mhla(model).")
    transformers = {name: patched.transformer for name, patched in running.items()}
    clock = _Clock(running.values())
    watches = {
        (component, name): _Watch(attn, original, clock)
        for component, patched in running.items()
        for name, (attn, original) in patched.running_pairs().items()
    }
    handles = [part.register_forward_pre_hook(clock.tick, with_kwargs=True) for part in transformers.values()]
    for watch in watches.values():
        handles += watch.install()
    try:
        with torch.compiler.set_stance("force_eager"):  # an already compiled graph lacks these hooks
            recorded = record_calls(transformers, run)
    finally:
        for handle in handles:
            handle.remove()
    names = {key: ".".join(key) if len(transformers) > 1 else key[1] for key in watches}
    check_reached(list(names.values()), [names[key] for key, watch in watches.items() if watch.calls])
    calls = {component: spread_calls(found) for component, found in recorded.items()}
    moves = {component: measure_sensitivity(patched, calls[component]) for component, patched in running.items()}
    layers = tuple(
        watch.result(component, name, names[component, name], moves[component][name])
        for (component, name), watch in watches.items()
    )
    changes = [measure_change(patched, calls[component]) for component, patched in running.items()]
    return Audit(layers, clock.rests, clock.knows_steps, sum(changes) / len(changes))


class _Clock:
    """Tracks the denoising step of every forward of the transformers."""

    def __init__(self, running: Iterable[Patched]) -> None:
        self._handles = {id(patched.transformer): patched for patched in running}
        self._steps: list[Step | None] = []
        self.resting: set[int] = set()
        """Indices of the forwards in which the patch is disabled."""

    def tick(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward."""
        self._steps.append(self._handles[id(transformer)].step_of(args, kwargs))

    @property
    def call(self) -> int:
        """Index of the running forward."""
        return len(self._steps) - 1

    @property
    def knows_steps(self) -> bool:
        """Whether all forwards have a step."""
        return None not in self._steps

    @property
    def indices(self) -> list[int]:
        """The step of every forward; its own index if steps are not known."""
        return [step.index if self.knows_steps and step is not None else call for call, step in enumerate(self._steps)]

    @property
    def rests(self) -> tuple[bool, ...]:
        """Of every step, whether the patch was disabled in it."""
        known = [step.count for step in self._steps if step is not None] if self.knows_steps else []
        resting = {self.indices[call] for call in self.resting}
        return tuple(index in resting for index in range(max([*known, 1 + max(self.indices)])))

    def by_step(self, calls: list[int], values: list[torch.Tensor]) -> torch.Tensor:
        """Values of forwards summed by step: float64 (S, ...)."""
        where, stacked = torch.tensor(self.indices)[calls], torch.stack(values)
        return torch.zeros(len(self.rests), *stacked.shape[1:], dtype=torch.float64).index_add_(0, where, stacked)


class _Watch:
    """Hooks of one patched self-attention."""

    def __init__(self, attn: Any, original: Any, clock: _Clock) -> None:
        self.attn, self.original, self.clock = attn, original, clock
        self.calls: list[int] = []
        self._handed: list[torch.Tensor] = []
        self._errors: list[torch.Tensor] = []
        self._squares: list[torch.Tensor] = []
        layer = layer_of(attn)
        self._has_lists = layer is not None and layer.config.sparse == "content"
        self._held: list[torch.Tensor] = []
        self._densities: list[float] = []

    def install(self) -> list[RemovableHandle]:
        """Put the hooks on."""
        handles = [self.attn.register_forward_hook(self._compare, with_kwargs=True)]
        projection = adapter_of(self.attn).output_projection(self.attn)
        if projection is not None:
            handles.append(projection.register_forward_pre_hook(lambda _, args: self._handed.append(args[0])))
        return handles

    def _compare(self, attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After a forward, run the other of the two attentions."""
        first, processor, resting = self._take(output), attn.processor, current().disabled
        if resting:
            self.clock.resting.add(self.clock.call)
        else:
            attn.set_processor(self.original)
        try:
            with call_context(disabled=False):
                second = self._take(attn.forward(*args, **kwargs))
        finally:
            attn.set_processor(processor)
        before, patched = (first, second) if resting else (second, first)
        before, patched = (tokens_of_grid(attn, args, kwargs, x) for x in (before, patched))
        # under perturbed-attention guidance the last part of a batch is no attention and is passed through
        before, patched = (x[: len(patched)].float().unflatten(-1, (attn.heads, -1)) for x in (before, patched))
        self.calls.append(self.clock.call)
        self._errors.append((patched - before).square().sum(dim=(0, 1, 3)).double().cpu())
        self._squares.append(before.square().sum(dim=(0, 1, 3)).double().cpu())
        if not self._has_lists:
            return
        given, config = layer_input(attn, args, kwargs), attn.mhla.config
        density = config.listed_on(given.grid)
        with without_autocast(given.query.device):
            call = attn.mhla.call(given.in_float32())
            held = weight_held(call, config.block_size, (density, *DENSITIES), _QUERIES, len(self._held))
        self._held.append(held.cpu())
        self._densities.append(density)

    def _take(self, returned: Any) -> torch.Tensor:
        """Output of the heads: the input of their projection, or without one the attention's return value."""
        handed, self._handed = [*self._handed, returned], []
        return adapter_of(self.attn).heads_output(self.attn, handed[0])

    def result(self, component: str, attention: str, name: str, moves: float) -> LayerAudit:
        """The result, given the names and the change of the transformer's output by this layer alone."""
        errors, squares = (self.clock.by_step(self.calls, found) for found in (self._errors, self._squares))
        layer = LayerAudit(component, attention, name, errors, squares, self.clock.rests, moves)
        if not self._held:
            return layer
        mass, *mass_at = torch.stack(self._held).mean(dim=0).tolist()
        density = sum(self._densities) / len(self._densities)
        return replace(layer, density=density, mass_kept=mass, mass_at=tuple(mass_at))


def write_audit(audit: Audit, folder: str | Path) -> list[Path]:
    """Write ``audit.json`` and ``audit.png``, and return the files.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the folder cannot be written.
    """
    require_matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(audit.to_dict(), folder / "audit.json")
    return [folder / "audit.json", draw_audit(audit, folder / "audit.png")]


def draw_audit(audit: Audit, file: Path) -> Path:
    """Two heat maps of the relative error: layers by denoising steps, and layers by heads. Grey did not run.

    Returns:
        ``file``.
    """
    plt = require_matplotlib()
    names = [layer.name for layer in audit.layers]
    maps = {"step" if audit.knows_steps else "forward": audit.errors_of_steps, "head": audit.errors_of_heads}
    worst = max(1e-9, *(float(values.nan_to_num().max()) for values in maps.values()))
    width = 4 + sum(0.22 * values.shape[1] for values in maps.values())
    size = (min(20.0, max(8.0, width)), min(20.0, 1.5 + 0.25 * len(names)))
    figure, axes = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)

    def ticks(count: int, most: int) -> Sequence[int]:
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
