"""An audit as files: figures as JSON, and heat maps of the error."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..fidelity import Audit
from ..files import write_json
from ..reporting import require_matplotlib

_MOST_ROWS, _MOST_COLUMNS = 40, 12
"""Names of layers that stand beside a map, and numbers below it; of more, every other one or fewer."""


def write_audit(audit: Audit, folder: str | Path) -> list[Path]:
    """Write ``audit.json`` and ``audit.png``.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the folder cannot be written.
    """
    require_matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(audit.to_dict(), folder / "audit.json")
    return [folder / "audit.json", draw_audit(audit, folder / "audit.png")]


def draw_audit(audit: Audit, file: Path) -> Path:
    """Two heat maps of the relative error: layers by denoising steps, and layers by heads. Grey is what did not run.

    Returns:
        ``file``.
    """
    plt = require_matplotlib()
    names = [layer.name for layer in audit.layers]
    maps = {"step" if audit.knows_steps else "forward": audit.errors_of_steps, "head": audit.errors_of_heads}
    worst = max(float(values.nan_to_num().max()) for values in maps.values())
    width = 4 + sum(0.22 * values.shape[1] for values in maps.values())
    size = (min(20.0, max(8.0, width)), min(20.0, 1.5 + 0.25 * len(names)))
    figure, axes = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    for axis, (name, values) in zip(axes, maps.items(), strict=True):
        image = _draw(axis, values, max(worst, 1e-9))
        axis.set_xlabel(name)
        axis.set_xticks(_ticks(values.shape[1], _MOST_COLUMNS))
    rows = _ticks(len(names), _MOST_ROWS)
    axes[0].set_yticks(rows, [names[row] for row in rows], fontsize=7)
    figure.colorbar(image, ax=axes, label="relative error", format=lambda x, _: f"{x:.0%}")
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _draw(axis: Any, values: torch.Tensor, worst: float) -> Any:
    axis.set_facecolor("0.8")
    return axis.imshow(values.numpy(), cmap="magma", vmin=0, vmax=worst, aspect="auto", interpolation="nearest")


def _ticks(count: int, most: int) -> Sequence[int]:
    return range(0, count, -(-count // most))
