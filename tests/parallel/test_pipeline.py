"""The script that makes one video with several processes."""

import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import WanPipeline

from mhla_diffusers import load_mhla
from mhla_diffusers.tiny import pipeline_folder

from .diffusers_on_cpu import diffusers_on_cpu
from .processes import Processes

_ROOT = Path(__file__).parents[2]
_CALL = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 2}


def _video() -> Any:
    """What the script writes in this process."""
    written: list[Any] = []
    numbers = {"--frames": 9, "--height": 64, "--width": 64, "--steps": 2, "--ring": 2}
    options = [str(part) for pair in numbers.items() for part in pair]
    model, weights = str(pipeline_folder("wan")), str(_ROOT / "patches" / "tiny-wan-mhla")
    line = ["generate_wan_parallel.py", "seven", "--model", model, "--weights", weights, *options]
    with (
        diffusers_on_cpu(),
        patch.object(sys, "argv", line),
        patch("mhla_diffusers.generation.record.write_video", lambda video, *_, **__: written.append(video)),
    ):
        runpy.run_path(str(_ROOT / "pipelines" / "generate_wan_parallel.py"), run_name="__main__")
    return written


def test_one_video_is_that_of_one_process() -> None:
    pipe = WanPipeline.from_pretrained(pipeline_folder("wan"))
    pipe.set_progress_bar_config(disable=True)
    load_mhla(pipe, _ROOT / "patches" / "tiny-wan-mhla")
    expected = pipe("seven", **_CALL, generator=torch.Generator().manual_seed(0)).frames[0]
    processes = Processes(2)  # of its own, since the script ends their group
    try:
        first, second = processes.run(_video)
    finally:
        processes.close()
    assert not second
    # of pixels from 0 to 1, after two steps and the autoencoder in float32
    assert np.abs(first[0] - expected).max() < 1e-4
