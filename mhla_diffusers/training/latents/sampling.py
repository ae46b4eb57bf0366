"""Generate with the transformer in training, to look at how it does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...families.class_labels import class_label
from .media import Clip


class PromptSampler:
    """Generates a PNG or MP4 for each of some prompts, from the same noise every time.

    Args:
        pipe: pipeline with its own transformer, which the one in training stands in for.
        prompts: one file each; classes for DiT.
        clip: frames, frames per second and size.
        steps: of the sampler.
        component: which transformer of the pipeline is trained.

    Raises:
        ValueError: a prompt that is no class of a DiT.
    """

    def __init__(self, pipe: Any, prompts: Sequence[str], clip: Clip, steps: int, component: str) -> None:
        from diffusers import DiTPipeline

        self._pipe = pipe
        self._prompts = prompts
        self._clip = clip
        self._steps = steps
        self._component = component
        pipe.set_progress_bar_config(disable=True)
        if isinstance(pipe, DiTPipeline):
            for prompt in prompts:
                class_label(pipe, prompt)  # refused before the training, not at its first samples

    @torch.no_grad()
    def __call__(self, transformer: nn.Module, folder: Path) -> None:
        """Write ``00.png`` or ``00.mp4`` and so on into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        setattr(self._pipe, self._component, transformer)
        training = transformer.training
        transformer.eval()
        try:
            for number, prompt in enumerate(self._prompts):
                self._generate(prompt, folder / f"{number:02d}")
        finally:
            transformer.train(training)

    def _generate(self, prompt: str, path: Path) -> None:
        from diffusers import DiTPipeline
        from diffusers.utils import export_to_video

        how: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "num_inference_steps": self._steps}
        if isinstance(self._pipe, DiTPipeline):
            self._pipe([class_label(self._pipe, prompt)], **how).images[0].save(path.with_suffix(".png"))
            return
        height, width = self._clip.sizes[0]
        how |= {"height": height, "width": width}
        if self._clip.frames == 1:
            self._pipe(prompt, **how).images[0].save(path.with_suffix(".png"))
            return
        frames = self._pipe(prompt, num_frames=self._clip.frames, **how).frames[0]
        export_to_video(frames, str(path.with_suffix(".mp4")), fps=round(self._clip.fps))
