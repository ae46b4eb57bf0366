"""Which processes share an attention, and which tokens each of them holds."""

from dataclasses import dataclass
from itertools import accumulate

Share = tuple[int, int]
"""Place on the grid, in raster order, of a process's first token, and how many it holds."""


@dataclass(frozen=True)
class Group:
    """Processes that work together, as one of them sees them."""

    name: str
    """As PyTorch knows it."""
    size: int
    rank: int
    """This process's place among them."""


@dataclass(frozen=True)
class Parallel:
    """The processes over which diffusers' context parallelism spreads the tokens of a transformer.

    The process u of those that exchange heads, in the row r of the ring, holds share r U + u of the tokens.
    """

    ring: Group
    """Those that keep their tokens and exchange states."""
    ulysses: Group
    """Those that exchange tokens for heads."""
    whole: Group
    """All of them."""
    anything: bool = False
    """Whether shares, and numbers of heads, may differ by one."""

    def shares(self, tokens: int, kind: str = "tokens") -> list[Share]:
        """Shares of all processes, of so many tokens of a kind, as errors call it.

        Raises:
            ValueError: the processes do not divide the tokens, and shares may not differ.
        """
        size = self.whole.size
        if tokens % size and not self.anything:
            way_out = "ring_anything=True" if self.ulysses.size == 1 else "ulysses_anything=True"
            both = self.ulysses.size > 1 and self.ring.size > 1
            more = "with one of the two degrees alone, " if both else ""
            raise ValueError(
                f"{tokens} {kind} cannot be split evenly over {size} processes; allowed is a number that {size} "
                f"divides (another height, width or number of frames, or length of the text), or {more}"
                f"ContextParallelConfig(..., {way_out})."
            )
        if tokens < size:
            raise ValueError(f"{tokens} {kind} are too few for {size} processes; use at most {tokens}.")
        return parts(tokens, size)

    def own_share(self, tokens: int) -> Share:
        """Share of this process, of so many tokens."""
        return self.shares(tokens)[self.whole.rank]

    def heads(self, count: int) -> slice:
        """The heads that this process attends with, of so many.

        Raises:
            ValueError: see :meth:`head_counts`.
        """
        counts, rank = self.head_counts(count), self.ulysses.rank
        return slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    def head_counts(self, count: int) -> list[int]:
        """How many heads each process attends with, of so many.

        Raises:
            ValueError: the processes do not divide them, and their numbers may not differ.
        """
        size = self.ulysses.size
        if (count % size and not self.anything) or count < size:
            raise ValueError(
                f"ulysses_degree={size} does not divide the {count} heads of this model; use a degree that does, such "
                f"as {next(d for d in range(min(size, count), 0, -1) if count % d == 0)}, ring_degree for the rest, "
                "or ContextParallelConfig(ulysses_degree=..., ulysses_anything=True)."
            )
        return [own for _, own in parts(count, size)]


def parts(count: int, size: int) -> list[Share]:
    """A count in parts that follow each other, the longer ones first, as ``torch.Tensor.tensor_split`` cuts."""
    least, longer = count // size, count % size  # torch.compile knows no divmod
    lengths = [least + (part < longer) for part in range(size)]
    return list(zip([0, *accumulate(lengths)], lengths, strict=False))
