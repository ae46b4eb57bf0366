"""The handle of a patched transformer, and finding it from a pipeline or a model."""

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.parallel.place import Parallel
from ..config import PatchConfig, Step
from ..families import Family, find_family, get_family, unwrapped
from .advice import advise
from .carry import CarriedForward, DenoisingRun
from .context import CallContext, CarryingCheckpoint, Grid, call_context, current, enter
from .layer import PatchedLayer, attentions_of, layer_of, replaced_processor
from .parallel import check_split, compare_patches, parallel_of, refuse_deciding_cache
from .processor import (
    MHLAProcessor,
    PerturbedMHLAProcessor,
    default_cross_attention_processor,
    has_mhla_processor,
    holds_weights,
    runs_mhla,
    with_backend_of,
)
from .steps import DenoisingLoop, forget_skipping
from .weights import base_weights, check_writable, has_lora, remove_lora, runs_lora

if TYPE_CHECKING:
    from .few_steps import FewSteps

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_mhla"
"""Holds the handle, on the module of a patched transformer that runs its blocks."""
_CACHE_CONTEXT = "cache_context"
"""Method of diffusers' ``CacheMixin`` that a pipeline enters around every forward."""
_GRAPHS = 64
"""Resolutions, each one graph, that a transformer is compiled for before torch.compile gives up; PyTorch allows 8."""
_owners: "weakref.WeakSet[Patched]" = weakref.WeakSet()
"""Handles with hooks; PyTorch's limit of graphs, which knows no single models, is raised while there are any."""
_limits_before: list[int] = []
"""PyTorch's limit while it is raised."""


class Patched:
    """One patched transformer: all that a patch has put into it, and all that is known of the two.

    :func:`apply_mhla` and :func:`load_mhla` make it, :func:`find_patched` finds it, and whatever works on a patch takes
    it. Its hooks give every forward its :class:`~mhla_diffusers.patching.context.CallContext`. A transformer that was
    patched by diffusers' own ``set_attn_processor``, which passes no model, gets a handle without hooks on demand.

    Args:
        transformer: of a family.
        processor: that runs MHLA; None of such a transformer in which none runs now.
    """

    def __init__(self, transformer: nn.Module, processor: MHLAProcessor | None) -> None:
        self.transformer = transformer
        self.family: Family = get_family(transformer)
        self.attentions: dict[str, Any] = self.family.self_attentions(transformer)
        """Name and module of every self-attention, patched or not, in the order of the layer indices."""
        self.processor = processor
        self.loop = DenoisingLoop(self.family, None)
        """The denoising loop of the pipeline that calls the transformer."""
        self.latest_grid: Grid | None = None
        """Token grid of the latest forward, to be shown; no attention reads it."""
        self.replaced_weights: dict[str, torch.Tensor] | None = {}
        """Weights of the model that the patch replaced, as they were; None if they were not kept."""
        self.lora: str | None = None
        """Name of the LoRA that belongs to the patch; None without one."""
        self.few_steps: FewSteps | None = None
        """How it samples, if it was distilled to a few steps."""
        self.replaced_scheduler: Any = None
        """The pipeline's own scheduler, while it has that of few steps."""
        self.runs: dict[int, DenoisingRun] = {}
        """What dense steps have shown, of every thread that samples."""
        self._parallel: Parallel | None = None
        """The processes between which tokens are split."""
        self._compared: Any = None
        """diffusers' configuration under which the processes have compared their patches."""
        self._warned: set[str] = set()
        self._hooks: list[RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a copied or pickled transformer makes again."""
        return {name: value for name, value in vars(self).items() if name != "_meet_processes"} | {"runs": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copied or pickled transformer."""
        vars(self).update(state)
        if self._hooks:
            self._prepare_compiling()

    @property
    def layers(self) -> dict[str, PatchedLayer]:
        """Name of every patched self-attention, with its layer."""
        found = ((name, layer_of(attn)) for name, attn in self.attentions.items())
        return {name: layer for name, layer in found if layer is not None}

    @property
    def config(self) -> PatchConfig:
        """Settings of the patch."""
        for attn in self.attentions.values():  # every forward asks, so the first layer is enough
            layer = layer_of(attn)
            if layer is not None:
                return layer.config
        if self.processor is None:
            raise ValueError("This transformer is not patched with MHLA.")
        return self.processor.config

    @property
    def is_installed(self) -> bool:
        """Whether it has hooks: not in diffusers' own form, and not any more after removal."""
        return vars(self.family.trunk(self.transformer)).get(_ATTRIBUTE) is self

    # Putting in and taking away

    def install(self, layers: Mapping[str, PatchedLayer], pipe: Any) -> None:
        """Patch the transformer.

        Args:
            layers: name of every self-attention to be patched, with its new layer.
            pipe: pipeline that calls the transformer; a transformer or None where that is not known.
        """
        processor, trunk = self.running_processor(), self.family.trunk(self.transformer)
        self.family.prepare(self.transformer)
        for name, layer in layers.items():
            attn = self.attentions[name]
            layer.original_processor = processor.enter(attn)
            attn.mhla = layer
            if getattr(attn.processor, "_parallel_config", None) is not None:
                processor._parallel_config = attn.processor._parallel_config
            attn.set_processor(processor)
        setattr(trunk, _ATTRIBUTE, self)
        if self.family.kind == "language":  # transformers passes their calls everything they need
            return
        self._prepare_compiling()
        self._hooks = [
            trunk.register_forward_pre_hook(self._begin, with_kwargs=True),
            trunk.register_forward_hook(self._end, always_call=True),
        ]
        if self.family.is_diffusion:
            self.loop = DenoisingLoop(self.family, pipe)
            if hasattr(type(self.transformer), _CACHE_CONTEXT):
                setattr(self.transformer, _CACHE_CONTEXT, self.cache_context)

    @torch.no_grad()
    def replace_weights(self, tensors: Mapping[str, torch.Tensor], keep: bool) -> None:
        """Write an adapted patch's weights over those of the model.

        Args:
            tensors: name in a plain model → value.
            keep: whether to keep those that change, on the CPU, for :meth:`remove`.
        """
        places = base_weights(self.transformer)
        replaced: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            first = places[name][0]
            new = tensor.to(first.device, first.dtype)
            if first.is_meta or torch.equal(first, new):
                continue
            if keep:
                replaced[name] = first.to("cpu", copy=True)
            self.replaced_weights = replaced if keep else None  # before it is written, should that be interrupted
            for place in places[name]:
                place.copy_(new)

    def check_removable(self) -> None:
        """Raise unless weights of the model that the patch replaced can be brought back.

        Raises:
            ValueError: they were not kept, or cannot be written, or the patch's LoRA is fused with weights.
        """
        for name, part in self.transformer.named_modules():
            if self.lora in (getattr(part, "merged_adapters", None) or ()):
                raise ValueError(
                    f"The patch's LoRA {self.lora!r} is fused with the weights of {name}; call unfuse_lora() before "
                    "remove_mhla()."
                )
        if self.replaced_weights is None:
            raise ValueError(
                "The patch replaced weights of the model, which load_mhla(..., keep_replaced=False) did not keep, so "
                "they cannot be brought back; load the model again with from_pretrained()."
            )
        check_writable(self.transformer, self.replaced_weights, "remove the patch")

    @torch.no_grad()
    def remove(self, model: Any = None) -> None:
        """Take everything away that :meth:`install` has put in, and bring back weights that were replaced.

        Args:
            model: pipeline that the patch is removed from; a transformer or None where that is not known.
        """
        if self.lora is not None and has_lora(self.transformer, self.lora):
            remove_lora(self.transformer, self.lora)
        elif self.lora is not None:
            logger.warning(
                "The patch's LoRA %r was unloaded by something else. If it was fused first, its weights stay in "
                "the model; load the model again with from_pretrained() then.",
                self.lora,
            )
        if self.few_steps is not None:
            from .few_step_scheduler import restore_scheduler

            for pipe in (self.loop.pipe, model):  # a copied pipeline is known only as the one that is given
                restore_scheduler(pipe, self.few_steps, self.replaced_scheduler)
        if self.replaced_weights:
            places = base_weights(self.transformer)
            for name, tensor in self.replaced_weights.items():
                for place in places[name]:
                    place.copy_(tensor)
        self.lora = self.few_steps = self.replaced_scheduler = None
        self.replaced_weights = {}
        for attn in attentions_of(self.transformer).values():
            if isinstance(attn.processor, MHLAProcessor) or hasattr(attn, "mhla"):
                original = self.original_processor(attn)
                if self.processor is not None:
                    self.processor.leave(attn, original)
                attn.set_processor(original)
            if hasattr(attn, "mhla"):
                del attn.mhla
        self.runs.clear()
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            for module in self._checkpointing():
                CarryingCheckpoint.take_off(module)
            _owners.discard(self)
            _restore_limit()
        if getattr(vars(self.transformer).get(_CACHE_CONTEXT), "__self__", None) is self:
            delattr(self.transformer, _CACHE_CONTEXT)
        if self.is_installed:
            delattr(self.family.trunk(self.transformer), _ATTRIBUTE)
        self.family.restore(self.transformer)

    # Which processors run

    def running_processor(self) -> MHLAProcessor:
        """Return the processor of the patch, also where something else has set others.

        Raises:
            ValueError: in diffusers' own form, where none runs.
        """
        if self.processor is None:
            raise ValueError(
                "No attention of this model runs MHLA now: its patch is switched off, or other processors have been "
                "set since. Leave mhla_disabled(), or set the processor again with transformer.set_attn_processor()."
            )
        return self.processor

    def original_processor(self, attn: Any) -> Any:
        """Return the processor that an attention had before the patch, or a fresh one where no record was kept.

        It gets the backend that ``set_attention_backend`` has set meanwhile. One with weights that was set since the
        patch, as loading an IP-Adapter does, stays.
        """
        if holds_weights(attn.processor) or self._is_unfused(attn):
            return attn.processor
        original = replaced_processor(attn)
        if original is None and any(attn is own for own in self.attentions.values()):
            original = self.family.self_attention_processor(attn)
        elif original is None:
            original = default_cross_attention_processor(attn, self.family)
        return with_backend_of(attn.processor, original) if isinstance(attn.processor, MHLAProcessor) else original

    def _is_unfused(self, attn: Any) -> bool:
        """Whether diffusers has brought back what ran before the projections were fused, and they were so when patched.

        Bringing back empties the dict in which it keeps those processors.
        """
        is_unfused = getattr(self.transformer, "original_attn_processors", None) == {}
        is_own = isinstance(attn.processor, MHLAProcessor) or _is_fused(attn.processor)
        return is_unfused and _is_fused(replaced_processor(attn)) and not is_own

    def running_attentions(self) -> dict[str, Any]:
        """Return every self-attention that runs MHLA now, in this thread, by name."""
        return {name: attn for name, attn in self.attentions.items() if runs_mhla(attn)}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the transformer attend as before the patch within the context, in this thread, with the same weights."""
        processors = {id(attn.processor): attn.processor for attn in attentions_of(self.transformer).values()}
        processors[id(self.processor)] = self.processor  # where guidance has put others
        switched = [one for one in processors.values() if isinstance(one, MHLAProcessor)]
        enter(current()._replace(off=(*current().off, *switched)))
        try:
            yield
        finally:  # takes out its own alone, as contexts of generators may end in any order
            off = list(current().off)
            for one in switched:
                if one in off:
                    off.remove(one)
            enter(current()._replace(off=tuple(off)))

    def _check_processors(self) -> None:
        """Look whether patched attentions still run MHLA, which something else may have changed.

        Under perturbed-attention guidance MHLA goes on in the branches that are not perturbed. Where diffusers has put
        a blank processor or one that runs fused projections, that of the patch comes back. Of others there is one
        warning.
        """
        foreign = {}
        for name, attn in self.attentions.items():
            processor, layer = attn.processor, layer_of(attn)
            if layer is None:
                continue
            if isinstance(processor, MHLAProcessor):
                if processor.is_blank:
                    attn.processor = self.processor
            elif getattr(attn, "fused_projections", False) and _is_fused(processor):
                attn.processor = self.processor
            elif self._is_unfused(attn):
                layer.original_processor, attn.processor = processor, self.processor
            elif (parts := self.family.perturbed_processors.get(type(processor).__name__)) is not None:
                if not self.running_processor().is_off:
                    attn.processor = PerturbedMHLAProcessor(self.running_processor(), parts)
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

    # Every forward

    def _begin(self, trunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the processors and set the context of the call, before a forward."""
        outer = current()
        if outer.of is self and outer.outer is not None:  # Ctrl-C ended its forward before, which PyTorch does not tell
            outer = outer.outer
        enter(CallContext(off=outer.off, of=self, outer=outer))  # for _end, which takes it back after a refusal too
        arguments = self.family.named_arguments(trunk, args, kwargs)
        if self.family.is_diffusion:
            self._check_processors()
        # the blocks depend on the sizes, so torch.compile should make one graph per resolution rather than try symbols
        name = self.family.latents_name
        latents = arguments.get(name)
        if latents is None:
            raise ValueError(f"{type(trunk).__name__} was called without {name}, of which it reads the token grid.")
        for tensor in [latents] if isinstance(latents, torch.Tensor) else latents:
            for axis in range(1, tensor.ndim) if isinstance(tensor, torch.Tensor) else ():
                torch._dynamo.mark_static(tensor, axis)
        grid = tuple(int(size) for size in self.family.grid_of_arguments(trunk, arguments))
        if 0 in grid:
            raise ValueError(f"{name} of {type(trunk).__name__} are too small for one token: the token grid is {grid}.")
        self._meet_processes()
        if self._parallel is not None:
            check_split(self.family, self.layers, arguments, grid, self._parallel)
        if not torch.compiler.is_compiling():
            layer = next(iter(self.layers.values()), None)
            if grid != self.latest_grid and layer is not None and self.family.own_attention == "softmax":
                advice = advise(layer.config, grid, layer.heads, layer.head_dim, self.family.extra_tokens)
                for topic in advice.keys() - self._warned:  # each once
                    self._warned.add(topic)
                    logger.warning(advice[topic])
            if self.few_steps is not None:
                self.few_steps.warn_of_call(self.transformer, self.loop.pipe)
            self._warn_of_lora()
        of_step: dict[str, Any] = {"disabled": False, "shows": False}
        if self.family.is_diffusion and self._has_dense_steps(outer, trunk):
            of_step = self._choose_attention(outer, trunk, args, kwargs, arguments)
        elif not torch.compiler.is_compiling():
            of_step["carried"] = None
        for module in self._checkpointing():
            CarryingCheckpoint.put_on(module)
        enter(outer._replace(grid=grid, parallel=self._parallel, **of_step, of=self, outer=outer))

    def _end(self, trunk: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """Take the context back after a forward, also one that failed, whose result is None."""
        context = current()
        if context.of is not self or context.outer is None:  # another hook has refused the forward before it began
            return
        enter(context.outer)
        if result is not None:
            self.latest_grid = context.grid
        if torch.compiler.is_compiling() or not isinstance(context.carried, CarriedForward):
            return
        if result is None and (run := self.runs.get(threading.get_ident())) is not None:
            run.clear()
        elif context.carried.step.index == context.carried.step.count - 1:
            context.carried.half.clear()

    @contextmanager
    def cache_context(self, name: str, **fields: Any) -> Iterator[None]:
        """Enter the transformer's own ``cache_context``, and note half and denoising step that it is given."""
        index, count, step = fields.get("step_index"), fields.get("num_inference_steps"), None
        known: dict[str, Any] = {"half": name, "carried": None}
        if index is not None and count is not None:
            step = self.loop.step_by_index(int(index), int(count))
            known |= {"step_disabled": self.config.is_dense(step), "step_shows": self.config.shows(step)}
            if self._has_dense_steps(current()._replace(step=step), self.transformer):
                known["carried"] = self._carried(step, name)
        own: Any = getattr(type(self.transformer), _CACHE_CONTEXT)
        with call_context(step=step, **known), own(self.transformer, name, **fields):
            yield

    def step_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """Return the denoising step of a forward with these arguments; None if it is unknown."""
        step = current().step
        return step if step is not None else self.loop.step_by_timestep(self.transformer, args, kwargs)

    def _has_dense_steps(self, context: CallContext, transformer: nn.Module) -> bool:
        """Whether the denoising step of a forward decides what attends; in training mode it never does."""
        config = self.config
        if not config.asks_for_dense_steps and (torch.is_grad_enabled() or not self._knows_steps(context)):
            return False
        is_off = self.processor is not None and self.processor.is_off
        return config.has_dense_steps and not (transformer.training or context.in_every_step or is_off)

    def _knows_steps(self, context: CallContext) -> bool:
        """Whether the denoising step of a forward is known, without breaking a graph."""
        if context.step is not None:
            return True
        return self.loop.pipe is not None and not torch.compiler.is_compiling()

    def _choose_attention(
        self,
        context: CallContext,
        transformer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return what the denoising step of a forward says of its attentions, as fields of the context."""
        config, carried = self.config, context.carried
        if context.step is not None:
            disabled, shows = context.step_disabled, context.step_shows
        elif isinstance(config.softmax_steps, float) and config.softmax_steps == 1:  # whichever step it is
            disabled, shows, carried = True, False, None
        else:
            step = self.loop.step_by_timestep(transformer, args, kwargs)
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

    def _warn_of_lora(self) -> None:
        """Warn once if the patch's LoRA does not run beside its patch, as loading another one leaves it inactive."""
        is_off = self.processor is not None and self.processor.is_off
        if self.lora is None or is_off or "lora" in self._warned:
            return
        if (why := self.inactive_lora()) is not None:
            self._warn_once("lora", "%s", why)

    def _warn_once(self, topic: str, message: str, *arguments: object) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message, *arguments)

    def _carried(self, step: Step, name: str | None) -> CarriedForward | None:
        """Return what the attentions of this thread's next forward carry; None if nothing is carried."""
        config = self.config
        if not config.carry:
            return None
        run = self.runs.setdefault(threading.get_ident(), DenoisingRun())
        is_new, half = run.step != step, run.half(step, self.loop.scheduler, name)
        if is_new and config.shows(step):  # else a cache may skip what this step is to show
            forget_skipping(self.transformer)
        return CarriedForward(half, step, config)

    def _checkpointing(self) -> list[Any]:
        """Return the modules that hold a function for gradient checkpointing."""
        if self.family.is_diffusion:
            return [self.transformer]
        return list(self.family.blocks_of(self.transformer).values())

    def _prepare_compiling(self) -> None:
        config = torch._dynamo.config
        if not _owners and config.recompile_limit < _GRAPHS:
            _limits_before.append(config.recompile_limit)
            config.recompile_limit = _GRAPHS
        weakref.finalize(self, _restore_limit)  # before the set knows it, which then forgets it first
        _owners.add(self)

        def meet() -> None:
            """Refuse a cache on which the processes may not agree, before a forward.

            At the first call under a configuration: learn who they are, and that they are patched alike.
            """
            config: Any = getattr(self.transformer, "_parallel_config", None)
            is_new = config is not self._compared
            if is_new:
                self._parallel = parallel_of(config)
            if self._parallel is not None:
                refuse_deciding_cache(self.transformer)
                if is_new:
                    compare_patches(self.layers, config, self._parallel)
            self._compared = config

        self._meet_processes = meet
        vars(meet)["_dynamo_marked_constant"] = True  # runs while torch.compile traces a graph, and not in it


def _is_fused(processor: Any) -> bool:
    """Whether it is one of diffusers' that run projections fused into one."""
    return type(processor).__name__.startswith("Fused")


def _restore_limit() -> None:
    """Restore PyTorch's limit of graphs once no owner is left, unless it was changed since."""
    if not _owners and _limits_before:
        before = _limits_before.pop()
        if torch._dynamo.config.recompile_limit == _GRAPHS:
            torch._dynamo.config.recompile_limit = before


# Which transformers there are


def find_transformers(model: Any) -> dict[str, nn.Module]:
    """Find the supported transformers of a pipeline by component name, or the transformer itself as ``transformer``.

    Raises:
        ValueError: if there is none, a model that has MHLA built in, or what :func:`refuse_wrapped` refuses.
    """
    refuse_wrapped(model)
    found = supported_transformers(model)
    if found:
        return found
    layers = _built_in_layers(model)
    if layers:
        raise ValueError(
            f"{type(model).__name__} has MHLA built in ({len(layers)} layers, the first is {next(iter(layers))}), so "
            "nothing can patch it or take the patch away. Its settings are those of its configuration, such as "
            "VLTConfig(mhla=…), and its save_pretrained() saves it."
        )
    for name, module in _modules(model).items():
        if name.startswith("transformer"):
            get_family(module)  # raises what is unsupported about it
    components = ", ".join(getattr(model, "components", {})) or "none"
    raise ValueError(
        f"{type(model).__name__} has no transformer that MHLA supports (components: {components}). Pass a pipeline "
        'or a model that the page "Models" of the documentation (docs/models.md) lists.'
    )


def supported_transformers(model: Any) -> dict[str, nn.Module]:
    """Find what :func:`find_transformers` finds, or nothing.

    A language or vision model in a pipeline encodes its prompts or pictures and is left alone.
    """
    is_alone = isinstance(model, nn.Module)
    return {
        name: module
        for name, module in _modules(model).items()
        if (family := find_family(module)) is not None and (is_alone or family.is_diffusion)
    }


def _modules(model: Any) -> dict[str, nn.Module]:
    if isinstance(model, type):
        raise ValueError(f"{model.__name__} is a class; give an instance, such as {model.__name__}.from_pretrained(…).")
    components = {"transformer": model} if isinstance(model, nn.Module) else getattr(model, "components", {})
    return {name: unwrapped(part) for name, part in components.items() if isinstance(part, nn.Module)}


def refuse_wrapped(model: Any) -> None:
    """Raise if the model that was meant lies inside what was given.

    Raises:
        ValueError: a class, a pipeline of transformers, or PEFT's wrapper, with the way to what is inside.
    """
    inside = getattr(model, "model", None)
    if not isinstance(model, nn.Module) and isinstance(inside, nn.Module) and find_family(inside) is not None:
        raise ValueError(
            f"{type(model).__name__} has its {type(inside).__name__} as .model; pass that: pipe.model of a pipeline of "
            "transformers."
        )
    for name, module in _modules(model).items():
        # PEFT's PeftModel would go on with a patched model inside, but is saved and called in its own ways
        take_out: Any = getattr(module, "get_base_model", None)
        if callable(take_out) and find_family(take_out()) is not None:
            raise ValueError(
                f"The {name} is wrapped in PEFT's {type(module).__name__}. Pass the model inside, which keeps the "
                f"adapters: {name}.get_base_model(), in a pipeline pipe.{name} = pipe.{name}.get_base_model(). "
                f"diffusers' own {name}.add_adapter(...) wraps nothing."
            )


# What is patched


def find_patched(model: Any) -> dict[str, Patched]:
    """Find the handle of every patched transformer of a pipeline by component name, of a model as ``transformer``."""
    found = {}
    for name, transformer in supported_transformers(model).items():
        held = vars(get_family(transformer).trunk(transformer)).get(_ATTRIBUTE)
        if held is None:  # diffusers' own form leaves no handle
            attentions = attentions_of(transformer).values()
            processor = next((attn.processor for attn in attentions if has_mhla_processor(attn)), None)
            if processor is not None or any(hasattr(attn, "mhla") for attn in attentions):
                held = Patched(transformer, processor)
        if held is not None:
            found[name] = held
    return found


def require_patched(model: Any) -> dict[str, Patched]:
    """Find the handles of :func:`find_patched`.

    Raises:
        ValueError: no transformer is patched, or what :func:`find_transformers` raises.
    """
    found = find_patched(model)
    if not found:
        find_transformers(model)  # raises the fitting error for a model that cannot be patched
        raise ValueError("The model is not patched with MHLA; call apply_mhla() first.")
    return found


def is_patched(model: Any) -> bool:
    """Whether any attention of a pipeline or transformer runs MHLA or holds its weights."""
    return bool(find_patched(model))


def mhla_layers(model: Any) -> dict[str, PatchedLayer]:
    """Find every layer that is in use by name, put in by a patch or built into the model, as into VLT.

    The name is the attention's with ``.mhla``; for a pipeline the component's name stands before it.
    """
    if not supported_transformers(model):
        return _built_in_layers(model)
    return {
        f"{'' if isinstance(model, nn.Module) else f'{component}.'}{name}.mhla": layer
        for component, patched in find_patched(model).items()
        for name, layer in patched.layers.items()
    }


def _built_in_layers(model: Any) -> dict[str, PatchedLayer]:
    """Find the layers of a model, also in PEFT's wrapper, that has MHLA without a patch and nothing of a family."""
    if not isinstance(model, nn.Module) or any(find_family(module) is not None for module in model.modules()):
        return {}
    layers = {path: layer_of(module) for path, module in unwrapped(model).named_modules()}
    return {f"{path}.mhla": layer for path, layer in layers.items() if layer is not None}


def require_layers(model: Any) -> dict[str, PatchedLayer]:
    """Find the layers of :func:`mhla_layers`.

    Raises:
        ValueError: if there are none, with the way to get them, or to a model that lies inside this one.
    """
    layers = mhla_layers(model)
    if not layers:
        require_patched(model)
        raise ValueError(
            "The model has no MHLA weights yet: diffusers' own set_attn_processor makes them at the first forward. "
            "Run one, or use mhla_diffusers.set_attn_processor(transformer, processor)."
        )
    return layers


@contextmanager
def mhla_disabled(model: Any) -> Iterator[None]:
    """Let the model attend as before the patch within the context, in this thread alone, with the same weights.

    Raises:
        ValueError: if the model is not patched.
    """
    with ExitStack() as stack:
        for patched in require_patched(model).values():
            stack.enter_context(patched.disabled())
        yield
