"""Small random pictures, an extractor that needs no weights, and the command."""

import torch
from PIL import Image
from typer.testing import CliRunner

from mhla_diffusers.cli import app
from mhla_diffusers.evaluation.extractors import ImageFeatures


def write_pictures(folder, count, seed=0, brightness=128, size=8):
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        noise = brightness + 40 * torch.randn(size, size, 3, generator=generator)
        Image.fromarray(noise.clamp(0, 255).to(torch.uint8).numpy()).save(folder / f"{number:04d}.png")
    return folder


def blocks(images):
    """Mean colours of the four quarters, 12 channels."""
    means = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)
    return ImageFeatures(means, spatial=means[:, :4], probabilities=means[:, :3].softmax(dim=1))


def mhla(*arguments):
    """The command within this process; errors of users are in ``exception``."""
    return CliRunner().invoke(app, list(map(str, arguments)))
