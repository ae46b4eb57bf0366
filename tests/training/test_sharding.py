import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.generation.pipelines import LORA_FILE
from mhla_diffusers.training import (
    InMemoryData,
    ObjectiveWeights,
    StageConfig,
    TrainingConfig,
    ValidationConfig,
    read_metrics,
    train,
)
from mhla_diffusers.training.distributed import gathered, meta_copy, sharding_is_asked_for

from .models import dit_data, sana_data, tiny_dit, tiny_sana, tiny_wan, wan_data
from .processes import finish, start_distributed_training

PATCH = MHLAConfig(blocks=(2, 2, 2), layers=(1,))
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
BOTH = ObjectiveWeights(diffusion=1.0, distillation=1.0)
TRANSFER_THEN_ALL = (
    StageConfig(2, 3e-3, "attention", ObjectiveWeights(transfer=1.0), mixing_learning_rate=0.2),
    StageConfig(2, 3e-3, "all", BOTH, mixing_learning_rate=0.2),
)
MHLA_THEN_LORA = (
    StageConfig(2, 3e-3, "mhla", ObjectiveWeights(distillation=1.0, transfer=1.0)),
    StageConfig(2, 3e-3, "lora", BOTH, lora_rank=2),
)


def _config(output: Path, batch_size: int, stages: tuple[StageConfig, ...], **settings: Any) -> TrainingConfig:
    return TrainingConfig(
        output=str(output),
        stages=stages,
        patch=PATCH,
        batch_size=batch_size,
        gradient_accumulation=2,
        max_gradient_norm=0.05,
        ema_decay=0.9,
        prompt_dropout=0.3,
        checkpoint_every=3,
        keep_checkpoints=9,
        validation=ValidationConfig(samples=3, every=2, timesteps=1),
        **settings,
    )


def _train_alone(config: TrainingConfig, resume: str | None = None) -> Any:
    transformer = apply_mhla(tiny_wan(), PATCH)
    train(transformer, wan_data(), config, resume=resume)
    return transformer


def _assert_same_metrics(one: Path, other: Path) -> None:
    records = [read_metrics(folder / "metrics.jsonl") for folder in (one, other)]
    assert len(records[0]) == len(records[1]) == 7
    for here, there in zip(*records, strict=True):
        assert here == pytest.approx(there, rel=1e-4)


def _assert_same_result(one: Path, other: Path) -> None:
    here, there = (load_mhla(tiny_wan(), folder / "result") for folder in (one, other))
    for name, value in here.state_dict().items():
        assert torch.allclose(there.state_dict()[name], value, atol=1e-4), name
    assert here.blocks[1].attn1.mhla.mixing.min() > 0
    assert here.blocks[1].attn1.mhla.mixing.max() < 1


@pytest.mark.slow
def test_sharded_run_is_that_of_one_process_and_resumes_sharded_or_alone(tmp_path: Path) -> None:
    sharded, alone = (_config(tmp_path / name, size, TRANSFER_THEN_ALL) for name, size in (("two", 1), ("one", 2)))
    finish(start_distributed_training(sharded, processes=2, **FSDP2))
    _train_alone(alone)
    _assert_same_metrics(tmp_path / "one", tmp_path / "two")
    _assert_same_result(tmp_path / "one", tmp_path / "two")
    undisturbed = read_metrics(tmp_path / "two" / "metrics.jsonl")
    for name in ("checkpoints/step-00000004", "result"):
        shutil.rmtree(tmp_path / "two" / name)
    shutil.copytree(tmp_path / "two", tmp_path / "resumed alone")
    finish(start_distributed_training(sharded, processes=2, resume="latest", **FSDP2))
    assert read_metrics(tmp_path / "two" / "metrics.jsonl") == undisturbed
    _train_alone(_config(tmp_path / "resumed alone", 2, TRANSFER_THEN_ALL), resume="latest")
    for name in ("two", "resumed alone"):
        _assert_same_metrics(tmp_path / "one", tmp_path / name)
        _assert_same_result(tmp_path / "one", tmp_path / name)


@pytest.mark.slow
def test_sharded_lora_with_gradient_checkpointing_is_that_of_one_process(tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": True, "stages": MHLA_THEN_LORA}
    finish(start_distributed_training(_config(tmp_path / "two", 1, **settings), processes=2, **FSDP2))
    _train_alone(_config(tmp_path / "one", 2, **settings))
    _assert_same_metrics(tmp_path / "one", tmp_path / "two")
    _assert_same_result(tmp_path / "one", tmp_path / "two")
    one, two = (load_file(tmp_path / name / "result" / LORA_FILE) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "make", "data"), [("sana", tiny_sana, sana_data), ("dit", tiny_dit, dit_data)])
def test_other_families_are_sharded(
    family: str, make: Callable[[], Any], data: Callable[[], InMemoryData], tmp_path: Path
) -> None:
    patch = MHLAConfig(blocks=(2, 2))
    stage = StageConfig(1, 1e-3, "all", ObjectiveWeights(diffusion=1.0, distillation=1.0, transfer=1.0))
    two, one = (
        TrainingConfig(output=str(tmp_path / name), stages=(stage,), patch=patch, batch_size=size)
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
        ({**FSDP2, "FSDP_VERSION": "1"}, "fsdp_version: 1 of accelerate's configuration is not supported"),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: true of"),
        ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fsdp_activation_checkpointing: true of"),
        ({**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading: true of"),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward: false of"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed, which training does not support; use .*fsdp2.yaml"),
    ],
)
def test_unsupported_sharding_is_refused_before_training(
    environment: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        _train_alone(_config(tmp_path / "run", 1, TRANSFER_THEN_ALL))
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
    config = _config(Path("unused"), 1, TRANSFER_THEN_ALL)
    assert sharding_is_asked_for(config) == (name == "fsdp2")
    if name == "fsdp2":
        with pytest.raises(ValueError, match="optimizer=adamw8bit does not work on weights in parts"):
            sharding_is_asked_for(replace(config, optimizer="adamw8bit"))


def test_meta_copy_takes_weights_and_leaves_the_original() -> None:
    transformer = apply_mhla(tiny_wan(), PATCH)
    empty = meta_copy(transformer)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict({key: gathered(value) for key, value in transformer.state_dict().items()}, assign=True)
    for name, parameter in transformer.named_parameters():
        assert torch.equal(empty.get_parameter(name), parameter)
