import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla
from mhla_diffusers.training import (
    InMemoryData,
    TrainingConfig,
    TrainingDivergedError,
    ValidationConfig,
    read_metrics,
    train,
)
from mhla_diffusers.training.latents.data import BatchOrder

from .models import dit_data, one_stage, tiny_dit, tiny_wan, wan_data
from .processes import finish, start_distributed_training

PATCH = MHLAConfig(blocks=(2, 2, 2))


def _poisoned(index: int, value: float = float("nan")) -> InMemoryData:
    data = wan_data()
    samples = [dict(data[place]) for place in range(len(data))]
    samples[index]["latents"] = torch.full_like(samples[index]["latents"], value)
    return InMemoryData(samples, data.empty)


def test_step_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    transformer = tiny_wan()
    result = train(transformer, _poisoned(3), one_stage(tmp_path, steps=8))
    assert result.finished
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert sum(record["skipped"] for record in records) == 1
    assert all(parameter.isfinite().all() for parameter in transformer.parameters())


def test_too_many_skipped_in_a_row_stop_the_run(tmp_path: Path) -> None:
    samples = [
        {**sample, "latents": sample["latents"] * float("inf")} for sample in map(wan_data().__getitem__, range(4))
    ]
    with pytest.raises(TrainingDivergedError, match="4 updates in a row, up to step 4, were skipped"):
        train(tiny_wan(), InMemoryData(samples), one_stage(tmp_path, steps=50, max_skipped=3))


def _diverges(output: Path, message: str, data: InMemoryData | None = None, **settings: Any) -> None:
    config = one_stage(output, **{"steps": 6, "learning_rate": 1e9, **settings})
    for resume in (None, "latest"):
        if resume and not (output / "checkpoints").exists():
            break
        with pytest.raises(TrainingDivergedError, match=message):
            train(tiny_wan(), data or wan_data(), config, resume=resume)
        assert not (output / "result").exists()


def test_a_run_that_diverged_ends_with_an_error_and_without_a_result(tmp_path: Path) -> None:
    """However it shows, and however often the run is resumed."""
    advice = "Lower the learning rate .* in another output folder.* holds no good checkpoint"
    _diverges(tmp_path / "a", f"all updates after step 1 were skipped.*{advice}")
    validation = ValidationConfig(samples=2)
    _diverges(tmp_path / "b", f"the validation loss after step 1 is nan.*{advice}", steps=1, validation=validation)
    _diverges(tmp_path / "c", f"all updates after step 1 were skipped.*{advice}", checkpoint_every=1)


def test_weights_that_no_loss_depends_on_are_looked_at_too(tmp_path: Path) -> None:
    transformer = tiny_dit()
    with torch.no_grad():
        transformer.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight[9] = float("inf")
    with pytest.raises(TrainingDivergedError, match="weights after step 4 are not finite"):
        train(transformer, dit_data(8), one_stage(tmp_path))
    assert not (tmp_path / "result").exists()


def test_the_last_checkpoint_before_the_divergence_is_named_and_resumes(tmp_path: Path) -> None:
    """A sample that is not finite in the last update: mended, the run goes on to the end as if nothing had been."""
    settings: dict[str, Any] = {"steps": 8, "learning_rate": 1e-3, "checkpoint_every": 3, "keep_checkpoints": 9}
    last = BatchOrder([(4, 2, 8, 8)] * 16, batch_size=2, seed=0)[7][0]
    _diverges(
        tmp_path / "run",
        "all updates after step 7 were skipped.*--resume .*/step-00000006",
        _poisoned(last),
        **settings,
    )
    resumed = train(tiny_wan(), wan_data(), one_stage(tmp_path / "run", **settings), resume="latest")
    alone = train(tiny_wan(), wan_data(), one_stage(tmp_path / "alone", **settings))
    weights = [
        next(Path(result.result).glob("*.safetensors")).read_bytes() for result in (resumed, alone) if result.result
    ]
    assert weights[0] == weights[1]
    assert len(weights) == 2


def test_from_scratch_and_reload(tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    transformer = tiny_wan()
    validation = ValidationConfig(samples=4, every=10)
    result = train(transformer, wan_data(), one_stage(tmp_path, steps=20, validation=validation, learning_rate=5e-3))
    losses = [record["validation_loss"] for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" not in record]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    loaded = WanTransformer3DModel.from_pretrained(result.result)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, transformer.get_parameter(name))


def test_validation_and_result_use_the_moving_average(tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    transformer = tiny_wan()
    result = train(transformer, wan_data(), one_stage(tmp_path, ema_decay=0.99))
    loaded = WanTransformer3DModel.from_pretrained(result.result)
    assert not torch.equal(loaded.proj_out.weight, transformer.proj_out.weight)


def test_order_of_samples_covers_every_epoch_and_keeps_shapes_apart() -> None:
    shapes = [(4, 8, 8)] * 6 + [(4, 4, 16)] * 3
    order = BatchOrder(shapes, batch_size=2, seed=0)
    epoch = [order[step] for step in range(order.batches_per_epoch)]
    assert sorted({index for batch in epoch for index in batch}) == list(range(9))
    assert all(len({shapes[index] for index in batch}) == 1 for batch in epoch)
    assert BatchOrder(shapes, batch_size=2, seed=0)[7] == order[7]
    assert [order[step + order.batches_per_epoch] for step in range(len(epoch))] != epoch


@pytest.mark.parametrize(
    ("settings", "told_of_cpus"),
    [
        # as torchrun starts them
        pytest.param({}, "false", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="would take the GPUs")),
        ({"trainable": "mhla", "objectives": {"transfer": 1.0}, "patch": PATCH}, "true"),
    ],
)
def test_two_processes_are_one_with_twice_the_batch(
    settings: dict[str, Any], told_of_cpus: str, tmp_path: Path
) -> None:
    common = {"steps": 6, "prompt_dropout": 0.3, "gradient_accumulation": 2, "learning_rate": 1e-3, **settings}
    validation = ValidationConfig(samples=3, every=3)
    config = one_stage(tmp_path / "two", batch_size=1, validation=validation, **common)
    two = start_distributed_training(config, processes=2, ACCELERATE_USE_CPU=told_of_cpus)
    transformer = apply_mhla(tiny_wan(), PATCH) if "patch" in settings else tiny_wan()
    train(transformer, wan_data(), one_stage(tmp_path / "one", batch_size=2, validation=validation, **common))
    finish(two, timeout=120)
    records = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    assert len(records[0]) == len(records[1]) == 9
    for one, other in zip(*records, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_processes_that_accelerate_does_not_join_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were launched, but accelerate has joined 1.*unset WORLD_SIZE"):
        train(tiny_wan(), wan_data(), one_stage(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_an_update_of_more_samples_than_there_are_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tiny_wan(), wan_data(6), one_stage(tmp_path, steps=1, batch_size=2, gradient_accumulation=4))
    assert "An update takes 8 samples of one shape, and 6 have latents of (4, 2, 8, 8)" in caplog.text


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    for name, checkpointing in (("without", False), ("with", True)):
        config = one_stage(tmp_path / name, patch=PATCH, gradient_checkpointing=checkpointing)
        train(apply_mhla(tiny_wan(), PATCH), wan_data(), config)
    records = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("without", "with")]
    for one, other in zip(*records, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_dit_labels_are_dropped_by_prompt_dropout_alone(tmp_path: Path) -> None:
    data = dit_data()
    train(tiny_dit(), data, one_stage(tmp_path / "a", steps=2))
    torch.manual_seed(123)
    train(tiny_dit(), data, one_stage(tmp_path / "b", steps=2))
    assert read_metrics(tmp_path / "a" / "metrics.jsonl") == read_metrics(tmp_path / "b" / "metrics.jsonl")


def test_tensorboard_gets_what_the_metrics_file_gets(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    validation = ValidationConfig(samples=2, every=3, timesteps=1)
    train(tiny_wan(), wan_data(), one_stage(tmp_path, steps=3, tracker="tensorboard", validation=validation))
    (events,) = tmp_path.rglob("events.out.tfevents*")
    shown = EventAccumulator(str(events))
    shown.Reload()
    records = read_metrics(tmp_path / "metrics.jsonl")
    for name in ("loss", "learning_rate", "gradient_norm", "validation_loss"):
        written = {record["step"]: record[name] for record in records if name in record}
        assert {event.step: event.value for event in shown.Scalars(name)} == pytest.approx(written)
    assert all(event.value > 0 for event in shown.Scalars("tokens_per_second"))


def test_tracker_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.utils.is_tensorboard_available", lambda: False)
    with pytest.raises(ValueError, match="tracker=tensorboard is not installed: pip install tensorboard, or set"):
        train(tiny_wan(), wan_data(), one_stage(tmp_path / "run", tracker="tensorboard"))
    assert not (tmp_path / "run").exists()


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    train(tiny_wan(), wan_data(), one_stage(tmp_path, steps=5, checkpoint_every=1, keep_checkpoints=2))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]


def _trained(output: Path, **settings: Any) -> TrainingConfig:
    config = one_stage(output, steps=2, **settings)
    train(tiny_wan(), wan_data(), config)
    return config


def test_what_is_refused_before_training(tmp_path: Path) -> None:
    config = _trained(tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run, up to step-00000002"):
        train(tiny_wan(), wan_data(), config)
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        train(tiny_wan(), wan_data(), one_stage(tmp_path / "other"), resume="latest")
    with pytest.raises(ValueError, match=r"another run: seed is 7 here and 0 there"):
        train(tiny_wan(), wan_data(), one_stage(tmp_path / "run", steps=2, seed=7), resume="latest")
    with pytest.raises(ValueError, match=r"samples per update is 6 here and 2 there"):
        train(tiny_wan(), wan_data(), one_stage(tmp_path / "run", steps=2, batch_size=6), resume="latest")
    with pytest.raises(ValueError, match=r"training samples is 12 here and 16 there"):
        train(tiny_wan(), wan_data(12), config, resume="latest")
    with pytest.raises(ValueError, match="the transformer is not patched"):
        train(tiny_wan(), wan_data(), one_stage(tmp_path / "x", patch=PATCH))
    with pytest.raises(ValueError, match="configuration says patch: null"):
        train(apply_mhla(tiny_wan(), PATCH), wan_data(), one_stage(tmp_path / "x"))
    with pytest.raises(ValueError, match=r"16 samples and validation.samples=16 of them are held out"):
        train(tiny_wan(), wan_data(), one_stage(tmp_path / "x", validation=ValidationConfig(samples=16)))
    without_empty = InMemoryData([wan_data()[0]])
    with pytest.raises(ValueError, match="needs the empty prompt's conditioning"):
        train(tiny_wan(), without_empty, one_stage(tmp_path / "x", batch_size=1, prompt_dropout=0.1))
    held_out = {"batch_size": 100, "validation": ValidationConfig(samples=2)}
    with pytest.raises(ValueError, match=r"batch_size=100 is more than the 6 samples .* batch_size=6 or less"):
        train(tiny_wan(), wan_data(8), one_stage(tmp_path / "x", **held_out))
    assert not (tmp_path / "x").exists()


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (Path.unlink, FileNotFoundError, "lacks {name}"),
        (_flip, ValueError, "is damaged: .*{name} is damaged or was changed"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), ValueError, "is damaged: .*{name}"),
    ],
)
@pytest.mark.parametrize("name", ["weights", "optimizer", "ema"])
def test_checkpoint_that_lacks_a_file_or_is_damaged_names_the_file_and_an_earlier_one(
    name: str, harm: Callable[[Path], object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    config = one_stage(tmp_path, steps=4, checkpoint_every=1, ema_decay=0.9)
    train(tiny_wan(), wan_data(), config)
    first, last = (tmp_path / "checkpoints" / f"step-{step:08d}" for step in (3, 4))
    harm(last / f"{name}.safetensors")
    words = words.format(name=f"{name}.safetensors")
    with pytest.raises(error, match=rf"Checkpoint {last} {words}.*--resume {first}$"):
        train(tiny_wan(), wan_data(), config, resume="latest")
    harm(first / f"{name}.safetensors")
    with pytest.raises(error, match=rf"Checkpoint {first} .*no earlier one.*another output folder"):
        train(tiny_wan(), wan_data(), config, resume=str(first))


def test_checkpoints_of_earlier_versions_have_no_hashes_and_resume(tmp_path: Path) -> None:
    config = one_stage(tmp_path)
    train(tiny_wan(), wan_data(), config)
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["files"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert train(tiny_wan(), wan_data(), config, resume="latest").finished
    (checkpoint / "optimizer.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks optimizer.safetensors"):
        train(tiny_wan(), wan_data(), config, resume="latest")
    (checkpoint / "state.json").write_text("{")
    with pytest.raises(ValueError, match=rf"Checkpoint {checkpoint} is damaged: .*state.json"):
        train(tiny_wan(), wan_data(), config, resume="latest")
