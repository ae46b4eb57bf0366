"""What an audit has found: how far patched attentions are from those before, and what block lists hold."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..reporting import text_table

_MOST_ROWS = 12
"""Of the table of steps; of more, several share a row."""


DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""At which it is measured how much softmax weight the lists hold."""


@dataclass(frozen=True)
class LayerAudit:
    """One patched self-attention. S steps, H heads."""

    component: str
    """Its transformer, such as ``transformer_2``."""
    attention: str
    """Its name in the transformer."""
    name: str
    """Shown: with the component's name before it, where a pipeline has two transformers."""
    errors: torch.Tensor
    """Squared error of what every head hands to the output projection, float64 (S, H); also of steps in which the patch
    rests, where it is the error that it would have."""
    squares: torch.Tensor
    """Square of what it hands on without the patch, float64 (S, H)."""
    rests: tuple[bool, ...]
    """Of every step, whether the patch rested in it."""
    moves: float
    """Relative squared change of the transformer's output where this layer alone is patched."""
    density: float | None = None
    """Part of all pairs of blocks that its lists hold; None without lists chosen by content."""
    mass_kept: float | None = None
    """Part of softmax attention's weight that these pairs hold, averaged over heads, queries and calls; else None."""
    mass_at: tuple[float, ...] = ()
    """The same at each of :data:`DENSITIES`; empty without lists."""

    @property
    def acting(self) -> torch.Tensor:
        """:attr:`errors` of the steps in which the patch did not rest, 0 in the others: (S, H)."""
        return self.errors * ~torch.tensor(self.rests)[:, None]

    @property
    def error(self) -> float:
        """Relative error over the run, ‖patched − before‖ / ‖before‖."""
        return float(_relative(self.acting.sum(), self.squares.sum()))

    @property
    def errors_of_heads(self) -> torch.Tensor:
        """The same of every head: (H,)."""
        return _relative(self.acting.sum(dim=0), self.squares.sum(dim=0))

    @property
    def worst_head(self) -> int:
        """Number of the head with the largest error."""
        return int(self.errors_of_heads.argmax())

    @property
    def change(self) -> float:
        """Relative change of the transformer's output where this layer alone is patched, √ :attr:`moves`."""
        return math.sqrt(self.moves)


@dataclass(frozen=True)
class Audit:
    """What a patch costs, layer by layer, head by head and step by step; printed, it is a table."""

    layers: tuple[LayerAudit, ...]
    """Of all transformers."""
    rests: tuple[bool, ...]
    """Of every step, whether the patch rested in it."""
    knows_steps: bool
    """Whether the pipeline told its steps; otherwise every forward counts as one."""
    moves: float
    """Relative squared change of the transformer's output by the whole patch, where it does not rest."""

    @property
    def errors_of_steps(self) -> torch.Tensor:
        """Relative error of every layer and step: (layers, S); NaN where a layer does not run."""
        found = [_relative(layer.acting.sum(dim=1), layer.squares.sum(dim=1)) for layer in self.layers]
        return torch.stack(found)

    @property
    def errors_of_heads(self) -> torch.Tensor:
        """Relative error of every layer and head: (layers, H)."""
        return torch.stack([layer.errors_of_heads for layer in self.layers])

    def __str__(self) -> str:
        lines = [self._table_of_layers(), "", self._table_of_steps(), ""]
        at_rest = " where it does not rest, which it does in every step" if all(self.rests) else ""
        lines.append(f"together the patch moves the output by {math.sqrt(self.moves):.1%}{at_rest}")
        return "\n".join(lines)

    def _table_of_layers(self) -> str:
        has_lists = any(layer.density is not None for layer in self.layers)
        header = ["layer", "error", "worst head", *(("density", "mass kept") if has_lists else ()), "moves"]
        rows = []
        for layer in self.layers:
            worst = layer.worst_head
            kept = ["-" if part is None else f"{part:.1%}" for part in (layer.density, layer.mass_kept)]
            row = [layer.name, f"{layer.error:.1%}", f"{worst}: {layer.errors_of_heads[worst]:.1%}"]
            rows.append([*row, *(kept if has_lists else ()), f"{layer.change:.1%}"])
        return text_table(header, rows, right=True)

    def _table_of_steps(self) -> str:
        errors = torch.stack([layer.acting.sum(dim=1) for layer in self.layers]).sum(dim=0)
        squares = torch.stack([layer.squares.sum(dim=1) for layer in self.layers]).sum(dim=0)
        width = math.ceil(len(errors) / _MOST_ROWS)
        rows = []
        for start in range(0, len(errors), width):
            here = slice(start, min(start + width, len(errors)))
            name = str(start) if here.stop - start == 1 else f"{start} to {here.stop - 1}"
            resting = "  as before the patch" if all(self.rests[here]) else ""
            rows.append((name, f"{_relative(errors[here].sum(), squares[here].sum()):.1%}{resting}"))
        return text_table(("step" if self.knows_steps else "forward", "error"), rows)

    def to_dict(self) -> dict[str, Any]:
        """Figures as JSON holds them; errors are relative, None where nothing ran."""
        by_steps = self.errors_of_steps
        return {
            "layers": [
                {
                    "name": layer.name,
                    "error": layer.error,
                    "errors_of_heads": _numbers(layer.errors_of_heads),
                    "errors_of_steps": _numbers(by_steps[index]),
                    "moves": layer.change,
                    "density": layer.density,
                    "mass_kept": layer.mass_kept,
                }
                for index, layer in enumerate(self.layers)
            ],
            "knows_steps": self.knows_steps,
            "rests": list(self.rests),
            "moves": math.sqrt(self.moves),
        }


def _relative(errors: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """NaN where there is nothing to compare with."""
    return (errors / squares).sqrt()


def _numbers(values: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
