"""The attention of image classifiers, each as few numbers, so that many of them can be compared (paper, Fig. 3)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..families import find_family
from ..patching import TransformerCall
from ..reporting import require_matplotlib
from .matrices import analyze_layers
from .pictures import draw_attention_maps, middle_of


def look_at_classifier(
    model: nn.Module, pictures: torch.Tensor, settings: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Rank and entropy of the attention matrices of a model, averaged over layers, heads and pictures (paper, Fig. 3b).

    Args:
        model: in eval mode, patched or not.
        pictures: (B, 3, H, W).
        settings: what its forward needs beside them, such as ``interpolate_pos_encoding`` at another size.

    Returns:
        As JSON has it: ``rank``, ``entropy`` in nats, the token ``grid``, and ``map``, what the token in the middle of
        the first picture gives to all tokens in the layer in the middle, its mean over heads; nothing of a model of no
        family, such as VLT, whose attention is built in.
    """
    family = find_family(model)
    if family is None:
        return {}
    call = TransformerCall((pictures,), settings)
    grid = call.grid(model)
    names = list(family.self_attentions(model))
    rows: dict[str, torch.Tensor] = {}

    def keep(name: str, matrix: torch.Tensor) -> None:
        rows[name] = matrix[0, :, middle_of(grid)].mean(dim=0)

    layers = analyze_layers(model, call, each=keep)
    weights = rows[names[len(names) // 2]].tolist()
    return {
        "rank": fmean(layer.rank for layer in layers),
        "entropy": fmean(layer.entropy for layer in layers),
        "grid": list(grid),
        "map": [round(weight, 6) for weight in weights],
    }


def draw_classifiers(results: Mapping[str, Sequence[Mapping[str, Any]]], output: Path) -> list[Path]:
    """Rank and entropy as bars, and the maps of the first of each, from :func:`look_at_classifier`.

    Args:
        results: name → one for every seed; those without a rank are left out.
        output: folder of ``rank-and-entropy.png`` and ``attention-maps.png``.

    Returns:
        The files; none where nothing has a rank.
    """
    known = {name: found for name, found in results.items() if "rank" in found[0]}
    if not known:
        return []
    output.mkdir(parents=True, exist_ok=True)
    first = next(iter(known.values()))[0]
    rows = {name: torch.tensor(found[0]["map"]) for name, found in known.items()}
    maps = draw_attention_maps(rows, first["grid"], middle_of(first["grid"]), output / "attention-maps.png")
    plt, names = require_matplotlib(), list(known)
    figure, axes = plt.subplots(1, 2, figsize=(9, 1.2 + 0.4 * len(names)), sharey=True, layout="constrained")
    for axis, key, label in zip(axes, ("rank", "entropy"), ("rank", "entropy in nats"), strict=True):
        values = [[float(one[key]) for one in known[name]] for name in names]
        spreads = [stdev(found) if len(found) > 1 else 0.0 for found in values]
        axis.barh(names, [fmean(found) for found in values], xerr=spreads, color="tab:blue", capsize=3)
        axis.set_xlabel(label)
    axes[0].invert_yaxis()
    figure.savefig(output / "rank-and-entropy.png", dpi=110)
    plt.close(figure)
    return [output / "rank-and-entropy.png", maps]
