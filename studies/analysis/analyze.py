"""Run a pipeline briefly and examine the attention of its transformer: rank, entropy, sensitivity and pictures.

    python studies/analysis/analyze.py dit seven --patch tiny-dit
    python studies/analysis/analyze.py sana "a four and a two" --patch my-patch --layers 1 --output outputs/attention

Prints a table, and writes analysis.json, attention-maps.png and, of a model with MHLA, mixing-matrices.png.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, StrictInt
from torch import nn

from mhla_diffusers import MHLAConfig, audit, is_patched, mhla_layers
from mhla_diffusers.attention.layout import block_sizes
from mhla_diffusers.auditing import TransformerCall, record_calls
from mhla_diffusers.families import get_family
from mhla_diffusers.files import write_json
from mhla_diffusers.generation.pipelines import PipelineChoice
from mhla_diffusers.patching import (
    MHLALayer,
    find_patched,
    find_transformers,
)
from mhla_diffusers.reporting import require_matplotlib, text_table
from mhla_diffusers.settings import check_value
from studies.analysis.matrices import each_attention_matrix, entropy, rank

LARGEST_GRID = 4096
"""Tokens up to which N x N matrices are formed."""
COLUMNS = 4
NEARLY_POSITIVE = 0.01
"""Negative values up to this fraction of the largest value are drawn as zero."""


@dataclass
class Layer:
    """One self-attention on one input."""

    name: str
    attention: str
    """Such as MHLA, sparse, linear or softmax."""
    tokens: int
    rank: float
    """Singular values above 1e-4 of the largest, averaged over samples and heads."""
    rank_bound: int
    """Σ_b min(n_b, D) for MHLA (paper, Sec. 4.3), min(N, D) for linear attention, else N."""
    entropy: float
    """In nats; log(tokens) for uniform weights."""
    moves: float | None = None
    """Relative squared change of the model's output when this layer alone is patched; None where it is not."""


# --- measuring ---


def analyze_layers(
    transformer: nn.Module, call: TransformerCall, names: Sequence[str], each: Callable[[str, torch.Tensor], None]
) -> list[Layer]:
    """Measure rank and entropy of self-attentions on one input.

    Args:
        transformer: patched or not.
        call: the input.
        names: of the self-attentions.
        each: called with name and attention matrix, float64 (B, H, N, N), of every layer.

    Raises:
        ValueError: more tokens than :data:`LARGEST_GRID`, or an unknown name.
    """
    family, grid = get_family(transformer), call.grid(transformer)
    tokens = math.prod(grid)
    if tokens > LARGEST_GRID:
        raise ValueError(
            f"The input has {tokens} tokens; {tokens} x {tokens} attention matrices are formed up to {LARGEST_GRID}. "
            "Give a smaller resolution or fewer frames."
        )
    attentions = family.self_attentions(transformer)
    patched = find_patched(transformer).get("transformer")
    found = []
    for name, matrix in each_attention_matrix(transformer, call, names):
        each(name, matrix)
        config = patched.config if patched is not None and name in patched.chosen else None
        kind = family.computes if config is None else config.short_name
        bound, head_dim = tokens, attentions[name].inner_dim // attentions[name].heads
        if isinstance(config, MHLAConfig):
            bound = sum(min(size, head_dim) for size in block_sizes(grid, config.layout_on(grid)[1]))
        elif kind == "linear":
            bound = min(tokens, head_dim)
        found.append(Layer(name, kind, tokens, rank(matrix), bound, entropy(matrix)))
    return found


def analyze(
    model: Any, run: Callable[[], object], output: Path, layers: Sequence[int] = (), token: int | None = None
) -> list[Layer]:
    """Examine a pipeline's first transformer on the middle one of the forwards that ``run`` makes.

    Args:
        model: a pipeline or transformer, patched or not.
        run: runs it, for example ``lambda: pipe("a cat", num_inference_steps=4)``.
        output: folder for ``analysis.json`` and the pictures.
        layers: indices of the self-attentions to examine; empty for all.
        token: index of the token whose attention is drawn; None for the one in the middle.

    Raises:
        ValueError: a layer or token out of range, too many tokens, or ``run`` did not reach the transformer.
    """
    component, transformer = next(iter(find_transformers(model).items()))
    names = list(get_family(transformer).self_attentions(transformer))
    check_value("layers", list(layers), list[Annotated[StrictInt, Field(ge=0, lt=len(names))]])
    names = [names[layer] for layer in layers] or names
    calls = record_calls({component: transformer}, run)[component]
    call = calls[len(calls) // 2]
    grid = call.grid(transformer)
    chosen = middle_of(grid) if token is None else token
    check_value("token", chosen, Annotated[StrictInt, Field(ge=0, lt=math.prod(grid))])
    rows: dict[str, torch.Tensor] = {}

    def keep(name: str, matrix: torch.Tensor) -> None:
        rows[name] = matrix[:, :, chosen].mean(dim=(0, 1)).cpu()

    found = analyze_layers(transformer, call, names, keep)
    output.mkdir(parents=True, exist_ok=True)
    draw_attention_maps(rows, grid, chosen, output / "attention-maps.png")
    if is_patched(transformer):
        measured = audit(transformer, lambda: [call.predict(transformer) for call in calls])
        moves = {layer.name: layer.moves for layer in measured.layers}
        for layer in found:
            layer.moves = moves.get(layer.name)
        patched = {name.removesuffix(".mhla"): layer for name, layer in mhla_layers(transformer).items()}
        mixing = {name: one.mixing for name in names if isinstance(one := patched.get(name), MHLALayer)}
        if mixing:
            draw_mixing_matrices(mixing, output / "mixing-matrices.png")
    write_json({"grid": grid, "token": chosen, "layers": [asdict(layer) for layer in found]}, output / "analysis.json")
    return found


# --- drawing ---


def middle_of(grid: Sequence[int]) -> int:
    """Return the index of the token in the middle of a grid."""
    index = 0
    for count in grid:
        index = index * count + count // 2
    return index


def side_by_side(values: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """Arrange values (N,) of a grid as one picture (height, width), with frames side by side and NaN between them."""
    frames = values.reshape(-1, *grid[-2:]).unbind()
    gap = torch.full((grid[-2], 1), math.nan, dtype=values.dtype)
    return torch.cat([part for frame in frames for part in (frame, gap)][:-1], dim=1)


def colours_of(values: torch.Tensor) -> dict[str, Any]:
    """Choose a color scale from zero to the largest value; symmetric for signed values, as RoPE gives."""
    lowest, highest = float(values.min()), float(values.max())
    if lowest > -NEARLY_POSITIVE * highest:
        return {"cmap": "magma", "vmin": 0, "vmax": highest}
    largest = max(-lowest, highest)
    return {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}


def draw_attention_maps(rows: Mapping[str, torch.Tensor], grid: Sequence[int], token: int, file: Path) -> None:
    """Draw how much one query token attends to every token of the grid, one map per layer; the token is marked.

    Args:
        rows: layer → (N,), the token's row of the attention matrix.
        grid: token grid.
        token: its index.
        file: where to.
    """
    plt = require_matplotlib()
    is_video = len(grid) == 3
    columns = 1 if is_video else min(COLUMNS, len(rows))
    bands = math.ceil(len(rows) / columns)
    size = (11.0, 1.9 * bands + 0.5) if is_video else (max(4.5, 2.9 * columns), 2.6 * bands + 0.5)
    figure, axes = plt.subplots(bands, columns, figsize=size, squeeze=False, layout="constrained")
    frame, place = divmod(token, grid[-2] * grid[-1])
    row, column = place // grid[-1], frame * (grid[-1] + 1) + place % grid[-1]
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (name, values) in zip(axes.flat, rows.items(), strict=False):
        image = axis.imshow(side_by_side(values.float(), grid), **colours_of(values))
        axis.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="cyan", linewidth=1.5))
        axis.set_title(name, fontsize=8)
        figure.colorbar(image, ax=axis, shrink=0.8)
    title = f"Attention of token {token} over the grid {'x'.join(map(str, grid))}"
    figure.suptitle(f"{title}, frames from left to right" if is_video else title, fontsize=10)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw_mixing_matrices(matrices: Mapping[str, torch.Tensor], file: Path) -> None:
    """Draw the mixing matrices of all layers, name → (M, M), or (H, M, M) for the mean over heads."""
    plt = require_matplotlib()
    shown = {name: x.detach().float().cpu().reshape(-1, *x.shape[-2:]).mean(dim=0) for name, x in matrices.items()}
    colours = colours_of(torch.stack(list(shown.values())))
    columns = min(COLUMNS, len(shown))
    bands = math.ceil(len(shown) / columns)
    size = max(5.0, 2.6 * columns + 1), 2.6 * bands + 0.5
    figure, axes = plt.subplots(bands, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, (name, matrix) in zip(axes.flat, shown.items(), strict=False):
        image = axis.imshow(matrix, **colours)
        axis.set_title(name, fontsize=8)
        axis.set(xlabel="key block", ylabel="query block")
    figure.colorbar(image, ax=axes, shrink=0.6)
    figure.savefig(file, dpi=110)
    plt.close(figure)


# --- main ---


def main() -> None:
    """Read the command line, run the pipeline and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help="wan, flux, mochi, …; mhla info lists all")
    parser.add_argument("prompt", help="what to generate; a class for dit")
    parser.add_argument("--model", help="Hub id or folder; default: the tiny pipeline of the family")
    parser.add_argument("--patch", help="as of mhla generate")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, nargs="+", default=[], help="indices; default: all")
    parser.add_argument("--token", type=int, help="whose attention is drawn; default: the middle one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/analysis"))
    given = parser.parse_args()
    choice = PipelineChoice(
        given.family,
        model=given.model,
        patch=given.patch,
        device=given.device,
        settings={"num_inference_steps": given.steps},
    )
    pipe = choice.load([given.prompt])

    def run() -> None:
        choice.call(pipe, [given.prompt], [torch.Generator().manual_seed(given.seed)])

    rows = []
    for layer in analyze(pipe, run, given.output, given.layers, given.token):
        moves = "-" if layer.moves is None else f"{layer.moves**0.5:.1%}"
        cells = str(layer.tokens), f"{layer.rank:.1f}", str(layer.rank_bound), f"{layer.entropy:.2f}", moves
        rows.append((layer.name, layer.attention, *cells))
    header = ("layer", "attention", "tokens", "rank", "at most", "entropy", "moves")
    sys.stdout.write(f"{text_table(header, rows, right=True)}\nPictures: {given.output}\n")


if __name__ == "__main__":
    main()
