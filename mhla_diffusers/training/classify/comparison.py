"""Kinds of attention side by side: accuracy at equal steps, rank and entropy of attention, and the ablations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...reporting import mean_and_spread, write_table
from ..comparing import Part, Result, file_name_of, parameters_of, results_of, settings_of
from .config import ClassifyConfig
from .evaluation import accuracy
from .run import build, pictures_of, train
from .sizes import call_settings

Look = Callable[[Any, torch.Tensor, Mapping[str, Any]], Mapping[str, Any]]
"""A model, pictures, (B, 3, H, W), and what else its forward needs → what is found of its attention, as JSON has it:
"rank", "entropy".
"""

_NOT_OF_ONE = ("seeds", "variants", "ablations", "workers", "save_every")
"""Settings that the result of one variant and seed does not depend on."""


@dataclass(frozen=True)
class Compared:
    """What a comparison gave: its tables, and the results behind them.

    Args:
        tables: as Markdown.
        results: name of a variant → one per seed.
    """

    tables: str
    results: dict[str, list[Result]]


def compare(config: ClassifyConfig, output: Path, look: Look) -> Compared:
    """Train every variant with every seed; what is finished is kept.

    Args:
        config: of the comparison.
        output: folder of a JSON file per variant and seed, and of ``comparison.md`` and ``.csv``.
        look: at the attention of a trained model.

    Raises:
        ValueError: settings that a model does not have, or the folder has results of another configuration.
    """
    results = _results(config, list(config.variants), output, look)
    rows = {name: name for name in config.variants}
    return Compared(_table("attention", rows, results, output, "comparison"), results)


def ablate(config: ClassifyConfig, output: Path, look: Look) -> Compared:
    """Like :func:`compare`, for the tables of ``ablations``; in the same folder its results are taken from there.

    Raises:
        ValueError: as :func:`compare`, or there are no ablations.
    """
    tables = {table: config.rows_of(table) for table in config.ablations}
    if not tables:
        raise ValueError("The configuration has no ablations: tables of rows with settings of a patch each.")
    names = list(dict.fromkeys(name for rows in tables.values() for name in rows.values()))
    results = _results(config, names, output, look)
    texts = [_table(table, rows, results, output, file_name_of(table)) for table, rows in tables.items()]
    return Compared("\n".join(texts), results)


def _results(config: ClassifyConfig, names: list[str], output: Path, look: Look) -> dict[str, list[Result]]:
    variants = config.all_variants()
    first, parts = _pictures(config, 1), {}
    for name in names:
        # says what is not allowed, before all training
        _look(look, build(config, variants[name], 0).eval(), config, first)
        settings = settings_of(config, _NOT_OF_ONE) | {"variant": variants[name]}
        for seed in config.seeds:
            file = output / f"{file_name_of(name)}-seed-{seed}.json"
            parts[name, seed] = Part(file, settings, partial(_judged, config, name, seed, look))
    found = dict(zip(parts, results_of(list(parts.values())), strict=True))
    return {name: [found[name, seed] for seed in config.seeds] for name in names}


def _judged(config: ClassifyConfig, name: str, seed: int, look: Look, checkpoints: Path) -> Result:
    """One variant, trained with one seed."""
    model = build(config, config.all_variants()[name], seed)
    seconds = train(model, config, seed, checkpoints)
    found = accuracy(model, pictures_of(config, seed, held_out=True), config.size, workers=config.workers)
    return {
        "name": name,
        "seed": seed,
        "top-1": found.top1,
        "top-5": found.top5,
        "parameters": parameters_of(model),
        "seconds": seconds,
        **_look(look, model, config, _pictures(config, config.analysed)),
    }


def _pictures(config: ClassifyConfig, most: int) -> torch.Tensor:
    """The first held-out ones, (B, 3, H, W)."""
    data: Any = pictures_of(config, 0, held_out=True)
    return torch.stack([data[index]["pixel_values"] for index in range(min(most, len(data)))])


def _look(look: Look, model: Any, config: ClassifyConfig, pictures: torch.Tensor) -> Mapping[str, Any]:
    return look(model, pictures.to(model.device), call_settings(model, config.size))


def _table(first: str, rows: Mapping[str, str], results: Mapping[str, list[Result]], output: Path, file: str) -> str:
    def spread(name: str, key: str, style: str, times: float = 1) -> str:
        return mean_and_spread([times * one[key] for one in results[name]], style) if key in results[name][0] else "-"

    header = [first, "parameters", "top-1, %", "rank", "entropy, nats", "CPU seconds"]
    cells = [
        [
            row,
            f"{results[name][0]['parameters']:,}",
            spread(name, "top-1", ".1f", 100),
            spread(name, "rank", ".1f"),
            spread(name, "entropy", ".2f"),
            spread(name, "seconds", ".0f"),
        ]
        for row, name in rows.items()
    ]
    return write_table(header, cells, output, file)
