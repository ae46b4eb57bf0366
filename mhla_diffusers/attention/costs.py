"""What an attention costs without its projections, counted from sizes. A multiplication and an addition count two."""


def softmax_flops(pairs: int, head_dim: int) -> int:
    """Two products of D channels for every pair of a query and a key."""
    return 4 * pairs * head_dim


def state_size(blocks: int, heads: int, head_dim: int) -> int:
    """Numbers in the KV summaries and key sums of all blocks."""
    return blocks * heads * head_dim * (head_dim + 1)


def linear_flops(tokens: int, blocks: int, heads: int, head_dim: int) -> int:
    """KV summaries, Multi-Head Mixing and reading, each with the normaliser; one block mixes nothing."""
    state = state_size(1, heads, head_dim)
    return 4 * tokens * state + (2 * blocks**2 * state if blocks > 1 else 0)
