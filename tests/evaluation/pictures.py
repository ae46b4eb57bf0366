"""Small random pictures, an extractor that needs no weights, and the command."""

import torch
from PIL import Image
from typer.testing import CliRunner

from mhla_diffusers.cli import app
from mhla_diffusers.files import write_json


def write_pictures(folder, count, seed=0, brightness=128, size=8):
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        noise = brightness + 40 * torch.randn(size, size, 3, generator=generator)
        Image.fromarray(noise.clamp(0, 255).to(torch.uint8).numpy()).save(folder / f"{number:04d}.png")
    return folder


def write_set(folder, texts, **choices):
    """What ``mhla generate`` records beside pictures 0000.png and so on."""
    samples = [{"file": f"{number:04d}.png", "text": text} for number, text in enumerate(texts)]
    write_json({"choices": choices, "samples": samples}, folder / "samples.json")
    return folder


def blocks(images):
    """Mean colours of the four quarters, 12 channels."""
    return torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)


def mhla(*arguments):
    """The command within this process; errors of users are in ``exception``."""
    return CliRunner().invoke(app, list(map(str, arguments)))
