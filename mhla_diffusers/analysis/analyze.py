"""Run a model briefly and examine its attention: rank, entropy, sensitivity and pictures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..families import get_family
from ..files import write_json
from ..patching import MHLALayer, find_transformers, is_patched, layer_sensitivity, mhla_layers, record_calls
from ..reporting import require_matplotlib
from ..settings import check_value
from .matrices import LayerAnalysis, analyze_layers
from .pictures import draw_attention_maps, draw_mixing_matrices, middle_of


def analyze(
    model: Any,
    run: Callable[[], object],
    output: Path,
    *,
    layers: Sequence[int] | None = None,
    token: int | None = None,
) -> tuple[list[LayerAnalysis], list[Path]]:
    """Examine a pipeline's first transformer on the middle one of the forwards that ``run`` makes.

    Args:
        model: a pipeline or transformer, patched or not.
        run: runs it, for example ``lambda: pipe("a cat", num_inference_steps=4)``.
        output: folder for ``analysis.json`` and the pictures.
        layers: indices of the self-attentions to examine; None for all.
        token: index of the token whose attention is drawn; None for the one in the middle.

    Returns:
        The layers, and the pictures: attention maps and, of a patched model, mixing matrices.

    Raises:
        ValueError: a layer or token out of range, too many tokens, or ``run`` did not reach the transformer.
    """
    require_matplotlib()
    output.mkdir(parents=True, exist_ok=True)
    component, transformer = next(iter(find_transformers(model).items()))
    names = list(get_family(transformer).attention.self_attentions(transformer))
    check_value("layers", list(layers or ()), list[int], at_least=0, at_most=len(names) - 1)
    names = names if layers is None else [names[layer] for layer in layers]
    calls = record_calls({component: transformer}, run)[component]
    call = calls[len(calls) // 2]
    grid = call.grid(transformer)
    tokens = torch.Size(grid).numel()
    chosen = middle_of(grid) if token is None else token
    check_value("token", chosen, int, at_least=0, at_most=tokens - 1)
    rows: dict[str, torch.Tensor] = {}

    def keep(name: str, matrix: torch.Tensor) -> None:
        rows[name] = matrix[:, :, chosen].mean(dim=(0, 1)).cpu()

    found = analyze_layers(transformer, call, names, keep)
    pictures = [draw_attention_maps(rows, grid, chosen, output / "attention-maps.png")]
    if is_patched(transformer):
        moves = layer_sensitivity(transformer, lambda: [call.predict(transformer) for call in calls])
        found = [replace(layer, moves=moves.get(layer.name)) for layer in found]
        patched = {name.removesuffix(".mhla"): layer for name, layer in mhla_layers(transformer).items()}
        mixing = {name: one.mixing for name in names if isinstance(one := patched.get(name), MHLALayer)}
        if mixing:
            pictures.append(draw_mixing_matrices(mixing, output / "mixing-matrices.png"))
    write_json({"grid": grid, "token": chosen, "layers": [asdict(layer) for layer in found]}, output / "analysis.json")
    return found, pictures
