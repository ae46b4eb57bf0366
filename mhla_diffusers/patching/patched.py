"""The handle of a patched model, with the hooks around every forward."""

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from ..attention.layout import Shape
from ..config import LinearConfig, PatchConfig, SparseConfig
from ..families import Counts, Family, named_arguments
from .call import Call, CarryingCheckpoint, LayerHook, Log, Tally, Watch, enter, held, leave, within
from .layer import MHLALayer
from .processor import MHLAProcessor
from .route import BACKEND, Mode, register_backend
from .steps import Pipeline
from .weights import inactive_lora

logger = logging.getLogger(__name__)

ATTRIBUTE = "_mhla"
FAR_OFF = 0.3
"""Median relative error of the attentions at dense steps from which a warning is due."""
NOT_SEEN = "no attention that the patch sees: it answers scaled_dot_product_attention alone"
_BACKEND = "_attention_backend"
_CALLER = nn.Module.__call__.__code__
_FIRST = torch.tensor(0, device="cpu")
"""Number of the layer of a model whose layers are not known; its calls of attention are counted instead."""


class Patched:
    """One patched model; ``pipe`` is the object with ``transformer`` and ``scheduler`` that was patched, if known."""

    def __init__(
        self, transformer: nn.Module, config: PatchConfig, family: Family, pipe: Any = None, backend: str = "auto"
    ) -> None:
        self.transformer = transformer
        self.config = config
        self.family = family
        self.backend = backend
        self.pipeline = Pipeline(pipe)
        self.attentions: dict[str, Any] = family.self_attentions(transformer)
        """Name and module of every self-attention, patched or not, in the order of the layer indices."""
        self.chosen: tuple[str, ...] = ()
        self.log = Log(logger)
        self.tally = Tally(self.log)
        """Counts of the latest call, running or ended; outside of sampling, of the latest forward."""
        self.latest_grid: Shape | None = None
        """Token grid of the latest forward, to be shown; no attention reads it."""
        self.replaced_weights: dict[str, torch.Tensor] = {}
        """Weights of the model that the patch replaced, as they were, on the CPU."""
        self.lora: str | None = None
        self._watch: Watch | None = None
        self._compiled: Callable[..., Any] | None = None
        self._hooks: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to running calls."""
        return vars(self) | {"tally": Tally(self.log), "latest_grid": None, "_compiled": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copied or pickled model."""
        vars(self).update(state)
        register_backend()

    @property
    def is_attached(self) -> bool:
        """Whether it has hooks: not if patched by diffusers' own setter, and not after removal."""
        return vars(self.transformer).get(ATTRIBUTE) is self

    @property
    def is_off(self) -> bool:
        """Whether it is within ``mhla_disabled`` in this thread."""
        return self in held().off

    @property
    def layers(self) -> dict[str, MHLALayer]:
        """Name of every self-attention that MHLA has a layer in, with the layer; empty for sparse attention."""
        return {name: attn.mhla for name, attn in self.attentions.items() if hasattr(attn, "mhla")}

    def attach(self, layers: Mapping[str, MHLALayer]) -> None:
        """Put hooks into the model, and the layers of MHLA with their processor."""
        if isinstance(self.config, LinearConfig):
            processor = MHLAProcessor(self.config, backend=self.backend)
            for name, layer in layers.items():
                attn = self.attentions[name]
                before = attn.processor
                if layer.original_processor is None and not isinstance(before, MHLAProcessor):
                    layer.original_processor = before
                processor._parallel_config = processor._parallel_config or getattr(before, "_parallel_config", None)
                attn.mhla = layer
                attn.set_processor(processor)
        else:
            register_backend()
            for number, (name, attn) in enumerate(self.attentions.items()):
                if name in self.chosen:
                    LayerHook(number).attach(attn)
        model = self.transformer
        self._hooks.append(model.register_forward_pre_hook(self.begin, with_kwargs=True))
        self._compiled = model._compiled_call_impl
        model.__dict__["_call_impl"] = self._call_impl
        if self._compiled is not None:
            model._compiled_call_impl = self._call_impl
        setattr(model, ATTRIBUTE, self)

    def detach(self) -> None:
        """Take them away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.transformer.__dict__.pop("_call_impl", None)
        if self.transformer._compiled_call_impl == self._call_impl:
            self.transformer._compiled_call_impl = self._compiled
        carrying = getattr(self.transformer, CarryingCheckpoint.ATTRIBUTE, None)
        if isinstance(carrying, CarryingCheckpoint):
            setattr(self.transformer, CarryingCheckpoint.ATTRIBUTE, carrying.checkpoint)
        for attn in self.attentions.values():
            LayerHook.detach(attn)
            if hasattr(getattr(attn, "processor", None), LayerHook.CHOSEN_BACKEND):
                _restore_backend(attn.processor)
        if ATTRIBUTE in vars(self.transformer):
            delattr(self.transformer, ATTRIBUTE)

    # Around a forward

    @_disable_dynamo(recursive=False)  # the model's own forward has graphs
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward as PyTorch does, but leave the thread as it was: an interrupt calls none of its hooks."""
        caller = sys._getframe(3)  # behind the two frames of the decorator
        model = caller.f_locals["self"] if caller.f_code is _CALLER else self.transformer  # or a shallow copy of it
        own = partial(type(model)._call_impl, model) if self._compiled is None else self._compiled
        if vars(self.transformer).get(ATTRIBUTE) is not self:  # compiled while it was patched
            return own(*args, **kwargs)
        output, before = None, enter()
        try:
            output = own(*args, **kwargs)
            return output
        finally:
            self.end(output, before)

    @_disable_dynamo  # what is found of a call stays out of graphs; blocks and the model's own forward have them
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the call of this thread, before a forward."""
        state = held()
        state.call = Call(self)
        if self in state.off:
            return
        named = named_arguments(model, args, kwargs)
        grid, extra = self.family.tokens_of(model, named)
        for tensor in named.values():  # blocks depend on the sizes: torch.compile makes a graph for each
            if isinstance(tensor, torch.Tensor):
                for axis in range(1, tensor.ndim):
                    torch._dynamo.mark_static(tensor, axis)
        checkpoint = getattr(model, CarryingCheckpoint.ATTRIBUTE, None)
        if checkpoint is not None and not isinstance(checkpoint, CarryingCheckpoint):
            setattr(model, CarryingCheckpoint.ATTRIBUTE, CarryingCheckpoint(checkpoint))
        state.call = self._in_step(self._entered(grid, extra), named)
        if self.lora is not None and (why := inactive_lora(model, self.lora)):
            self.log.once(logging.WARNING, why)

    @_disable_dynamo
    def end(self, output: Any, before: tuple[Any, ...]) -> None:
        """Leave a forward; of one that failed or was interrupted, the output is None."""
        call = held().call
        leave(before)
        if call is None:  # refused by another hook before it began
            return
        if output is not None and call.grid:
            self.latest_grid = call.grid
        if call.run is None and call.tally is not None:
            if output is not None and not self.family.knows_layers and not str(call.tally):
                self.log.once(logging.WARNING, f"MHLA: {type(self.transformer).__name__}: {NOT_SEEN}.")
            self._log_end(call.tally, 0)
        elif call.run is not None and output is None:
            call.run.clear()
        elif call.step is not None and call.step.index == call.step.count - 1:
            for branch in call.branches:
                branch.residuals.clear()

    def _entered(self, grid: Shape, extra: Counts) -> Call:
        """Return the call of a forward, after attaching what its attentions need."""
        family, config = self.family, self.config
        self.tally = Tally(self.log)
        call = Call(self, grid, extra, family.rows_alike, family.pads_behind_grid, tally=self.tally, watch=self._watch)
        if not isinstance(config, SparseConfig):
            self._warn_of_processors()
            parallel = getattr(getattr(self.transformer, "_parallel_config", None), "context_parallel_config", None)
            return call if parallel is None else call._replace(split=parallel._flattened_mesh.get_group())
        if not family.knows_layers:
            held().layer = _FIRST
            call = call._replace(dense_layers=config.dense_layers, mode=Mode(self.transformer))
        for name in self.chosen:
            processor = getattr(self.attentions[name], "processor", None)
            if not hasattr(processor, _BACKEND):  # it calls PyTorch's function
                call = call if call.mode is not None else call._replace(mode=Mode())
            elif (chosen := getattr(processor, _BACKEND)) != BACKEND:  # what the user has chosen since
                setattr(processor, LayerHook.CHOSEN_BACKEND, chosen)
                setattr(processor, _BACKEND, BACKEND)
            held().backend = getattr(processor, LayerHook.CHOSEN_BACKEND, None)  # of others that share a processor
        if call.mode is not None:
            call.mode.__enter__()
        return call

    def _in_step(self, call: Call, named: Mapping[str, Any]) -> Call:
        """Return the call with its step and its branch's residuals; neither while gradients are enabled."""
        config = self.config
        if torch.is_grad_enabled() or held().in_every_step or not (config.has_dense_steps or self._watch):
            return call
        sampling = self.pipeline.sampling(self.transformer, named.get("timestep"))
        if sampling is None:
            if config.has_dense_steps:
                self.log.once(
                    logging.WARNING,
                    f"The denoising step of a forward of {type(self.transformer).__name__} is unknown, so "
                    f"{config.dense_words} has no effect. Call the pipeline, or give apply_mhla() the object that has "
                    "the transformer and its scheduler; dense_first=0, dense_last=0, dense_every=0 for no dense steps.",
                )
            return call
        run, step, timesteps = sampling
        tally = run.tallies.get(id(self))
        if tally is None:
            tally = run.tallies[id(self)] = self.tally
            dense = len(config.dense_steps(step.count))
            if dense == step.count:
                self.log.once(
                    logging.WARNING,
                    f"All {dense} steps of this call are dense by {config.dense_words}, so the patch does not run. "
                    "Lower these settings, or take more steps.",
                )
            weakref.finalize(run, self._log_end, tally, dense)
        self.tally = tally
        call = call._replace(step=step, is_dense=config.is_dense(step), run=run, tally=tally)
        if not (isinstance(config, SparseConfig) and config.correct and config.has_dense_steps):
            return call
        branch, begins = run.branch(id(self), step, timesteps, _conditions(named))
        records = config.records_residual(step)
        if begins and records:
            rerun_blocks(self.transformer)
        return call._replace(branches=(branch,), records_residual=records)

    def _log_end(self, tally: Tally, dense_steps: int) -> None:
        """Log what a finished call has counted and measured, as a warning if the error of its attentions is large."""
        self.log.summary(tally)
        if not tally.errors:
            return
        median = float(torch.stack([error.cpu() for error in tally.errors.values()])[:, 1].float().median())
        level = logging.WARNING if median > FAR_OFF else logging.INFO
        logger.log(level, "corrected from dense steps (%d); %s", dense_steps, self.error_words(tally))

    # What attentions do while a patch is measured

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Context in which a function sees every patched attention and returns its output; graphs run eagerly."""
        before, self._watch = self._watch, watch
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._watch = before

    @contextmanager
    def on_grid(self, grid: Shape) -> Iterator[None]:
        """Let single self-attentions of the model be called on a token grid within the context, patched."""
        extra = self.family.extra
        with within(None):
            held().call = self._entered(grid, (0, None) if callable(extra) else extra)
            yield

    def name_at(self, place: tuple[int, int]) -> str:
        """Return the name of the self-attention of a place, (layer, which of its calls of attention)."""
        return list(self.attentions)[place[0]] if self.attentions else f"attention {place[1]}"

    def error_words(self, tally: Tally | None = None) -> str:
        """Describe the error of a call's attentions at its latest dense step; empty before one."""
        errors = (self.tally if tally is None else tally).errors
        if not errors:
            return ""
        before, after = torch.stack([error.cpu() for error in errors.values()]).float().unbind(dim=1)
        return (
            f"error of an attention at the latest dense step {after.median():.0%} (median), {after.max():.0%} "
            f"({self.name_at(list(errors)[int(after.argmax())])}); {before.median():.0%} before correction"
        )

    def _warn_of_processors(self) -> None:
        """Warn once where something has set other processors since."""
        found = {name: self.attentions[name].processor for name in self.layers}
        foreign = [name for name, processor in found.items() if not isinstance(processor, MHLAProcessor)]
        if foreign:
            self.log.once(
                logging.WARNING,
                f"{len(foreign)} patched layers do not run MHLA, for example {foreign[0]}, which runs "
                f"{type(found[foreign[0]]).__name__}. change_mhla(model) brings MHLA back, or call remove_mhla(model).",
            )


def _conditions(named: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor that identifies a guidance branch: the caption, else the first one after the latents."""
    for found in (named.get("encoder_hidden_states"), *list(named.values())[1:]):
        if isinstance(found, torch.Tensor) and found.ndim > 1:
            return found
    return None


def _restore_backend(processor: Any) -> None:
    chosen = vars(processor).pop(LayerHook.CHOSEN_BACKEND)
    if getattr(processor, _BACKEND) == BACKEND:  # else the user has chosen another one since
        delattr(processor, _BACKEND)
        if chosen != getattr(type(processor), _BACKEND, None):
            setattr(processor, _BACKEND, chosen)


def rerun_blocks(transformer: nn.Module) -> None:
    """Let a step cache that decides by content run every block of the next forward, as in the first step of a call."""
    for module in transformer.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        for hook in () if registry is None else registry.hooks.values():
            if type(hook).__module__.endswith(("first_block_cache", "sea_cache")):
                context = hook.state_manager._context
                hook.reset_state(module)
                hook.state_manager.set_context(context)  # which resetting forgets
