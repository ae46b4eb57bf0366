"""Kinds of attention side by side: perplexity at equal steps, trained from scratch and adapted, and in longer texts."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...patching import change_mhla, is_patched, mhla_layers
from ...reporting import mean_and_spread, write_table
from ..comparing import Part, Result, file_name_of, parameters_of, results_of, settings_of
from .run import SOFTMAX, LanguageConfig, Variant, as_variant, build, losses_by_place, rows_of, train

_FARTHEST = 4
"""Times the trained length that perplexity is told for."""


def compare(config: LanguageConfig, output: Path) -> str:
    """Train and adapt every variant with every seed; seeds that are finished are kept.

    Args:
        config: of the comparison.
        output: folder of ``seed-<n>.json``, and of the tables.

    Returns:
        The tables as Markdown.

    Raises:
        ValueError: nothing of the text is held out, or the folder has seeds of another configuration.
    """
    rows_of(config, held_out=True)  # before all the training
    settings = settings_of(config)
    parts = [Part(output / f"seed-{seed}.json", settings, partial(_of_seed, config, seed)) for seed in config.seeds]
    return _tables(config, results_of(parts), output)


def _of_seed(config: LanguageConfig, seed: int, checkpoints: Path) -> dict[str, Any]:
    scratch: dict[str, Result] = {}
    adapted: dict[str, Result] = {}
    for name, variant in config.variants.items():
        model = build(config, variant, seed)
        seconds = train(model, config, seed, config.steps, checkpoints / "scratch" / file_name_of(name))
        scratch[name] = judged(model, config) | {"seconds": seconds}
        if variant == SOFTMAX:
            folder = checkpoints / "adapted"
            adapted = {
                other: _adapted(model, one, config, seed, folder / file_name_of(other))
                for other, one in config.adapt.items()
            }
    return {"seed": seed, "scratch": scratch, "adapted": adapted}


def _adapted(trained: Any, variant: Variant, config: LanguageConfig, seed: int, checkpoints: Path) -> Result:
    model = as_variant(copy.deepcopy(trained), variant)
    before = math.exp(float(losses_by_place(model, _held_out(config, config.length)).mean()))
    seconds = train(model, config, seed + 1, config.adapt_steps, checkpoints)
    return judged(model, config) | {"seconds": seconds, "before": before}


def _held_out(config: LanguageConfig, length: int) -> list[torch.Tensor]:
    """Rows of a length, (N,) each."""
    return [row["input_ids"] for row in rows_of(replace(config, length=length), held_out=True)]


def judged(model: Any, config: LanguageConfig) -> Result:
    """Held-out perplexity, and by place in texts of four times the length."""
    losses = losses_by_place(model, _held_out(config, config.length))
    if is_patched(model) and next(iter(mhla_layers(model).values())).config.blocks[0] > 1:
        change_mhla(model, beyond="relative")
    far = losses_by_place(model, _held_out(config, _FARTHEST * config.length))
    ends = [0, *(config.length * 2**power for power in range(_FARTHEST.bit_length()))]
    parts = [far[start:end].mean() for start, end in zip(ends, ends[1:], strict=False)]
    return {
        "perplexity": math.exp(float(losses.mean())),
        "by place": [math.exp(float(part)) for part in parts],
        "parameters": parameters_of(model),
    }


def _tables(config: LanguageConfig, results: Sequence[dict[str, Any]], output: Path) -> str:
    def spread(kind: str, name: str, key: str, style: str = ".3f") -> str:
        return mean_and_spread([one[kind][name][key] for one in results], style)

    steps = f"{config.steps} steps"
    texts = [
        write_table(
            ["attention", "parameters", f"perplexity after {steps}", "CPU seconds"],
            [
                [
                    name,
                    f"{results[0]['scratch'][name]['parameters']:,}",
                    spread("scratch", name, "perplexity"),
                    spread("scratch", name, "seconds", ".0f"),
                ]
                for name in config.variants
            ],
            output,
            "scratch",
        )
    ]
    if config.adapt:
        after = f"after {config.adapt_steps} steps"
        rows = [
            [name, spread("adapted", name, "before"), spread("adapted", name, "perplexity")] for name in config.adapt
        ]
        header = ["trained with softmax, then", "before adaptation", after]
        texts.append(write_table(header, rows, output, "adapted"))
    length = config.length
    places = [f"tokens {start + 1} to {2 * start or length}" for start in (0, length, 2 * length)]
    far = [
        [
            name,
            *(
                mean_and_spread([one["scratch"][name]["by place"][index] for one in results], ".3f")
                for index in range(3)
            ),
        ]
        for name in config.variants
    ]
    texts.append(write_table(["attention", *places], far, output, "beyond"))
    return "\n".join(texts)
