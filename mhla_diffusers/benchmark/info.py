"""``mhla info``: versions, devices, backends, supported models, presets and saved patches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors import safe_open

from ..attention import BACKENDS, feature_map_names
from ..config import (
    LinearConfig,
    PatchConfig,
    SparseConfig,
    adapted_patch_folder,
    adapted_patch_names,
    load_patch,
    patch_folder,
    patch_names,
)
from ..families import families
from ..patching import PATCH_FILE, read_record
from ..patching.describe import dense_in_words
from ..reporting import scaled, text_table, times, wrap
from ..tiny import TINY
from .cases import choose_cases
from .cases import models as known_models
from .counts import ATTENTION, PARTS, count_forward
from .measure import versions

_SPARSE, _LINEAR = "works untrained", "has to be adapted first"
"""What a fresh patch needs."""


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
        config = preset.patch
        setting = f"{config.density:.1%}" if isinstance(config, SparseConfig) else ""
        setting = times(config.blocks) if isinstance(config, LinearConfig) else setting
        row = f"  {name}", f"{config.short_name}, {setting}", str(config.layers)
        presets.setdefault(preset.base_model, [(preset.base_model, "", "")]).append(row)
    title = f"\nPresets: sparse attention {_SPARSE}, MHLA {_LINEAR}"
    rows = [row for of_model in presets.values() for row in of_model]
    _print_table(title, ["base model, presets for --patch", "attention", "layers"], rows)
    adapted = []
    for name in adapted_patch_names():
        record = read_record(patch_folder() / name)
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
    """Return which attention runs in which layers, with its main setting."""
    layers = "every layer" if str(config.layers) == "all" else f"layers {config.layers}"
    if isinstance(config, SparseConfig):
        return f"{config.attention}, density {config.density:.1%}, in {layers}"
    assert isinstance(config, LinearConfig)
    return f"{config.attention} of {times(config.blocks)} blocks in {layers}"


def _needs(config: PatchConfig) -> str:
    return _LINEAR if isinstance(config, LinearConfig) else _SPARSE


def print_model(
    name: str, size: str | None, frames: int | None, patch: str | None, changes: Mapping[str, Any], steps: int
) -> None:
    """Print the FLOPs of one forward of a model by part, unpatched and patched, and the most that the patch can bring.

    Nothing is downloaded and nothing runs: the transformer is built without values. ``patch`` is as for
    :func:`print_any_patch`, by default that of ``apply_mhla(pipe)``; ``changes`` replace settings. ``steps`` counts the
    denoising steps of a call, dense ones included.
    """
    cases = choose_cases([name], size and [size], None if frames is None else [frames])
    case, family = cases[0], cases[0].family
    of_family, config = (family.name, family.default_config) if patch is None else _first_config(patch)
    if of_family not in ("", family.name):
        raise ValueError(f"The patch is for the {of_family!r} family, but {name} belongs to {family.name!r}.")
    config = config.replace(**changes)
    counts = [(one, count_forward(one), count_forward(one, config)) for one in cases]
    _, plain, patched = counts[0]
    whole, left = sum(plain.values()), sum(patched.values())
    cost, cost_after = (scaled(one, 1000, "FLOP") for one in (whole, left))
    tokens = f"{times(case.grid)} = {math.prod(case.grid):,} tokens"
    _say(f"{name} at {case.size}: {tokens}; its own attention is {family.computes}")
    if case.model.is_tiny and name.removeprefix("tiny-") in TINY:
        _say(f"a configuration for trying commands out; {name} of mhla generate is another one, with other strides")
    _say(f"patched: {summary_of(config)}; {_needs(config)}")
    _say(f"one forward: {cost} → {cost_after}, counted: a factor of at most {whole / left:.2f}")
    if config.has_dense_steps:
        _say(f"{dense_in_words(config, steps)}: a call at most {config.call_speedup(whole, left, steps):.2f}")
    rows = [(part, *(scaled(one[part], 1000, "") for one in (plain, patched))) for part in PARTS if plain[part]]
    rows.append(("forward", scaled(whole, 1000, ""), scaled(left, 1000, "")))
    _print_table("\nFLOPs of one forward", ["part", "unpatched", "patched"], rows, right=True)
    part = plain[ATTENTION] / whole
    most = f"; an attention that cost nothing would bring {1 / (1 - part):.2f}" if part < 1 else ""
    _say(f"\nSelf-attention is {part:.0%} of the unpatched forward{most}.")
    if len(cases) > 1:
        rows = []
        for one, plain, patched in counts:
            whole, left = sum(plain.values()), sum(patched.values())
            share, factor = f"{plain[ATTENTION] / whole:.0%}", f"{whole / left:.2f}"
            rows.append((one.size, f"{math.prod(one.grid):,}", share, factor))
        header = ["at", "tokens", "self-attention", "factor"]
        _print_table("\nThe most that the patch brings to a forward, by size", header, rows, right=True)


def _first_config(patch: str) -> tuple[str, PatchConfig]:
    folder = _saved_folder(patch)
    if folder is None:
        ready = load_patch(patch)
        return ready.family, ready.patch
    part = next(iter(read_record(folder).transformers.values()))
    return part.family, PatchConfig.read(part.patch)


def print_any_patch(patch: str) -> None:
    """Print a preset by its name or YAML path, or a saved patch by its folder."""
    folder = _saved_folder(patch)
    if folder is None:
        preset = load_patch(patch)
        _say(f"{patch} runs {summary_of(preset.patch)}; {_needs(preset.patch)}\n")
        _print_table(preset.description, ["setting", "value"], _rows(preset.to_dict()))
        return
    record = read_record(folder)
    runs = dict.fromkeys(summary_of(PatchConfig.read(part.patch)) for part in record.transformers.values())
    with safe_open(folder / PATCH_FILE, framework="pt") as tensors:
        sizes = {name: math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    own = [size for name, size in sizes.items() if ".mhla." in name]
    _say(
        f"{folder} was saved with what it has learned, for load_mhla(): {' and '.join(runs)}\n\n"
        f"{len(own)} tensors of MHLA with {sum(own):,} values, {len(sizes) - len(own)} of the model with "
        f"{sum(sizes.values()) - sum(own):,}\n"
    )
    _print_table("Saved patch", ["record", "value"], _rows(record.to_dict()))


def _saved_folder(patch: str) -> Path | None:
    if patch in patch_names():
        return None
    return adapted_patch_folder(patch) or (Path(patch) if Path(patch).is_dir() else None)


def _rows(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return dotted name and text of every value of nested settings; of names of weights there are many."""
    rows = []
    for name, value in content.items():
        if isinstance(value, Mapping):
            rows += _rows(value, f"{prefix}{name}.")
        else:
            text = f"{len(value)}, such as {value[0]}" if name == "base_weights" and value else str(value)
            rows.append((f"{prefix}{name}", text))
    return rows


def _say(text: str) -> None:
    typer.echo("\n".join(part for line in text.split("\n") for part in wrap(line) or [""]))


def _print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], right: bool = False) -> None:
    typer.echo(f"{title}\n{text_table(header, rows, right)}")
