"""The handle of a patched transformer."""

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.parallel.place import Parallel
from ..config import MHLAConfig
from ..families import Family, get_family
from .adapter import check_adapter, has_adapter, remove_adapter
from .costs import attention_sizes
from .few_steps import FewSteps
from .hooks import step_cache
from .layer import MHLALayer, attentions_of, layer_of, replaced_processor
from .parallel import check_split, compare_patches, parallel_of, refuse_deciding_cache
from .processor import (
    MHLAProcessor,
    PerturbedMHLAProcessor,
    default_cross_attention_processor,
    holds_weights,
    with_backend_of,
)
from .runtime import CarryingCheckpoint, Grid, allow_graphs, call_context, current, give_back_graphs
from .steps import DenoisingLoop, Step
from .weights import base_weights, check_writable, write_weights

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_mhla"
"""Of the module of a patched transformer that runs its blocks: the handle."""
_CACHE_CONTEXT = "cache_context"
"""Method of diffusers' ``CacheMixin`` that a pipeline enters around every forward."""


class Patched:
    """One patched transformer: all that a patch has put into it, and all that is known of the two.

    :func:`apply_mhla` and :func:`load_mhla` make it, :func:`find_patched` finds it, and whatever works on a patch takes
    it. Its hooks give every forward its :class:`~mhla_diffusers.patching.runtime.CallContext`. A transformer that was
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
        self.latest_grid: Grid | None = None
        """Token grid of the latest forward, to be shown; no attention reads it."""
        self.replaced_weights: dict[str, torch.Tensor] | None = {}
        """Weights of the model that the patch replaced, as they were; None if they were not kept."""
        self.adapter: str | None = None
        """Name of the LoRA that belongs to the patch; None without one."""
        self.few_steps: FewSteps | None = None
        """How it samples, if it was distilled to a few steps."""
        self._scheduler: Any = None
        """The pipeline's own scheduler, while it has that of few steps."""
        self.paused = 0
        """How many contexts have other processors run on purpose."""
        self.parallel: Parallel | None = None
        """The processes between which tokens are split."""
        self._compared: Any = None
        """diffusers' configuration under which the processes have compared their patches."""
        self._has_warned_of_cost = self._has_warned_of_processors = self._has_warned_of_steps = False
        self._hooks: list[RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:
        """For a copied or pickled transformer."""
        return {name: value for name, value in vars(self).items() if name != "_meet_processes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of such a one."""
        vars(self).update(state)
        if self._hooks:
            self._prepare_compiling()

    @property
    def layers(self) -> dict[str, MHLALayer]:
        """Name of every patched self-attention, with its layer."""
        found = ((name, layer_of(attn)) for name, attn in self.attentions.items())
        return {name: layer for name, layer in found if layer is not None}

    @property
    def config(self) -> MHLAConfig:
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
        return installed_on(self.transformer) is self

    # Putting in and taking away

    def install(self, layers: dict[str, MHLALayer], pipe: Any) -> None:
        """Patch the transformer.

        Args:
            layers: name of every self-attention to be patched, with its new layer.
            pipe: pipeline that calls the transformer; a transformer or None where that is not known.
        """
        processor, trunk = self.running_processor(), self.family.trunk(self.transformer)
        self.family.prepare(self.transformer)
        for name, layer in layers.items():
            attn = self.attentions[name]
            layer.original_processor = attn.processor
            attn.mhla = layer
            if getattr(attn.processor, "_parallel_config", None) is not None:
                processor._parallel_config = attn.processor._parallel_config
            attn.set_processor(processor)
        setattr(trunk, _ATTRIBUTE, self)
        if self.family.kind == "language":  # transformers passes their calls everything they need
            return
        self._prepare_compiling()
        self._hooks = [
            trunk.register_forward_pre_hook(self.begin, with_kwargs=True),
            trunk.register_forward_hook(self.end, always_call=True),
        ]
        if self.family.is_diffusion:
            self.call_from(pipe)
            if hasattr(type(self.transformer), _CACHE_CONTEXT):
                setattr(self.transformer, _CACHE_CONTEXT, _Listening(self))

    def call_from(self, pipe: Any) -> None:
        """Say which pipeline calls the transformer; it is not kept alive."""
        self.loop = DenoisingLoop(self.family, None if isinstance(pipe, nn.Module) else pipe)

    def sample_in(self, few_steps: FewSteps, pipe: Any) -> None:
        """Say that the model was distilled to a few steps, and give its pipeline the scheduler for them.

        Args:
            few_steps: which.
            pipe: pipeline that calls the transformer; a transformer where that is not known.
        """
        self.few_steps = few_steps
        if isinstance(pipe, nn.Module):
            logger.warning(
                "This model %s: set pipe.scheduler = FewStepScheduler(%s, %g), or load into the pipeline, which does.",
                few_steps,
                list(few_steps.times),
                few_steps.guidance,
            )
            return
        from .few_step_scheduler import few_steps_of, sample_in

        if few_steps_of(pipe) != few_steps:
            self._scheduler = pipe.scheduler
            sample_in(pipe, few_steps)

    def _restore_scheduler(self, model: Any) -> None:
        from .few_step_scheduler import few_steps_of

        for pipe in (self.loop.pipe, model):  # a copied pipeline is known only as the one the patch is removed from
            if self._scheduler is not None and few_steps_of(pipe) == self.few_steps:  # not one that was set since
                pipe.scheduler = self._scheduler
        self.few_steps = self._scheduler = None

    def check_removable(self) -> None:
        """Raise unless weights of the model that the patch replaced can be brought back.

        Raises:
            ValueError: they were not kept, or cannot be written, or the patch's LoRA is fused with weights.
        """
        check_adapter(self.transformer, self.adapter)
        if self.replaced_weights is None:
            raise ValueError(
                "The patch replaced weights of the model, which load_mhla(..., keep_replaced=False) did not keep, so "
                "they cannot be brought back; load the model again with from_pretrained()."
            )
        check_writable(self.transformer, self.replaced_weights, "remove the patch")

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

    def remove(self, model: Any = None) -> None:
        """Take everything away that :meth:`install` has put in, and bring back weights that were replaced.

        Args:
            model: pipeline that the patch is removed from; a transformer or None where that is not known.
        """
        if self.adapter is not None:
            if has_adapter(self.transformer, self.adapter):
                remove_adapter(self.transformer, self.adapter)
            else:
                logger.warning(
                    "The patch's LoRA %r was unloaded by something else. If it was fused first, its weights stay in "
                    "the model; load the model again with from_pretrained() then.",
                    self.adapter,
                )
            self.adapter = None
        if self.few_steps is not None:
            self._restore_scheduler(model)
        write_weights(self.transformer, self.replaced_weights or {})
        self.replaced_weights = {}
        for attn in attentions_of(self.transformer).values():
            if isinstance(attn.processor, MHLAProcessor) or hasattr(attn, "mhla"):
                attn.set_processor(self.original_processor(attn))
            if hasattr(attn, "mhla"):
                del attn.mhla
        for hook in self._hooks:
            hook.remove()
        if isinstance(vars(self.transformer).get(_CACHE_CONTEXT), _Listening):
            delattr(self.transformer, _CACHE_CONTEXT)
        if self._hooks:
            for module in self._that_checkpoint():
                CarryingCheckpoint.take_off(module)
            give_back_graphs(self)
        if self.is_installed:
            delattr(self.family.trunk(self.transformer), _ATTRIBUTE)
        self.family.restore(self.transformer)

    def original_processor(self, attn: Any) -> Any:
        """The processor that an attention had before the patch, or a fresh one where no record was kept.

        It gets the backend that ``set_attention_backend`` has set meanwhile. One with weights that was set since the
        patch, as loading an IP-Adapter does, stays.
        """
        if holds_weights(attn.processor):
            return attn.processor
        original = replaced_processor(attn)
        if original is None and any(attn is own for own in self.attentions.values()):
            original = self.family.self_attention_processor(attn)
        elif original is None:
            original = default_cross_attention_processor(attn, self.family)
        return with_backend_of(attn.processor, original) if isinstance(attn.processor, MHLAProcessor) else original

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within it no other processor of the transformer is warned of or replaced."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it the transformer attends as before the patch, with the same weights."""
        running = [
            attn for attn in attentions_of(self.transformer).values() if isinstance(attn.processor, MHLAProcessor)
        ]
        switched = [(attn, attn.processor, hasattr(attn, "mhla")) for attn in running]
        for attn in running:
            attn.set_processor(self.original_processor(attn))
        try:
            with self.pause():
                yield
        finally:
            for attn, processor, had_layer in switched:
                # the patch may have been removed meanwhile; in diffusers' own form there may be no layer yet
                if hasattr(attn, "mhla") or not had_layer:
                    attn.set_processor(processor)

    def running_pairs(self) -> dict[str, tuple[Any, Any]]:
        """Name of every self-attention that runs MHLA → it and its original processor."""
        return {
            name: (attn, self.original_processor(attn))
            for name, attn in self.attentions.items()
            if isinstance(attn.processor, MHLAProcessor)
        }

    def running_processor(self) -> MHLAProcessor:
        """The processor of the patch, also where something else has set others.

        Raises:
            ValueError: in diffusers' own form, where none runs.
        """
        if self.processor is None:
            raise ValueError(
                "No attention of this model runs MHLA now: its patch is switched off, or other processors have been "
                "set since. Leave mhla_disabled(), or set the processor again with transformer.set_attn_processor()."
            )
        return self.processor

    # Every forward

    def begin(self, trunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward: look at the processors and fill in the context of the call."""
        context = current()
        # of a forward that this one runs in, such as a student's that asks a patched teacher
        context.outer = context.grid, context.parallel, context.disabled, context.outer
        arguments = self.family.named_arguments(args, kwargs)
        if self.family.is_diffusion and not self.paused:
            self._check_processors()
        # the blocks depend on the sizes, so torch.compile should make one graph per resolution rather than try symbols
        name = self.family.forward_names[0]
        latents = arguments.get(name)
        if latents is None:
            raise ValueError(f"{type(trunk).__name__} was called without {name}, of which it reads the token grid.")
        for tensor in [latents] if isinstance(latents, torch.Tensor) else latents:
            for axis in range(1, tensor.ndim) if isinstance(tensor, torch.Tensor) else ():
                torch._dynamo.mark_static(tensor, axis)
        grid = tuple(int(size) for size in self.family.grid_of_arguments(trunk, arguments))
        self._meet_processes()
        context.parallel = None
        if self.parallel is not None:
            check_split(self.family, self.layers, arguments, grid, self.parallel)
            context.parallel = self.parallel
        if not torch.compiler.is_compiling() and not self._has_warned_of_cost and grid != self.latest_grid:
            self._warn_if_nothing_is_gained(grid)
        if self.few_steps is not None and not torch.compiler.is_compiling():
            self._warn_of_call(self.few_steps)
        context.grid = grid
        context.disabled = self.family.is_diffusion and self._is_disabled(trunk, args, kwargs)
        for module in self._that_checkpoint():
            CarryingCheckpoint.put_on(module)

    def _warn_of_call(self, few_steps: FewSteps) -> None:
        """Say what spoils the samples of a distilled model: guidance, which most pipelines have by default, and a
        cache that extrapolates over the noise between steps.
        """
        pipe, cache = self.loop.pipe, step_cache(self.transformer)
        if cache is not None and cache.name == "TaylorSeer":
            warnings.warn(
                "TaylorSeer extrapolates from step to step, and this model was distilled to a few steps with fresh "
                f"noise between them, so its samples are spoilt; call {cache.way_out}.",
                stacklevel=2,
            )
        if few_steps.guidance > 1 and getattr(pipe, "do_classifier_free_guidance", False):
            warnings.warn(
                f"guidance_scale={getattr(pipe, 'guidance_scale', 'unknown')}: guidance of {few_steps.guidance:g} was "
                "distilled into this model, which is now guided twice and slower; call the pipeline with "
                "guidance_scale=1.0.",
                stacklevel=2,
            )

    def end(self, trunk: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """After a forward, also one that failed, whose result is None."""
        context = current()
        if result is not None:
            self.latest_grid = context.grid
        context.grid, context.parallel, context.disabled, context.outer = context.outer or (None, None, False, None)

    def step_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """The denoising step of a forward with these arguments; None if it is unknown."""
        step = current().step
        return step if step is not None else self.loop.step_by_timestep(self.transformer, args, kwargs)

    def _is_disabled(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the patch is disabled in the denoising step of a forward; in training mode it never is."""
        steps, context = self.config.softmax_steps, current()
        if not steps or transformer.training or context.in_every_step:
            return False
        if isinstance(steps, float) and steps == 1:  # whichever step it is
            return True
        if context.step is not None:
            return context.step_disabled
        step = self.loop.step_by_timestep(transformer, args, kwargs)
        if step is None and not self._has_warned_of_steps:
            self._has_warned_of_steps = True
            logger.warning(
                "softmax_steps=%s has no effect on a forward of %s whose denoising step is unknown: MHLA runs. "
                "Give the pipeline that calls it to apply_mhla(), load_mhla() or change_mhla(), or enter "
                'transformer.cache_context("cond", step_index=…, num_inference_steps=…) around it.',
                steps,
                type(transformer).__name__,
            )
        return step is not None and step.is_among_first(steps)

    def _check_processors(self) -> None:
        """Look whether patched attentions still run MHLA, which something else may have changed.

        Under perturbed-attention guidance MHLA goes on in the branches that are not perturbed. Where diffusers has put
        a blank processor or one that runs fused projections, that of the patch comes back. Of others there is one
        warning.
        """
        others = {}
        for name, attn in self.attentions.items():
            if layer_of(attn) is None:
                continue
            processor = attn.processor
            parts = None if isinstance(processor, MHLAProcessor) else self.family.perturbed_parts(processor)
            is_of_fusing = getattr(attn, "fused_projections", False) and type(processor).__name__.startswith("Fused")
            if isinstance(processor, MHLAProcessor):
                if processor.is_blank:
                    attn.processor = self.processor
            elif is_of_fusing:
                attn.processor = self.processor
            elif parts is not None:
                attn.processor = PerturbedMHLAProcessor(self.running_processor(), parts)
            else:
                others[name] = type(processor).__name__
        if torch.compiler.is_compiling():
            return
        if others and not self._has_warned_of_processors:
            name, kind = next(iter(others.items()))
            logger.warning(
                "%d patched layers do not run MHLA, for example %s, which runs %s: something has set their "
                "processors since. describe(model) shows what every layer runs, change_mhla(model) brings MHLA "
                "back, remove_mhla(model) takes it away.",
                len(others),
                name,
                kind,
            )
        self._has_warned_of_processors = bool(others)

    def _warn_if_nothing_is_gained(self, grid: Grid) -> None:
        """Warn, once, of a grid on which the patch computes no less than the softmax attention that it replaces."""
        layer = next(iter(self.layers.values()), None)
        if layer is None or self.family.own_attention != "softmax" or layer.config.causal is not None:
            return
        sizes = attention_sizes(layer.config, grid, layer.heads, layer.head_dim, self.family.extra_tokens)
        if layer.config.listed < 1 and sizes.flops >= sizes.softmax_flops:
            self._has_warned_of_cost = True
            logger.warning(
                "On a grid of %d tokens this patch computes %.0f%% of what softmax attention does, so it gains nothing "
                "here. Fewer MHLA blocks (blocks), a lower density or larger uniform blocks (block_size) cost less; "
                "softmax attention costs more at larger sizes.",
                math.prod(grid),
                100 * sizes.flops / sizes.softmax_flops,
            )

    def _that_checkpoint(self) -> list[Any]:
        """Modules that hold a function for gradient checkpointing."""
        if self.family.is_diffusion:
            return [self.transformer]
        return list(self.family.blocks_of(self.transformer).values())

    def _prepare_compiling(self) -> None:
        allow_graphs(self)

        def meet() -> None:
            """Before a forward: refuse a cache on which the processes may not agree.

            At the first call under a configuration: learn who they are, and that they are patched alike.
            """
            config: Any = getattr(self.transformer, "_parallel_config", None)
            is_new = config is not self._compared
            if is_new:
                self.parallel = parallel_of(config)
            if self.parallel is not None:
                refuse_deciding_cache(self.transformer)
                if is_new:
                    compare_patches(self.layers, config, self.parallel)
            self._compared = config

        self._meet_processes = meet
        vars(meet)["_dynamo_marked_constant"] = True  # runs while torch.compile traces a graph, and not in it


class _Listening:
    """A transformer's ``cache_context`` that notes the denoising step it is called with."""

    def __init__(self, patched: Patched) -> None:
        self._patched = patched

    def __call__(self, name: str, **fields: Any) -> AbstractContextManager[None]:
        """As diffusers calls it; passes all arguments on."""
        return self._noted(name, fields)

    @contextmanager
    def _noted(self, name: str, fields: dict[str, Any]) -> Iterator[None]:
        index, count = fields.get("step_index"), fields.get("num_inference_steps")
        patched, step, transformer = self._patched, None, self._patched.transformer
        if index is not None and count is not None:
            step = patched.loop.step_by_index(int(index), int(count))
        disabled = step is not None and step.is_among_first(patched.config.softmax_steps)
        of_class: Any = getattr(type(transformer), _CACHE_CONTEXT)
        with call_context(step=step, step_disabled=disabled), of_class(transformer, name, **fields):
            yield


def installed_on(transformer: nn.Module) -> Patched | None:
    """The handle that was installed on a transformer of a family; None without one."""
    held: Patched | None = vars(get_family(transformer).trunk(transformer)).get(_ATTRIBUTE)
    return held
