"""The handle of a patched model: what is known of it and of its patch, and the hooks around every forward."""

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

from ..attention.layout import Shape, check_grid
from ..config import PatchConfig, SparseConfig
from ..families import Family, named_arguments
from .call import CHOSEN_BACKEND, Call, CarryingCheckpoint, Counts, LayerHook, Tally, Watch, held, is_off, within
from .layer import MHLALayer, layer_of
from .processor import MHLAProcessor, is_fused, replaced_processor
from .residual import Errors
from .route import BACKEND, Mode, is_checkpointed, register_backend
from .steps import Pipeline, Sampling
from .weights import has_lora, runs_lora

logger = logging.getLogger(__name__)

ATTRIBUTE = "_mhla"
"""Holds the handle, on a patched model."""
_BACKEND = "_attention_backend"
"""Attribute of processors that dispatch, which diffusers' set_attention_backend writes."""
_NONE = object()


class Facts(NamedTuple):
    """What the route must know of a model's forward: of its family, or given by hand."""

    grid: Shape | Callable[..., Shape]
    """The token grid, or a function of the forward's arguments that returns it."""
    extra: Counts | Callable[..., Counts] = (0, 0)
    """Extra tokens before and after the grid's in the sequence that attention sees, or such a function."""


class Patched:
    """One patched model. :func:`apply_mhla` makes it, :func:`find_patched` finds it, what works on a patch takes it.

    Args:
        transformer: the model.
        config: settings of the patch.
        family: of the model; None for one that is patched by its grid.
        facts: of a model without a family.
        pipe: pipeline or object with ``transformer`` and ``scheduler`` that the patch was applied to.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
    """

    def __init__(
        self,
        transformer: nn.Module,
        config: PatchConfig,
        family: Family | None = None,
        facts: Facts | None = None,
        pipe: Any = None,
        backend: str = "auto",
    ) -> None:
        self.transformer = transformer
        self.config = config
        self.family = family
        self.facts = facts
        self.backend = backend
        self.pipeline = Pipeline(pipe)
        self.attentions: dict[str, Any] = {} if family is None else family.self_attentions(transformer)
        """Name and module of every self-attention, patched or not, in the order of the layer indices."""
        self.names = tuple(self.attentions)
        self.chosen: tuple[str, ...] = ()
        """Names of those that are patched."""
        self.tally = Tally()
        self.latest_grid: Shape | None = None
        """Token grid of the latest forward, to be shown; no attention reads it."""
        self.replaced_weights: dict[str, torch.Tensor] | None = {}
        """Weights of the model that the patch replaced, as they were; None if they were not kept."""
        self.lora: str | None = None
        """Name of the LoRA that belongs to the patch; None without one."""
        self.errors: Errors = {}
        """Those of the latest call."""
        self._watch: Watch | None = None
        self._hooks: list[Any] = []
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to running calls."""
        return vars(self) | {"errors": {}, "latest_grid": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copied or pickled model."""
        vars(self).update(state)
        register_backend()

    @property
    def is_sparse(self) -> bool:
        """Whether it runs sparse attention."""
        return isinstance(self.config, SparseConfig)

    @property
    def of_family(self) -> Family:
        """The family of the model, which has one."""
        assert self.family is not None
        return self.family

    @property
    def is_attached(self) -> bool:
        """Whether it has hooks: not in diffusers' own form, and not any more after removal."""
        return vars(self.transformer).get(ATTRIBUTE) is self

    @property
    def is_off(self) -> bool:
        """Whether it is within ``mhla_disabled`` in this thread."""
        return is_off(self)

    @property
    def layers(self) -> dict[str, MHLALayer]:
        """Name of every self-attention that MHLA has a layer in, with the layer; empty for sparse attention."""
        found = ((name, layer_of(attn)) for name, attn in self.attentions.items())
        return {name: layer for name, layer in found if layer is not None}

    # Putting in and taking away

    def attach(self) -> None:
        """Put the hooks into the model."""
        if self.is_sparse:
            register_backend()
            for number, (name, attn) in enumerate(self.attentions.items()):
                if name in self.chosen:
                    LayerHook(number).attach(attn)
        model = self.transformer
        self._hooks.append(model.register_forward_pre_hook(self.begin, with_kwargs=True))
        self._hooks.append(model.register_forward_hook(self.end, always_call=True))
        setattr(model, ATTRIBUTE, self)

    def detach(self) -> None:
        """Take them away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        CarryingCheckpoint.take_off(self.transformer)
        for attn in self.attentions.values():
            LayerHook.detach(attn)
            if hasattr(getattr(attn, "processor", None), CHOSEN_BACKEND):
                _restore_backend(attn.processor)
        if ATTRIBUTE in vars(self.transformer):
            delattr(self.transformer, ATTRIBUTE)

    # Around a forward

    @_disable_dynamo  # what is found of a call stays out of graphs; blocks and the model's own forward have them
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the call of this thread, before a forward."""
        state = held()
        outer = state.call
        if outer is not None and outer.patch is self:  # Ctrl-C ended its last forward, without its hooks
            self._leave(outer)
            outer = outer.outer
        state.call = Call(self, outer=outer)  # so that end() takes it back after a refusal too
        if is_off(self):
            return
        named = named_arguments(model, args, kwargs)
        grid, extra = self._tokens(model, args, kwargs, named)
        for tensor in named.values():  # blocks depend on the sizes: torch.compile makes a graph for each
            if isinstance(tensor, torch.Tensor):
                for axis in range(1, tensor.ndim):
                    torch._dynamo.mark_static(tensor, axis)
        CarryingCheckpoint.put_on(model)
        call = self._entered(grid, extra, outer)
        state.call = call
        state.call = self._in_step(call, named)
        if self.lora is not None and "lora" not in self._warned and (why := self.inactive_lora()) is not None:
            self._warn_once("lora", why)

    @_disable_dynamo
    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the call back after a forward, also one that failed, whose output is None."""
        state = held()
        call = state.call
        if call is None or call.patch is not self:  # refused by another hook before it began
            return
        state.call = call.outer
        self._leave(call)
        if output is not None and call.grid:
            self.latest_grid = call.grid
        if call.run is None:
            if self.family is None and not self.tally.summary():
                self.tally.latest = "no attention that the patch sees: it answers scaled_dot_product_attention alone"
                self.tally.log_once(logging.WARNING, f"{type(self.transformer).__name__}: {self.tally.latest}")
            self.tally.end()
        elif output is None:
            call.run.clear()
        elif call.step is not None and call.step.index == call.step.count - 1:
            for branch in call.branches:
                branch.residuals.clear()

    def _entered(self, grid: Shape, extra: Counts, outer: Call | None) -> Call:
        """Return the call of a forward, after attaching what its attentions need."""
        mode: Mode | None = None
        if not self.is_sparse:
            self._keep_processors()
        elif self._answers_pytorch():
            mode = Mode(partial(is_checkpointed, self.transformer)) if self.family is None else Mode()
            mode.enter()
        if self.family is None:
            state = held()
            state.layer, state.part, state.over_grid = _FIRST, 0, 0
        facts = (False, False) if self.family is None else (self.family.rows_alike, self.family.pads_behind_grid)
        split = None if self.is_sparse else _processes_of(self.transformer)
        call = Call(self, grid, extra, *facts, split=split, mode=mode, outer=outer)
        call = call._replace(tally=self.tally, watch=self._watch)
        if not isinstance(self.config, SparseConfig):
            return call
        dense_layers = self.config.dense_layers if self.family is None else 0
        return call._replace(rule=self.config.rule_on(grid), dense_layers=dense_layers)

    def _leave(self, call: Call) -> None:
        if self.family is None:
            held().layer = None
        if call.mode is not None:
            call.mode.leave()

    def _tokens(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]
    ) -> tuple[Shape, Counts]:
        """Return token grid and extra tokens of a forward.

        Raises:
            ValueError: no latents, or a grid without a token.
        """
        if self.family is None:
            assert self.facts is not None
            grid: Any = self.facts.grid
            extra: Any = self.facts.extra
            grid = check_grid(_called(grid, args, kwargs, named)) if callable(grid) else grid
            return grid, check_counts(_called(extra, args, kwargs, named)) if callable(extra) else extra
        name = self.family.latents_name
        if named.get(name) is None:
            raise ValueError(f"{type(model).__name__} was called without {name}, whose shape gives the token grid.")
        grid = tuple(int(size) for size in self.family.grid(model, named))
        if 0 in grid:
            raise ValueError(f"{name} of {type(model).__name__} are too small for one token: the token grid is {grid}.")
        extra = self.family.extra
        return grid, extra(named) if callable(extra) else extra

    def _answers_pytorch(self) -> bool:
        """Set the route's backend on attentions that dispatch; return whether others call PyTorch's function."""
        others = self.family is None
        for name in self.chosen:
            processor = getattr(self.attentions[name], "processor", None)
            chosen = getattr(processor, _BACKEND, _NONE)
            if chosen is _NONE:
                others = True
            elif chosen != BACKEND:  # what the user has chosen since
                setattr(processor, CHOSEN_BACKEND, chosen)
                setattr(processor, _BACKEND, BACKEND)
        return others

    def _in_step(self, call: Call, named: Mapping[str, Any]) -> Call:
        """Return the call with its step and its branch's residuals; neither while gradients are enabled."""
        config = self.config
        if torch.is_grad_enabled() or held().in_every_step or not (config.has_dense_steps or self._watch):
            return call
        timestep, conditions = named.get("timestep"), _conditions(named)
        sampling: Sampling | None = self.pipeline.sampling(self.transformer, timestep)
        if sampling is None:
            if config.has_dense_steps:
                self._warn_once(
                    "steps",
                    f"The denoising step of a forward of {type(self.transformer).__name__} is unknown, so "
                    f"{config.dense_words} has no effect. Call the pipeline, or give apply_mhla() the object that has "
                    "the transformer and its scheduler; dense_first=0, dense_last=0, dense_every=0 for no dense steps.",
                )
            return call
        run, step, timesteps = sampling
        errors = run.errors.get(id(self))
        if errors is None:
            config.check_steps(step.count)
            dense = config.dense_steps(step.count)
            if dense and len(dense) == step.count:
                self._warn_once(
                    "dense",
                    f"All {step.count} steps of this call are dense by {config.dense_words}, so the patch does not "
                    "run. Lower these settings, or remove the patch.",
                )
            errors = run.errors[id(self)] = self.errors = {}
            self.tally.end()
            weakref.finalize(run, self._log_end, errors, len(dense))
        call = call._replace(step=step, is_dense=config.is_dense(step), run=run, errors=errors)
        if not (isinstance(config, SparseConfig) and config.correct and config.has_dense_steps):
            return call
        branch, begins = run.branch(id(self), step, timesteps, conditions)
        records = config.records_residual(step)
        if begins and records:
            rerun_blocks(self.transformer)
        return call._replace(branches=(branch,), records_residual=records)

    # What attentions do while a patch is measured

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Show every patched attention to a function, whose result it goes on with; nothing runs in a graph."""
        before, self._watch = self._watch, watch
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._watch = before

    @contextmanager
    def on_grid(self, grid: Shape) -> Iterator[None]:
        """Let single self-attentions of the model be called on a token grid within the context, patched."""
        extra = self.of_family.extra
        call = self._entered(grid, (0, None) if callable(extra) else extra, None)
        try:
            with within(call):
                yield
        finally:
            self._leave(call)

    def name_at(self, place: tuple[int, int]) -> str:
        """Return the name of the self-attention of a place, (layer, which of its calls of attention)."""
        return self.names[place[0]] if self.names else f"attention {place[1]}"

    def name_of(self, attn: Any) -> str:
        """Return the name of a self-attention."""
        return next(name for name, one in self.attentions.items() if one is attn)

    # Which processors run MHLA

    def _keep_processors(self) -> None:
        """Look whether patched attentions still run MHLA, which something else may have changed.

        Where diffusers has put a blank processor or one that runs fused projections, that of the patch comes back. Of
        others there is one warning.
        """
        foreign, own = {}, None
        for name in self.layers:
            attn = self.attentions[name]
            processor = attn.processor
            own = own or MHLAProcessor(self.config, backend=self.backend)
            if isinstance(processor, MHLAProcessor):
                if processor.is_blank:
                    attn.processor = own
            elif is_fused(processor):
                if own.fused is None:
                    own = MHLAProcessor(self.config, backend=self.backend)
                    own.fused = processor
                attn.processor = own
            else:
                foreign[name] = type(processor).__name__
        if foreign:
            name, kind = next(iter(foreign.items()))
            self._warn_once(
                "processors",
                f"{len(foreign)} patched layers do not run MHLA, for example {name}, which runs {kind}: something has "
                "set their processors since. change_mhla(model) brings MHLA back, remove_mhla(model) takes it away.",
            )

    def original_processor(self, attn: Any) -> Any:
        """Return the processor that an attention had before MHLA, or a fresh one where no record was kept."""
        original, processor = replaced_processor(attn), attn.processor
        if original is None:
            assert self.family is not None
            assert self.family.mhla is not None
            is_self = any(attn is own for own in self.attentions.values())
            mhla = self.family.mhla
            original = mhla.own_processor(attn) if is_self else mhla.own_cross_processor(attn)
        return processor.with_choices(original) if isinstance(processor, MHLAProcessor) else original

    # What dense steps have measured

    def error_words(self) -> str:
        """Say how far the attentions were from full attention at the latest dense step; empty before one.

        Reads the device.
        """
        return self._words_of(self.errors)[0] if self.errors else ""

    def _words_of(self, errors: Errors) -> tuple[str, float]:
        """Return words, and the median relative error of the attentions after correction."""
        before, after = torch.stack(list(errors.values())).float().cpu().unbind(dim=1)
        worst = self.name_at(list(errors)[int(after.argmax())])
        words = (
            f"error of an attention at the latest dense step {after.median():.0%} (median), {after.max():.0%} "
            f"({worst}); {before.median():.0%} before correction"
        )
        return words, float(after.median())

    def _log_end(self, errors: Errors, dense_steps: int) -> None:
        """Log a summary of a finished call; warn if the error of its attentions is large."""
        self.tally.end()
        if not errors:
            return
        words, median = self._words_of(errors)
        logger.info("corrected from %d dense step%s; %s", dense_steps, "s"[: dense_steps != 1], words)
        if median > FAR_OFF:
            logger.warning(
                "The attentions of %s have a median error of %.0f %% at dense steps. Raise density above %s, or let "
                "mhla tune find settings.",
                type(self.transformer).__name__,
                100 * median,
                getattr(self.config, "density", "that of the patch"),
            )

    def _warn_once(self, topic: str, words: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning("%s", words)

    def inactive_lora(self) -> str | None:
        """Return why the patch's LoRA does not run, and what to do; None if it does, or there is none."""
        if self.lora is None or runs_lora(self.transformer, self.lora):
            return None
        if not has_lora(self.transformer, self.lora):
            return (
                f"The patch's LoRA {self.lora!r} was unloaded, and the patch was made with it. Call remove_mhla() and "
                "load_mhla() again, and unload other adapters with delete_adapters()."
            )
        return (
            f"The patch's LoRA {self.lora!r} is not active, and the patch was made with it. Name it beside others: "
            f"transformer.set_adapters([{self.lora!r}, ...])."
        )


FAR_OFF = 0.3
"""Median relative error of the attentions at dense steps from which a warning is due."""
_FIRST = torch.tensor(0, device="cpu")
"""Number of the layer of a model without a family, whose calls of attention are counted instead."""


def _processes_of(transformer: Any) -> ProcessGroup | None:
    """Return the processes over which diffusers' context parallelism splits a transformer's tokens; None for one."""
    config = getattr(getattr(transformer, "_parallel_config", None), "context_parallel_config", None)
    return None if config is None else config._flattened_mesh.get_group()


def _conditions(named: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor that identifies a guidance branch: the caption, else the first one after the latents."""
    caption = named.get("encoder_hidden_states")
    tensors = (caption, *list(named.values())[1:])
    return next((x for x in tensors if isinstance(x, torch.Tensor) and x.ndim > 1), None)


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]) -> Any:
    """Call a user's function with a forward's arguments: by name where it takes these, or as they were given."""
    try:
        inspect.signature(function).bind(**named)
    except TypeError:
        return function(*args, **kwargs)
    return function(**named)


def check_counts(extra: Any) -> Counts:
    """Return numbers of extra tokens; ValueError for what is none, or two unknown ones."""
    counts: Any = tuple(extra) if isinstance(extra, list | tuple) else extra
    fits = isinstance(counts, tuple) and len(counts) == 2 and counts.count(None) < 2
    if not fits or not all(n is None or (isinstance(n, int) and n >= 0) for n in counts):
        raise ValueError(
            f"extra={extra!r} must be two counts of tokens before and after the grid, such as (0, 77), or (0, None) "
            "for any number."
        )
    return counts


def _restore_backend(processor: Any) -> None:
    """Restore the attention backend that the user chose."""
    chosen = vars(processor).pop(CHOSEN_BACKEND)
    if vars(processor).pop(_BACKEND, BACKEND) != BACKEND or chosen != getattr(type(processor), _BACKEND, None):
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
