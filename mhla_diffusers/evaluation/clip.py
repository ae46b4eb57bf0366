"""CLIP score: how well images show their prompts."""

from collections.abc import Sequence
from typing import Any

import torch

from ..devices import choose_device
from .extractors import load_whole


class ClipScorer:
    """100 times the cosine of image and text embeddings; SANA's numbers use OpenAI's ViT-L/14.

    Args:
        model: Hub id or folder of a CLIP model with its processor.
        device: where it runs; "auto" for a GPU if there is one.

    Raises:
        ValueError: no such device, or weights that are damaged or do not fit the model.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        from transformers import CLIPModel, CLIPProcessor

        self._device = choose_device(device)
        self._model = load_whole(CLIPModel, model).to(self._device).eval()
        self._processor = CLIPProcessor.from_pretrained(model)

    @torch.no_grad()
    def __call__(self, images: Sequence[torch.Tensor], texts: Sequence[str]) -> torch.Tensor:
        """Score images, each uint8 (3, H, W), with their texts, truncated to CLIP's 77 tokens: float32 (B,)."""
        if any(image.ndim != 3 for image in images):
            raise ValueError("CLIP scores images; for videos use VBench.")
        inputs: Any = self._processor(
            text=list(texts), images=list(images), return_tensors="pt", padding=True, truncation=True
        ).to(self._device)
        output = self._model(**inputs)
        # the model's embeddings have length 1
        return 100 * (output.image_embeds.float() * output.text_embeds.float()).sum(dim=-1).cpu()
