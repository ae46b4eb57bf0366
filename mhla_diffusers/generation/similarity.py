"""Similarity of two samples from the same noise, one from a patched model: PSNR, SSIM and LPIPS."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import conv2d

from ..devices import choose_device

_LARGEST_PSNR = 100.0
_DEVIATION = 1.5
SMALLEST_SSIM = 11
"""Pixels of the window of SSIM, and so of the least height and width."""
_ALEXNET = "alexnet-owt-7be5be79.pth"
_ALEXNET_SOURCE = f"https://download.pytorch.org/models/{_ALEXNET}"


@dataclass(frozen=True)
class Similarity:
    """A similarity measure of two frames."""

    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Maps frames and reference frames, both uint8 (F, 3, H, W), to a value for each: (F,)."""
    smallest: int = 1
    """Minimum height and width in pixels."""


def psnr(frames: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in dB, over the three channels: float64 (F,), at most 100, the value for equal frames.

    Args:
        frames: uint8 (F, 3, H, W).
        reference: like ``frames``.
    """
    error = (frames.short() - reference.short()).double().square().mean(dim=(1, 2, 3))
    return (10 * (255**2 / error).log10()).clamp(max=_LARGEST_PSNR)


def ssim(frames: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Structural similarity (Wang et al., 2004), averaged over the three channels: float32 (F,), at most 1.

    Gaussian window of 11x11 pixels with a standard deviation of 1.5, inside the frame; K1 = 0.01, K2 = 0.03.

    Args:
        frames: uint8 (F, 3, H, W), of 11 pixels or more in height and width.
        reference: like ``frames``.
    """
    places = torch.arange(SMALLEST_SSIM, device=frames.device) - SMALLEST_SSIM // 2
    window = (-places.square() / (2 * _DEVIATION**2)).exp()
    window = (window / window.sum()).view(1, 1, 1, -1)

    def local_mean(channels: torch.Tensor) -> torch.Tensor:
        return conv2d(conv2d(channels, window), window.mT)

    first, second = (x.flatten(0, 1)[:, None].float() / 255 for x in (frames, reference))
    means = local_mean(first), local_mean(second)
    variances = local_mean(first.square()) - means[0].square(), local_mean(second.square()) - means[1].square()
    covariance = local_mean(first * second) - means[0] * means[1]
    luminance = (2 * means[0] * means[1] + 0.01**2) / (means[0].square() + means[1].square() + 0.01**2)
    structure = (2 * covariance + 0.03**2) / (variances[0] + variances[1] + 0.03**2)
    return (luminance * structure).view(len(frames), -1).mean(dim=1)


def load_similarities(device: str = "cpu") -> tuple[dict[str, Similarity], str | None]:
    """PSNR, SSIM and, if the ``lpips`` package and its weights are present, LPIPS with AlexNet. Downloads nothing.

    Returns:
        Name → measure, and why LPIPS is missing, if it is.

    Raises:
        ValueError: no such device here.
    """
    place = choose_device(device)

    def on_device(of: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
        return lambda frames, reference: of(frames.to(place), reference.to(place)).cpu()

    found = {"psnr": Similarity(on_device(psnr)), "ssim": Similarity(on_device(ssim), SMALLEST_SSIM)}
    weights = Path(torch.hub.get_dir(), "checkpoints", _ALEXNET)
    try:
        import lpips
    except (ImportError, RuntimeError) as error:  # RuntimeError if torchvision does not match torch
        return found, f"LPIPS is left out: lpips cannot be imported ({error}): pip install mhla_diffusers[eval]"
    if not weights.is_file():
        return found, f"LPIPS is left out: there is no {weights}. Download it from {_ALEXNET_SOURCE}."
    model = lpips.LPIPS(net="alex", verbose=False).to(place)

    def distance(frames: torch.Tensor, reference: torch.Tensor) -> Any:
        return model(frames / 127.5 - 1, reference / 127.5 - 1).flatten()

    # below 31 pixels AlexNet's pooling leaves nothing
    return {**found, "lpips": Similarity(on_device(distance), 31)}, None
