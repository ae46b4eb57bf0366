"""Compare every patched self-attention with the one before the patch, on the same input, while a model runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.tile_errors import TiledInput, pair_errors
from ..attention.tile_scores import spend
from ..attention.tiles import Cut
from ..patching.attended import Attended
from ..patching.calibration import check_reached, tokens_of_grid
from ..patching.denoising_steps import Step, StepHooks
from ..patching.exact_calibration import QUERIES, head_projections, spread_calls, tiled_input
from ..patching.finding import find_transformers, hook_of, require_diffusion, require_layers
from ..patching.layer import layer_of
from ..patching.processor import attended, form_of
from ..patching.sensitivity import check_run, measure_change, measure_sensitivity, patched_pairs, record_calls
from ..patching.token_grid import attend_as_before, attends_as_before
from .audit_result import Audit, Fit, LayerAudit, TileAudit


@torch.no_grad()
def audit(model: Any, run: Callable[[], object]) -> Audit:
    """What a patch costs, layer by layer, head by head and step by step, and whether its exact tiles still fit.

    ``run`` is called once with the patch on. In every patched self-attention the patched attention and the one before
    it, with the same weights and LoRA, are evaluated on the same input, and what their heads hand to the output
    projection is compared. Of exact tiles the softmax weight that they hold is measured on some queries of every tile.
    At last one layer at a time is patched on a few of the calls, to see how much it moves the output of the
    transformer. The model is left as it is. A causal patch is compared with attention that sees later frames too, which
    is in its error.

    Args:
        model: a patched pipeline or transformer.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``.

    Returns:
        What was found; print it, or give it to :func:`densify`.

    Raises:
        ValueError: if the model is a language model or not patched, its patch is switched off, or ``run`` did not reach
            every layer or ran at several sizes that cut tiles differently.
    """
    check_run(run)
    require_diffusion(model, "audit()")
    require_layers(model)
    pairs = {name: found for name, part in find_transformers(model).items() if (found := patched_pairs(part))}
    if not pairs:
        raise ValueError("No attention of this model runs MHLA now; leave mhla_disabled(), or call change_mhla(model).")
    transformers = {name: part for name, part in find_transformers(model).items() if name in pairs}
    clock = _Clock()
    watches = {
        (component, name): _Watch(attn, original, clock)
        for component, found in pairs.items()
        for name, (attn, original) in found.items()
    }
    handles = [part.register_forward_pre_hook(clock.tick, with_kwargs=True) for part in transformers.values()]
    for watch in watches.values():
        handles += watch.install()
    try:
        with torch.compiler.set_stance("force_eager"):  # a graph that is compiled already has none of these hooks
            recorded = record_calls(transformers, run)
    finally:
        for handle in handles:
            handle.remove()
    names = {key: ".".join(key) if len(transformers) > 1 else key[1] for key in watches}
    check_reached(list(names.values()), [names[key] for key, watch in watches.items() if watch.calls])
    calls = {component: spread_calls(found) for component, found in recorded.items()}
    halves = {component: spread_calls(clock.halves(part)) for component, part in transformers.items()}
    moves = {
        component: measure_sensitivity(part, pairs[component], calls[component])
        for component, part in transformers.items()
    }
    layers = tuple(
        LayerAudit(
            component, name, names[component, name], *watch.sums(), clock.rests, moves[component][name], watch.tiles()
        )
        for (component, name), watch in watches.items()
    )
    changes = [measure_change(part, calls[component]) for component, part in transformers.items()]
    return Audit(layers, clock.rests, clock.knows_steps, sum(changes) / len(changes), _fit(layers), calls, halves)


class _Clock:
    """Which denoising step every forward of the transformers belongs to."""

    def __init__(self) -> None:
        self._steps: list[Step | None] = []
        self._resting: set[int] = set()
        self._generation = 0
        self._halves: dict[nn.Module, list[int]] = {}

    def tick(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward."""
        hooks = hook_of(transformer, StepHooks)
        step, before = hooks.step(transformer, args, kwargs) if hooks is not None else None, self._latest
        if step is not None and before is not None and step.index < before.index:
            self._generation += 1
        self._steps.append(step)
        self._halves.setdefault(transformer, []).append(self.half)

    @property
    def _latest(self) -> Step | None:
        return self._steps[-1] if self._steps else None

    @property
    def call(self) -> int:
        """Number of the forward that is running."""
        return len(self._steps) - 1

    @property
    def half(self) -> int:
        """Half of the run that the forward belongs to, 0 or 1: one has the first steps of one generation, the other
        those of the next, so that they differ in what is generated where there are several.
        """
        step = self._latest
        return self.call % 2 if step is None else (self._generation + (2 * step.index >= step.count)) % 2

    def halves(self, transformer: nn.Module) -> list[int]:
        """The halves of all forwards of a transformer."""
        return self._halves[transformer]

    def rest(self) -> None:
        """The patch rests in the forward that is running."""
        self._resting.add(self.call)

    @property
    def knows_steps(self) -> bool:
        """Whether all forwards have a step."""
        return None not in self._steps

    @property
    def indices(self) -> list[int]:
        """The step of every forward; its number where steps are not known."""
        return [step.index if self.knows_steps and step is not None else call for call, step in enumerate(self._steps)]

    @property
    def rests(self) -> tuple[bool, ...]:
        """Of every step, whether the patch rested in it."""
        known = [step.count for step in self._steps if step is not None] if self.knows_steps else []
        resting = {self.indices[call] for call in self._resting}
        return tuple(index in resting for index in range(max([*known, 1 + max(self.indices)])))

    def by_step(self, calls: list[int], values: list[torch.Tensor]) -> torch.Tensor:
        """Values of some forwards added up by step: float64 (S, ...)."""
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
        self._tiles = _Tiles(attn, clock) if layer is not None and layer.sparse is not None else None

    def install(self) -> list[RemovableHandle]:
        """Put the hooks on."""
        handles = [self.attn.register_forward_hook(self._compare, with_kwargs=True)]
        projection = form_of(self.attn).output_projection(self.attn)
        if projection is not None:
            handles.append(projection.register_forward_pre_hook(lambda _, args: self._handed.append(args[0])))
        return handles

    def _compare(self, attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After a forward, run the other one of the two attentions."""
        first = self._take(output)
        if attends_as_before():
            self.clock.rest()
            attend_as_before(False)
            try:
                other = attn.forward(*args, **kwargs)
            finally:
                attend_as_before(True)
            before, patched = first, self._take(other)
        else:
            processor = attn.processor
            attn.set_processor(self.original)
            try:
                other = attn.forward(*args, **kwargs)
            finally:
                attn.set_processor(processor)
            before, patched = self._take(other), first
        before, patched = (tokens_of_grid(attn, args, kwargs, x) for x in (before, patched))
        # under perturbed-attention guidance the last part of a batch is no attention, and handed on by itself
        before, patched = (x[: len(patched)].float().unflatten(-1, (attn.heads, -1)) for x in (before, patched))
        self.calls.append(self.clock.call)
        self._errors.append((patched - before).square().sum(dim=(0, 1, 3)).double().cpu())
        self._squares.append(before.square().sum(dim=(0, 1, 3)).double().cpu())
        if self._tiles is not None:
            self._tiles.add(attended(attn, args, kwargs))
            self._handed.clear()  # measuring sends something through the projection too

    def _take(self, returned: Any) -> torch.Tensor:
        """What the heads gave: what went into their projection, or without one what the attention returned."""
        handed, self._handed = [*self._handed, form_of(self.attn).heads_output(returned)], []
        return handed[0]

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared errors, and squares of what is handed on without the patch: each (S, H)."""
        return self.clock.by_step(self.calls, self._errors), self.clock.by_step(self.calls, self._squares)

    def tiles(self) -> TileAudit | None:
        """What was found of exact tiles."""
        return self._tiles.result(self.calls) if self._tiles is not None else None


class _Tiles:
    """The exact tiles of one self-attention during a run."""

    def __init__(self, attn: Any, clock: _Clock) -> None:
        self.attn, self.clock = attn, clock
        self._pair_errors: dict[int, torch.Tensor] = {}
        self._left: list[torch.Tensor] = []
        self._total: list[torch.Tensor] = []
        self._mass = self._square = self._share = 0.0
        self._counts: Cut = ()
        self._tiles = 0
        self._projections: torch.Tensor | None = None

    def add(self, given: Attended) -> None:
        """Measure the pairs of one forward, each sample by its own lists where these are chosen by content."""
        layer = self.attn.mhla
        if self._projections is None:
            self._projections = head_projections(self.attn)
        lists = layer.call(given).exact
        if self._tiles not in (0, lists.tiles) or self._counts not in ((), lists.counts):
            raise ValueError("run() ran at sizes that cut exact tiles differently; audit one size at a time.")
        mask, self._counts, self._tiles = lists.mask(), lists.counts, lists.tiles
        tiled = tiled_input(self.attn, given)
        samples = tiled.samples(min(QUERIES, tiled.exists.shape[1]), len(self._left))
        left, errors = torch.zeros(()), torch.zeros(())
        for exact, one in zip(mask, _samples(tiled, len(mask)), strict=True):
            found, masses, squares = pair_errors(one, samples, self._projections, layer.config.pooled)
            left = left + (found * ~exact).sum().cpu() / len(mask)
            errors = errors.to(found.device) + found / len(mask)
            self._mass += (1 - float((masses * ~exact).sum(dim=-1).mean())) / len(mask)
            self._square += float(squares.sum()) * mask.shape[-1] / len(mask)
        half, errors = self.clock.half, errors.cpu()
        self._pair_errors[half] = self._pair_errors[half] + errors if half in self._pair_errors else errors
        self._left.append(left.double())
        self._total.append(errors.sum().double())
        self._share += float(mask.float().mean())

    def result(self, calls: list[int]) -> TileAudit:
        """What was found."""
        some = next(iter(self._pair_errors.values()))
        halves = torch.stack([self._pair_errors.get(half, torch.zeros_like(some)) for half in (0, 1)])
        left, total = (self.clock.by_step(calls, found) for found in (self._left, self._total))
        count, kind = len(calls), self.attn.mhla.config.sparse
        share, mass = self._share / count, self._mass / count
        return TileAudit(kind, self._counts, share, mass, halves, left, total, self._square)


def _samples(tiled: TiledInput, lists: int) -> list[TiledInput]:
    """The whole input, or its samples one by one where each has lists of its own."""
    if lists == 1:
        return [tiled]
    return [
        replace(
            tiled,
            query=tiled.query[[one]],
            key=tiled.key[[one]],
            value=tiled.value[[one]],
            weight=tiled.weight[[one]] if len(tiled.weight) > 1 else tiled.weight,
        )
        for one in range(lists)
    ]


def _fit(layers: Sequence[LayerAudit]) -> Fit | None:
    """Compare the lists that there are with those that this run would choose, each transformer's budget by itself."""
    found = [layer.tiles for layer in layers if layer.tiles is not None]
    if not found:
        return None
    components = dict.fromkeys(layer.component for layer in layers)
    parts = [[layer for layer in layers if layer.component == name and layer.tiles is not None] for name in components]
    left = sum(layer.gain * float(layer.tiles.left.sum()) for layer in layers if layer.tiles is not None)
    anew = sum(_left_anew(part) for part in parts if part)
    return Fit(left**0.5, anew**0.5, all(tiles.kind == "calibrated" for tiles in found))


def _left_anew(layers: Sequence[LayerAudit]) -> float:
    tiles = [layer.tiles for layer in layers if layer.tiles is not None]
    share = sum(one.share for one in tiles) / len(tiles)
    scores = [layer.gain * one.pair_errors.sum(dim=0) for layer, one in zip(layers, tiles, strict=True)]
    return sum(float((score * ~mask).sum()) for score, mask in zip(scores, spend(scores, share), strict=True))
