"""A run that is killed or stopped and resumed is the run that was left alone."""

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.cli import app
from mhla_diffusers.families import get_family
from mhla_diffusers.generation.generate import SampleSet, generate
from mhla_diffusers.generation.record import Sample
from mhla_diffusers.training import TrainingConfig, export_checkpoint, read_metrics, train
from mhla_diffusers.training.data.batches import NoisedBatches

from ..refusals import refused
from .models import settings, tiny_wan, wan_data
from .processes import finish, start_process, start_training

PATCH = MHLAConfig(blocks=(2, 2, 2))


def _config(output: Path, steps: int = 30, **changes: Any) -> TrainingConfig:
    usual: dict[str, Any] = {"trainable": "attention", "objectives": {"diffusion": 1.0, "distillation": 1.0}}
    usual |= {"scheduler": "cosine", "warmup_steps": 3, "patch": PATCH, "checkpoint_every": 3}
    usual |= {"gradient_accumulation": 2, "ema_decay": 0.9, "prompt_dropout": 0.3}
    return settings(output, steps, **{**usual, **changes})


def _wait_for_step(output: Path, step: int, process: BaseProcess) -> None:
    while process.is_alive():
        metrics = output / "metrics.jsonl"
        if metrics.is_file() and metrics.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.005)


@pytest.mark.parametrize("objective", ["transfer", "distillation"])
def test_killed_and_resumed_gives_the_same_losses_and_weights(objective: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 12, "objectives": {objective: 1.0}}
    undisturbed = start_training(_config(tmp_path / "alone", **changes))
    interrupted, chance = _config(tmp_path / "killed", **changes), random.Random(5)
    for kill_at in sorted(chance.sample(range(4, 10), 2)):
        process = start_training(interrupted, "latest")
        _wait_for_step(tmp_path / "killed", kill_at, process)
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.join()
    finish([undisturbed, start_training(interrupted, "latest")])
    alone, killed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "killed"))
    assert len(alone) == 12 and killed == alone
    results = [next((tmp_path / name / "result").glob("*.safetensors")).read_bytes() for name in ("alone", "killed")]
    assert results[0] == results[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_exit(tmp_path: Path, number: signal.Signals) -> None:
    """Twice, since a launcher may hand on a Ctrl-C that has come from the terminal."""
    process = start_training(_config(tmp_path / "run", steps=300).replace(checkpoint_every=1000))
    _wait_for_step(tmp_path / "run", 5, process)
    for _ in range(2):
        psutil.Process(process.pid).send_signal(number)
    process.join(timeout=60)
    assert process.exitcode == 128 + number
    steps = len(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert not (tmp_path / "run" / "result").exists()
    patched = apply_mhla(tiny_wan(), PATCH)
    export_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{steps:08d}", tmp_path / "so-far", patched)
    load_mhla(tiny_wan(), tmp_path / "so-far")


def test_ctrl_c_leaves_workers_alone(tmp_path: Path) -> None:
    """A terminal sends it to the processes that read data as well."""
    config = settings(tmp_path, steps=6, workers=1)
    process = get_family(tiny_wan()).training.process(tiny_wan(), 3.0)
    batches = NoisedBatches(wan_data(), process, config, torch.device("cpu")).from_step(0)
    before = set(psutil.Process().children())
    next(batches)
    (worker,) = set(psutil.Process().children()) - before
    worker.send_signal(signal.SIGINT)
    for _ in range(4):  # more than are read ahead
        next(batches)


class _Watched:
    """Data that calls something with the number of samples read so far, this one included, whenever one is read."""

    def __init__(self, on_read: Callable[[int], object]) -> None:
        self.data, self.on_read, self.read, self.empty = wan_data(), on_read, 0, None
        self.shapes, self.weights = self.data.shapes, self.data.weights

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> object:
        self.read += 1
        self.on_read(self.read)
        return self.data[index]


def _waiting(folder: Path) -> BaseProcess:
    """A training that reads its data for a minute."""
    process = start_process(_train_on_data_that_waits, folder)
    while not (folder / "waiting").exists():
        assert process.is_alive()
        time.sleep(0.01)
    return process


def test_two_runs_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    """Also to encode and to generate; a run that was killed leaves the folder free."""
    process, config = _waiting(tmp_path), settings(tmp_path / "run", steps=1)
    (tmp_path / "prompts.txt").write_text("seven")
    synthesize = ["synthesize", "--model", "tiny-dit", "--prompts", str(tmp_path / "prompts.txt"), "--output"]
    for begin in (
        lambda: train(tiny_wan(), wan_data(), config),
        lambda: CliRunner().invoke(app, [*synthesize, config.output], catch_exceptions=False),
        lambda: next(generate(SampleSet("dit", samples=[Sample("0.png", "1")], output=tmp_path / "run"))),
    ):
        with refused(str(tmp_path / "run"), error=OSError):
            begin()
    process.kill()
    process.join()
    assert train(tiny_wan(), wan_data(), config).finished
    assert not (tmp_path / "run" / ".lock").exists()


def _train_on_data_that_waits(folder: Path) -> None:
    def wait(read: int) -> None:
        if read == 2:
            (folder / "waiting").touch()
            time.sleep(60)

    config = settings(folder / "run", steps=6, patch=PATCH)
    train(apply_mhla(tiny_wan(), PATCH), _Watched(wait), config)  # type: ignore[arg-type]


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    process = _waiting(tmp_path)
    for _ in range(2):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        time.sleep(1.2)
    process.join(timeout=30)
    assert process.exitcode == 1  # multiprocessing's, of a process that ended with an error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_full_disk_keeps_the_last_checkpoint_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path / "run", steps=6, checkpoint_every=2, patch=PATCH, keep_checkpoints=9)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(read: int) -> None:
        """From step 3 to 5, as far as a file size limit can."""
        full = 2 * config.batch_size < read <= 4 * config.batch_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if full else limits[0], limits[1]))

    try:
        train(apply_mhla(tiny_wan(), PATCH), _Watched(fill), config)  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000006"]
    assert "could not be written" in caplog.text and ".." not in caplog.text
