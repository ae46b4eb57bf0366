"""CLIP score: how well images show their prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..devices import choose_device
from .description import Progress
from .images import read_image
from .sets import require_samples


class ClipScorer:
    """100 times the cosine of image and text embeddings; SANA's numbers are of OpenAI's ViT-L/14.

    Args:
        model: Hub id or folder of a CLIP model with its processor.
        device: where it runs; "auto" for a GPU if there is one.

    Raises:
        OSError: there is no such model.
        ValueError: no such device here.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        from transformers import CLIPModel, CLIPProcessor

        self._device = choose_device(device)
        self._model = CLIPModel.from_pretrained(model).to(self._device).eval()
        self._processor = CLIPProcessor.from_pretrained(model)

    @torch.no_grad()
    def __call__(self, images: Sequence[torch.Tensor], texts: Sequence[str]) -> torch.Tensor:
        """Score of each pair: float32 (B,).

        Args:
            images: uint8, each (3, H, W).
            texts: B prompts; what exceeds the 77 tokens of CLIP is cut off.
        """
        inputs: Any = self._processor(
            text=list(texts), images=list(images), return_tensors="pt", padding=True, truncation=True
        ).to(self._device)
        output = self._model(**inputs)
        # the embeddings of the model's output are of length 1
        return 100 * (output.image_embeds.float() * output.text_embeds.float()).sum(dim=-1).cpu()


def score_samples(
    folder: Path, scorer: ClipScorer, batch_size: int = 32, progress: Progress | None = None
) -> dict[str, float]:
    """CLIP score of every image of a sample set: file → score.

    Args:
        folder: of the set, with its ``samples.json``.
        scorer: which CLIP.
        batch_size: images per forward.
        progress: called with the number of images done and their total.

    Raises:
        FileNotFoundError: no list of samples, or missing files.
        ValueError: damaged images.
    """
    samples = require_samples(folder)
    scores: dict[str, float] = {}
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        values = scorer([read_image(folder / sample.file) for sample in batch], [sample.text for sample in batch])
        scores |= dict(zip((sample.file for sample in batch), values.tolist(), strict=True))
        if progress is not None:
            progress(len(scores), len(samples))
    return scores
