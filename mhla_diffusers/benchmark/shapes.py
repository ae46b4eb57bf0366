"""Attentions by themselves: shapes of real models, what each costs, and attentions of others to compare with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention import BlockLists
from ..attention.call import list_length
from ..attention.costs import AttentionSizes
from ..attention.layout import block_count, layout_of
from ..config import DEFAULT_BLOCK_SIZE, DEFAULT_DENSITY, MHLAConfig
from ..families import Model
from .models import family_of_model, models, models_unasked
from .timing import free_bytes


@dataclass(frozen=True)
class Shape:
    """An attention by itself."""

    name: str
    grid: tuple[int, ...]
    """Tokens per axis."""
    blocks: tuple[int, ...]
    heads: int
    head_dim: int
    block_size: int | None = None
    """Tokens of the uniform blocks of the sparse branch; None where it is not measured."""
    density: float = DEFAULT_DENSITY
    """Part of all pairs of uniform blocks that is in the lists."""
    rope: bool = False
    """Whether the model has RoPE."""

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.grid)

    @property
    def uniform_blocks(self) -> int:
        """T.

        Raises:
            ValueError: the shape has no uniform blocks.
        """
        if self.block_size is None:
            raise ValueError(f"Shape {self.name!r} has no sparse branch; give it a block_size, such as 64.")
        return block_count(self.grid, self.block_size)

    @property
    def sizes(self) -> AttentionSizes:
        """What its cost depends on."""
        config = MHLAConfig(self.blocks)
        if self.block_size is not None:
            config = config.replace(sparse="content", density=self.density, block_size=self.block_size)
        return config.sizes_on(self.grid, self.heads, self.head_dim)


TINY = Shape("tiny", (4, 6, 6), (2, 2, 3), 2, 16, block_size=16, rope=True)
"""For trying the command out."""


def shapes() -> dict[str, Shape]:
    """Name → attention: the tiny one, and those of the models of all families, such as wan2.1-1.3b-480p."""
    found = [
        shape_of(model, grid, f"{model.name}-{label}")
        for model in models().values()
        for label, grid in model.grids.items()
    ]
    return {shape.name: shape for shape in (TINY, *found)}


def shape_of(model: Model, grid: tuple[int, ...], name: str) -> Shape:
    """The self-attention of a model on a token grid, with the block counts that it is measured with."""
    family = family_of_model(model)
    return Shape(
        name,
        grid,
        tuple(min(pair) for pair in zip(model.blocks, grid, strict=True)),
        model.heads,
        model.head_dim,
        DEFAULT_BLOCK_SIZE if family.own_attention == "softmax" else None,
        rope=family.has_rope,
    )


def choose_shapes(names: list[str] | None, device_type: str) -> list[Shape]:
    """Shapes by name; for None on a GPU those of the models that need not be asked for, on a CPU the cheapest of them.

    Raises:
        ValueError: unknown name.
    """
    known = shapes()
    for name in names or ():
        if name not in known:
            raise ValueError(f"Unknown shape {name!r}; allowed: {', '.join(known)}.")
    if names:
        return [known[name] for name in names]
    real = [known[f"{model.name}-{label}"] for model in models_unasked() for label in model.grids]
    return real if device_type != "cpu" else [min(real, key=lambda shape: shape.sizes.softmax_flops)]


@dataclass(frozen=True)
class Cost:
    """Of one forward, or one forward and backward."""

    flops: int
    bytes: int
    """The least that must move: inputs are read once and outputs written once, and so are block states."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, factor: float) -> "Cost":
        """Of so many."""
        return Cost(round(factor * self.flops), round(factor * self.bytes))


Work = Literal["softmax", "linear", "lists", "sparse"]
"""Softmax over all pairs, the linear branch, softmax over listed pairs alone, or sparse and linear branch together."""


def cost_of(shape: Shape, work: Work, itemsize: int, backward: bool) -> Cost:
    """Count an attention of inputs with so many bytes per element.

    The backward pass counts twice the forward; what a kernel computes again is not counted.
    """
    sizes, ends = shape.sizes, shape.tokens * shape.heads * shape.head_dim * itemsize
    flops, between = {
        "softmax": (sizes.softmax_flops, 0),
        "linear": (sizes.linear_flops, 2 * sizes.state_bytes),
        "lists": (sizes.listed_flops, 0),
        "sparse": (sizes.flops, sizes.moved_bytes),
    }[work]
    # query, key, value and output; in the backward pass query, key, value and four gradients
    return Cost(flops * (3 if backward else 1), (11 if backward else 4) * ends + between * (2 if backward else 1))


# ---- softmax attention of PyTorch -----------------------------------------------------------------------------------

SOFTMAX_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Of PyTorch's scaled_dot_product_attention."""


def softmax_attention(backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """PyTorch's softmax attention of (B, N, H, D) tensors by one backend.

    Raises:
        RuntimeError: that backend cannot run the call.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel([SOFTMAX_BACKENDS[backend]]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def why_no_softmax(backend: str, device: torch.device, tokens: int, heads: int) -> str | None:
    """Why a backend is not to be tried; None if it is, which does not mean that it can run the call.

    Heads are those of all samples of the batch.
    """
    if device.type != "cpu":
        return None
    if backend in ("cudnn", "efficient"):
        return "PyTorch has this backend on GPUs only"
    # Linux promises memory that it does not have and ends the process that takes it, so this must be told beforehand
    needed, free = 2 * 4 * heads * tokens**2, free_bytes(device)
    if backend in ("math", "flex") and needed > free:
        return f"its N x N weights need {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free"
    return None


# ---- attentions of other packages -----------------------------------------------------------------------------------

FLASH, FLASH3, CHUNKED = "flash-attn", "FlashAttention-3", "flash-linear-attention"
_MODULES = {FLASH: ("flash_attn",), FLASH3: ("fa3_fwd_interface", "flash_attn_interface"), CHUNKED: ("fla",)}
"""Of which the first that is there is taken: FlashAttention-3 is in fa3-fwd and in flash-attn-3."""
_INSTALL = {FLASH3: " (fa3-fwd or flash-attn-3)"}


def why_no_package(name: str, device: torch.device) -> str | None:
    """Why a package is not to be tried; None if it is, which does not mean that it can run the call."""
    if device.type == "cpu":
        return f"{name} runs on GPUs only"
    is_there = any(find_spec(module) is not None for module in _MODULES[name])
    return None if is_there else f"{name}{_INSTALL.get(name, '')} is not installed"


def _flash(name: str, *inputs: torch.Tensor) -> torch.Tensor:
    """Softmax attention; some versions return the log-sum-exp too."""
    module = next(module for module in _MODULES[name] if find_spec(module) is not None)
    output: Any = import_module(module).flash_attn_func(*inputs)
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _chunked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal linear attention, φ = ReLU, without a normaliser: the nearest to plain linear attention that fla has."""
    linear: Any = import_module("fla.ops.linear_attn")
    output: torch.Tensor = linear.chunk_linear_attn(query.relu(), key.relu(), value, normalize=False)[0]
    return output


PACKAGES: dict[str, Callable[..., torch.Tensor]] = {
    FLASH: lambda *inputs: _flash(FLASH, *inputs),
    FLASH3: lambda *inputs: _flash(FLASH3, *inputs),
    CHUNKED: _chunked,
}
"""Name → attention of query, key and value, each (B, N, H, D)."""


# ---- FlexAttention over the same block lists ------------------------------------------------------------------------


def draw_lists(shape: Shape, device: torch.device) -> BlockLists:
    """Random lists from a seed, every query block with as many key blocks and at least one."""
    blocks, size = shape.uniform_blocks, int(shape.block_size or 0)
    order = torch.rand(shape.heads, blocks, blocks, generator=torch.Generator().manual_seed(0))
    chosen = order.topk(list_length(shape.density, blocks), dim=-1).indices
    mask = torch.zeros(order.shape, dtype=torch.bool).scatter_(-1, chosen, value=True)
    return BlockLists.from_mask(size, mask.to(device))


def why_no_flex(device: torch.device, backward: bool) -> str | None:
    """Why FlexAttention is not to be tried; None if it is, which does not mean that it compiles."""
    return "FlexAttention has no backward pass on CPUs" if backward and device.type == "cpu" else None


def flex_over_lists(shape: Shape, inputs: Sequence[torch.Tensor], lists: BlockLists) -> Callable[[], torch.Tensor]:
    """Softmax attention over listed blocks by compiled FlexAttention: what attends gives (B, N, H, D).

    Tokens are brought into the order of the uniform blocks and back again. Blocks that are not listed are left out.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    device, block = inputs[0].device, lists.block_size
    layout = layout_of(shape.grid, block, device=str(device))
    rows, back, is_token = layout.order.clamp_min(0), layout.rows, layout.order >= 0
    listed = lists.mask()
    count = listed.sum(dim=-1, dtype=torch.int32)
    order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    lengths = (len(is_token), len(is_token))

    def holds_token(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return is_token[key]

    if len(is_token) == shape.tokens:  # all blocks are full; FlexAttention confuses tensors given twice
        nothing = torch.zeros_like(count), torch.zeros_like(order)
        mask = BlockMask.from_kv_blocks(*nothing, count, order, BLOCK_SIZE=block, seq_lengths=lengths)
    else:
        mask = BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=block, mask_mod=holds_token, seq_lengths=lengths)
    # what its kernels on GPUs are told to take at once where blocks are small
    small: Any = {"BLOCK_M": block, "BLOCK_N": block} if block <= 64 and device.type != "cpu" else None

    @torch.compile(dynamic=False)
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.index_select(1, rows).transpose(1, 2) for x in (query, key, value))
        output: Any = flex_attention(q, k, v, block_mask=mask, kernel_options=small)
        return output.transpose(1, 2).index_select(1, back)

    return lambda: attend(*inputs)
