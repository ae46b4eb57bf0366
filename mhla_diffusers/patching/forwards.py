"""What happens around every forward of a patched transformer: its processors, its context, its denoising step."""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from ..config import Step
from .advice import advice_on
from .carry import CarriedForward, DenoisingRun
from .context import CallContext, CarryingCheckpoint, Grid, call_context, current, enter, of_this_thread, split_of
from .handle import Patched
from .layer import layer_of
from .processor import MHLAProcessor, PerturbedMHLAProcessor, is_fused
from .recompiling import give_back_limit, raise_limit
from .steps import DenoisingLoop, forget_skipping

logger = logging.getLogger(__name__)

CACHE_CONTEXT = "cache_context"
"""Method of diffusers' ``CacheMixin`` that a pipeline enters around every forward."""


class Forwards:
    """The hooks of a patched transformer, which give every forward its :class:`CallContext`.

    Args:
        patched: the transformer with its patch.
    """

    _split: ProcessGroup | None = None
    """The processes over which tokens are split."""

    def __init__(self, patched: Patched) -> None:
        self.patched = patched
        self._warned: set[str] = set()
        self._is_compiled = False
        """Whether there is a graph of the transformer or of its blocks."""
        self._hooks: list[RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a copied or pickled transformer makes again."""
        made_again = ("_find_split", "_note_graph", "_split")
        return {name: value for name, value in vars(self).items() if name not in made_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copied or pickled transformer."""
        vars(self).update(state)
        if self._hooks:
            self._prepare_compiling()

    # Putting in and taking away

    def install(self, pipe: Any) -> None:
        """Put the hooks on the transformer.

        Args:
            pipe: pipeline that calls the transformer; a transformer or None where that is not known.
        """
        self._prepare_compiling()
        self._hooks = [
            self.patched.transformer.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.patched.transformer.register_forward_hook(self._end, always_call=True),
        ]
        self.patched.loop = DenoisingLoop(self.patched.family, pipe)
        if hasattr(type(self.patched.transformer), CACHE_CONTEXT):
            setattr(self.patched.transformer, CACHE_CONTEXT, self.cache_context)

    def remove(self) -> None:
        """Take the hooks away."""
        self.patched.runs.clear()
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            CarryingCheckpoint.take_off(self.patched.transformer)
            give_back_limit(self)
        transformer = self.patched.transformer
        if getattr(vars(transformer).get(CACHE_CONTEXT), "__self__", None) is self:
            delattr(transformer, CACHE_CONTEXT)

    def _prepare_compiling(self) -> None:
        """Raise the limit of graphs, and make what runs while torch.compile traces a forward, in no graph."""
        raise_limit(self)

        def find_split() -> None:
            """Learn over which processes the tokens are split."""
            self._split = split_of(self.patched.transformer)

        def note_graph() -> None:
            """Log once that another graph is made, of the transformer or of its blocks."""
            if self._is_compiled and self.patched.latest_grid is not None and "graphs" not in self._warned:
                self._warned.add("graphs")
                logger.info(
                    "%s is compiled again: where it is patched it has one graph per resolution, with dynamic=True too.",
                    type(self.patched.transformer).__name__,
                )
            self._is_compiled = True

        self._find_split, self._note_graph = find_split, note_graph
        for function in (find_split, note_graph):
            vars(function)["_dynamo_marked_constant"] = True

    # Around a forward

    def _begin(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the processors and set the context of the call, before a forward."""
        patched, family, outer = self.patched, self.patched.family, current()
        if outer.of is patched and outer.outer is not None:  # Ctrl-C ended its last forward, without its hooks
            outer = outer.outer
        # so that _end takes it back after a refusal too
        enter(CallContext(off=outer.off, of=patched, outer=outer))
        arguments = family.forward.named_arguments(transformer, args, kwargs)
        self._check_processors()
        name = family.forward.latents_name
        latents = arguments.get(name)
        if latents is None:
            kind = type(transformer).__name__
            raise ValueError(f"{kind} was called without {name}, whose shape gives the token grid.")
        # the blocks depend on the sizes, so torch.compile should make one graph per resolution rather than try symbols
        for tensor in [latents] if isinstance(latents, torch.Tensor) else latents:
            for axis in range(1, tensor.ndim) if isinstance(tensor, torch.Tensor) else ():
                torch._dynamo.mark_static(tensor, axis)
        grid = tuple(int(size) for size in family.forward.grid_of_arguments(transformer, arguments))
        if 0 in grid:
            kind = type(transformer).__name__
            raise ValueError(f"{name} of {kind} are too small for one token: the token grid is {grid}.")
        is_compiled = torch.compiler.is_compiling()
        if not is_compiled and grid != patched.latest_grid:
            is_compiled = any(block._compiled_call_impl for block in family.attention.blocks_of(transformer).values())
        if is_compiled:
            self._note_graph()
        self._find_split()
        if not torch.compiler.is_compiling():
            self._warn_of_call(grid)
        of_step: dict[str, Any] = {"disabled": False, "shows": False}
        if self._has_dense_steps(outer, transformer):
            of_step = self._choose_attention(outer, transformer, args, kwargs, arguments)
        elif not torch.compiler.is_compiling():
            of_step["carried"] = None
        CarryingCheckpoint.put_on(transformer)
        tables: dict[Any, Any] | None = None if torch.compiler.is_compiling() else {}
        enter(outer._replace(grid=grid, tables=tables, split=self._split, **of_step, of=patched, outer=outer))

    def _end(self, transformer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """Take the context back after a forward, also one that failed, whose result is None."""
        context = current()
        if context.of is not self.patched or context.outer is None:  # refused by another hook before it began
            return
        enter(context.outer)
        if result is not None:
            self.patched.latest_grid = context.grid
        if torch.compiler.is_compiling() or not isinstance(context.carried, CarriedForward):
            return
        if result is None and (run := self.patched.runs.get(threading.get_ident())) is not None:
            run.clear()
        elif context.carried.step.index == context.carried.step.count - 1:
            context.carried.half.clear()

    def _warn_of_call(self, grid: Grid) -> None:
        """Warn, of each topic once, of what a call on this token grid does not get from the patch.

        Training has said it before, of its largest samples.
        """
        patched = self.patched
        if grid != patched.latest_grid and not (patched.transformer.training or current().in_every_step):
            for topic, words in advice_on(patched, grid).items():
                self._warn_once(topic, "%s", words)
        if patched.lora is not None and "lora" not in self._warned and not patched.is_off:
            why = patched.inactive_lora()
            if why is not None:
                self._warn_once("lora", "%s", why)

    @contextmanager
    def cache_context(self, name: str, **fields: Any) -> Iterator[None]:
        """Enter the transformer's own ``cache_context``, and note half and denoising step that it is given."""
        index, count, step = fields.get("step_index"), fields.get("num_inference_steps"), None
        known: dict[str, Any] = {"half": name, "carried": None}
        if index is not None and count is not None:
            step = self.patched.loop.step_by_index(int(index), int(count))
            known |= {
                "step_disabled": self.patched.config.is_dense(step),
                "step_shows": self.patched.config.shows(step),
            }
            if self._has_dense_steps(current()._replace(step=step), self.patched.transformer):
                known["carried"] = self._carried(step, name)
        own: Any = getattr(type(self.patched.transformer), CACHE_CONTEXT)
        with call_context(step=step, **known), own(self.patched.transformer, name, **fields):
            yield

    def _has_dense_steps(self, context: CallContext, transformer: nn.Module) -> bool:
        """Whether the denoising step of a forward decides what attends; in training mode it never does."""
        config = self.patched.config
        if not config.asks_for_dense_steps:
            if torch.is_grad_enabled():
                return False
            # a graph would break on finding the step by its timestep
            if context.step is None and (self.patched.loop.pipe is None or torch.compiler.is_compiling()):
                return False
        return config.has_dense_steps and not (transformer.training or context.in_every_step or self.patched.is_off)

    def _choose_attention(
        self,
        context: CallContext,
        transformer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return what the denoising step of a forward says of its attentions, as fields of the context."""
        config, carried = self.patched.config, context.carried
        if context.step is not None:
            disabled, shows = context.step_disabled, context.step_shows
        elif isinstance(config.softmax_steps, float) and config.softmax_steps == 1:  # whichever step it is
            disabled, shows, carried = True, False, None
        else:
            step = self.patched.loop.step_by_timestep(transformer, args, kwargs)
            disabled = shows = False
            if step is not None:
                disabled, shows = config.is_dense(step), config.shows(step)
                if shows and torch.compiler.is_compiling():  # the graph goes on behind the comparison of timesteps
                    shows = False
                    self._warn_once(
                        "carry",
                        "The whole %s is compiled, and its pipeline does not state the denoising step, so nothing of "
                        "what dense steps show is carried. Compile its blocks instead, each with block.compile().",
                        type(transformer).__name__,
                    )
            elif config.asks_for_dense_steps:
                self._warn_once(
                    "steps",
                    "The denoising step of a forward of %s is unknown, so MHLA runs in it despite %s. Give"
                    " the pipeline that calls it to apply_mhla(), load_mhla() or change_mhla(), or enter "
                    'transformer.cache_context("cond", step_index=…, num_inference_steps=…) around it.',
                    type(transformer).__name__,
                    config.dense_words,
                )
            if not torch.compiler.is_compiling():
                carried = None if step is None else self._carried(step, context.half)
        if torch.compiler.is_compiling():
            return {"disabled": disabled, "shows": shows}
        if isinstance(carried, CarriedForward):
            carried.half.check_conditions(arguments.get("encoder_hidden_states"), disabled)
        return {"disabled": disabled, "shows": shows, "carried": carried}

    def _carried(self, step: Step, name: str | None) -> CarriedForward | None:
        """Return what the attentions of this thread's next forward carry; None if nothing is carried."""
        config = self.patched.config
        if not config.carry:
            return None
        run = of_this_thread(self.patched.runs, DenoisingRun)
        is_new, half = run.step != step, run.half(step, self.patched.loop.scheduler, name)
        if is_new and config.shows(step):  # else a cache may skip what this step is to show
            forget_skipping(self.patched.transformer)
        return CarriedForward(half, step, config)

    def _check_processors(self) -> None:
        """Look whether patched attentions still run MHLA, which something else may have changed.

        Under perturbed-attention guidance MHLA goes on in the branches that are not perturbed. Where diffusers has put
        a blank processor or one that runs fused projections, that of the patch comes back. Of others there is one
        warning.
        """
        patched, foreign = self.patched, {}
        for name, attn in patched.attentions.items():
            processor, layer = attn.processor, layer_of(attn)
            if layer is None:
                continue
            if isinstance(processor, MHLAProcessor):
                if processor.is_blank:
                    attn.processor = patched.processor
            elif getattr(attn, "fused_projections", False) and is_fused(processor):
                attn.processor = patched.processor
            elif patched.is_unfused(attn):
                layer.original_processor, attn.processor = processor, patched.processor
            elif (parts := patched.family.attention.perturbed_processors.get(type(processor).__name__)) is not None:
                if not patched.is_off:
                    attn.processor = PerturbedMHLAProcessor(patched.running_processor(), parts)
            else:
                foreign[name] = type(processor).__name__
        if torch.compiler.is_compiling():
            return
        if foreign and "processors" not in self._warned:
            name, kind = next(iter(foreign.items()))
            logger.warning(
                "%d patched layers do not run MHLA, for example %s, which runs %s: something has set their "
                "processors since. describe(model) shows what every layer runs, change_mhla(model) brings MHLA "
                "back, remove_mhla(model) takes it away.",
                len(foreign),
                name,
                kind,
            )
            self._warned.add("processors")
        elif not foreign:
            self._warned.discard("processors")

    def _warn_once(self, topic: str, message: str, *arguments: object) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message, *arguments)
