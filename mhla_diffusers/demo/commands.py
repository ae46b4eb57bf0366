"""``mhla demo``."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    family: Annotated[str, typer.Option(help="dit, sana or wan.")] = "wan",
    output: Annotated[Path, typer.Option(help="Folder for the table, pictures and page.")] = Path("outputs/demo"),
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU if there is one.")] = "auto",
    seed: Annotated[int, typer.Option(help="Same seed, same table on the same machine.")] = 0,
    updates: Annotated[int, typer.Option(help="Of each attention that is adapted live; 0 for none.")] = 60,
) -> None:
    """Softmax, linear attention and MHLA, adapted, on a tiny pipeline: generate, compare, adapt live; minutes."""
    from ..devices import choose_device
    from .run import DemoConfig, run_demo

    config = DemoConfig(output, family, str(choose_device(device)), seed, updates)
    run_demo(config)
