"""Compare every patched self-attention with the one before the patch, on the same input, while a model runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.calibrate import weight_held
from ..attention.precision import without_autocast
from ..patching.attended import Attended
from ..patching.calibration import check_reached, tokens_of_grid
from ..patching.denoising_steps import Step, StepHooks
from ..patching.finding import find_transformers, hook_of, require_diffusion, require_layers
from ..patching.layer import layer_of
from ..patching.processor import adapter_of, attended
from ..patching.sensitivity import check_run, measure_change, measure_sensitivity, patched_pairs, record_calls
from ..patching.sparse_calibration import spread_calls
from ..patching.token_grid import attend_as_before, attends_as_before
from .audit_result import DENSITIES, Audit, LayerAudit

_QUERIES = 512
"""Queries of every head whose softmax weights are formed; each costs N of them."""


@torch.no_grad()
def audit(model: Any, run: Callable[[], object]) -> Audit:
    """What a patch costs, layer by layer, head by head and step by step, and how much its block lists hold.

    ``run`` is called once with the patch on. In every patched self-attention the patched attention and the one before
    it, with the same weights and LoRA, are evaluated on the same input, and what their heads hand to the output
    projection is compared. Of block lists the softmax weight that they hold is measured on some queries.
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
            every layer.
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
    moves = {
        component: measure_sensitivity(part, pairs[component], calls[component])
        for component, part in transformers.items()
    }
    layers = tuple(
        watch.result(component, name, names[component, name], moves[component][name])
        for (component, name), watch in watches.items()
    )
    changes = [measure_change(part, calls[component]) for component, part in transformers.items()]
    return Audit(layers, clock.rests, clock.knows_steps, sum(changes) / len(changes))


class _Clock:
    """Which denoising step every forward of the transformers belongs to."""

    def __init__(self) -> None:
        self._steps: list[Step | None] = []
        self._resting: set[int] = set()

    def tick(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward."""
        hooks = hook_of(transformer, StepHooks)
        self._steps.append(hooks.step(transformer, args, kwargs) if hooks is not None else None)

    @property
    def call(self) -> int:
        """Number of the forward that is running."""
        return len(self._steps) - 1

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
        if self._has_lists:
            self._look_at_lists(attended(attn, args, kwargs))

    def _look_at_lists(self, given: Attended) -> None:
        """Measure what lists of every density hold in one forward."""
        config = self.attn.mhla.config
        density = config.listed_on(given.grid)
        with without_autocast(given.query.device):
            call = self.attn.mhla.call(given.in_float32())
            held = weight_held(call, config.block_size, (density, *DENSITIES), _QUERIES, len(self._held))
        self._held.append(held.cpu())
        self._densities.append(density)

    def _take(self, returned: Any) -> torch.Tensor:
        """What the heads gave: what went into their projection, or without one what the attention returned."""
        handed, self._handed = [*self._handed, adapter_of(self.attn).heads_output(returned)], []
        return handed[0]

    def result(self, component: str, attention: str, name: str, moves: float) -> LayerAudit:
        """What was found, given the names and the change of the transformer's output by this layer alone."""
        errors, squares = (self.clock.by_step(self.calls, found) for found in (self._errors, self._squares))
        layer = LayerAudit(component, attention, name, errors, squares, self.clock.rests, moves)
        if not self._held:
            return layer
        mass, *mass_at = torch.stack(self._held).mean(dim=0).tolist()
        density = sum(self._densities) / len(self._densities)
        return replace(layer, density=density, mass_kept=mass, mass_at=tuple(mass_at))
