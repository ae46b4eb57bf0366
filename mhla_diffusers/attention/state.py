"""Causal MHLA step by step: states of earlier frame blocks instead of keys and values.

Of every frame block that is over (see :mod:`mhla_diffusers.attention.causal`) the KV states are kept, and of the one
that is not, its state so far, or where the own block is attended to with softmax, its keys and values.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal, get_args

import torch

from ..errors import check_choice
from .api import BACKENDS, backend_for, check_call
from .call import MHLACall
from .causal import Causal, Own, beside_earlier, causal_attention, has_own_part, least_mixing, own_softmax, part_of
from .layout import check_layout, frame_block_starts
from .precision import sum_dtype, without_autocast
from .rope import Rotary, rotated

Beyond = Literal["error", "relative"]


class MHLAState:
    """State of earlier tokens, which :meth:`step` reads and updates.

    Equal to ``mhla_attention(..., causal=...)`` of the whole sequence up to rounding, wherever steps end: after any
    token, or with ``causal="block"`` after any frame block. With F frame blocks on the grid it keeps the KV states of
    at most F + 1, of D (D + 1) numbers for every block and head, independent of the sequence length, and with
    ``linear_weight`` less than a frame block of keys and values. A cache of keys and values keeps 2 N D.

    Args:
        grid: token grid of the longest sequence, or with ``beyond="relative"`` of what was trained.
        blocks: block count per axis; the product is M.
        causal: "token" or "block".
        beyond: what comes behind the grid's last token: "error", or "relative", by which later blocks see what the last
            one of the matrix sees (:func:`mhla_diffusers.attention.mixing.extend_mixing`). It needs two blocks of one
            length, or more, along the first axis.
        backend: see :func:`mhla_attention`.
        **settings: feature_map, rope, normalize and eps of :func:`mhla_attention`.

    Raises:
        ValueError: grid, blocks or settings do not fit.
    """

    def __init__(
        self,
        grid: Sequence[int],
        blocks: Sequence[int],
        *,
        causal: Causal,
        beyond: Beyond = "error",
        backend: str = "auto",
        **settings: Any,
    ) -> None:
        self.grid, self.blocks = check_layout(grid, blocks)
        check_choice("backend", backend, BACKENDS)
        check_choice("beyond", beyond, get_args(Beyond))
        if beyond == "relative" and (self.blocks[0] < 2 or self.grid[0] % self.blocks[0]):
            raise ValueError(
                "beyond='relative' needs at least two blocks of equal length, but the first axis of the grid "
                f"{self.grid} has {self.grid[0]} tokens in {self.blocks[0]} blocks."
            )
        self.causal, self.beyond, self.backend, self.settings = causal, beyond, backend, settings
        self.length = 0
        """Tokens so far."""
        # first token of every frame block of the grid, and the end of the last one
        self._starts = frame_block_starts(self.grid, self.blocks)
        # (B, H, F, blocks of a frame block, D + normalize, D) of the frame blocks that are over, oldest first; behind
        # the matrix's last frame block the oldest is a sum, which _row_of divides
        self._closed: torch.Tensor | None = None
        # (B, H, blocks of a frame block, D + normalize, D): their mixture for the open frame block, and its own states
        self._earlier: torch.Tensor | None = None
        self._open: torch.Tensor | None = None
        # its keys after RoPE and values (B, H, n, D), for softmax among tokens
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mixing: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        output_norm: torch.Tensor | None = None,
        output_gate: torch.Tensor | None = None,
        linear_weight: torch.Tensor | None = None,
        keep: bool = True,
    ) -> torch.Tensor:
        """Attend with the next tokens: one or more, or with ``causal="block"`` whole frame blocks.

        Args:
            query: (B, n, H, D).
            key: like ``query``.
            value: like ``query``.
            mixing: (M, M) or (H, M, M); like the other weights it may be offloaded between the steps. Without gradients
                it must stay the same within a frame block, for which the past is mixed once.
            rotary: (cos, sin), each (1 or B, n, 1, D), of these tokens.
            output_norm: (D,).
            output_gate: (B, n, H, D).
            linear_weight: (H,), in every step or in none.
            keep: whether they belong to the past of the next step. Without it the state stays as it is, as for a frame
                block that is denoised in several steps.

        Returns:
            (B, n, H, D).

        Raises:
            ValueError: shapes do not fit each other or the state, or the sequence is longer than the grid with
                ``beyond="error"``. After this and any other error the state is as before.
        """
        call = MHLACall(
            query=query,
            key=key,
            value=value,
            mixing=mixing,
            grid=self.grid,
            blocks=self.blocks,
            rotary=rotary,
            output_norm=output_norm,
            output_gate=output_gate,
            linear_weight=linear_weight,
            causal=self.causal,
            **self.settings,
        )
        check_call(call)
        self._check(query)
        backend = backend_for(call, self.backend)
        with without_autocast(query.device):  # states and their mixtures stay as precise as they are kept
            if self._earlier is None and not torch.is_grad_enabled():
                self._mix_earlier(self._row_of(call))  # before what is put back, as every denoising step needs it
            before = vars(self).copy()
            try:
                output = self._go_on(backend, call, keep)
            except BaseException:  # an interrupted step too would leave half of itself behind
                vars(self).update(before)
                raise
        if not keep:
            vars(self).update(before)
        if torch.is_grad_enabled():  # an update may follow, after which the past is mixed otherwise
            self._earlier = None
        return output

    @property
    def nbytes(self) -> int:
        """Bytes that the state takes."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def reorder(self, samples: torch.Tensor | Sequence[int]) -> None:
        """Select or repeat samples of the batch by index, as beam search does."""
        for name, tensor in self._tensors().items():
            setattr(self, name, tensor.index_select(0, torch.as_tensor(samples, device=tensor.device)))

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def _check(self, query: torch.Tensor) -> None:
        batch, count, heads, head_dim = query.shape
        known = next(iter(self._tensors().values()), None)
        if known is not None and (known.shape[0], known.shape[1], known.shape[-1]) != (batch, heads, head_dim):
            raise ValueError(
                f"This state is for a batch of {known.shape[0]} with {known.shape[1]} heads of {known.shape[-1]}, but "
                f"query has {batch} with {heads} heads of {head_dim}. Use another state for other samples; reorder() "
                "selects samples of this one."
            )
        end, last = self.length + count, self._starts[-1]
        if self.beyond == "error" and end > last:
            raise ValueError(
                f"After {self.length} tokens, {count} more exceed the {last} tokens of the grid {self.grid}. Give a "
                "longer grid (in a patch more blocks, or a larger block_length), or beyond='relative'."
            )
        is_whole = end in self._starts if end <= last else (end - last) % self._starts[1] == 0
        if self.causal == "block" and not is_whole:
            raise ValueError(
                f"With causal='block' a step is one whole block of the first axis; after {self.length} tokens the "
                f"next has {self._place()[2]} tokens, but query has {count}."
            )

    def _place(self) -> tuple[int, int, int]:
        """Index of the unfinished frame block, its tokens so far, and its final length."""
        starts, length = self._starts, self.length
        if length < starts[-1]:
            row = bisect_right(starts, length) - 1
            return row, length - starts[row], starts[row + 1] - starts[row]
        row, offset = divmod(length - starts[-1], starts[1])
        return self.blocks[0] + row, offset, starts[1]

    def _go_on(self, backend: ModuleType, call: MHLACall, keep: bool) -> torch.Tensor:
        """Output frame block by frame block; the beginning of a sequence is one call.

        Without ``keep`` what the last one leaves behind is not summed up.
        """
        outputs, done, count = [], 0, call.query.shape[1]
        if not self.length and count > self._starts[1]:
            done = min(count, self._starts[-1])
            begin = part_of(call, slice(0, done))
            outputs.append(causal_attention(begin, backend))
            if keep or done < count:
                self._keep_begin(backend, begin)
        while done < count:
            _, offset, length = self._place()
            end = min(done + length - offset, count)
            piece, earlier = self._piece(part_of(call, slice(done, end)))
            outputs.append(self._attend(backend, piece, earlier, keep or end < count))
            done = end
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]

    def _row_of(self, call: MHLACall) -> torch.Tensor:
        """What the open frame block sees: (..., frame blocks up to it, its blocks, blocks of a frame block)."""
        row, side = self._place()[0], math.prod(self.blocks[1:])
        last = min(row, self.blocks[0] - 1)
        # of one frame block alone, as a step of one token must not cost what the whole matrix does
        mixing = call.mixing.unflatten(-1, (-1, side)).unflatten(-3, (-1, side))[..., last, :, : last + 1, :]
        if row > last:  # the oldest is the mean of frame blocks that are kept added up
            mixing = torch.cat([mixing[..., :1, :] / (row - last + 1), mixing[..., 1:, :]], dim=-2)
        return least_mixing(mixing)

    def _mix_earlier(self, mixing: torch.Tensor) -> None:
        """Mix the past for the open frame block, once; with gradients in every step, whose mixing they need."""
        if self._closed is not None and (self._earlier is None or torch.is_grad_enabled()):
            coefficients = mixing[..., :-1, :].flatten(-2).expand(self._closed.shape[1], -1, -1)
            self._earlier = _mixed(coefficients, self._closed.flatten(2, 3))

    def _piece(self, call: MHLACall) -> tuple[MHLACall, torch.Tensor | None]:
        """Tokens of one frame block as a call of their own, and the mixture of earlier frame blocks that they see."""
        mixing = self._row_of(call)
        self._mix_earlier(mixing)
        frames = call.query.shape[1] // math.prod(self.grid[1:])
        grid, blocks = (frames, *self.grid[1:]), (1, *self.blocks[1:])
        return replace(call, grid=grid, blocks=blocks, mixing=mixing[..., -1, :], first=0), self._earlier

    def _attend(self, backend: ModuleType, piece: MHLACall, earlier: torch.Tensor | None, keep: bool) -> torch.Tensor:
        seen = replace(piece, mixing=torch.eye(piece.mixing.shape[-1], device=piece.query.device))
        if not has_own_part(piece):
            states = backend.states(piece)
            own = _mixed(piece.mixing, states)
            output = backend.read(seen, own if earlier is None else earlier + own)[0]
            if keep:
                self._keep(piece, states)
            return output
        own_part = self._own(backend, piece)
        if self._open is not None and piece.linear_weight is None:
            before = _mixed(piece.mixing, self._open)
            earlier = before if earlier is None else earlier + before
        seen = replace(seen, output_norm=None, output_gate=None, linear_weight=None)
        output = beside_earlier(piece, own_part, None if earlier is None else backend.read(seen, earlier))
        if keep:
            self._keep(piece, backend.states(piece))
        return output

    def _own(self, backend: ModuleType, piece: MHLACall) -> Own:
        """What the tokens of a piece take from their own frame block."""
        if piece.causal == "block" or piece.linear_weight is None:
            return backend.own_block(piece)
        query, key, value = _by_head(piece)
        if self._keys is not None and self._values is not None:
            key, value = torch.cat([self._keys, key], dim=2), torch.cat([self._values, value], dim=2)
        self._keys, self._values = key, value
        output, log_sum = own_softmax(query, key, value, is_causal=True)
        return output.transpose(1, 2), log_sum.transpose(1, 2)

    def _keep(self, piece: MHLACall, states: torch.Tensor) -> None:
        """Add a piece to the state."""
        _, offset, length = self._place()
        self._open = states if self._open is None else self._open + states
        self.length += piece.query.shape[1]
        if offset + piece.query.shape[1] == length:
            self._close(self._open[:, :, None])

    def _close(self, frame_blocks: torch.Tensor) -> None:
        """Append finished frame blocks (B, H, n, blocks of a frame block, D + normalize, D)."""
        closed = frame_blocks if self._closed is None else torch.cat([self._closed, frame_blocks], dim=2)
        too_many = closed.shape[2] - (self.blocks[0] - 1)
        if too_many > 0 and self.blocks[0] > 1:
            oldest = closed[:, :, : too_many + 1].sum(dim=2, keepdim=True)
            closed = torch.cat([oldest, closed[:, :, too_many + 1 :]], dim=2)
        self._closed = closed if self.blocks[0] > 1 else None
        self._earlier = self._open = self._keys = self._values = None

    def _keep_begin(self, backend: ModuleType, begin: MHLACall) -> None:
        """State after the beginning of a sequence."""
        count = begin.query.shape[1]
        over = sum(start <= count for start in self._starts) - 1
        by_frame_block = backend.states(begin).unflatten(2, (self.blocks[0], -1))
        self.length = count
        self._close(by_frame_block[:, :, :over])
        rest = count - self._starts[over]
        if rest:
            self._open = by_frame_block[:, :, over]
            if begin.causal == "token" and begin.linear_weight is not None:
                _, self._keys, self._values = _by_head(part_of(begin, slice(count - rest, count)))


def _mixed(mixing: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Multi-Head Mixing of (B, H, M, D + normalize, D)."""
    return (mixing.to(states.dtype) @ states.flatten(3)).unflatten(3, states.shape[3:])


def _by_head(call: MHLACall) -> tuple[torch.Tensor, ...]:
    """Query and key after RoPE and value, (B, H, n, D)."""
    dtype = sum_dtype(call.query.dtype)
    query, key = (rotated(x.to(dtype), call.rotary) for x in (call.query, call.key))
    return query.transpose(1, 2), key.transpose(1, 2), call.value.to(dtype).transpose(1, 2)
