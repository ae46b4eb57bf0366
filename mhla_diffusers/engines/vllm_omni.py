"""Attention backend "MHLA" of vLLM-Omni 0.30.0: sparse self-attention where a model publishes its video's token grid.

The engine calls :func:`register` in each of its processes (entry point group ``vllm_omni.general_plugins``).
``DIFFUSION_ATTENTION_BACKEND=MHLA`` selects the backend.
"""

import math
from functools import cache
from typing import Any

import torch
from aenum import extend_enum
from torch.nn import functional
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.diffusion.attention.selector import HEAD_SIZE_UNKNOWN, get_attn_backend_for_role
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

from ..attention.layout import Extra, Shape
from ..config import Step
from ..errors import check
from ..patching.route import Request
from .engine import Engine
from .settings import settings_from_environment

NAME = "MHLA"


def register() -> None:
    """Add the backend to those of vLLM-Omni; a second call changes nothing."""
    if NAME not in DiffusionAttentionBackendEnum.__members__:
        extend_enum(DiffusionAttentionBackendEnum, NAME, f"{__name__}.{MHLABackend.__name__}")


@cache
def engine() -> Engine:
    """Return what all layers of this process attend with."""
    return Engine(settings_from_environment(), init_logger("vllm_omni.mhla"))


def _dense_backend(head_dim: int = HEAD_SIZE_UNKNOWN) -> type[AttentionBackend]:
    """Return the engine's own choice for this machine, which must accept masks: TRTLLM_ATTN does not."""
    return get_attn_backend_for_role("self", head_dim, allow_trtllm_default=False)[0]


class MHLABackend(AttentionBackend):
    """Backend whose dense attention, and so the masks it accepts, is the engine's choice for the machine."""

    @staticmethod
    def get_name() -> str:
        """Return :data:`NAME`."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type["MHLAImpl"]:
        """Return the class whose objects attend."""
        return MHLAImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """Return the engine's own class."""
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> None:
        """Return None: no backend of vLLM-Omni 0.30 has a builder of metadata."""

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return an empty list, which allows any head dim."""
        return []

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        """Return whether the dense attention accepts masks."""
        return _dense_backend().supports_attention_mask()

    @classmethod
    def supports_packed_mask_free(cls) -> bool:
        """Return whether the dense attention knows padding without a mask."""
        return _dense_backend().supports_packed_mask_free()


class MHLAImpl(AttentionImpl):
    """Attention of one layer, which raises ValueError for settings or parallelism that are not allowed."""

    def __init__(
        self, softmax_scale: float, causal: bool = False, prefix: str = "", role: str = "self", **others: Any
    ) -> None:
        parallel = getattr(get_current_diffusion_config_or_none(), "parallel_config", None)
        for name in ("ring_degree", "allgather_degree"):
            degree = getattr(parallel, name, 1)
            check(
                degree == 1,
                f"{NAME} needs all tokens in every process, but {name}={degree} splits them; use {name}=1 and "
                "ulysses_degree, which splits the heads.",
            )
        # the user did not select it, so it may do without its kernel where that does not fit
        others["backend_explicit"] = False
        self.dense: AttentionImpl = _dense_backend(others["head_size"]).get_impl_cls()(
            softmax_scale=softmax_scale, causal=causal, prefix=prefix, role=role, **others
        )
        self.engine = engine()
        self.is_cross = role == "cross"
        self.layer = extract_layer_index(prefix) if any(part.isdigit() for part in prefix.split(".")) else None
        self.request = Request(is_causal=causal, scale=softmax_scale)

    # in a graph of the engine's blocks, step and layer would be constants, and the counters would not advance
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Return (B, N, H, D), zero for padding, from all tokens and the heads of this process, after RoPE."""
        # the role of some models' cross-attention has a name of their own, such as "longcat_video.avatar_audio"
        if self.is_cross or query.shape[1] != key.shape[1]:
            return self.dense.forward(query, key, value, attn_metadata)
        metadata = attn_metadata or AttentionMetadata()
        (grid, extra), tokens = _video(metadata), query.shape[1]
        used = min(tokens, math.prod(grid) + sum(extra)) if grid else tokens
        obstacle = _masked(metadata, tokens, used)
        if obstacle:
            used = tokens

        def own(*_: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.dense.forward(query, key, value, metadata)[:, :used]
            return output

        context = get_forward_context() if is_forward_context_available() else None
        index = None if context is None else context.denoise_step_idx
        # the engine's Wan does not report how many steps there are; a share then counts as a share of 50
        step = None if context is None or index is None else Step(index, context.total_denoise_steps or 0)
        call = self.engine.call(grid, extra, step, context, self.layer)
        output = self.engine.attend(
            query[:, :used], key[:, :used], value[:, :used], call, self.layer, self.request._replace(own=own), obstacle
        )
        return functional.pad(output, (0, 0, 0, 0, 0, tokens - used))


def _video(metadata: AttentionMetadata) -> tuple[Shape, Extra]:
    """Return the generated video's grid (empty if unknown), and the valid tokens before and after it."""
    layout = metadata.video_layout
    for span in layout.video_spans if layout else ():
        if span.role == "target":
            return tuple(span.latent_grid), (span.start, layout.used_len - span.start - span.length)
    if layout is None or layout.latent_grid is None:
        return (), (0, 0)
    return tuple(layout.latent_grid), (layout.prefix_len or 0, 0)


def _masked(metadata: AttentionMetadata, tokens: int, used: int) -> str:
    """Name what masks tokens other than padding; empty if nothing does.

    A model that gives its video's grid promises that a mask of keys hides the padding behind the used tokens alone.
    """
    if metadata.full_attn_spans is not None:
        return "full_attn_spans"
    if any(x is not None for x in (metadata.joint_query, metadata.joint_key, metadata.joint_attn_mask)):
        return "joint tokens beside the sequence"
    mask = metadata.attn_mask
    return "" if mask is None or (mask.ndim == 2 and used < tokens) else f"a mask of shape {tuple(mask.shape)}"
