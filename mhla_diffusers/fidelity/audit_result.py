"""What an audit has found: how far patched attentions are from those before, and what exact tiles leave out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.tiles import Cut
from ..patching.sensitivity import TransformerCall
from ..reporting import text_table

STALE = 0.85
"""Lists are stale where lists chosen anew would leave less than this part of the error that they leave."""
_NOTHING = 1e-3
"""Error that is not worth a calibration."""
_MOST_ROWS = 12
"""Of the table of steps; of more, several share a row."""


@dataclass(frozen=True)
class TileAudit:
    """The exact tiles of one self-attention; sums over the calls of a run."""

    kind: str
    """own, calibrated or content."""
    counts: Cut
    """Tile counts per axis, whose product is T; or the tokens of a tile along the curve."""
    share: float
    """Part of its pairs of tiles that is exact."""
    mass: float
    """Part of softmax attention's weight that these pairs hold, averaged over heads, queries and calls."""
    pair_errors: torch.Tensor
    """What leaving a pair inexact costs, float32 (2, H, T, T) on the CPU: in two halves of the run, so that what is
    chosen by one can be judged by the other; see :func:`mhla_diffusers.attention.tile_errors.pair_errors`."""
    left: torch.Tensor
    """Those of the pairs that are not exact, summed: float64 (S,), by step."""
    total: torch.Tensor
    """Those of all pairs, summed: float64 (S,), by step."""
    square: float
    """What an output of nothing at all would cost, in the same measure."""


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
    tiles: TileAudit | None
    """None without exact tiles, or where the own attention is linear."""

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
    def density(self) -> float | None:
        """Part of its pairs of tiles that is exact; None without exact tiles."""
        return None if self.tiles is None else self.tiles.share

    @property
    def mass_kept(self) -> float | None:
        """Part of softmax attention's weight that these pairs hold; None without exact tiles."""
        return None if self.tiles is None else self.tiles.mass

    @property
    def change(self) -> float:
        """Relative change of the transformer's output where this layer alone is patched, √ :attr:`moves`."""
        return math.sqrt(self.moves)

    @property
    def gain(self) -> float:
        """Relative squared change of the transformer's output for one unit of ``errors``, or of ``tiles.pair_errors``.

        Where the exact tiles leave next to nothing, an error counts as much in the output as in the attention's.
        """
        if self.tiles is None:
            return self.moves / max(float(self.errors.sum()), 1e-30)
        left = float(self.tiles.left.sum())
        is_measurable = left > 1e-6 * self.tiles.square
        return self.moves / left if is_measurable else 1 / max(self.tiles.square, 1e-30)


@dataclass(frozen=True)
class Fit:
    """Whether exact tiles are where the model attends now.

    Expected relative changes of the transformer's output, those of single layers added up as if they were independent.
    """

    left: float
    """With the lists that there are."""
    anew: float
    """With lists chosen anew at the same share by what this run has shown."""
    is_calibrated: bool
    """Whether the lists were calibrated; others are chosen by rule at every call."""

    @property
    def is_stale(self) -> bool:
        """Whether calibrating again is worth it, if the run is the one that was calibrated on, prompts and seeds alike.

        Of another run lists are always worse than those that it would choose itself.
        """
        return self.is_calibrated and self.left > _NOTHING and self.anew < STALE * self.left

    def __str__(self) -> str:
        if not self.is_calibrated:
            return (
                f"the exact tiles are chosen by rule and leave {self.left:.1%}; the best lists of this run would leave "
                f"{self.anew:.1%} at the same share"
            )
        if self.is_stale:
            return (
                f"the calibration is stale: chosen anew, the same share would leave {self.anew:.1%} instead of "
                f"{self.left:.1%}; calibrate_sparse(pipe, run). Unless this run is of other prompts or seeds than "
                "that of the calibration, of which lists are always worse"
            )
        return (
            f"the calibration fits: it leaves {self.left:.1%}; chosen anew, the same share would leave {self.anew:.1%}"
        )


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
    fit: Fit | None
    """None without exact tiles."""
    calls: Mapping[str, Sequence[TransformerCall]]
    """Component → some of its forwards, of the patched trajectory."""
    halves: Mapping[str, Sequence[int]]
    """Component → of each of these, the half of the run that it belongs to, see :class:`TileAudit`."""

    def errors_of_layer(self, layer: LayerAudit) -> torch.Tensor:
        """Relative error of every head over the run, ‖patched − before‖ / ‖before‖: (H,)."""
        return layer.errors_of_heads

    def error_of_layer(self, layer: LayerAudit) -> float:
        """The same of all heads together."""
        return layer.error

    @property
    def errors_of_steps(self) -> torch.Tensor:
        """Relative error of every layer and step: (layers, S); NaN where a layer does not run."""
        found = [_relative(layer.acting.sum(dim=1), layer.squares.sum(dim=1)) for layer in self.layers]
        return torch.stack(found)

    @property
    def errors_of_heads(self) -> torch.Tensor:
        """Relative error of every layer and head: (layers, H)."""
        return torch.stack([self.errors_of_layer(layer) for layer in self.layers])

    def __str__(self) -> str:
        lines = [self._table_of_layers(), "", self._table_of_steps(), ""]
        at_rest = " where it does not rest, which it does in every step" if all(self.rests) else ""
        lines.append(f"together the patch moves the output by {math.sqrt(self.moves):.1%}{at_rest}")
        if self.fit is not None:
            lines.append(str(self.fit))
        return "\n".join(lines)

    def _table_of_layers(self) -> str:
        has_tiles = any(layer.tiles is not None for layer in self.layers)
        header = ["layer", "error", "worst head", *(("exact", "mass kept") if has_tiles else ()), "moves"]
        rows = []
        for layer in self.layers:
            worst, tiles = layer.worst_head, layer.tiles
            kept = ("-", "-") if tiles is None else (f"{tiles.share:.1%}", f"{tiles.mass:.1%}")
            row = [layer.name, f"{layer.error:.1%}", f"{worst}: {layer.errors_of_heads[worst]:.1%}"]
            rows.append([*row, *(kept if has_tiles else ()), f"{layer.change:.1%}"])
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
        """Figures as JSON holds them, without the scores of pairs; errors are relative, None where nothing ran."""
        by_steps = self.errors_of_steps
        return {
            "layers": [
                {
                    "name": layer.name,
                    "error": layer.error,
                    "errors_of_heads": _numbers(layer.errors_of_heads),
                    "errors_of_steps": _numbers(by_steps[index]),
                    "moves": layer.change,
                    "sparse": None
                    if layer.tiles is None
                    else {"kind": layer.tiles.kind, "share": layer.tiles.share, "mass_kept": layer.tiles.mass},
                }
                for index, layer in enumerate(self.layers)
            ],
            "knows_steps": self.knows_steps,
            "rests": list(self.rests),
            "moves": math.sqrt(self.moves),
            "fit": None
            if self.fit is None
            else {"left": self.fit.left, "anew": self.fit.anew, "is_stale": self.fit.is_stale},
        }


def _relative(errors: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """NaN where there is nothing to compare with."""
    return (errors / squares).sqrt()


def _numbers(values: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
