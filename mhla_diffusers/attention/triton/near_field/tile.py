"""What the near field's kernels share: operands of the tensor cores, and one number per query."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import triton
import triton.language as tl

from ..forward_kernels import token_weight
from ..tile import to_bfloat16, tokens_in


@triton.jit
def operand(x, number: tl.constexpr):
    """A float32 tile rounded to the input's type, which is what softmax attention multiplies in."""
    if number == tl.float32:
        return x
    elif number == tl.bfloat16:
        return to_bfloat16(x)
    else:
        return x.to(tl.float16)


@triton.jit
def product(a, b, total):
    """``a @ b + total`` of two tiles from :func:`operand`; float32 ones are not rounded to tf32."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def key_bias(key_mask, tile, layout):
    """What is added to the logits of a tile of keys, (tokens,): minus infinity for a key that takes no part."""
    if key_mask is None:
        return tl.where(tile.exists, 0.0, float("-inf"))
    else:
        return tl.log(token_weight(key_mask, tile, layout))


@triton.jit
def numbers_of(pointer, tile, layout):
    """Addresses of a tile's numbers, one per token, in a contiguous (B, H, N)."""
    return pointer + (tile.batch * layout.heads + tile.head) * tokens_in(layout) + tile.tokens
