"""What an attention costs without its projections, counted from sizes. A multiplication and an addition count two."""

from dataclasses import dataclass

from .call import list_length

_FLOAT32 = 4


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
    """Blocks of queries that mix the states; None for M."""
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
        """Return the sizes of sparse attention; at a density of 1 it is softmax attention.

        Args:
            tokens: N, of the grid.
            heads: H.
            head_dim: D.
            query_blocks: uniform blocks of queries.
            key_blocks: blocks of keys; one that is not listed takes part through its mean.
            stretches: KV states of stretches of keys, which every query block mixes; 0 with means alone.
            density: part of all pairs of blocks that is listed; every query block has at least one key block.
            extra: extra tokens.
        """
        listed = list_length(density, key_blocks)
        is_softmax = listed == key_blocks
        return cls(
            tokens,
            heads,
            head_dim,
            blocks=0 if is_softmax else stretches,
            mixtures=query_blocks,
            block_pairs=round(listed / key_blocks * heads * tokens**2),
            pooled_keys=0 if is_softmax else key_blocks,
            extra=extra,
        )

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
        state = self.heads * self.head_dim * (self.head_dim + (self.mixtures is None))
        mixing = 2 * self.blocks * self._mixtures * state if self.blocks > 1 else 0
        return 4 * self.tokens * state + mixing if self.blocks else 0

    @property
    def _mixtures(self) -> int:
        return self.blocks if self.mixtures is None else self.mixtures

    @property
    def listed_flops(self) -> int:
        """FLOPs of softmax attention over the listed blocks, and from and to extra tokens."""
        return 4 * self.listed_pairs * self.head_dim

    @property
    def flops(self) -> int:
        """FLOPs of all branches and extra tokens together."""
        pooled = 4 * self.heads * self.tokens * self.pooled_keys * self.head_dim
        own = 4 * self.own_pairs * self.head_dim
        return self.linear_flops + self.listed_flops + own + pooled

    @property
    def state_bytes(self) -> int:
        """KV and normaliser states of all blocks, in float32."""
        return self.blocks * self._bytes_of_state

    @property
    def mixed_bytes(self) -> int:
        """Mixtures of the states, in float32."""
        return self._mixtures * self._bytes_of_state if self.blocks else 0

    @property
    def _bytes_of_state(self) -> int:
        return _FLOAT32 * self.heads * self.head_dim * (self.head_dim + (self.mixtures is None))

    @property
    def pooled_bytes(self) -> int:
        """Pooled keys and values of all blocks, in float32."""
        return 2 * _FLOAT32 * self.pooled_keys * self.heads * self.head_dim

    @property
    def held_bytes(self) -> int:
        """Held beside query, key, value and output: states, their mixtures, and pooled keys."""
        return self.state_bytes + self.mixed_bytes + self.pooled_bytes

    @property
    def weight_bytes(self) -> int:
        """The attention matrix of softmax in float32, which a fused kernel does not store."""
        return _FLOAT32 * self.pairs
