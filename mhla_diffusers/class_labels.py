"""Classes of a DiT pipeline by number or name."""

from collections.abc import Collection
from typing import Any


def class_label(pipe: Any, prompt: str) -> int:
    """The number of a class, given by number, by name, or as the last word of a phrase such as "a seven".

    Raises:
        ValueError: the pipeline has no such class.
    """
    numbers = {str(number): number for number in _classes(pipe)}
    text = prompt.strip()
    number = text.lstrip("0") or text[-1:]
    if number in numbers:
        return numbers[number]
    lower = {name.lower(): label for name, label in pipe.labels.items()}
    for name in (text, *text.split()[-1:]):
        # as it is written first: "Cardigan" is a dog of ImageNet, "cardigan" is not
        label = pipe.labels.get(name, lower.get(name.lower()))
        if label is not None:
            return int(label)
    known = ", ".join(sorted(pipe.labels)[:12])
    allowed = (
        f"from {min(numbers.values())} to {max(numbers.values())}{f', or a name such as {known}' if known else ''}"
    )
    raise ValueError(f"{prompt!r} is no class of this DiT; give a number {allowed}.")


def _classes(pipe: Any) -> Collection[int]:
    """Those with names, on which the pipeline was trained; all that the transformer has room for if none has a name."""
    return {int(label) for label in pipe.labels.values()} or range(pipe.transformer.config.num_embeds_ada_norm)
