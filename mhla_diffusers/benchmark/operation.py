"""One attention by itself: MHLA, sparse and plain linear attention against softmax, ``mhla bench op``."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention import BlockLists, initial_mixing, mhla_attention, sparse_attention
from ..attention.layout import layout_of
from ..attention.triton.backend import why_not
from ..settings import check_names
from .correctness import check_operation, check_same
from .measure import Results, Variant, free_bytes
from .shapes import Shape, Work, draw_lists, flops_of, make_inputs, random_rotary, sparse_config

STAGES = ("forward", "forward+backward")
SOFTMAX = "softmax"
PLAIN = "plain linear"
SPARSE = "sparse"
"""As of a patch: keys are sorted, lists chosen, and β and γ fitted at every call."""
GIVEN = "sparse, lists given"
"""The same without sorting, choosing and fitting."""
LISTED = "listed blocks alone"
"""Softmax over the same lists without means and states, which FlexAttention lacks."""
CAUSAL = "causal linear"
"""Without a normaliser: the nearest to plain linear attention that flash-linear-attention has."""
SOFTMAX_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Backends of PyTorch's scaled_dot_product_attention."""
Attend = Callable[[], torch.Tensor]


# ---- attentions, and why one cannot run here ------------------------------------------------------------------------


def why_no_triton(shape: Shape, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the fused kernels cannot be timed; None if they can."""
    if device.type == "cpu":
        return "the fused kernels run on CUDA and ROCm devices"  # their interpreter is for tests and has no speed
    return why_not(torch.empty(1, 0, shape.heads, shape.head_dim, device=device, dtype=dtype), "relu")


def fastest_backend(shape: Shape, device: torch.device, dtype: torch.dtype) -> str:
    """Return "triton" where the fused kernels can run, else "eager"."""
    return "triton" if why_no_triton(shape, device, dtype) is None else "eager"


def softmax_attention(backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Run PyTorch's softmax attention of (B, N, H, D) tensors by one backend; RuntimeError if it cannot."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel([SOFTMAX_BACKENDS[backend]]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def why_no_softmax(backend: str, device: torch.device, tokens: int, heads: int) -> str | None:
    """Return why a softmax backend is not to be tried; None if it is, though it may still refuse the call.

    Heads are those of all samples of the batch.
    """
    if device.type != "cpu":
        return None
    if backend in ("cudnn", "efficient"):
        return "PyTorch has this backend on GPUs only"
    # Linux promises memory that it does not have and ends the process that takes it, so this must be known beforehand
    needed, free = 2 * 4 * heads * tokens**2, free_bytes(device)
    if backend in ("math", "flex") and needed > free:
        return f"its N x N weights need {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free"
    return None


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, module: str) -> torch.Tensor:
    """Run FlashAttention of a package; some versions return the log-sum-exp too."""
    output: Any = import_module(module).flash_attn_func(query, key, value)
    return output[0] if isinstance(output, tuple) else output


def _chunked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, module: str) -> torch.Tensor:
    """Run causal linear attention of flash-linear-attention, φ = ReLU."""
    linear: Any = import_module(f"{module}.ops.linear_attn")
    output: torch.Tensor = linear.chunk_linear_attn(query.relu(), key.relu(), value, normalize=False)[0]
    return output


PACKAGES: dict[str, tuple[tuple[str, ...], Callable[..., torch.Tensor]]] = {
    "flash-attn": (("flash_attn",), _flash),
    "FlashAttention-3": (("fa3_fwd_interface", "flash_attn_interface"), _flash),
    "flash-linear-attention": (("fla",), _chunked),
}
"""Package → modules to try in order, and its attention of query, key and value, each (B, N, H, D).
FlashAttention-3 is in fa3-fwd and in flash-attn-3.
"""


def package_attention(name: str, inputs: Sequence[torch.Tensor]) -> Attend | str:
    """Return a call of another package's attention, or why there is none."""
    modules, attention = PACKAGES[name]
    if inputs[0].device.type == "cpu":
        return f"{name} runs on GPUs only"
    there = [module for module in modules if find_spec(module) is not None]
    if not there:
        return f"{name} is not installed: no module {' or '.join(modules)}"
    return partial(attention, *inputs, module=there[0])


def flex_over_lists(shape: Shape, inputs: Sequence[torch.Tensor], lists: BlockLists) -> Attend:
    """Return a call of compiled FlexAttention over listed blocks, which gives (B, N, H, D).

    Tokens are brought into the order of the uniform blocks and back again. Blocks that are not listed are left out.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    device, block, keys = inputs[0].device, lists.block_size, lists.key_block_size
    layout = layout_of(shape.grid, block, device=str(device))
    rows, back, is_token = layout.order.clamp_min(0), layout.rows, layout.order >= 0
    listed = lists.mask()
    listed = torch.nn.functional.pad(listed, (0, len(is_token) // keys - listed.shape[-1]))  # blocks of padding alone
    count = listed.sum(dim=-1, dtype=torch.int32)
    order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    sizes: dict[str, Any] = {"BLOCK_SIZE": (block, keys), "seq_lengths": (len(is_token), len(is_token))}

    def holds_token(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return is_token[key]

    if len(is_token) == shape.tokens:  # all blocks are full; FlexAttention confuses tensors given twice
        nothing = torch.zeros_like(count), torch.zeros_like(order)
        mask = BlockMask.from_kv_blocks(*nothing, count, order, **sizes)
    else:
        mask = BlockMask.from_kv_blocks(count, order, mask_mod=holds_token, **sizes)
    # on GPUs its kernels need smaller tiles where blocks are small
    small: Any = {"BLOCK_M": block, "BLOCK_N": keys} if block <= 64 and device.type != "cpu" else None

    @torch.compile(dynamic=False)
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.index_select(1, rows).transpose(1, 2) for x in (query, key, value))
        output: Any = flex_attention(q, k, v, block_mask=mask, kernel_options=small)
        return output.transpose(1, 2).index_select(1, back)

    return lambda: attend(*inputs)


# ---- mhla bench op --------------------------------------------------------------------------------------------------


def benchmark_operation(shape: Shape, results: Results, stages: Sequence[str], *, compile: bool) -> None:
    """Check every MHLA backend against the reference, then time all variants in turns, for each stage.

    MHLA is timed with a mixing matrix per head, and both with RoPE where the model has it. Softmax attention is timed
    without RoPE. With ``compile`` torch.compile of the eager backend and FlexAttention are timed too, which take a
    minute to compile.

    Raises:
        IncorrectAttentionError: a backend is wrong here; then nothing is timed.
        ValueError: an unknown stage.
    """
    device, dtype = results.device, results.dtype
    check_names(stages, STAGES, "stage")
    for backend in ("eager", "triton"):
        if backend == "eager" or why_no_triton(shape, device, dtype) is None:
            for sparse in (False, True) if shape.block_size is not None else (False,):
                check_operation(shape, device, dtype, backend, sparse=sparse)
    for stage in stages:
        torch.compiler.reset()
        variants = operation_variants(shape, device, dtype, backward=stage == "forward+backward", compile=compile)
        if stage == "forward" and device.type == "cuda":  # a small grid does not show a fault that needs many tokens
            runs: dict[str, Any] = {variant.name: variant.run for variant in variants}
            for kind in ("MHLA", GIVEN):
                fused, eager = (runs.get(f"{kind} {backend}", "") for backend in ("triton", "eager"))
                if not isinstance(fused, str) and not isinstance(eager, str):
                    check_same(fused(), eager(), f"{kind} triton")
        results.add(results.measure(variants, case=shape.name, stage=stage, tokens=shape.tokens))


def operation_variants(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, backward: bool, compile: bool
) -> list[Variant]:
    """List MHLA, sparse and plain linear attention and softmax, each by all backends."""
    inputs = tuple(x.requires_grad_(backward) for x in make_inputs(shape, device, dtype))
    upstream = torch.ones_like(inputs[0])
    lists = draw_lists(shape, device) if shape.block_size is not None else None
    no_triton = why_no_triton(shape, device, dtype)
    not_asked = None if compile else "not asked for; add --compile"
    no_flex = not_asked or ("it has no backward pass on CPUs" if backward and device.type == "cpu" else None)
    rotary: dict[str, Any] = {"rotary": random_rotary(shape, device)} if shape.rope else {}
    variants: list[Variant] = []

    def add(kind: str, backend: str, work: Work, attend: Attend | str, leaves: Sequence[torch.Tensor] = ()) -> None:
        """Append a variant: a forward without gradients, or with those of inputs and leaves."""
        run: Callable[[], object] | str = attend
        if not isinstance(attend, str):
            run = torch.no_grad()(attend)
            if backward:
                run = lambda: torch.autograd.grad(attend(), (*inputs, *leaves), upstream)  # noqa: E731
        of_kind = shape.plain if kind in (PLAIN, CAUSAL) else shape
        flops = flops_of(of_kind, work, backward=backward)
        blocks = math.prod(of_kind.blocks) if work == "linear" else None
        note = "without RoPE" if kind in (SOFTMAX, LISTED, CAUSAL) and shape.rope else ""
        variants.append(Variant(f"{kind} {backend}", run, kind == SOFTMAX, flops, blocks, note))

    def add_mhla(kind: str, backend: str, absent: str | None) -> None:
        """Append MHLA; what is learnable in a patched model takes gradients, and may be computed in another way."""
        of_kind = shape.plain if kind == PLAIN else shape
        mixing = initial_mixing(of_kind.blocks).to(device).repeat(shape.heads, 1, 1).requires_grad_()
        function: Any = mhla_attention
        options: dict[str, Any] = rotary | {"backend": backend}
        if backend == "torch.compile" and absent is None:
            function, options["backend"] = torch.compile(mhla_attention, dynamic=False), "eager"
        attend = absent or partial(function, *inputs, mixing, of_kind.grid, of_kind.blocks, **options)
        add(kind, backend, "linear", attend, (mixing,))

    def add_sparse(kind: str, backend: str, absent: str | None) -> None:
        """Append sparse attention, with its own lists or with those that were drawn."""
        config, heads = sparse_config(shape), torch.ones(shape.heads, device=device)
        options: dict[str, Any] = {"density": config.density, "block_size": config.block_size}
        options["key_block_size"] = config.key_block_size
        if kind == GIVEN:
            options = {"lists": lists, "pooled_bias": 0 * heads, "state_weight": heads}
        function: Any = sparse_attention
        add(
            kind,
            backend,
            "sparse",
            absent or partial(function, *inputs, shape.grid, backend=backend, **rotary, **options),
        )

    for backend, absent in (("eager", None), ("triton", no_triton)):
        for kind in ("MHLA", PLAIN):
            add_mhla(kind, backend, absent)
        for kind in (SPARSE, GIVEN) if lists is not None else ():
            add_sparse(kind, backend, absent)
    add_mhla("MHLA", "torch.compile", not_asked)
    if lists is not None:
        add(LISTED, "FlexAttention", "lists", no_flex or flex_over_lists(shape, inputs, lists))
    add(CAUSAL, "flash-linear-attention", "linear", package_attention("flash-linear-attention", inputs))
    for backend in SOFTMAX_BACKENDS:
        absent = why_no_softmax(backend, device, shape.tokens, shape.heads)
        add(SOFTMAX, backend, "softmax", absent or partial(softmax_attention, backend, *inputs))
    for package in ("flash-attn", "FlashAttention-3"):
        add(SOFTMAX, package, "softmax", package_attention(package, inputs))
    return variants
