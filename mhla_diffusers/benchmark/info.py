"""``mhla info``: versions, devices, backends, supported models, presets and saved patches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from ..attention import BACKENDS, feature_map_names
from ..config import LinearConfig, adapted_patches, load_patch, patch_names
from ..devices import choose_device
from ..families import families
from ..generation.pipelines import has_weights
from ..patching import read_record
from ..patching.describe import dense_in_words
from ..reporting import scaled, text_table, times, wrap
from .cases import choose_cases
from .cases import models as known_models
from .measure import gather_conditions


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
    patches: dict[str, list[tuple[str, str, str]]] = {}
    for name in (*patch_names(), *adapted_patches()):
        content, _, config = _read_patch(name)
        setting = times(config.blocks) if isinstance(config, LinearConfig) else f"{config.density:.1%}"
        row = f"  {name}", f"{config.short_name}, {setting}", str(config.layers)
        patches.setdefault(content.base_model, [(content.base_model, "", "")]).append(row)
    title = "\nPatches: sparse attention works untrained, MHLA is adapted for tiny models alone"
    rows = [row for of_model in patches.values() for row in of_model]
    _print_table(title, ["base model, names for --patch", "attention", "layers"], rows)


def report() -> str:
    """Write plain text to begin a bug report with: no paths, no names of users or machines."""
    found = {**gather_conditions(choose_device("auto")), "backends": ", ".join(BACKENDS)}
    return "\n".join(f"{name}: {text}" for name, text in found.items() if name != "command")  # which may have paths


def summary_of(config: Any) -> str:
    """Return which attention runs in which layers, with its main setting, and whether it works untrained."""
    layers = "every layer" if str(config.layers) == "all" else f"layers {config.layers}"
    if isinstance(config, LinearConfig):
        return f"{config.attention} of {times(config.blocks)} blocks in {layers}; has to be adapted first"
    layers += f" but the first {config.dense_layers}" if config.dense_layers else ""
    return f"{config.attention}, density {config.density:.1%}, in {layers}; works untrained"


def print_model(
    name: str, size: str | None, frames: int | None, patch: str | None, changes: Mapping[str, Any], steps: int
) -> None:
    """Print the FLOPs of one forward of a model by part, unpatched and patched, and the most that the patch can bring.

    Nothing is downloaded and nothing runs: the transformer is built without values. ``patch`` is by
    default that of ``apply_mhla(pipe)``; ``changes`` replace settings; ``steps`` counts a call's denoising steps.
    """
    cases = choose_cases(name, size, frames)
    case, family = cases[0], cases[0].family
    _, of_family, config = (None, family.name, family.default_config) if patch is None else _read_patch(patch)
    if of_family not in ("", family.name):
        raise ValueError(f"The patch is for the {of_family!r} family, but {name} belongs to {family.name!r}.")
    config = config.replace(**changes)
    counted = [(one.flops(), one.flops(config)) for one in cases]
    plain, patched = counted[0]
    whole, left = sum(plain.values()), sum(patched.values())
    cost, cost_after = (scaled(one, 1000, "FLOP") for one in (whole, left))
    size = f"{name} at {case.size}: {times(case.grid)} = {math.prod(case.grid):,} tokens"
    _say(f"{size}; its own attention is {family.computes}\npatched: {summary_of(config)}")
    _say(f"one forward: {cost} → {cost_after}, so at most {whole / left:.2f} times faster")
    most = config.call_speedup(whole, left, steps)
    _say(f"{dense_in_words(config, steps)}: a call is at most {most:.2f} times faster")
    rows = [(part, *(scaled(x, 1000, "") for x in (plain[part], patched[part]))) for part in plain if plain[part]]
    rows.append(("forward", scaled(whole, 1000, ""), scaled(left, 1000, "")))
    _print_table("\nFLOPs of one forward", ["part", "unpatched", "patched"], rows, right=True)
    lines = []
    for one, (plain, patched) in zip(cases, counted, strict=True):
        whole = sum(plain.values())
        share = f"{plain['self-attention'] / whole:.0%}"
        lines.append((one.size, f"{math.prod(one.grid):,}", share, f"{whole / sum(patched.values()):.2f}"))
    _print_table("\nA forward's speedup, by size", ["size", "tokens", "self-attention", "at most"], lines, right=True)


def _read_patch(patch: str) -> tuple[Any, str, Any]:
    """Read a preset or the record of a saved patch; return it with the family and settings of its first transformer."""
    if not has_weights(patch):
        preset = load_patch(patch)
        return preset, preset.family, preset.patch
    record = read_record(adapted_patches().get(patch) or Path(patch))
    part = next(iter(record.transformers.values()))
    return record, part.family, part.patch


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
