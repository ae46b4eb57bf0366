"""One batch spread over several processes trains as it does in one."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.checks import check_splits
from mhla_diffusers.training.config import ContextParallel

from ..parallel.diffusers_on_cpu import diffusers_on_cpu
from .models import sana_data, tiny_sana, tiny_wan, wan_data
from .processes import finish, start_distributed_training
from .test_sharding import FSDP2

PATCH = MHLAConfig(blocks=(2, 2, 2), layers=(1,))
"""Beside a layer that keeps softmax."""
TRANSFER_THEN_ALL = (
    StageConfig(1, 1e-3, "attention", ObjectiveWeights(transfer=1.0)),
    StageConfig(1, 1e-3, "all", ObjectiveWeights(diffusion=1.0, distillation=1.0)),
)
ROUNDING = 1e-5
"""Relative, of float32 sums in another order: of gradients and metrics."""
ROUNDED_UPDATES = 1e-4
"""Relative, of weights: AdamW divides each element of a gradient by its own size, so that an element ten times smaller
than the others carries ten times their relative rounding into an update of the same size."""


def config(output: Path, batch_size: int, degrees: ContextParallel | None = None, **settings: Any) -> TrainingConfig:
    given: dict[str, Any] = {
        "stages": TRANSFER_THEN_ALL,
        "patch": PATCH,
        "gradient_accumulation": 2,
        "prompt_dropout": 0.3,
        "checkpoint_every": 1,
        "validation": ValidationConfig(samples=3, every=1, timesteps=1),
    }
    degrees = degrees or ContextParallel()
    return TrainingConfig(output=str(output), batch_size=batch_size, context_parallel=degrees, **(given | settings))


def differences(one: Path, other: Path) -> dict[str, float]:
    """Relative differences of two runs: of the metrics, and after every update of gradients and weights.

    The first moments that AdamW begins a stage with are its gradients, but for a factor.
    """
    found = {}
    records = [read_metrics(path / "metrics.jsonl") for path in (one, other)]
    for here, there in zip(*records, strict=True):
        assert here.keys() == there.keys()
        found |= {
            f"{name} after {here['step']}": abs(value - there[name]) / max(abs(value), 1e-6)
            for name, value in here.items()
        }
    for step in (1, 2):
        weights, moments = (
            [load_file(path / f"checkpoints/step-{step:08d}" / f"{kind}.safetensors") for path in (one, other)]
            for kind in ("weights", "optimizer")
        )
        gradients = [{name: x for name, x in of_run.items() if name.endswith("exp_avg")} for of_run in moments]
        for here, there in (weights, gradients):
            assert here.keys() == there.keys()
            # of a bias that was zero, or a gradient that would be, all is rounding
            least = 1e-3 * max(value.norm() for value in here.values())
            for name, value in here.items():
                found[f"{name} after {step}"] = float((there[name] - value).norm() / max(value.norm(), least))
    return found


def assert_same_updates(one: Path, other: Path) -> None:
    of_weights = load_file(one / "checkpoints/step-00000001/weights.safetensors").keys()
    shares = {
        name: found / (ROUNDED_UPDATES if name.rpartition(" after ")[0] in of_weights else ROUNDING)
        for name, found in differences(one, other).items()
    }
    assert max(shares.values()) < 1, sorted(shares.items(), key=lambda item: -item[1])[:6]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(apply_mhla(tiny_wan(), PATCH), wan_data(), config(folder / "run", 2))
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "ring", "ulysses", "sharding"),
    [(4, 2, 2, FSDP2), (4, 2, 1, FSDP2), (4, 1, 2, {})],
    ids=["both", "two groups", "two groups with copies of the weights"],
)
def test_an_update_is_that_of_one_process(
    alone: Path, processes: int, ring: int, ulysses: int, sharding: dict[str, str], tmp_path: Path
) -> None:
    groups = processes // (ring * ulysses)
    settings = config(tmp_path / "run", 2 // groups, ContextParallel(ring, ulysses))
    finish(start_distributed_training(settings, processes, **sharding))
    assert_same_updates(alone, tmp_path / "run")


@pytest.mark.slow
def test_a_run_resumes_alone_and_split(alone: Path, tmp_path: Path) -> None:
    """Copies of the weights with gradients computed again, then one process, then groups again."""
    degrees = ContextParallel(ulysses=2)
    shutil.copytree(alone, tmp_path / "run")
    for name in ("checkpoints/step-00000002", "result"):
        shutil.rmtree(tmp_path / "run" / name)
    split = config(tmp_path / "run", 2, degrees, gradient_checkpointing=True)
    finish(start_distributed_training(split, 2, resume="latest"))
    assert_same_updates(alone, tmp_path / "run")
    here, there = (load_mhla(tiny_wan(), folder / "result").state_dict() for folder in (alone, tmp_path / "run"))
    assert all(torch.allclose(there[name], value, atol=1e-5) for name, value in here.items())


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (ContextParallel(3), "3 processes evenly, but latents of shape .* make 32 tokens; .* such as 1"),
        (ContextParallel(1, 4), "ulysses=4 does not divide the 2 heads of this transformer; allowed is one of 2"),
        (ContextParallel(2), "cannot go round a ring .* Use context_parallel.ulysses alone"),
    ],
)
def test_what_cannot_be_split_is_refused(degrees: ContextParallel, message: str) -> None:
    transformer = apply_mhla(tiny_wan(), PATCH)
    with pytest.raises(ValueError, match=message):
        check_splits(transformer, wan_data(), config(Path("unused"), 1, degrees))


def test_softmax_round_a_ring_is_not_computed_again() -> None:
    settings = config(Path("unused"), 1, ContextParallel(2), gradient_checkpointing=True)
    with diffusers_on_cpu():
        with pytest.raises(ValueError, match="gradient_checkpointing: true does not go with softmax"):
            check_splits(apply_mhla(tiny_wan(), PATCH), wan_data(), settings)
        check_splits(apply_mhla(tiny_wan(), PATCH, layers="all"), wan_data(), settings)


def test_a_transformer_that_diffusers_cannot_split_is_refused() -> None:
    with pytest.raises(ValueError, match="SanaTransformer2DModel are split .* it does for .*WanTransformer3DModel"):
        check_splits(tiny_sana(), sana_data(), config(Path("unused"), 1, ContextParallel(1, 2)))


def test_processes_that_are_no_whole_groups_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processes, size in ((1, 2), (6, 4)):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        settings = config(tmp_path / "run", 1, ContextParallel(ulysses=size))
        with pytest.raises(ValueError, match=f"groups of {size} processes, which {processes} processes cannot be made"):
            train(apply_mhla(tiny_wan(), PATCH), wan_data(), settings)
    assert not (tmp_path / "run").exists()


def test_a_transformer_that_is_split_already_is_refused() -> None:
    transformer = tiny_wan()
    transformer._parallel_config = object()
    with pytest.raises(ValueError, match="enable_parallelism.* was called before training"):
        check_splits(transformer, wan_data(), config(Path("unused"), 1))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path: Path) -> None:
    stages = (StageConfig(10_000, 1e-3, "all", ObjectiveWeights(diffusion=1.0)),)
    settings = config(tmp_path / "run", 1, ContextParallel(2), stages=stages, checkpoint_every=10_000)
    first, second = start_distributed_training(settings, 2, **FSDP2)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while first.is_alive() and not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 2):
            time.sleep(0.05)
        second.kill()
        first.join(60)
        assert first.exitcode == 1
    finally:
        first.kill()
