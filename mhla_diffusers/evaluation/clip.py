"""CLIP score: how well images show their prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..devices import choose_device
from ..generation.pipelines import pipeline_file


class ClipScorer:
    """100 times the cosine of image and text embeddings; SANA's numbers use OpenAI's ViT-L/14.

    By transformers: torchmetrics 1.9 fails with its version 5, and cuts the end token off long prompts. ``model`` is a
    Hub id or folder; OSError if it cannot be had, ValueError if its weights do not fit its config.json.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        from transformers import CLIPModel, CLIPProcessor

        self._device = choose_device(device)
        if not Path(model).is_dir():
            pipeline_file(model, "config.json")  # raises at once where the Hub's client would try for most of a minute
        clip, found = CLIPModel.from_pretrained(model, output_loading_info=True)
        if missing := sorted(found["missing_keys"]):  # transformers fills in random values
            raise ValueError(
                f"The weights of {model} lack {len(missing)} tensors such as {missing[0]}. Download them again."
            )
        self._model = clip.to(self._device).eval()
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
