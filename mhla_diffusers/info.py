"""``mhla info``: versions, devices, backends, supported models and ready patches."""

import importlib.metadata
import math
import platform
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from .attention import backend_names, feature_map_names
from .config import load_patch, patch_names
from .families import families

_PACKAGES = ("mhla_diffusers", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "triton")

_AXES = ("frames", "height", "width")


def info_command(patch: Annotated[str | None, typer.Option(help="Show one patch: name or YAML path.")] = None) -> None:
    """Versions, devices, backends, supported models and ready patches."""
    if patch is None:
        print_info()
    else:
        print_patch(patch)


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
    patches = Table("name", "blocks", "layers", "base model", title="Ready patches")
    for name in patch_names():
        patch = load_patch(name)
        patches.add_row(name, "x".join(map(str, patch.config.blocks)), str(patch.config.layers), patch.base_model)
    console.print(patches)


def print_patch(name: str) -> None:
    """Every setting of one patch."""
    patch = load_patch(name)
    table = Table("setting", "value", title=f"{name}: {patch.description}")
    table.add_row("family", patch.family)
    table.add_row("base model", patch.base_model)
    for field, value in patch.config.to_dict().items():
        table.add_row(field, str(value))
    table.add_row("M", str(math.prod(patch.config.blocks)))
    Console().print(table)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
