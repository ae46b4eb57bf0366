"""The route: the model's own attention runs, and its call is answered here, sparse or dense.

Three ways lead to :func:`attend`: diffusers' dispatcher, for which an attention backend is registered, in models that
dispatch; a torch-function mode in models that call PyTorch's ``scaled_dot_product_attention``; and the engines.
"""

import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import repeat
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..attention import SparseCall, reference_attention, run
from ..attention.layout import Extra
from ..attention.precision import autocast_type
from ..families.mhla import key_weights
from .call import Call, Seen, held
from .residual import BranchState

BACKEND = "mhla"
DENSE_STEP = "dense steps"


class Request(NamedTuple):
    """What a model asks of attention beside query, key and value, in the words of diffusers' dispatcher."""

    mask: torch.Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    dispatches: bool = False
    """Whether it came from diffusers' dispatcher, and goes back to it where attention stays dense."""
    backend: str | None = None
    parallel: Any = None
    own: Callable[..., torch.Tensor] | None = None
    """An engine's own attention, of the same tensors; None for diffusers and PyTorch."""

    def exact(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return what the model's own attention gives, (B, N, H, D)."""
        if self.own is not None:
            return self.own(query, key, value)
        if self.dispatches:
            from diffusers.models.attention_dispatch import dispatch_attention_fn

            how = self.mask, self.dropout, self.is_causal, self.scale, self.enable_gqa
            output: torch.Tensor = dispatch_attention_fn(
                query, key, value, *how, backend=self.backend, parallel_config=self.parallel
            )
            return output
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return functional.scaled_dot_product_attention(
            query, key, value, self.mask, self.dropout, self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        ).transpose(1, 2)


class Fit(NamedTuple):
    """How the tokens of an attention lie on the grid, or why it stays dense."""

    extra: Extra = (0, 0)
    key_mask: torch.Tensor | None = None
    """(B, N), which tokens take part."""
    differs: bool = False
    """Whether there are queries of extra tokens, whose rows of the mask may differ from the grid's."""
    reason: str = ""
    level: int = logging.WARNING


Here = tuple[Call | None, torch.Tensor | None, int]
"""Call, number of the self-attention that runs, on the CPU, and how many calls of attention it has made before."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, request: Request, here: Here | None = None
) -> torch.Tensor:
    """Answer a call of attention: dense, sparse, or sparse and corrected by a dense step's residual; (B, N, H, D).

    Args:
        query: (B, N, H, D) after RoPE, the grid's tokens in raster order with extra ones before or after them.
        key: (B, N', H', D).
        value: like ``key``.
        request: what else the model asks for.
        here: the call, layer and part that attend; None for those of this thread.
    """
    if here is None:
        state = held()
        here = state.call, state.layer, state.part
        state.part += 1
    call, layer, part = here
    if call is None or layer is None:
        return request.exact(query, key, value)
    fit = fitted(query, key, value, call, request)
    if torch.compiler.is_compiling():
        if fit.reason:
            return request.exact(query, key, value)
        if torch.is_grad_enabled() or not call.patch.config.has_dense_steps:
            return sparse(query, key, value, call, fit, request)
        return _operator(query, key, value, request.mask, layer, part, request.scale, request.enable_gqa,
                         request.dispatches, request.backend or "")  # fmt: skip
    if call.dense_layers and not fit.reason:
        state = held()
        state.over_grid += 1
        if state.over_grid <= call.dense_layers:
            fit = fit._replace(reason=f"dense_layers={call.dense_layers}", level=logging.INFO)
    place = int(layer), part
    if fit.reason or call.is_dense:
        if call.tally is not None:
            call.tally.note_dense(fit.reason or DENSE_STEP, query, fit.level if fit.reason else logging.INFO)
        exact = request.exact(query, key, value)
        if call.is_dense and call.records_residual and call.step is not None and not fit.reason:
            found = sparse(query, key, value, call, fit, request)
            parts = (x.flatten(2).chunk(len(call.branches)) for x in (exact, found))
            for branch, one, other in zip(call.branches, *parts, strict=True):
                residual = branch.record(place, one, other, call.step.index)
                if call.tally is not None:
                    call.tally.errors[place] = residual.error
        return exact
    output = sparse(query, key, value, call, fit, request)
    if call.tally is not None:
        call.tally.sparse += 1
    if call.branches and call.step is not None:
        halves = output.flatten(2).chunk(len(call.branches))
        corrected = list(map(BranchState.correct, call.branches, repeat(place), halves, repeat(call.step)))
        output = (corrected[0] if len(corrected) == 1 else torch.cat(corrected)).view(output.shape)
    if call.watch is not None:
        exact_of = partial(request.exact, query, key, value)

        def reference() -> torch.Tensor:
            return sparse(query.double(), key.double(), value.double(), call, fit, request, reference_attention)

        shown = query, key, value, call.grid, fit.extra, fit.key_mask
        output = call.watch(Seen(call.patch.name_at(place), *shown, exact_of, reference, output))
    return output


def fitted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, request: Request) -> Fit:
    """Return how the tokens of an attention lie on the grid of a call."""
    tokens, keys, grid = query.shape[1], key.shape[1], math.prod(call.grid)
    before, after = call.extra if keys > grid else (0, 0)
    if before is None:
        before = max(0, keys - grid - (after or 0))
    extra = before, max(0, keys - grid - before) if after is None else after
    if keys != tokens and not (tokens == grid and keys == grid + sum(extra)):
        words = f"{tokens:,} queries of {keys:,} keys are not over the grid, as in cross-attention"
        return Fit(reason=words, level=logging.INFO)
    reason, key_mask, differs, mask = "", None, False, request.mask
    if keys != grid + sum(extra):
        size = "x".join(map(str, call.grid))
        reason = f"{tokens:,} tokens are not those of the grid {size} and {sum(extra)} others"
    elif not query.dtype == key.dtype == value.dtype and autocast_type(query) is None:
        reason = f"query, key and value differ in type: {query.dtype}, {key.dtype}, {value.dtype}"
    elif value.shape[-1] != query.shape[-1]:
        reason = f"values have head dim {value.shape[-1]}, queries {query.shape[-1]}"
    elif request.is_causal or request.dropout:
        reason = "causal attention" if request.is_causal else "dropout"
    elif mask is not None and call.pads_behind_grid:
        reason = "samples of different lengths, whose grids begin at different tokens"
    elif mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]  # (B, H, queries, keys)
        differs = mask.shape[2] != 1 and mask.stride(2) != 0
        by_head = mask.shape[1] != 1 and mask.stride(1) != 0
        if mask.shape[3] != keys or by_head or (differs and not call.rows_alike):
            reason = "a mask between tokens"
        else:
            key_mask = key_weights(mask[:, 0, before if differs else 0].expand(len(query), -1))
    return Fit(extra, key_mask, differs and tokens > grid, reason)


def sparse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    fit: Fit,
    request: Request,
    compute: Callable[[SparseCall], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return sparse attention, (B, N, H, D); (B, product of the grid, H, D) where extra tokens have keys alone.

    By the patch's backend, or as ``compute`` does.
    """
    tokens, (before, after), given, lower = query.shape[1], fit.extra, (query, key, value), autocast_type(query)
    if lower is not None:  # as scaled_dot_product_attention casts
        query, key, value = (x.to(lower) for x in given)
    factor = 1.0 if request.scale is None else request.scale * math.sqrt(query.shape[-1])
    if not math.isclose(factor, 1, rel_tol=1e-6):
        query = query * factor
    if key.shape[2] != query.shape[2]:
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    is_grid_alone = tokens != key.shape[1]
    if is_grid_alone:  # any query will do for the others, whose output nobody gets
        query = functional.pad(query, (0, 0, 0, 0, before, after))
    config = call.patch.config
    rule = config.rule_on(call.grid)
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value, "key_mask": fit.key_mask}
    of_grid = SparseCall(**tensors, grid=call.grid, sparse=rule, far=config.far, extra=fit.extra)
    output = run(of_grid, call.patch.backend) if compute is None else compute(of_grid)
    if is_grid_alone:
        return output[:, before : before + tokens]
    return _with_own_rows(output, *given, fit, request) if fit.differs else output


def _with_own_rows(
    output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, fit: Fit, request: Request
) -> torch.Tensor:
    """Run the model's own attention for extra tokens, whose mask rows may differ from the grid's."""
    (before, after), end = fit.extra, query.shape[1] - fit.extra[1]

    def outside(x: torch.Tensor, axis: int) -> torch.Tensor:
        return torch.cat([x.narrow(axis, 0, before), x.narrow(axis, end, after)], axis)

    assert request.mask is not None
    mask = outside(request.mask, -2)
    mask = mask.to(query.dtype) if mask.is_floating_point() else mask
    exact = request._replace(mask=mask).exact(outside(query, 1), key, value)
    return torch.cat([exact[:, :before], output[:, before:end], exact[:, before:]], dim=1)


# torch.compile calls this as it is: which step it is and what was measured stays out of its graphs


@torch.library.custom_op("mhla_diffusers::attend", mutates_args=())
def _operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    layer: torch.Tensor,
    part: int,
    scale: float | None,
    enable_gqa: bool,
    dispatches: bool,
    backend: str,
) -> torch.Tensor:
    request = Request(mask, 0.0, False, scale, enable_gqa, dispatches, backend or None)
    call = held().call
    if call is None:
        return request.exact(query, key, value).clone(memory_format=torch.contiguous_format)
    return attend(query, key, value, request, (call, layer, part)).clone(memory_format=torch.contiguous_format)


@_operator.register_fake
def _(query: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


# diffusers' dispatcher


def register_backend() -> None:
    """Register the attention backend with diffusers, once; ImportError where its backends have another form."""
    from diffusers import __version__
    from diffusers.models import attention_dispatch

    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    if BACKEND in names._value2member_map_:
        return
    try:
        member = str.__new__(names, BACKEND)
        member._name_, member._value_ = BACKEND.upper(), BACKEND
        names._member_map_[member._name_] = names._value2member_map_[BACKEND] = member
        registry.register(member, supports_context_parallel=True)(_backend)
    except (AttributeError, TypeError) as error:
        raise ImportError(
            f"diffusers {__version__} has attention backends that mhla_diffusers does not support; install diffusers "
            "0.42, or use apply_mhla(model, grid=...)."
        ) from error


def _backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    request = Request(attn_mask, dropout_p, is_causal, scale, enable_gqa, True, held().backend, _parallel_config)
    call = held().call
    # first, so that graphs know of no step
    if _parallel_config is None or call is None or not call.grid or held().layer is None:
        return attend(query, key, value, request)
    if call.is_dense and not call.records_residual:
        return attend(query, key, value, request)
    return _split_over_processes(query, key, value, request)


def _split_over_processes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, request: Request
) -> torch.Tensor:
    """Attend under diffusers' context parallelism: with Ulysses each process has all tokens of some heads."""
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    if request.parallel.context_parallel_config.ring_degree > 1:
        raise ValueError(
            "Ring attention gives each process only some keys, but sparse attention needs all of them; use "
            "ContextParallelConfig(ulysses_degree=...)."
        )
    state, own = held(), request._replace(parallel=None, dispatches=False)
    here = state.call, state.layer, state.part  # of now: gradients come behind the forward
    state.part += 1

    def answered(mask: torch.Tensor | None, query: Any, key: Any, value: Any) -> torch.Tensor:
        return attend(query, key, value, own._replace(mask=mask), here)

    def forward(ctx: Any, query: Any, key: Any, value: Any, attn_mask: Any, *_: Any, **__: Any) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask = attn_mask
        return answered(attn_mask, query, key, value)

    def backward(ctx: Any, gradient: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = answered(ctx.mask, *inputs)
        return torch.autograd.grad(output, inputs, gradient)

    output: torch.Tensor = _templated_context_parallel_attention(
        query, key, value, request.mask, scale=request.scale, forward_op=forward, backward_op=backward,
        _parallel_config=request.parallel,
    )  # fmt: skip
    return output


# PyTorch's function


class Mode(TorchFunctionMode):
    """Answers models that call PyTorch's ``scaled_dot_product_attention`` themselves.

    In one without a family, ``by_hand``, attentions are counted outside of graphs, and stay dense where gradient
    checkpointing will run them again without their call.
    """

    def __init__(self, by_hand: nn.Module | None = None) -> None:
        super().__init__()
        self.by_hand = by_hand
        if "torch._dynamo" in sys.modules:
            # a graph of this function by itself would be taken for other functions of PyTorch, with wrong results
            torch._dynamo.eval_frame.skip_code(Mode.__torch_function__.__code__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = held()
        if state.layer is None or state.call is None:
            return func(*args, **(kwargs or {}))
        reason = ""
        if func is functional.multi_head_attention_forward:
            reason = "nn.MultiheadAttention, whose call of attention is out of reach"
        elif func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        elif (query := args[0] if args else (kwargs or {})["query"]).ndim != 4:
            reason = f"query has {query.ndim} axes, and attention over the grid 4, with heads"
        elif self.by_hand is not None and is_checkpointed(self.by_hand):
            reason = "gradient checkpointing runs it again, without its call"
        if reason:
            if state.call.tally is not None:
                state.call.tally.note_dense(reason, args[0] if args else (kwargs or {})["query"], logging.WARNING)
            return func(*args, **(kwargs or {}))
        answer = _answer_pytorch if self.by_hand is None else _answer_outside_graphs
        return answer(*args, **(kwargs or {}))


def _answer_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Answer a call of ``scaled_dot_product_attention``; a function, because Dynamo guards no method of a mode."""
    request = Request(attn_mask, dropout_p, is_causal, scale, enable_gqa)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return attend(query, key, value, request).transpose(1, 2)


_answer_outside_graphs = _disable_dynamo(_answer_pytorch)


def is_checkpointed(model: nn.Module) -> bool:
    """Whether gradient checkpointing within a model's forward will run this attention again, after the forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        if frame.f_code is _CALL and frame.f_locals["self"] is model:
            return False
        frame = frame.f_back
    return False


_CALL = nn.Module._call_impl.__code__
