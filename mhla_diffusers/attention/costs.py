"""What an attention costs without its projections, counted from sizes. A multiplication and an addition count two."""

from dataclasses import dataclass, replace

from .block_lists import list_length

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
    tile_pairs: int = 0
    """Pairs of a query and a key in exact tiles of the grid, of all heads."""
    means: int = 0
    """Tiles that take part through their means; 0 without them."""
    linear_branch: bool = True
    """Whether MHLA over all blocks is computed."""
    extra: int = 0
    """Extra tokens, n, which attend to everything and are attended to by everything exactly."""
    seen_pairs: int | None = None
    """Pairs of a query and a key, of all heads, that softmax attention in its place sees, where the order of the tokens
    keeps others from it; None for all pairs."""
    own_pairs: int = 0
    """Pairs that causal attention weighs one by one with MHLA's weights, within a block of the sequence."""

    def with_exact_tiles(self, tiles: int, share: float, *, pooled: bool, equal_lists: bool = True) -> "AttentionSizes":
        """The same with exact tiles beside MHLA; at a share of 1 they are all there is.

        Args:
            tiles: T.
            share: part of all pairs of tiles; every query tile has at least one key tile.
            pooled: whether the other tiles take part through their means.
            equal_lists: whether all query tiles have as many key tiles; calibrated lists differ.
        """
        listed = list_length(share, tiles) / tiles if equal_lists else max(share, 1 / tiles)
        return replace(
            self,
            tile_pairs=round(listed * self.heads * self.tokens**2),
            means=tiles if pooled and share < 1 else 0,
            linear_branch=share < 1,
        )

    @property
    def pairs(self) -> int:
        """Of a query and a key, of all heads: those that softmax attention in its place sees."""
        return self._all_pairs if self.seen_pairs is None else self.seen_pairs

    @property
    def _all_pairs(self) -> int:
        return self.heads * (self.tokens + self.extra) ** 2

    @property
    def exact_pairs(self) -> int:
        """Pairs that are attended to with softmax: in exact tiles, and all with a token outside the grid in them."""
        return self.tile_pairs + self._all_pairs - self.heads * self.tokens**2

    @property
    def softmax_flops(self) -> int:
        """Of softmax attention in its place: two products of D channels for every pair."""
        return 4 * self.pairs * self.head_dim

    @property
    def linear_flops(self) -> int:
        """Of MHLA alone: KV summaries, Multi-Head Mixing and reading, each with the normaliser."""
        state = self.heads * self.head_dim * (self.head_dim + 1)
        return 4 * self.tokens * state + (2 * self.blocks**2 * state if self.blocks > 1 else 0)

    @property
    def listed_flops(self) -> int:
        """Of softmax attention over the exact tiles, from and to extra tokens alone."""
        return 4 * self.exact_pairs * self.head_dim

    @property
    def flops(self) -> int:
        """Of exact tiles, extra tokens, means and MHLA together; of MHLA where there is nothing else."""
        means = 4 * self.heads * self.tokens * self.means * self.head_dim
        own = 4 * self.own_pairs * self.head_dim
        return (self.linear_flops if self.linear_branch else 0) + self.listed_flops + own + means

    @property
    def summary_bytes(self) -> int:
        """KV summaries and key sums of all blocks, in float32."""
        return _FLOAT32 * self.blocks * self.heads * self.head_dim * (self.head_dim + 1)

    @property
    def mean_bytes(self) -> int:
        """Mean keys and values of all tiles, in float32."""
        return 2 * _FLOAT32 * self.means * self.heads * self.head_dim

    @property
    def held_bytes(self) -> int:
        """Held beside query, key, value and output: summaries, their mixtures, and means."""
        return (2 * self.summary_bytes if self.linear_branch else 0) + self.mean_bytes

    @property
    def moved_bytes(self) -> int:
        """The least that moves beside query, key, value and output: summaries and means, written once and read once."""
        return (2 * self.summary_bytes if self.linear_branch else 0) + 2 * self.mean_bytes

    @property
    def weight_bytes(self) -> int:
        """All weights of softmax attention, written out in float32; a fused kernel holds next to none."""
        return _FLOAT32 * self.pairs
