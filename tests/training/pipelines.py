"""Pipelines around the models to train, and files to encode."""

from pathlib import Path
from typing import Any

import numpy as np
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image

from .. import models, pipelines
from .models import tiny_dit, tiny_sana


def wan_pipeline(latent_channels: int = 4) -> Any:
    transformer = models.wan(
        noise=0, in_channels=latent_channels, out_channels=latent_channels, text_dim=8, num_layers=2
    )
    scale = {"latents_mean": [0.1] * latent_channels, "latents_std": [0.5] * latent_channels}
    return pipelines.wan_pipeline(transformer, {"base_dim": 4, "z_dim": latent_channels, **scale})


def sana_pipeline() -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return pipelines.sana_pipeline(tiny_sana(), {"scaling_factor": 0.41407}, scheduler=scheduler)


def dit_pipeline() -> Any:
    scheduler = DDIMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False)
    labels = {3: "cat, house cat", 5: "dog"}
    return pipelines.dit_pipeline(tiny_dit(), {"scaling_factor": 0.18215}, scheduler=scheduler, id2label=labels)


def write_video(path: Path, frames: int = 12, fps: int = 8, size: tuple[int, int] = (40, 48)) -> None:
    """A video whose frame i is of grey level 10 i."""
    write_frames(path, np.stack([np.full((*size, 3), 10 * index, dtype=np.uint8) for index in range(frames)]), fps)


def write_frames(path: Path, frames: "np.ndarray[Any, Any]", fps: int = 8) -> None:
    """A video of frames, uint8 (F, H, W, 3)."""
    import av

    path.parent.mkdir(exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.bit_rate = 2_000_000
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def write_image(path: Path, size: tuple[int, int] = (40, 40), level: int = 100) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.full((*size, 3), level, dtype=np.uint8)).save(path)
