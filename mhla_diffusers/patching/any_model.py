"""Sparse attention in a model without a family: wherever it calls PyTorch's ``scaled_dot_product_attention``.

A :class:`torch.overrides.TorchFunctionMode`, which is active within the model's forward and in its thread alone, hands
query, key and value after RoPE to :class:`~mhla_diffusers.patching.attend.EngineAttention`, as engines do. Attentions
whose tokens are not those of the token grid, and masked or causal ones, stay as they are and are counted.
"""

import logging
import math
import sys
import threading
import weakref
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
Grid = tuple[int, ...] | Callable[..., tuple[int, ...]]
Extras = Extra | Callable[..., Extra]


class AnyPatch:
    """Sparse attention of one model without a family.

    Args:
        config: settings, of all layers.
        grid: token grid, 1 to 3 axes, or a function of the forward's arguments that returns it.
        extra: tokens before and after those of the grid in the same sequence, such as text, or such a function.
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
        self.extra = extra if callable(extra) else check_extra(extra)
        self.pipe = None if pipe is None else weakref.ref(pipe)
        if pipe is None and config.asks_for_dense_steps:
            raise ValueError(
                f"{config.dense_words} counts the denoising steps of a pipeline: apply_mhla(pipe, grid=...), or leave "
                "these settings out."
            )
        self._attentions: dict[int, EngineAttention] = {}
        """What every thread attends with, which knows how far its call is."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to calls, and the pipeline: some other one will call a copied model."""
        return vars(self) | {"_attentions": {}, "pipe": None}

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
        grid = check_grid(self.grid(*args, **kwargs)) if callable(self.grid) else self.grid
        extra = check_extra(self.extra(*args, **kwargs)) if callable(self.extra) else self.extra
        attention = of_this_thread(self._attentions, lambda: EngineAttention(self.settings, logger))
        scheduler = self.scheduler
        calls = _SparseCalls(attention, grid, extra, step_by_counting(scheduler))
        if calls.step is not None:
            attention.end_with(scheduler.timesteps)  # every call of a pipeline makes new ones
        try:
            with calls:
                output = forward(*args, **kwargs)
        except BaseException:
            attention.end_of_call()  # nothing of a call that failed is carried
            raise
        if not calls.sees_attention and attention.latest != _NOTHING_SEEN:
            attention.latest = _NOTHING_SEEN
            logger.warning("MHLA: %s", _NOTHING_SEEN)
        if calls.step is None:
            attention.end_of_call()
        return output

    def __str__(self) -> str:
        """What the latest call of this thread has run."""
        attention = self._attentions.get(threading.get_ident())
        latest = "" if attention is None else attention.latest or attention.summary()
        config = self.settings.config
        latest = latest or "no forward so far: what attends sparsely is known after one"
        return f"{config.summary(config.density)}\n{latest}"


class _SparseCalls(TorchFunctionMode):
    """Attends sparsely in the place of ``scaled_dot_product_attention``, for one forward."""

    def __init__(self, attention: EngineAttention, grid: Shape, extra: Extra, step: Step | None) -> None:
        super().__init__()
        self.attention, self.grid, self.extra, self.step = attention, grid, extra, step
        self._layer, self.sees_attention = 0, False
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
        if query.ndim != 4 or key.shape[-2] != query.shape[-2]:
            self.attention.stay_dense("keys of another sequence, as in cross-attention", query.shape, logging.INFO)
            return None
        wants = {"a mask": attn_mask is not None, "causal attention": is_causal, "dropout": dropout_p > 0}
        wants["gradient checkpointing, whose recomputation is outside the patch"] = (
            self._takes_gradients and _is_recomputed()
        )
        extra: Extra = (0, 0) if query.shape[-2] == math.prod(self.grid) else self.extra
        if scale is not None:
            query = query * (scale * math.sqrt(query.shape[-1]))
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))

        def dense() -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)

        self._layer += 1
        output = self.attention.attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            self.grid,
            extra=extra,
            layer=self._layer - 1,
            step=self.step,
            obstacle=next((name for name, is_wanted in wants.items() if is_wanted), ""),
            dense=dense,
        )
        return None if output is None else output.transpose(1, 2)


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
    """Patch a model without a family, or those of a pipeline whose names begin with ``transformer``.

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
        pipe = None if patch.pipe is None else patch.pipe()
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
    components = getattr(model, "components", None) or {}
    chosen = [part for name, part in components.items() if name.startswith("transformer") or name == "unet"]
    return [unwrapped(part) for part in chosen if isinstance(part, nn.Module)]
