"""``mhla info``: versions, devices, backends, supported models, presets and saved patches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
import yaml

from ..attention import BACKENDS, feature_map_names
from ..config import LinearConfig, PatchConfig, SparseConfig, adapted_patches, load_patch, patch_names
from ..families import families
from ..generation.pipelines import has_weights
from ..patching import read_record
from ..patching.describe import dense_in_words
from ..reporting import scaled, text_table, times, wrap
from .cases import choose_cases
from .cases import models as known_models
from .measure import versions


def print_info() -> None:
    """Print versions, devices and backends, then supported models and patches."""
    _say(f"{report()}\nfeature maps: {', '.join(feature_map_names())}\n")
    models = [
        (family.name, name, family.default_config.short_name, times(family.mhla_blocks))
        for family in families()
        for name in family.transformers
    ]
    _print_table("Supported models", ["family", "transformer", "default", "blocks"], models)
    _say("blocks: of MHLA, as height x width, frames x height x width, or along a text")
    _say(f"\nModels for --model of info and bench:\n{', '.join(known_models())}")
    presets: dict[str, list[tuple[str, str, str]]] = {}
    for name in patch_names():
        preset = load_patch(name)
        config: Any = preset.patch
        setting = times(config.blocks) if isinstance(config, LinearConfig) else f"{config.density:.1%}"
        row = f"  {name}", f"{config.short_name}, {setting}", str(config.layers)
        presets.setdefault(preset.base_model, [(preset.base_model, "", "")]).append(row)
    title = "\nPresets: sparse attention works untrained, MHLA has to be adapted first"
    rows = [row for of_model in presets.values() for row in of_model]
    _print_table(title, ["base model, presets for --patch", "attention", "layers"], rows)
    adapted = []
    for name, folder in adapted_patches().items():
        record = read_record(folder)
        adapted.append((name, record.base_model, next(iter(record.transformers.values())).family))
    _print_table("\nAdapted patches, for load_mhla", ["name", "for", "family"], adapted)


def report() -> str:
    """Write plain text to begin a bug report with: no paths, no names of users or machines."""
    devices = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        memory, capability = f"{card.total_memory / 2**30:.0f} GiB", f"{card.major}.{card.minor}"
        devices.append(f"{card.name} ({memory}, capability {capability})")
    devices.append(f"CPU with {torch.get_num_threads()} threads")
    found = {**versions(), "devices": ", ".join(devices), "backends": ", ".join(BACKENDS)}
    return "\n".join(f"{name}: {text}" for name, text in found.items())


def summary_of(config: PatchConfig) -> str:
    """Return which attention runs in which layers, with its main setting, and whether it works untrained."""
    layers = "every layer" if str(config.layers) == "all" else f"layers {config.layers}"
    if isinstance(config, SparseConfig):
        layers += f" but the first {config.dense_layers}" if config.dense_layers else ""
        return f"{config.attention}, density {config.density:.1%}, in {layers}; works untrained"
    assert isinstance(config, LinearConfig)
    return f"{config.attention} of {times(config.blocks)} blocks in {layers}; has to be adapted first"


def print_model(
    name: str, size: str | None, frames: int | None, patch: str | None, changes: Mapping[str, Any], steps: int
) -> None:
    """Print the FLOPs of one forward of a model by part, unpatched and patched, and the most that the patch can bring.

    Nothing is downloaded and nothing runs: the transformer is built without values. ``patch`` is as for
    :func:`print_any_patch`, by default that of ``apply_mhla(pipe)``; ``changes`` replace settings. ``steps`` counts the
    denoising steps of a call, dense ones included.
    """
    cases = choose_cases(name, size, frames)
    case, family = cases[0], cases[0].family
    _, of_family, config = (None, family.name, family.default_config) if patch is None else _read_patch(patch)
    if of_family not in ("", family.name):
        raise ValueError(f"The patch is for the {of_family!r} family, but {name} belongs to {family.name!r}.")
    config = config.replace(**changes)
    plain, patched = case.flops(), case.flops(config)
    whole, left = sum(plain.values()), sum(patched.values())
    cost, cost_after = (scaled(one, 1000, "FLOP") for one in (whole, left))
    tokens = f"{times(case.grid)} = {math.prod(case.grid):,} tokens"
    _say(f"{name} at {case.size}: {tokens}; its own attention is {family.computes}")
    _say(f"patched: {summary_of(config)}")
    _say(f"one forward: {cost} → {cost_after}, so at most {whole / left:.2f} times faster")
    if config.has_dense_steps:
        most = config.call_speedup(whole, left, steps)
        _say(f"{dense_in_words(config, steps)}: a call is at most {most:.2f} times faster")
    rows = [(part, *(scaled(x, 1000, "") for x in (plain[part], patched[part]))) for part in plain if plain[part]]
    rows.append(("forward", scaled(whole, 1000, ""), scaled(left, 1000, "")))
    _print_table("\nFLOPs of one forward", ["part", "unpatched", "patched"], rows, right=True)
    part = plain["self-attention"] / whole
    _say(
        f"\nSelf-attention is {part:.0%} of the forward; without it, that is at most {1 / (1 - part):.2f} times faster."
    )
    if len(cases) > 1:
        lines = []
        for one in cases:
            plain = one.flops()
            whole, left = sum(plain.values()), sum(one.flops(config).values())
            share = f"{plain['self-attention'] / whole:.0%}"
            lines.append((one.size, f"{math.prod(one.grid):,}", share, f"{whole / left:.2f}"))
        header = ["size", "tokens", "self-attention", "at most"]
        _print_table("\nUpper bound on the speedup of a forward, by size", header, lines, right=True)


def _read_patch(patch: str) -> tuple[Any, str, PatchConfig]:
    """Read a preset or the record of a saved patch; return it with the family and settings of its first transformer."""
    if not has_weights(patch):
        preset = load_patch(patch)
        return preset, preset.family, preset.patch
    record = read_record(adapted_patches().get(patch) or Path(patch))
    part = next(iter(record.transformers.values()))
    return record, part.family, PatchConfig.read(part.patch)


def print_any_patch(patch: str) -> None:
    """Print a preset by its name or YAML path, or a saved patch by its name or folder, as YAML."""
    content, _, config = _read_patch(patch)
    runs, _, needs = summary_of(config).partition("; ")
    _say(f"{patch} runs {runs}; {'a saved patch with weights, for load_mhla()' if has_weights(patch) else needs}\n")
    shown = content.to_dict()
    for part in shown.get("transformers", {}).values():
        names = part["base_weights"]
        part["base_weights"] = f"{len(names)}, such as {names[0]}" if names else 0
    typer.echo(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=70), nl=False)


def _say(text: str) -> None:
    typer.echo("\n".join(part for line in text.split("\n") for part in wrap(line) or [""]))


def _print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], right: bool = False) -> None:
    typer.echo(f"{title}\n{text_table(header, rows, right)}")
