"""``mhla info``: versions, devices, backends, supported models and ready patches."""

import importlib.metadata
import math
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .attention import backend_names, feature_map_names
from .attention.blocks import block_sizes
from .attention.tile_scores import list_length
from .benchmark.shapes import Shape, exact_cost, linear_cost, softmax_cost
from .config import MHLAConfig, Patch, adapted_patch_names, load_patch, patch_folder, patch_names
from .families import families
from .patching.record import read_record

_PACKAGES = ("mhla_diffusers", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "triton")

_AXES = ("frames", "height", "width")


def print_info() -> None:
    """Versions, devices, backends, supported models and ready patches."""
    console = Console()
    versions = Table("package", "version", title="Versions")
    for package in _PACKAGES:
        versions.add_row(package, _version(package))
    console.print(versions)
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    console.print(f"Devices: {', '.join([*devices, f'CPU ({platform.machine()})'])}")
    console.print(f"Backends: {', '.join(backend_names())}; feature maps: {', '.join(feature_map_names())}")
    models = Table("family", "transformers", "token grid", "default blocks", title="Supported models")
    for family in families():
        axes = " x ".join(_AXES[-family.axes :])
        models.add_row(family.name, ", ".join(family.transformers), axes, str(family.default_config.blocks))
    console.print(models)
    patches = Table("name", "blocks", "layers", "exact", "base model", title="Ready patches")
    for name in patch_names():
        patch = load_patch(name)
        blocks, exact = _times(patch.config.blocks), patch.config.exact
        patches.add_row(name, blocks, str(patch.config.layers), "" if exact == "none" else exact, patch.base_model)
    console.print(patches)
    adapted = Table("name", "for", "family", title="Adapted patches, for load_mhla")
    for name in adapted_patch_names():
        record = read_record(patch_folder() / name)
        adapted.add_row(name, record.base_model, next(iter(record.transformers.values())).family)
    console.print(adapted)


def report(patch: str | None) -> str:
    """What a report of a bug begins with, as plain text to paste: no paths, no names of users or machines.

    Args:
        patch: name or YAML file of the patch that it is about.

    Raises:
        ValueError: unknown patch, or a file that is none.
        FileNotFoundError: no such file.
    """
    devices = [_describe_gpu(index) for index in range(torch.cuda.device_count())]
    lines = [
        *(f"{package} {_version(package)}" for package in _PACKAGES),
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"CUDA {torch.version.cuda or 'none'}, ROCm {torch.version.hip or 'none'}",
        f"devices: {', '.join([*devices, f'CPU with {torch.get_num_threads()} threads'])}",
        f"backends: {', '.join(backend_names())}",
    ]
    if patch is not None:
        found = load_patch(patch)
        settings = ", ".join(f"{name}={value!r}" for name, value in found.config.to_dict().items())
        name = Path(patch).name if Path(patch).suffix else patch
        lines.append(f"patch {name}: family={found.family!r}, {settings}")
    return "\n".join(lines)


def _describe_gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB, capability {capability})"


def print_patch(name: str) -> None:
    """Every setting of one patch, and what a layer costs at the sizes that its family is measured at."""
    patch = load_patch(name)
    config, console = patch.config, Console()
    table = Table("setting", "value", title=f"{name}: {patch.description}")
    table.add_row("family", patch.family)
    table.add_row("base model", patch.base_model)
    for field, value in config.to_dict().items():
        table.add_row(field, str(value))
    table.add_row("M", str(math.prod(config.blocks)))
    if config.exact != "none":
        count = math.prod(config.tiles)
        table.add_row("tiles", f"{_times(config.tiles)} = {count}")
        table.add_row("exact pairs of tiles", f"{list_length(config.share, count) / count:.1%}")
    console.print(table)
    costs = _costs(patch)
    if costs.row_count:
        console.print(costs)


def _costs(patch: Patch) -> Table:
    """FLOPs of a layer at every grid that a model of the family is measured at."""
    config = patch.config
    has_exact = config.exact != "none"
    header = ["at", "grid", *(["tiles"] if has_exact else []), "softmax", "MHLA", *(["exact"] if has_exact else [])]
    table = Table(*header, title="GFLOP of a self-attention's forward")
    for column in table.columns[-3 if has_exact else -2 :]:
        column.justify = "right"
    for shape in _shapes(patch):
        costs = [softmax_cost, linear_cost, *([exact_cost] if has_exact else [])]
        cells = [_giga(cost(shape, 1, False).flops) for cost in costs]
        tiles = [_tokens_per_tile(shape.grid, config)] if has_exact else []
        table.add_row(shape.name, _times(shape.grid), *tiles, *cells)
    return table


def _shapes(patch: Patch) -> list[Shape]:
    """Attentions that are measured and that the patch fits."""
    config = patch.config
    counts = [config.blocks] if config.exact == "none" else [config.blocks, config.tiles]
    return [
        Shape(
            f"{model.name}-{label}",
            grid,
            config.blocks,
            model.heads,
            model.head_dim,
            None if config.exact == "none" else config.tiles,
            config.share,
            config.tile_means,
        )
        for family in families()
        if family.name == patch.family
        for model in family.models
        for label, grid in model.grids.items()
        if all(count <= size for shape in counts for count, size in zip(shape, grid, strict=True))
    ]


def _tokens_per_tile(grid: tuple[int, ...], config: MHLAConfig) -> str:
    sizes = block_sizes(grid, config.tiles)
    low, high = min(sizes), max(sizes)
    return f"{len(sizes)} of {low}" + ("" if low == high else f"-{high}")


def _giga(number: int) -> str:
    return f"{number / 1e9:,.0f}" if number >= 1e11 else f"{number / 1e9:.2f}"


def _times(counts: tuple[int, ...]) -> str:
    return "x".join(map(str, counts))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
