"""Count the FLOPs of an attention without its projections; a multiply-add is two."""

from dataclasses import dataclass

from .blocks import list_length


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes that determine the cost of one self-attention, for one sample and one forward."""

    tokens: int
    """N, of the grid."""
    heads: int
    head_dim: int
    blocks: int = 1
    """M, KV states; one mixes nothing, which is plain linear attention, and with none nothing is read from states."""
    mixtures: int | None = None
    """Blocks of queries that mix the states; None for M, with key sums beside the states."""
    block_pairs: int = 0
    """Pairs of a query and a key in listed blocks of the grid, of all heads."""
    pooled_keys: int = 0
    """Blocks that take part through their pooled keys; 0 without them."""
    extra: int = 0
    """Extra tokens, n, which attend to everything and are attended to by everything with softmax."""
    own_pairs: int = 0
    """Pairs that causal attention weighs one by one with MHLA's weights, within a block of the sequence."""

    @classmethod
    def of_sparse(
        cls,
        tokens: int,
        heads: int,
        head_dim: int,
        query_blocks: int,
        key_blocks: int,
        stretches: int,
        density: float,
        extra: int = 0,
    ) -> "AttentionSizes":
        """Return the sizes of sparse attention; where all key blocks are listed it is softmax attention.

        ``stretches`` are those with a KV state, which every query block mixes; 0 with means alone.
        """
        listed = list_length(density, key_blocks)
        pairs = round(listed / key_blocks * heads * tokens**2)
        if listed == key_blocks:
            return cls(tokens, heads, head_dim, 0, query_blocks, pairs, extra=extra)
        return cls(tokens, heads, head_dim, stretches, query_blocks, pairs, key_blocks, extra)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that softmax attention would see, over all heads."""
        return self.heads * (self.tokens + self.extra) ** 2

    @property
    def listed_pairs(self) -> int:
        """Pairs that are attended to with softmax: in listed blocks, and all with an extra token in them."""
        return self.block_pairs + self.pairs - self.heads * self.tokens**2

    @property
    def softmax_flops(self) -> int:
        """FLOPs of softmax attention: two products of D channels for every pair."""
        return 4 * self.pairs * self.head_dim

    @property
    def linear_flops(self) -> int:
        """FLOPs of KV states, Multi-Head Mixing and reading; of MHLA each with the normaliser."""
        mixing = 2 * self.blocks * self._mixtures * self._state if self.blocks > 1 else 0
        return 4 * self.tokens * self._state + mixing if self.blocks else 0

    @property
    def flops(self) -> int:
        """FLOPs of all branches and extra tokens together."""
        pooled = self.heads * self.tokens * self.pooled_keys
        return self.linear_flops + 4 * self.head_dim * (self.listed_pairs + self.own_pairs + pooled)

    @property
    def _mixtures(self) -> int:
        return self.blocks if self.mixtures is None else self.mixtures

    @property
    def _state(self) -> int:
        """Numbers of one state, of all heads."""
        return self.heads * self.head_dim * (self.head_dim + (self.mixtures is None))
