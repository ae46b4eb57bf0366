"""Similarity of two samples from the same noise: PSNR, SSIM and LPIPS by torchmetrics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..devices import choose_device

Similarity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps frames and reference frames, both uint8 (F, 3, H, W), to a value for each: (F,)."""

_WINDOW = 11
"""Pixels of SSIM's Gaussian window, whose standard deviation is 1.5."""
_ALEXNET = "alexnet-owt-7be5be79.pth"


def psnr(frames: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio in dB over the three channels: float64 (F,), 100 for equal frames."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    pair = frames.double(), reference.double()
    ratio = peak_signal_noise_ratio(*pair, data_range=255.0, reduction="none", dim=(1, 2, 3))
    return torch.as_tensor(ratio).clamp(max=100)


def ssim(frames: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity (Wang et al., 2004), averaged over channels: float32 (F,).

    Gaussian window inside the frame, K1 = 0.01, K2 = 0.03; torchmetrics' own mean includes reflected borders.
    ValueError for frames smaller than the window.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    if min(frames.shape[2:]) < _WINDOW:
        raise ValueError(f"SSIM needs frames of {_WINDOW} pixels or more, got {tuple(frames.shape[2:])}.")
    _, values = structural_similarity_index_measure(
        frames.float() / 255, reference.float() / 255, data_range=1.0, reduction="none", return_full_image=True
    )
    border = _WINDOW // 2
    return torch.as_tensor(values)[..., border:-border, border:-border].mean(dim=(1, 2, 3))


def load_similarities(device: str = "cpu") -> tuple[dict[str, Similarity], list[str]]:
    """Return name → measure for PSNR, SSIM and LPIPS with AlexNet, and why LPIPS is missing. Downloads nothing."""
    place = choose_device(device)

    def on_device(measure: Similarity) -> Similarity:
        return lambda frames, reference: measure(frames.to(place), reference.to(place)).cpu()

    found = {"psnr": on_device(psnr), "ssim": on_device(ssim)}
    weights = Path(torch.hub.get_dir(), "checkpoints", _ALEXNET)
    if not weights.is_file():
        source = f"https://download.pytorch.org/models/{_ALEXNET}"
        return found, [f"LPIPS is left out: there is no {weights}. Download it from {source}."]
    try:
        from torchmetrics.image import LearnedPerceptualImagePatchSimilarity

        model: Any = LearnedPerceptualImagePatchSimilarity("alex", reduction="none", normalize=True).to(place)
    except (ImportError, RuntimeError) as error:  # no torchvision, or one of another torch
        return found, [f"LPIPS is left out: it needs a torchvision that matches your torch ({error})."]

    def distance(frames: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(model(frames / 255, reference / 255)).view(len(frames))

    return {**found, "lpips": on_device(distance)}, []
