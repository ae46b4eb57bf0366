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
from mhla_diffusers.training import (
    InMemoryData,
    ObjectiveWeights,
    StageConfig,
    TrainingConfig,
    ValidationConfig,
    read_metrics,
    train,
)
from mhla_diffusers.training.export import LORA_FILE
from mhla_diffusers.training.sharding import gathered, meta_copy, sharding_is_asked_for
from mhla_diffusers.training.zero import zero_is_asked_for

from .models import broken_wan_data, dit_data, sana_data, tiny_dit, tiny_sana, tiny_wan, wan_data
from .processes import ZERO, finish, needs_deepspeed, start_distributed_training, start_training

PATCH = MHLAConfig(blocks=(2, 2, 2), layers=(1,))
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
WAYS = [pytest.param(FSDP2, id="fsdp2"), pytest.param(ZERO, id="zero", marks=needs_deepspeed)]
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
@pytest.mark.parametrize("way", WAYS)
def test_sharded_run_is_that_of_one_process_and_resumes_sharded_or_alone(way: dict[str, str], tmp_path: Path) -> None:
    sharded, alone = (_config(tmp_path / name, size, TRANSFER_THEN_ALL) for name, size in (("two", 1), ("one", 2)))
    finish(start_distributed_training(sharded, processes=2, **way))
    _train_alone(alone)
    _assert_same_metrics(tmp_path / "one", tmp_path / "two")
    _assert_same_result(tmp_path / "one", tmp_path / "two")
    undisturbed = read_metrics(tmp_path / "two" / "metrics.jsonl")
    for name in ("checkpoints/step-00000004", "result"):
        shutil.rmtree(tmp_path / "two" / name)
    shutil.copytree(tmp_path / "two", tmp_path / "resumed alone")
    finish(start_distributed_training(sharded, processes=2, resume="latest", **way))
    assert read_metrics(tmp_path / "two" / "metrics.jsonl") == undisturbed
    _train_alone(_config(tmp_path / "resumed alone", 2, TRANSFER_THEN_ALL), resume="latest")
    for name in ("two", "resumed alone"):
        _assert_same_metrics(tmp_path / "one", tmp_path / name)
        _assert_same_result(tmp_path / "one", tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_sharded_lora_with_gradient_checkpointing_is_that_of_one_process(way: dict[str, str], tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": True, "stages": MHLA_THEN_LORA}
    finish(start_distributed_training(_config(tmp_path / "two", 1, **settings), processes=2, **way))
    _train_alone(_config(tmp_path / "one", 2, **settings))
    _assert_same_metrics(tmp_path / "one", tmp_path / "two")
    _assert_same_result(tmp_path / "one", tmp_path / "two")
    one, two = (load_file(tmp_path / name / "result" / LORA_FILE) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


@needs_deepspeed
@pytest.mark.slow
def test_deepspeed_resumes_a_run_of_one_process_and_skips_what_that_skips(tmp_path: Path) -> None:
    stage = StageConfig(8, 1e-3, "all", ObjectiveWeights(diffusion=1.0))
    settings: dict[str, Any] = {"stages": (stage,), "patch": PATCH, "checkpoint_every": 2, "keep_checkpoints": 9}
    one, two = tmp_path / "one", tmp_path / "two"
    train(apply_mhla(tiny_wan(), PATCH), broken_wan_data(), TrainingConfig(str(one), batch_size=2, **settings))
    shutil.copytree(one, two)
    for name in ("checkpoints/step-00000004", "checkpoints/step-00000006", "checkpoints/step-00000008", "result"):
        shutil.rmtree(two / name)
    config = TrainingConfig(str(two), batch_size=1, **settings)
    finish(start_distributed_training(config, processes=2, resume="latest", family="broken wan", **ZERO))
    here, there = (read_metrics(folder / "metrics.jsonl") for folder in (one, two))
    assert [record["step"] for record in here if record["skipped"]] == [4, 5]
    for one_record, two_record in zip(here, there, strict=True):
        if one_record["skipped"]:
            del one_record["gradient_norm"], two_record["gradient_norm"]
        assert one_record == pytest.approx(two_record, rel=1e-4, nan_ok=True)
    _assert_same_result(one, two)


@needs_deepspeed
@pytest.mark.slow
def test_deepspeed_trains_in_bfloat16_as_one_process_does(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "bf16"}
    finish(start_distributed_training(_config(tmp_path / "two", 1, TRANSFER_THEN_ALL, **settings), 2, **ZERO))
    finish([start_training(_config(tmp_path / "one", 2, TRANSFER_THEN_ALL, **settings))])
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [record["step"] for record in one] == [record["step"] for record in two]
    for there, here in zip(one, two, strict=True):
        for name in there.keys() & {"loss", "validation_loss"}:
            # a batch of two is summed in another order, and bfloat16 rounds at 2^-8
            assert here[name] == pytest.approx(there[name], rel=2**-7), (name, there["step"])


@needs_deepspeed
@pytest.mark.slow
def test_process_without_a_launcher_trains_alone_and_in_bfloat16_whatever_accelerate_is_told(tmp_path: Path) -> None:
    stage = StageConfig(2, 1e-3, "all", ObjectiveWeights(diffusion=1.0))
    for name, environment in (("told", ZERO), ("not told", {})):
        config = TrainingConfig(str(tmp_path / name), stages=(stage,), patch=PATCH, precision="bf16")
        finish([start_training(config, environment=environment)])
    told, other = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("told", "not told"))
    assert told == other


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
        ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero_stage: 3 of .* only 2 is. Use .* or fsdp2.yaml"),
        ({**ZERO, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "offload_optimizer_device: cpu of"),
        ({**ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "own.json"}, "deepspeed_config_file: own.json of"),
        (
            {**ZERO, "ACCELERATE_GRADIENT_CLIPPING": "1.0"},
            "gradient_clipping: 1.0 of .* leave it out.* of the training",
        ),
        (
            {**ZERO, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"},
            "gradient_accumulation_steps: auto of .* leave it",
        ),
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


@pytest.mark.parametrize(
    ("name", "kind", "environment"),
    [
        ("ddp", "MULTI_GPU", "prepare_multi_gpu_env"),
        ("fsdp2", "FSDP", "prepare_multi_gpu_env"),
        pytest.param("deepspeed", "DEEPSPEED", "prepare_deepspeed_cmd_env", marks=needs_deepspeed),
    ],
)
def test_shipped_accelerate_configuration_is_supported(
    name: str, kind: str, environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    monkeypatch.chdir(Path(__file__).parents[2])
    path = Path("finetune", "accelerate", f"{name}.yaml")
    assert load_config_from_file(str(path)).distributed_type == kind
    (command,) = re.findall(r"^# +accelerate launch (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    arguments = launch_command_parser().parse_args(command.split())
    assert Path(arguments.training_script).is_file()
    arguments, _, _ = _validate_launch_command(arguments)
    # launching adds it before it asks for the environment
    arguments.deepspeed_fields_from_accelerate_config = ""
    found = getattr(launch, environment)(arguments)
    for variable, value in (found[1] if isinstance(found, tuple) else found).items():
        monkeypatch.setenv(variable, value)
    config = _config(Path("unused"), 1, TRANSFER_THEN_ALL)
    ways = {"fsdp2": sharding_is_asked_for, "deepspeed": zero_is_asked_for}
    assert {way: asked_for(config) for way, asked_for in ways.items()} == {way: way == name for way in ways}
    if name in ways:
        with pytest.raises(ValueError, match="optimizer=adamw8bit does not work on .* in parts"):
            ways[name](replace(config, optimizer="adamw8bit"))


def test_missing_deepspeed_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.utils.is_deepspeed_available", lambda: False)
    for name, value in ZERO.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ImportError, match=r"missing or older .*pip install mhla_diffusers\[deepspeed\], or use .*fsdp2.yaml"
    ):
        _train_alone(_config(tmp_path / "run", 1, TRANSFER_THEN_ALL))
    assert not (tmp_path / "run").exists()


def test_meta_copy_takes_weights_and_leaves_the_original() -> None:
    transformer = apply_mhla(tiny_wan(), PATCH)
    empty = meta_copy(transformer)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict({key: gathered(value) for key, value in transformer.state_dict().items()}, assign=True)
    for name, parameter in transformer.named_parameters():
        assert torch.equal(empty.get_parameter(name), parameter)
