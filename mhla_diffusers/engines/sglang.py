# mypy: disable-error-code="untyped-decorator"
"""SGLang plug-in: sparse self-attention in the transformers that SGLang 0.5.23 serves.

SGLang calls :func:`activate` in each of its processes (entry point group ``sglang.multimodal_gen.plugins``). The
attention backend that it chooses stays, and attends wherever sparse attention cannot.
"""

import functools
import logging
import os
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from ..attention.layout import Shape
from ..config import Step
from ..patching.route import Request
from .engine import Engine
from .settings import settings_from_environment

_VERSION = "0.5.23"
_ATTENTION = "sglang.multimodal_gen.runtime.layers.attention"


def activate() -> None:
    """Register sparse attention with SGLang if a variable of it is set; SystemExit for a wrong name or value."""
    if not any(name.startswith("MHLA_") and text for name, text in os.environ.items()):
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType
    from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

    logger = init_logger(__name__)
    try:
        settings = settings_from_environment()
    except (ValueError, OSError) as error:  # OSError: MHLA_PATCH names a file that is not there
        # SGLang logs other exceptions of a plug-in and goes on without it: dense, where sparse was asked for
        raise SystemExit(f"mhla_diffusers: {error}") from error
    if version("sglang") != _VERSION:
        logger.warning("MHLA: this is SGLang %s; only %s is tested", version("sglang"), _VERSION)
    choose = functools.partial(_choose_backend, Engine(settings, logger))
    HookRegistry.register(f"{_ATTENTION}.selector.get_attn_backend", choose, HookType.AROUND)
    for layer in ("USPAttention", "LocalAttention"):
        HookRegistry.register(f"{_ATTENTION}.layer.{layer}.forward", _attend_in_layer, HookType.AROUND)


def _choose_backend(engine: Engine, choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from sglang.multimodal_gen.runtime.layers.attention.selector import get_component_attn_backend_name
    from sglang.multimodal_gen.runtime.loader.component_loaders.transformer_loader import TransformerLoader

    dense = choose(*args, **kwargs)
    component = get_component_attn_backend_name()  # encoders and VAEs attend too
    if kwargs.get("is_cross_attention") or component not in (None, *TransformerLoader.component_names):
        return dense
    if dense.get_enum().is_sparse:
        engine.log.logger.warning("MHLA: %s is already sparse, so it is not replaced", dense.get_enum())
        return dense
    return _sparse_backend(engine, dense)


@functools.cache
def _sparse_backend(engine: Engine, dense: type[Any]) -> type[Any]:
    settings = {"engine": engine, "dense_class": dense.get_impl_cls()}
    implementation = type(f"Sparse{dense.get_impl_cls().__name__}", (SparseImplementation,), settings)
    return type(f"Sparse{dense.__name__}", (dense,), {"get_impl_cls": staticmethod(lambda: implementation)})


class SparseImplementation:
    """Attention of one layer; what cannot be sparse is that of SGLang's own implementation, as is cross-attention.

    Under Ulysses it gets all tokens and the heads of its process.
    """

    engine: Engine
    dense_class: type[Any]

    def __init__(self, *, softmax_scale: float, causal: bool = False, prefix: str = "", **kwargs: Any) -> None:
        self.dense = self.dense_class(softmax_scale=softmax_scale, causal=causal, prefix=prefix, **kwargs)
        self.is_cross_attention = kwargs.get("is_cross_attention", False)
        number = re.match(r"(?:transformer_)?blocks\.(\d+)\.", prefix)
        self.layer = int(number[1]) if number else None
        self.request = Request(is_causal=causal, scale=softmax_scale)
        self.extra = (0, 0)
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name == "dense":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.dense, name)

    def stay_dense(self, query: torch.Tensor, reason: str) -> None:
        """Count an attention that SGLang's own implementation answers."""
        if not self.is_cross_attention:
            self.engine.tally.note_dense(reason, query, logging.WARNING)

    @torch.compiler.disable  # compiled code would count once, when it is traced
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None, **kwargs: Any
    ) -> Any:
        """Attend to (B, N, H, D); with ``return_softmax_lse`` densely, and return the log-sum-exp too."""
        dense = functools.partial(self.dense.forward, query, key, value, attn_metadata, **kwargs)
        if self.is_cross_attention or kwargs.get("return_softmax_lse"):
            return dense()
        self.calls += 1
        context, batch = _forward_batch()
        step = None
        if batch is not None:
            count = batch.num_inference_steps if batch.timesteps is None else len(batch.timesteps)
            step = Step(int(context.current_timestep), count)
        call = self.engine.call(_grid(), self.extra, step, batch, self.layer)
        request = self.request._replace(own=lambda *_: dense())
        return self.engine.attend(query, key, value, call, self.layer, request)

    def forward_into(self, *args: Any) -> bool:
        """Return False: SGLang then calls :meth:`forward`."""
        return False

    @torch.compiler.disable
    def forward_varlen(self, query: torch.Tensor, *args: Any, **bounds: Any) -> torch.Tensor:
        """Attend densely to sequences that are packed into one (N, H, D)."""
        self.stay_dense(query, "sequences are packed into one")
        return self.dense.forward_varlen(query, *args, **bounds)


def _attend_in_layer(forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(layer.attn_impl, SparseImplementation):
        return _attend_and_count(forward, layer, *args, **kwargs)
    return forward(layer, *args, **kwargs)


@torch.compiler.disable
def _attend_and_count(forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    implementation = layer.attn_impl
    calls = implementation.calls
    implementation.extra = (kwargs.get("num_replicated_prefix", 0), kwargs.get("num_replicated_suffix", 0))
    output = forward(layer, *args, **kwargs)
    if implementation.calls == calls:
        query = args[0] if args else kwargs["q"]
        implementation.stay_dense(query, "a mask, padding or ring attention, by SGLang itself")
    return output


def _forward_batch() -> Any:
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context_or_none

    context = get_forward_context_or_none()
    return (None, None) if context is None or context.forward_batch is None else (context, context.forward_batch)


def _grid() -> Shape:
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    shape = getattr(_forward_batch()[1], "raw_latent_shape", None)
    model = get_global_server_args().pipeline_config.dit_config
    patch = getattr(model, "patch_size", None)
    if isinstance(patch, int):
        patch = (getattr(model, "patch_size_t", 1), patch, patch)
    if shape is None or len(shape) != 5 or patch is None:
        return ()
    return tuple(size // length for size, length in zip(shape[2:], patch, strict=True))
