"""What an attention costs without its projections, counted from sizes. A multiplication and an addition count two."""

from dataclasses import dataclass, replace

from .call import list_length

_FLOAT32 = 4


@dataclass(frozen=True)
class AttentionSizes:
    """All that the cost of one self-attention depends on, for one sample and one forward."""

    tokens: int
    """N, of the grid."""
    heads: int
    head_dim: int
    blocks: int = 1
    """M; one block mixes nothing, which is plain linear attention."""
    block_pairs: int = 0
    """Pairs of a query and a key in listed blocks of the grid, of all heads."""
    pooled_keys: int = 0
    """Blocks that take part through their pooled keys; 0 without them."""
    linear_branch: bool = True
    """Whether MHLA over all blocks is computed."""
    extra: int = 0
    """Extra tokens, n, which attend to everything and are attended to by everything with softmax."""
    seen_pairs: int | None = None
    """Pairs of a query and a key, of all heads, that softmax attention in its place sees, where the order of the tokens
    keeps others from it; None for all pairs."""
    own_pairs: int = 0
    """Pairs that causal attention weighs one by one with MHLA's weights, within a block of the sequence."""

    def with_sparse(self, blocks: int, density: float, *, pooled: bool) -> "AttentionSizes":
        """The same with the sparse branch beside MHLA; at a density of 1 it is all there is.

        Args:
            blocks: T, uniform blocks.
            density: part of all pairs of blocks that is listed; every query block has at least one key block.
            pooled: whether the other blocks take part through their pooled keys.
        """
        return replace(
            self,
            block_pairs=round(list_length(density, blocks) / blocks * self.heads * self.tokens**2),
            pooled_keys=blocks if pooled and density < 1 else 0,
            linear_branch=density < 1,
        )

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that softmax attention would see, over all heads."""
        return self._all_pairs if self.seen_pairs is None else self.seen_pairs

    @property
    def _all_pairs(self) -> int:
        return self.heads * (self.tokens + self.extra) ** 2

    @property
    def listed_pairs(self) -> int:
        """Pairs that are attended to with softmax: in listed blocks, and all with an extra token in them."""
        return self.block_pairs + self._all_pairs - self.heads * self.tokens**2

    @property
    def softmax_flops(self) -> int:
        """FLOPs of softmax attention: two products of D channels for every pair."""
        return 4 * self.pairs * self.head_dim

    @property
    def linear_flops(self) -> int:
        """FLOPs of MHLA alone: KV states, Multi-Head Mixing and reading, each with the normaliser."""
        state = self.heads * self.head_dim * (self.head_dim + 1)
        return 4 * self.tokens * state + (2 * self.blocks**2 * state if self.blocks > 1 else 0)

    @property
    def listed_flops(self) -> int:
        """FLOPs of softmax attention over the listed blocks, and from and to extra tokens."""
        return 4 * self.listed_pairs * self.head_dim

    @property
    def flops(self) -> int:
        """FLOPs of all branches and extra tokens together."""
        pooled = 4 * self.heads * self.tokens * self.pooled_keys * self.head_dim
        own = 4 * self.own_pairs * self.head_dim
        return (self.linear_flops if self.linear_branch else 0) + self.listed_flops + own + pooled

    @property
    def state_bytes(self) -> int:
        """KV and normaliser states of all blocks, in float32."""
        return _FLOAT32 * self.blocks * self.heads * self.head_dim * (self.head_dim + 1)

    @property
    def pooled_bytes(self) -> int:
        """Pooled keys and values of all blocks, in float32."""
        return 2 * _FLOAT32 * self.pooled_keys * self.heads * self.head_dim

    @property
    def held_bytes(self) -> int:
        """Held beside query, key, value and output: states, their mixtures, and pooled keys."""
        return (2 * self.state_bytes if self.linear_branch else 0) + self.pooled_bytes

    @property
    def weight_bytes(self) -> int:
        """All weights of softmax attention, written out in float32; a fused kernel holds next to none."""
        return _FLOAT32 * self.pairs
