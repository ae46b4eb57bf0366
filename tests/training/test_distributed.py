"""Several processes train as one does: weights in parts (FSDP2), and one batch spread over a group."""

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.training import (
    InMemoryData,
    ObjectiveWeights,
    StageConfig,
    TrainingConfig,
    ValidationConfig,
    export_checkpoint,
    read_metrics,
    train,
)
from mhla_diffusers.training.checks import check_fits
from mhla_diffusers.training.distributed import uses_fsdp2

from ..refusals import refused
from .models import dit_data, one_stage, sana_data, tiny_dit, tiny_sana, tiny_wan, wan_data
from .processes import finish, start_distributed_training

PATCH = MHLAConfig(blocks=(2, 2, 2), layers=(1,))
"""Beside a layer that keeps softmax."""
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
BOTH = ObjectiveWeights(diffusion=1.0, distillation=1.0)
TRANSFER_THEN_ALL = (
    StageConfig(1, 1e-3, "attention", ObjectiveWeights(transfer=1.0)),
    StageConfig(2, 1e-3, "all", BOTH),
)
MHLA_THEN_LORA = (
    StageConfig(1, 3e-3, "mhla", ObjectiveWeights(distillation=1.0, transfer=1.0), mixing_learning_rate=0.9),
    StageConfig(2, 3e-3, "lora", BOTH, lora_rank=2),
)
ROUNDING = 1e-5
"""Relative, of float32 sums in another order: of gradients and metrics."""
ROUNDED_UPDATES = 1e-4
"""Relative, of weights: AdamW divides each element of a gradient by its own size, so that an element ten times smaller
than the others carries ten times their relative rounding into an update of the same size."""


def _config(output: Path, batch_size: int, group: int = 1, **settings: Any) -> TrainingConfig:
    given: dict[str, Any] = {
        "stages": TRANSFER_THEN_ALL,
        "patch": PATCH,
        "gradient_accumulation": 2,
        "max_gradient_norm": 0.05,
        "ema_decay": 0.9,
        "prompt_dropout": 0.3,
        "checkpoint_every": 1,
        "keep_checkpoints": 9,
        "validation": ValidationConfig(samples=3, every=1, timesteps=1),
    }
    return TrainingConfig(output=str(output), batch_size=batch_size, context_parallel=group, **(given | settings))


def _patched() -> Any:
    return apply_mhla(tiny_wan(), PATCH)


def _train_alone(config: TrainingConfig, resume: str | None = None) -> None:
    train(_patched(), wan_data(), config, resume=resume)


def _assert_same_run(one: Path, other: Path) -> None:
    """Differ by rounding alone: in metrics, gradients and weights of all checkpoints, and in the result.

    The first moments that AdamW begins a stage with are its gradients, but for a factor.
    """
    found = {}
    for here, there in zip(*(read_metrics(path / "metrics.jsonl") for path in (one, other)), strict=True):
        assert here.keys() == there.keys()
        for name, value in here.items():
            found[f"{name} after {here['step']}"] = abs(value - there[name]) / max(abs(value), 1e-6) / ROUNDING
    for checkpoint in sorted((one / "checkpoints").iterdir()):
        for kind, allowed in (("weights", ROUNDED_UPDATES), ("optimizer", ROUNDING), ("ema", ROUNDED_UPDATES)):
            here, there = (
                load_file(path / "checkpoints" / checkpoint.name / f"{kind}.safetensors") for path in (one, other)
            )
            assert here.keys() == there.keys()
            names = [name for name in here if kind != "optimizer" or name.endswith("exp_avg")]
            # of a bias that was zero, or a gradient that would be, all is rounding
            least = 1e-3 * max((here[name].float().norm() for name in names), default=0.0)
            for name in names:
                difference = (there[name] - here[name]).float().norm() / max(here[name].float().norm(), least)
                found[f"{kind} {name} of {checkpoint.name}"] = float(difference) / allowed
    assert max(found.values()) < 1, sorted(found.items(), key=lambda item: -item[1])[:6]
    here, there = (load_mhla(tiny_wan(), folder / "result").state_dict() for folder in (one, other))
    assert all(torch.allclose(there[name], value, atol=1e-5) for name, value in here.items())


def _back_to_step(step: int, run: Path, copy: Path) -> Path:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "result")
    for checkpoint in sorted((copy / "checkpoints").iterdir())[step:]:
        shutil.rmtree(checkpoint)
    return copy


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    _train_alone(_config(folder, 2))
    return folder


@pytest.mark.slow
def test_a_sharded_run_is_that_of_one_process_and_resumes_sharded_or_alone(alone: Path, tmp_path: Path) -> None:
    """In the middle of a stage; what it exports on its way is what one process makes of its checkpoint."""
    config = replace(_config(tmp_path / "sharded", 1), export_every=2)
    finish(start_distributed_training(config, processes=2, **FSDP2))
    _assert_same_run(alone, tmp_path / "sharded")
    checkpoint = tmp_path / "sharded" / "checkpoints" / "step-00000002"
    export_checkpoint(checkpoint, tmp_path / "exported", lambda *_: _patched())
    exported = tmp_path / "sharded" / "exports" / checkpoint.name
    assert {file.name: file.read_bytes() for file in exported.iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "exported").iterdir()
    }
    resumed, resumed_alone = (_back_to_step(2, tmp_path / "sharded", tmp_path / name) for name in ("again", "one"))
    finish(start_distributed_training(replace(config, output=str(resumed)), 2, "latest", **FSDP2))
    assert read_metrics(resumed / "metrics.jsonl") == read_metrics(tmp_path / "sharded" / "metrics.jsonl")
    _assert_same_run(alone, resumed)
    _train_alone(_config(resumed_alone, 2), resume="latest")
    _assert_same_run(alone, resumed_alone)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [FSDP2, {}], ids=["two groups", "two groups with copies of the weights"])
def test_a_batch_over_a_group_trains_as_in_one_process(alone: Path, sharding: dict[str, str], tmp_path: Path) -> None:
    finish(start_distributed_training(_config(tmp_path / "run", 1, group=2), 4, **sharding))
    _assert_same_run(alone, tmp_path / "run")


@pytest.mark.slow
def test_a_run_resumes_alone_and_split(alone: Path, tmp_path: Path) -> None:
    """Copies of the weights with gradients computed again."""
    run = _back_to_step(1, alone, tmp_path / "run")
    split = _config(run, 2, group=2, gradient_checkpointing=True)
    finish(start_distributed_training(split, 2, resume="latest"))
    _assert_same_run(alone, run)


@pytest.mark.slow
def test_sharded_lora_with_gradient_checkpointing_is_that_of_one_process(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_checkpointing": True, "stages": MHLA_THEN_LORA, "ema_decay": None}
    finish(start_distributed_training(_config(tmp_path / "two", 1, **settings), processes=2, **FSDP2))
    _train_alone(_config(tmp_path / "one", 2, **settings))
    one, two = (load_file(next((tmp_path / name / "result").glob("lora-*"))) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
    one, two = (load_mhla(tiny_wan(), tmp_path / name / "result").state_dict() for name in ("one", "two"))
    assert all(torch.allclose(two[name], value, atol=1e-4) for name, value in one.items())
    mixing = two["blocks.1.attn1.mhla.mixing"]
    assert 0 < mixing.min() < 1e-3 and 0.999 < mixing.max() < 1  # clipped


@pytest.mark.slow
@pytest.mark.parametrize(("family", "make", "data"), [("sana", tiny_sana, sana_data), ("dit", tiny_dit, dit_data)])
def test_other_families_are_sharded(
    family: str, make: Callable[[], Any], data: Callable[[], InMemoryData], tmp_path: Path
) -> None:
    patch = MHLAConfig(blocks=(2, 2))
    objectives = {"diffusion": 1.0, "distillation": 1.0, "transfer": 1.0}
    two, one = (
        one_stage(tmp_path / name, steps=1, objectives=objectives, patch=patch, batch_size=size)
        for name, size in (("two", 1), ("one", 2))
    )
    finish(start_distributed_training(two, processes=2, family=family, **FSDP2))
    train(apply_mhla(make(), patch), data(), one)
    here, there = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert here[0] == pytest.approx(there[0], rel=1e-4)
    load_mhla(make(), tmp_path / "two" / "result")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**FSDP2, "FSDP_VERSION": "1"}, "fsdp_version: 1"),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: true"),
        ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fsdp_activation_checkpointing: true"),
        ({**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading: true"),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward: false"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"WORLD_SIZE": "1"}, " 2 .* 1 "),
        ({"WORLD_SIZE": "5"}, " 2 .* 5 "),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),  # launched, but not joined
    ],
)
def test_unsupported_processes_are_refused_before_training(
    environment: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        _train_alone(_config(tmp_path / "run", 1, group=2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "kind"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP")])
def test_shipped_accelerate_configuration_is_supported(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    monkeypatch.chdir(Path(__file__).parents[2])
    path = Path("finetune", "accelerate", f"{name}.yaml")
    assert load_config_from_file(str(path)).distributed_type == kind
    (command,) = re.findall(r"^# +accelerate launch (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    arguments = launch_command_parser().parse_args(command.split())
    assert Path(arguments.training_script).is_file()
    arguments, _, _ = _validate_launch_command(arguments)
    for variable, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(variable, value)
    config = _config(Path("unused"), 1)
    assert uses_fsdp2(config) == (name == "fsdp2")
    if name == "fsdp2":
        with refused("optimizer=adamw8bit"):
            uses_fsdp2(replace(config, optimizer="adamw8bit"))


def _split_already() -> Any:
    transformer = _patched()
    transformer._parallel_config = object()
    return transformer


def _convolving() -> Any:
    return apply_mhla(tiny_wan(), PATCH, convolution=3)


def _patched_sana() -> Any:
    return apply_mhla(tiny_sana(), blocks=(2, 2))


@pytest.mark.parametrize(
    ("make", "data", "group", "words"),
    [
        (_patched, wan_data, 4, "context_parallel=4 .* 2 heads .* 2"),
        (_patched_sana, sana_data, 2, "SanaTransformer2DModel"),
        (_convolving, wan_data, 2, "convolution=3"),
        (_split_already, wan_data, 1, "enable_parallelism"),
    ],
)
def test_what_cannot_be_split_is_refused(
    make: Callable[[], Any], data: Callable[[], InMemoryData], group: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_fits(make(), data(), _config(Path("unused"), 1, group))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path: Path) -> None:
    stages = (StageConfig(10_000, 1e-3, "all", ObjectiveWeights(diffusion=1.0)),)
    settings = _config(tmp_path / "run", 1, group=2, stages=stages, checkpoint_every=10_000)
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
