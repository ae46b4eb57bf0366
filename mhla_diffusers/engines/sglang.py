# mypy: disable-error-code="untyped-decorator"
"""SGLang plug-in: sparse self-attention in the transformers that SGLang 0.5.23 serves.

SGLang calls :func:`activate` in each of its processes (entry point group ``sglang.multimodal_gen.plugins``). It does
nothing unless ``MHLA_DENSITY`` or ``MHLA_PATCH`` is set; :func:`.environment.settings_from_environment` lists the
variables. The attention backend that SGLang chooses stays, and attends wherever sparse attention cannot.
"""

import atexit
import functools
import math
import os
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from ..config import Step
from ..patching.attend import EngineAttention
from .environment import settings_from_environment

_VERSION = "0.5.23"
"""Version of SGLang that this was written for and is tested with."""
_ATTENTION = "sglang.multimodal_gen.runtime.layers.attention"
_RING = "ring attention, which needs the log-sum-exp"


def activate() -> None:
    """Register sparse attention with SGLang if ``MHLA_DENSITY`` or ``MHLA_PATCH`` is set.

    Raises:
        SystemExit: a variable has a wrong name or value.
    """
    given = sorted(name for name, text in os.environ.items() if name.startswith("MHLA_") and text)
    if not given:
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType
    from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

    logger = init_logger(__name__)
    try:
        settings = settings_from_environment()
    except ValueError as error:
        # SGLang logs other exceptions of a plug-in and goes on without it: dense, where sparse was asked for
        raise SystemExit(f"mhla_diffusers: {error}") from error
    if not {"MHLA_DENSITY", "MHLA_PATCH"} & set(given):
        logger.warning("MHLA: %s has no effect without MHLA_DENSITY or MHLA_PATCH", ", ".join(given))
        return
    if version("sglang") != _VERSION:
        logger.warning("MHLA: this is SGLang %s; only %s is tested", version("sglang"), _VERSION)
    attention = EngineAttention(settings, logger)
    atexit.register(attention.end_of_call)
    choose = functools.partial(_choose_backend, attention)
    HookRegistry.register(f"{_ATTENTION}.selector.get_attn_backend", choose, HookType.AROUND)
    for layer in ("USPAttention", "LocalAttention"):
        HookRegistry.register(f"{_ATTENTION}.layer.{layer}.forward", _attend_in_layer, HookType.AROUND)


def _choose_backend(attention: EngineAttention, choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the backend that SGLang chooses, made sparse for the self-attention of a transformer that denoises."""
    from sglang.multimodal_gen.runtime.layers.attention.selector import get_component_attn_backend_name

    dense = choose(*args, **kwargs)
    component = get_component_attn_backend_name()
    if kwargs.get("is_cross_attention") or (component is not None and not _denoises(component)):
        return dense
    if dense.get_enum().is_sparse:
        attention.logger.warning("MHLA: dense attention is replaced, and %s is sparse; it stays", dense.get_enum())
        return dense
    return _sparse_backend(attention, dense)


def _denoises(component: str) -> bool:
    """Whether a component of a pipeline is a transformer, and no encoder or VAE."""
    from sglang.multimodal_gen.runtime.loader.component_loaders.transformer_loader import TransformerLoader

    return component in TransformerLoader.component_names


@functools.cache
def _sparse_backend(attention: EngineAttention, dense: type[Any]) -> type[Any]:
    """Return a subclass of a backend, with its name and abilities, whose implementation is sparse."""
    settings = {"attention": attention, "dense_class": dense.get_impl_cls()}
    implementation = type(f"Sparse{dense.get_impl_cls().__name__}", (SparseImplementation,), settings)
    methods = {
        "get_impl_cls": staticmethod(lambda: implementation),
        "supports_packed_varlen": staticmethod(dense.supports_packed_varlen),
    }
    return type(f"Sparse{dense.__name__}", (dense,), methods)


class SparseImplementation:
    """Attention of one layer: sparse where it can be, and everything else that of SGLang's own implementation.

    Under Ulysses it gets all tokens and the heads of its process.

    Args:
        prefix: name of the layer in its model, such as "blocks.3.attn1.impl".
        causal: whether later tokens are masked.
        softmax_scale: factor of the scores.
        head_size: channels of a head.
        is_cross_attention: whether keys are of another sequence; then it is dense and not counted.
        packed_trailing_padding: whether the model is MiniMax-H3, which alone sets it: text, sound and references come
            first in its sequence, then the video, then padding.
        kwargs: more of what SGLang's implementation takes.
    """

    attention: EngineAttention
    dense_class: type[Any]

    def __init__(
        self,
        *,
        softmax_scale: float,
        head_size: int,
        causal: bool = False,
        prefix: str = "",
        is_cross_attention: bool = False,
        packed_trailing_padding: bool = False,
        **kwargs: Any,
    ) -> None:
        self.dense = self.dense_class(
            softmax_scale=softmax_scale,
            head_size=head_size,
            causal=causal,
            prefix=prefix,
            is_cross_attention=is_cross_attention,
            packed_trailing_padding=packed_trailing_padding,
            **kwargs,
        )
        self.is_cross_attention = is_cross_attention
        self.is_packed_video = packed_trailing_padding
        number = re.match(r"(?:transformer_)?blocks\.(\d+)\.", prefix)
        self.layer = int(number[1]) if number else None
        self.obstacle = ""
        if causal:
            self.obstacle = "it is causal"
        elif not math.isclose(softmax_scale, head_size**-0.5):
            self.obstacle = f"its scores are multiplied by {softmax_scale:g}, not by 1/sqrt({head_size})"
        elif self.attention.settings.softmax_layers and self.layer is None:
            self.obstacle = f"MHLA_SOFTMAX_LAYERS is set, and layer {prefix!r} has no number"
        self.extra = (0, 0)
        """Tokens before and after the grid's in the present call."""
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name == "dense":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.dense, name)

    @torch.compiler.disable  # compiled code would count once, when it is traced
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        obstacle: str = "",
        dense: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Attend to (B, N, H, D) sparsely, or return None for dense attention, which ``dense`` is."""
        self.calls += 1
        if self.is_cross_attention:
            return None
        return self.attention.attend(
            query,
            key,
            value,
            _grid(),
            extra=self.extra,
            layer=self.layer,
            step=_step(self.attention),
            obstacle=obstacle or self.obstacle,
            dense=dense,
        )

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None, **kwargs: Any
    ) -> Any:
        """Attend to (B, N, H, D); with ``return_softmax_lse`` densely, and return the log-sum-exp too."""

        def dense() -> Any:
            return self.dense.forward(query, key, value, attn_metadata, **kwargs)

        output = self.attend(query, key, value, _RING if kwargs.get("return_softmax_lse") else "", dense)
        return dense() if output is None else output

    def forward_into(self, *args: Any) -> bool:
        """Return False: SGLang then calls :meth:`forward`."""
        return False

    def forward_ring_kv_chunk(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """Attend densely to a part of the keys, all of them (N, H, D)."""
        self.attend(query[None], key[None], value[None], obstacle=_RING)
        return self.dense.forward_ring_kv_chunk(query, key, value)

    def forward_varlen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **bounds: Any
    ) -> torch.Tensor:
        """Attend to (N, H, D), in which ``cu_seqlens_host`` has the ends of sequences; one alone can be sparse.

        Padding behind MiniMax-H3's gives zeros, as with SGLang's FlashAttention.
        """
        ends: tuple[int, ...] = bounds.get("cu_seqlens_host") or ()
        tokens = ends[1] if self.is_packed_video and len(ends) == 3 else len(query)
        is_one = ends in ((0, tokens), (0, tokens, len(query)))
        if self.is_packed_video:
            self.extra = (max(tokens - math.prod(_grid() or (tokens,)), 0), 0)
        output = self.attend(
            *(x[None, :tokens] for x in (query, key, value)),
            obstacle="" if is_one else f"several sequences are packed into one, with ends {ends or 'unknown'}",
        )
        if output is None:
            return self.dense.forward_varlen(query, key, value, **bounds)
        return torch.cat((output[0], query.new_zeros(len(query) - tokens, *query.shape[1:])))


def _attend_in_layer(forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward, whose attention knows which tokens lie outside the grid."""
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
        tensors = args if len(args) >= 3 else (kwargs["q"], kwargs["k"], kwargs["v"])
        implementation.attend(*tensors[:3], obstacle="SGLang attends with a mask or padding itself")
    return output


def _grid() -> tuple[int, ...] | None:
    """Return the token grid (F, Hg, Wg) of the request; None if SGLang does not give it."""
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context_or_none
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    context = get_forward_context_or_none()
    shape = getattr(context.forward_batch, "raw_latent_shape", None) if context else None
    model = get_global_server_args().pipeline_config.dit_config
    patch = getattr(model, "patch_size", None)
    if isinstance(patch, int):
        patch = (getattr(model, "patch_size_t", 1), patch, patch)
    if shape is None or len(shape) != 5 or patch is None:
        return None
    return tuple(size // length for size, length in zip(shape[2:], patch, strict=True))


def _step(attention: EngineAttention) -> Step | None:
    """Return the denoising step of the request; None outside of denoising."""
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context_or_none

    context = get_forward_context_or_none()
    if context is None or context.forward_batch is None:
        return None
    batch = context.forward_batch
    count = batch.num_inference_steps if batch.timesteps is None else len(batch.timesteps)
    if count == 1:
        attention.end_with(batch)
    return Step(int(context.current_timestep), count)
