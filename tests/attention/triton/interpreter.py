"""Triton's interpreter, several times faster, and with the bfloat16 of a GPU.

Most of its time goes into Python around a few operations of NumPy on small arrays. What is remembered here is what
follows from a type alone; what is left out is what has no effect. NumPy has no bfloat16: the interpreter keeps its bits
as integers, multiplies those in ``tl.dot``, and cuts a float32 off where a GPU rounds it.
"""

from functools import cache

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter


@cache
def make_interpreter_fast() -> None:
    """Once for a process; on a machine with a GPU nothing, for there the same classes belong to the compiler."""
    if triton.knobs.runtime.interpret:
        _patch_language_once_per_function()
        _round_bfloat16()
        _multiply_bfloat16()
        _sort_with_numpy()


def _patch_language_once_per_function() -> None:
    """Replace the functions of triton.language once for each helper function, not at each call.

    From the second call on that does nothing, for the replacements stay.
    """
    patched = set()
    patch_language = interpreter._patch_lang

    def call(self, *args, **kwargs):
        if self.fn not in patched:
            patched.add(self.fn)
            patch_language(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _float32_of(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bfloat16_of(values):
    """Bits of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = values.view(np.uint32)
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def _round_bfloat16() -> None:
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        types = src.dtype.scalar, dst_type.scalar
        if types == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_float32_of(src.data), tl.float32)
        if types == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_bfloat16_of(np.ascontiguousarray(src.data)), tl.bfloat16)
        return cast(self, src, dst_type)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


def _multiply_bfloat16() -> None:
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, *others):
        a, b = (
            interpreter.TensorHandle(_float32_of(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        return create_dot(self, a, b, *others)

    interpreter.InterpreterBuilder.create_dot = dot


def _sort_with_numpy() -> None:
    """Triton sorts by a network of exchanges, one element after the other in the interpreter: half of its time."""

    def sort(x, dim=None, descending=False):
        assert not descending
        axis = -1 if dim is None else getattr(dim, "value", dim)
        return tl.tensor(interpreter.TensorHandle(np.sort(x.handle.data, axis=axis), x.dtype.scalar), x.type)

    tl.sort = sort
