"""Sparse attention in a model without a family: wherever it calls PyTorch's ``scaled_dot_product_attention``.

A :class:`torch.overrides.TorchFunctionMode`, which is active within the model's forward and in its thread alone, hands
query, key and value after RoPE to :class:`~mhla_diffusers.patching.attend.EngineAttention`, as engines do. Attentions
whose tokens are not those of the token grid, and masked or causal ones, stay as they are and are counted.
"""

import inspect
import logging
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..attention.layout import Extra, Shape, check_extra, check_grid
from ..config import SparseConfig, Step
from ..families import find_family, get_family, unwrapped, why_refused
from ..families.mhla import key_padding_mask
from ..settings import check
from .attend import EngineAttention, EngineSettings
from .context import is_off, of_this_thread, switched_off
from .steps import step_by_counting

logger = logging.getLogger(__name__)

ATTRIBUTE = "_mhla_any"
"""Holds the patch of a model without a family."""
_NOTHING_SEEN = (
    "the forward called no scaled_dot_product_attention, so nothing of it is sparse; PyTorch's fast path of "
    "TransformerEncoderLayer and kernels of other libraries do not call it"
)
_MOST_FORWARDS = 16
"""More forwards than this in one dense step mean that nobody calls the scheduler's ``step()``."""
Grid = tuple[int, ...] | Callable[..., tuple[int, ...]]
Counts = tuple[int | None, int | None]
"""Numbers of tokens before and after the grid; None means as many as the sequence holds."""
Extras = Counts | Callable[..., Counts]


class AnyPatch:
    """Sparse attention of one model without a family.

    Args:
        config: settings, of all layers.
        grid: token grid, 1 to 3 axes, or a function of the forward's arguments that returns it.
        extra: tokens before and after those of the grid in the same sequence, such as text, or such a function; None
            in the place of one number for as many as there are.
        pipe: pipeline that calls the model; None without one.

    Raises:
        ValueError: a grid or a count that is none, layers that are chosen, or dense steps without a pipeline.
    """

    def __init__(self, config: SparseConfig, grid: Grid, extra: Extras, pipe: Any) -> None:
        check(
            config.layers == "all",
            f"layers={config.layers!r}: layers can be chosen of models with a family alone; leave it out.",
        )
        self.settings = EngineSettings(config, min_tokens=0)
        self.grid = grid if callable(grid) else check_grid(grid)
        self.extra = extra if callable(extra) else _check_counts(extra)
        self.pipe = None if pipe is None else weakref.ref(pipe)
        if pipe is None and config.asks_for_dense_steps:
            raise ValueError(
                f"{config.dense_words} counts the denoising steps of a pipeline: apply_mhla(pipe, grid=...), or leave "
                "these settings out."
            )
        self._attentions: dict[int, EngineAttention] = {}
        """What every thread attends with, which knows how far its call is."""
        self._forwards: dict[int, _Forwards] = {}
        """Those of the present call of every thread."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to calls, and the pipeline: some other one will call a copied model."""
        return vars(self) | {"_attentions": {}, "_forwards": {}, "pipe": None}

    @property
    def is_off(self) -> bool:
        """Whether its model is within ``mhla_disabled`` in this thread."""
        return is_off(self)

    @property
    def scheduler(self) -> Any:
        """Scheduler of the pipeline; None without a pipeline."""
        return getattr(None if self.pipe is None else self.pipe(), "scheduler", None)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward of the model with sparse attention; ValueError for a grid that is none."""
        named = _named(forward, args, kwargs)
        grid = check_grid(_called(self.grid, args, kwargs, named)) if callable(self.grid) else self.grid
        extra = _check_counts(_called(self.extra, args, kwargs, named)) if callable(self.extra) else self.extra
        attention = of_this_thread(self._attentions, lambda: EngineAttention(self.settings, logger))
        scheduler = self.scheduler
        step, number = step_by_counting(scheduler), 0
        if step is not None:
            attention.end_with(scheduler.timesteps)  # every call of a pipeline makes new ones
            forwards = of_this_thread(self._forwards, _Forwards)
            number = forwards.name(step, scheduler.timesteps, list(named.values())[1:])
            if len(forwards.in_step) > _MOST_FORWARDS and self.settings.config.is_dense(step):
                attention.warn_once("all is dense while scheduler.step() is not called, which counts the steps")
            if forwards.are_new and self.settings.config.has_dense_steps:
                attention.warn_once(
                    "every step gets new tensors as captions, so what dense steps show is not carried; it is for those "
                    "that live as long as the sampling"
                )
        elif self.settings.config.asks_for_dense_steps:
            attention.warn_once(
                "dense steps have no effect: the scheduler counts no steps, or the pipeline is gone; "
                "change_mhla(pipe) takes the pipeline that calls the model"
            )
        calls = _SparseCalls(attention, grid, extra, step, number)
        try:
            with calls:
                output = forward(*args, **kwargs)
        except BaseException:
            attention.end_of_call()  # nothing of a call that failed is carried
            self._forwards.pop(threading.get_ident(), None)
            raise
        if not calls.sees_attention and attention.latest != _NOTHING_SEEN:
            attention.latest = _NOTHING_SEEN
            logger.warning("MHLA: %s", _NOTHING_SEEN)
        if step is None:
            if attention.is_all_dense:
                attention.warn_once("no attention of a forward was sparse; describe(model) says why")
            attention.end_of_call()
        return output

    def __str__(self) -> str:
        """What the latest call of this thread has run."""
        attention = self._attentions.get(threading.get_ident())
        latest = "" if attention is None else attention.summary() or attention.latest
        config = self.settings.config
        latest = latest or "no forward so far: what attends sparsely is known after one"
        return f"{config.summary(config.density)}\n{latest}"


def _named(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by their names in its signature; those of ``*args`` have none."""
    signature = inspect.signature(forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}{place}": value for place, value in enumerate(named.pop(name, ()))}
    return named


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]) -> Any:
    """Call a user's function with a forward's arguments: by name where it takes these, or as they were given."""
    try:
        inspect.signature(function).bind(**named)
    except TypeError:
        return function(*args, **kwargs)
    return function(**named)


class _Forwards:
    """Which of its forwards a step makes, such as with and without a caption.

    A forward is recognised by the tensors that it shares with an earlier step, and by its order if it takes nothing
    but latents. A forward that gets only new tensors is not recognised.
    """

    def __init__(self) -> None:
        self._conditions: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """The tensors that each forward got besides the latents."""
        self.in_step: set[int] = set()
        """Numbers of the forwards of the present step."""
        self.are_new = False
        """Whether the tensors of all forwards of earlier steps are gone."""
        self._step = -1
        self._timesteps: Callable[[], Any] = lambda: None

    def name(self, step: Step, timesteps: Any, arguments: list[Any]) -> int:
        """Return the number of the next forward.

        Args:
            step: of the forward.
            timesteps: the scheduler's, which are new in every call of a pipeline.
            arguments: the forward's arguments without the latents, which are new in every step.
        """
        if self._timesteps() is not timesteps:
            self._conditions.clear()
            self._timesteps, self._step = weakref.ref(timesteps), -1
        if step.index != self._step:
            self.in_step.clear()
            self._step = step.index
        given = [x for x in arguments if isinstance(x, torch.Tensor) and x.ndim > 1]
        free = [number for number in self._conditions if number not in self.in_step]
        living = {n: [x for ref in self._conditions[n] if (x := ref()) is not None] for n in free}
        same = [n for n in free if living[n] and all(any(x is y for y in given) for x in living[n])]
        alone = [n for n in free if not given and not self._conditions[n]]
        self.are_new = bool(given and free) and not any(living.values())
        number = (same + alone + [len(self._conditions)])[0]
        self._conditions[number] = [weakref.ref(x) for x in given]
        self.in_step.add(number)
        return number


class _SparseCalls(TorchFunctionMode):
    """Attends sparsely in the place of ``scaled_dot_product_attention``, for one forward."""

    def __init__(self, attention: EngineAttention, grid: Shape, extra: Counts, step: Step | None, number: int) -> None:
        super().__init__()
        self.attention, self.grid, self.extra, self.step, self.number = attention, grid, extra, step, number
        self.sees_attention = False
        self._layers: Counter[tuple[int, int]] = Counter()
        """Attentions so far, by queries and keys: a step with a cache may lack some that the one before had."""
        if "torch._dynamo" in sys.modules:
            # a graph of this function by itself would be taken for other functions of PyTorch, with wrong results
            torch._dynamo.eval_frame.skip_code(_SparseCalls.__torch_function__.__code__)
        self._takes_gradients = torch.is_grad_enabled()
        self._attends = _untraced(self._attend)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch; sparse attention replaces ``scaled_dot_product_attention`` where it fits."""
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.sees_attention = True
        output = self._attends(*args, **kwargs)
        return func(*args, **kwargs) if output is None else output

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        """Return (B, H, N, D); None where the model's own attention is to run."""
        if query.ndim != 4:
            axes = f"a query of {query.ndim} axes, not of (B, H, N, D)"
            return self.attention.attend(query, key, value, self.grid, step=self.step, obstacle=axes)
        tokens, keys = query.shape[-2], key.shape[-2]
        extra = _counted(self.extra, keys - math.prod(self.grid))
        is_other = keys != tokens and (tokens != math.prod(self.grid) or keys != tokens + sum(extra))
        key_mask = None if attn_mask is None or is_other else _key_mask(attn_mask, len(query), keys)
        wants = {
            "a mask between tokens": attn_mask is not None and key_mask is None,
            "causal attention": is_causal,
            "dropout": dropout_p > 0,
        }
        wants["gradient checkpointing, whose recomputation is outside the patch"] = (
            self._takes_gradients and _is_recomputed()
        )
        if scale is not None:
            query = query * (scale * math.sqrt(query.shape[-1]))
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))

        def dense() -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask).transpose(1, 2)

        self._layers[tokens, keys] += 1
        output = self.attention.attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            self.grid,
            extra=extra,
            key_mask=key_mask,
            layer=None if is_other else self._layers[tokens, keys] - 1,
            step=self.step,
            obstacle=next((name for name, is_wanted in wants.items() if is_wanted), ""),
            other=f"{tokens:,} queries of {keys:,} keys are not over the grid, as in cross-attention" * is_other,
            parts=((self.number, tokens, keys),),
            dense=dense,
        )
        return None if output is None else output.transpose(1, 2)


def _check_counts(extra: Any) -> Counts:
    """Return the numbers of tokens beside the grid; ValueError for what is none, or two unknown ones."""
    counts: Any = tuple(extra) if isinstance(extra, list | tuple) else extra
    if isinstance(counts, tuple) and len(counts) == 2 and counts.count(None) == 1:
        check(
            all(n is None or (isinstance(n, int) and n >= 0) for n in counts),
            f"extra={extra!r} must be two counts of tokens before and after the grid, such as (0, 77) or (0, None) for "
            "as many as there are.",
        )
        return counts[0], counts[1]
    return check_extra(counts)


def _counted(extra: Counts, others: int) -> Extra:
    """Return how many tokens stand before and after the grid in a sequence with so many besides."""
    before, after = extra if others > 0 else (0, 0)
    if before is None:
        return max(0, others - (after or 0)), after or 0
    return before, max(0, others - before) if after is None else after


def _key_mask(mask: torch.Tensor, batch: int, keys: int) -> torch.Tensor | None:
    """Return a mask of ``scaled_dot_product_attention`` as one of keys, (B, N); None for one that differs by query.

    A mask that was expanded over heads or queries is one of keys.
    """
    mask = mask[(None,) * (4 - mask.ndim)]
    if any(mask.shape[i] != 1 and mask.stride(i) != 0 for i in (1, 2)) or mask.shape[3] != keys:
        return None
    return key_padding_mask(mask[:, :1, :1].expand(batch, -1, -1, -1), batch, keys)


def _is_recomputed() -> bool:
    """Whether gradient checkpointing within the model will run this attention again, behind the end of its forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not AnyPatch.run.__code__:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def _untraced(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """Keep torch.compile out of a function; where it was never imported, which takes a second, it compiles nothing."""
    return torch.compiler.disable(function, recursive=recursive) if "torch._dynamo" in sys.modules else function


class _SparseForward:
    """Mixin of a patched model, whose forward runs within the patch."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inherited forward."""
        inherited: Any = super()
        patch: AnyPatch = getattr(self, ATTRIBUTE)
        if patch.is_off:
            return inherited.forward(*args, **kwargs)
        return _untraced(patch.run, recursive=False)(inherited.forward, args, kwargs)


def apply_to_any(model: Any, config: SparseConfig, grid: Grid, extra: Extras) -> None:
    """Patch a model without a family, or those of a pipeline, or of another object, named ``transformer…`` or ``unet``.

    Raises:
        ValueError: a model that has a family or is patched, nothing to patch, or what :class:`AnyPatch` refuses.
    """
    from ..families.patched_classes import switch

    modules = _modules(model)
    if not modules:
        raise ValueError(f"{type(model).__name__} is neither a model nor a pipeline with a transformer or a unet.")
    for module in modules:
        if why_refused(type(module)) is not None:
            get_family(module)  # raises the reason
        if (family := find_family(module)) is not None:
            raise ValueError(
                f"{type(module).__name__} is of the family {family.name!r}, which reads the token grid of every call; "
                "leave grid and extra out."
            )
        for part in module.modules():
            if ATTRIBUTE in vars(part):
                raise ValueError(f"This {type(part).__name__} is already patched; call remove_mhla() with it first.")
    pipe = None if isinstance(model, nn.Module) else model
    patches = [AnyPatch(config, grid, extra, pipe) for _ in modules]
    for module, patch in zip(modules, patches, strict=True):
        setattr(module, ATTRIBUTE, patch)
        switch(module, _SparseForward)


def change_any(model: Any, settings: Mapping[str, Any]) -> None:
    """Give models patched by :func:`apply_to_any` other settings on the same grid; without settings, the same.

    Raises:
        ValueError: switched off, or settings that :class:`AnyPatch` refuses; nothing is changed then.
    """
    changed = {}
    for module, patch in any_patches(model).items():
        if patch.is_off:
            raise ValueError("The patch is switched off; leave mhla_disabled() before change_mhla().")
        known = None if patch.pipe is None else patch.pipe()
        pipe = known if isinstance(model, nn.Module) else model
        changed[module] = AnyPatch(patch.settings.config.replace(**settings), patch.grid, patch.extra, pipe)
    for module, patch in changed.items():
        setattr(module, ATTRIBUTE, patch)


def any_patches(model: Any) -> dict[nn.Module, AnyPatch]:
    """Find the patched models without a family, and their patches."""
    return {module: vars(module)[ATTRIBUTE] for module in _modules(model) if ATTRIBUTE in vars(module)}


def remove_from_any(model: Any) -> None:
    """Undo :func:`apply_to_any`."""
    from ..families.patched_classes import switch_back

    for module in any_patches(model):
        switch_back(module)
        delattr(module, ATTRIBUTE)


def any_disabled(model: Any) -> AbstractContextManager[None]:
    """Let patched models without a family attend as before within the context, in this thread."""
    return switched_off(list(any_patches(model).values()))


def _modules(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [unwrapped(model)]
    components = getattr(model, "components", None) or getattr(model, "__dict__", {})
    chosen = [part for name, part in components.items() if name.startswith("transformer") or name == "unet"]
    return [unwrapped(part) for part in chosen if isinstance(part, nn.Module)]
