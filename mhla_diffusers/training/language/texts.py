"""Texts as rows of tokens: the pages of Python's own ``help()``, or a data set of the Hub."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

PYTHON_TOPICS = "python-topics"
"""Name of the text that every Python has: ``pydoc_data.topics``, under the licence of Python (PSF)."""
BYTES = 256
"""Tokens of a vocabulary of bytes."""
_HELD_OUT = 10
"""Every tenth page is kept from training."""

Row = dict[str, torch.Tensor]
"""``input_ids`` and ``labels``, (N,)."""


class Rows(Dataset[Row]):
    """Rows of one length, cut from one text after another.

    Args:
        tokens: (n,) of all texts; what does not fill the last row is left out.
        length: N.
    """

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].unflatten(0, (-1, length))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        return {"input_ids": row, "labels": row}

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def python_topics(length: int, held_out: bool) -> Rows:
    """The pages of ``help()`` on Python's language as bytes.

    Args:
        length: tokens of a row.
        held_out: every tenth page, or all others.
    """
    from pydoc_data.topics import topics

    pages = [topics[name] for name in sorted(topics)]
    chosen = [page for index, page in enumerate(pages) if (index % _HELD_OUT == _HELD_OUT - 1) == held_out]
    return Rows(torch.tensor(list("\n\n".join(chosen).encode())), length)


class StreamedRows(IterableDataset[Row]):
    """Rows of one length, cut from texts as they come.

    Args:
        texts: gives the texts from their begin.
        encode: a text as tokens, its end marked.
        length: tokens of a row.
    """

    def __init__(self, texts: Callable[[], Iterable[str]], encode: Callable[[str], list[int]], length: int) -> None:
        self.texts = texts
        self.encode = encode
        self.length = length

    def __iter__(self) -> Iterator[Row]:
        """Every row; what does not fill the last one is left out."""
        rest: list[int] = []
        for text in self.texts():
            rest += self.encode(text)
            while len(rest) >= self.length:
                row, rest = torch.tensor(rest[: self.length]), rest[self.length :]
                yield {"input_ids": row, "labels": row}


def hub_texts(name: str, subset: str | None, tokenizer: str, length: int) -> StreamedRows:
    """Rows of a data set of the Hub that is read while it is trained on.

    Args:
        name: of the data set.
        subset: of its configuration.
        tokenizer: model whose tokenizer cuts the texts.
        length: tokens of a row.

    Raises:
        ValueError: the package ``datasets`` is not installed, or the tokenizer knows no end of a text.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            'Data sets of the Hub are read with the package datasets: pip install "mhla_diffusers[language]".'
        ) from error
    from transformers import AutoTokenizer

    cutter: Any = AutoTokenizer.from_pretrained(tokenizer)
    if cutter.eos_token_id is None:
        raise ValueError(f"The tokenizer of {tokenizer} marks no end of a text; choose one that has an eos_token.")

    def texts() -> Iterator[str]:
        return (sample["text"] for sample in load_dataset(name, subset, split="train", streaming=True))

    return StreamedRows(texts, lambda text: [*cutter(text)["input_ids"], cutter.eos_token_id], length)
