import json
import shutil
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from mhla_diffusers import MHLAConfig, SparseConfig, apply_mhla
from mhla_diffusers.training import InMemoryData, TrainingDivergedError, ValidationConfig, read_metrics, train
from mhla_diffusers.training.data.batches import batches_from

from .models import dit_data, poisoned_wan_data, settings, tiny_dit, tiny_wan, wan_data

PATCH, SPARSE = MHLAConfig(blocks=(2, 2, 2)), SparseConfig(density=0.5, block_size=2)


def _patched(config: Any = PATCH) -> Any:
    return apply_mhla(tiny_wan(), config)


def test_step_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    transformer = tiny_wan()
    assert train(transformer, poisoned_wan_data(3), settings(tmp_path, steps=8)).finished
    assert sum(record["skipped"] for record in read_metrics(tmp_path / "metrics.jsonl")) == 1
    assert all(parameter.isfinite().all() for parameter in transformer.parameters())


def _diverges(output: Path, message: str, data: InMemoryData | None = None, **changes: Any) -> None:
    """However often the run is resumed, and without a result."""
    config = settings(output, **{"steps": 6, "learning_rate": 1e9, **changes})
    for resume in (None, "latest"):
        if resume is None or (output / "checkpoints").exists():
            with pytest.raises(TrainingDivergedError, match=message):
                train(tiny_wan(), data or wan_data(), config, resume=resume)
            assert not (output / "result").exists()


def test_a_run_that_diverged_ends_with_an_error_and_without_a_result(tmp_path: Path) -> None:
    _diverges(tmp_path / "a", "step 1 ")
    _diverges(tmp_path / "b", "step 1 .*nan", steps=1, validation=ValidationConfig(samples=2))
    _diverges(tmp_path / "c", "step 1 ", checkpoint_every=1)
    endless = poisoned_wan_data(*range(16), value=float("inf"))
    _diverges(tmp_path / "d", "4 .*step 4", endless, steps=50, max_skipped=3)
    # weights that no loss depends on: the embedding of a class that no sample has
    transformer = tiny_dit()
    with torch.no_grad():
        transformer.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight[9] = float("inf")
    with pytest.raises(TrainingDivergedError):
        train(transformer, dit_data(8), settings(tmp_path / "e"))
    assert not (tmp_path / "e/result").exists()


def test_the_last_checkpoint_before_the_divergence_is_named_and_resumes(tmp_path: Path) -> None:
    """A sample that is not finite in the last update: mended, the run goes on to the end as if nothing had been."""
    usual: dict[str, Any] = {"steps": 8, "learning_rate": 1e-3, "checkpoint_every": 3, "keep_checkpoints": 9}
    last = next(batches_from(7, [(4, 2, 8, 8)] * 16, 2, 0, [1.0] * 16))[0]
    _diverges(tmp_path / "run", "step 7 .*/step-00000006", poisoned_wan_data(last), **usual)
    train(tiny_wan(), wan_data(), settings(tmp_path / "run", **usual), resume="latest")
    train(tiny_wan(), wan_data(), settings(tmp_path / "alone", **usual))
    resumed, alone = (next((tmp_path / name / "result").glob("*.safetensors")) for name in ("run", "alone"))
    assert resumed.read_bytes() == alone.read_bytes()


@pytest.mark.parametrize("changes", [{}, {"ema_decay": 0.99}, {"optimizer": "schedule-free"}])
def test_a_model_from_scratch_learns_and_its_result_is_it_or_its_average(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """And old checkpoints are removed."""
    transformer, usual = tiny_wan(), {"checkpoint_every": 4, "keep_checkpoints": 2, "learning_rate": 5e-3}
    validation = ValidationConfig(samples=4, every=10)
    config = settings(tmp_path, steps=20, validation=validation, **usual, **changes)
    result = train(transformer, wan_data(), config).result
    losses = [record["validation_loss"] for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" not in record]
    assert len(losses) == 3 and losses[-1] < losses[0]
    loaded = WanTransformer3DModel.from_pretrained(result).state_dict()
    same = [torch.equal(loaded[name], tensor) for name, tensor in transformer.state_dict().items()]
    assert not any(same) if changes else all(same)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000016", "step-00000020"]


def test_order_of_samples_covers_every_epoch_and_keeps_shapes_apart() -> None:
    """What an epoch leaves over begins the next one's batches, so no sample is drawn more often than another."""
    shapes = [(4, 8, 8)] * 6 + [(4, 4, 16)] * 3  # nine batches every two epochs
    batches = list(islice(batches_from(0, shapes, 2, 0, [1.0] * 9), 18))
    for epochs in (batches[:9], batches[9:]):
        assert sorted(index for batch in epochs for index in batch) == sorted([*range(9)] * 2)
        assert all(len({shapes[index] for index in batch}) == 1 for batch in epochs)
    assert batches[:9] != batches[9:] and sorted({*batches[0], *batches[1]}) != [0, 1, 2, 3]
    for step in (3, 12):
        assert list(islice(batches_from(step, shapes, 2, 0, [1.0] * 9), 18 - step)) == batches[step:]


def test_dit_labels_are_dropped_by_prompt_dropout_alone(tmp_path: Path) -> None:
    train(tiny_dit(), dit_data(), settings(tmp_path / "a", steps=2))
    torch.manual_seed(123)
    train(tiny_dit(), dit_data(), settings(tmp_path / "b", steps=2))
    assert read_metrics(tmp_path / "a" / "metrics.jsonl") == read_metrics(tmp_path / "b" / "metrics.jsonl")


def test_tensorboard_and_metrics_show_the_same_beside_the_unpatched_loss(tmp_path: Path) -> None:
    """Also where a run goes on from before its last points; the unpatched weights are then no longer those of it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    usual: dict[str, Any] = {"validation": ValidationConfig(samples=2, every=2, timesteps=1), "steps": 6}
    train(tiny_wan(), wan_data(), settings(tmp_path / "unpatched", **usual))
    unpatched = read_metrics(tmp_path / "unpatched" / "metrics.jsonl")[0]["validation_loss"]
    usual |= {"tracker": "tensorboard", "checkpoint_every": 2, "keep_checkpoints": 9, "learning_rate": 1e-2}
    config = settings(tmp_path / "run", patch=PATCH, **usual)
    for resume in (None, "latest"):
        train(_patched(), wan_data(), config, resume=resume)
        (board,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
        shown, records = EventAccumulator(str(board)).Reload(), read_metrics(tmp_path / "run" / "metrics.jsonl")
        for name in ("loss", "learning_rate", "gradient_norm", "validation_loss", "unpatched_validation_loss"):
            found = [(event.step, event.value) for event in shown.Scalars(name)]
            written = [(record["step"], record[name]) for record in records if name in record]
            assert [step for step, _ in found] == [step for step, _ in written]
            assert [value for _, value in found] == pytest.approx([value for _, value in written])
        validations = [record for record in records if "validation_loss" in record]
        assert len(records) == 6 + 4 and [record["step"] for record in validations] == [0, 2, 4, 6]
        assert all(one["unpatched_validation_loss"] == unpatched != one["validation_loss"] for one in validations)
        time.sleep(1)  # the names of the files have their second
        shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two updates with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("finished")
    train(tiny_wan(), wan_data(), settings(folder / "run", steps=2, checkpoint_every=1, ema_decay=0.9))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output": "run"}, "step-00000002"),
        ({"output": "run", "resume": "{first}"}, "step-00000002.*--resume latest.*output="),
        ({"output": "run", "resume": "nowhere"}, "nowhere .*latest"),
        ({"patch": PATCH}, "not patched"),
        ({"make": _patched}, "patch=None"),
        ({"make": lambda: _patched(SPARSE), "patch": SPARSE, "trainable": "mhla"}, "'mhla' .*'attention', 'lora'"),
        ({"prompt_dropout": 0.1, "empty": None}, "prompt_dropout=0.1"),
        (
            {"batch_size": 100, "validation": ValidationConfig(samples=10)},
            "batch_size=100 .*validation.samples=10 .* 16 ",
        ),
    ],
)
def test_what_is_refused_before_training(changes: dict[str, Any], words: str, finished: Path) -> None:
    given: dict[str, Any] = {"output": "x", "make": tiny_wan, "empty": wan_data().empty, "resume": "", **changes}
    resume = given.pop("resume").format(first=finished / "run/checkpoints/step-00000001") or None
    output, transformer = finished / given.pop("output"), given.pop("make")()
    data = InMemoryData(wan_data(), given.pop("empty"))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        train(transformer, data, settings(output, 2, **{"ema_decay": 0.9, **given}), resume=resume)
    assert [path.name for path in finished.iterdir()] == ["run"]


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def _age(file: Path) -> None:
    """Make it one of an earlier version."""
    state = json.loads(file.read_text())
    old = {name: value for name, value in state.items() if name != "format_version"}
    file.write_text(json.dumps({**old, "config": {"output": "x", "stages": []}}))


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        *((name, _flip, "SHA-256") for name in ("weights.safetensors", "optimizer.bin")),
        *(("state.json", lambda file, x=x: file.write_text(x), "state.json") for x in ("{", "[]", "{}")),
        ("state.json", _age, "earlier version.*patch: …/result"),
    ],
)
def test_checkpoint_that_is_damaged_or_old_says_so(
    name: str, harm: Callable[[Path], object], words: str, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    harm(checkpoint / name)
    with pytest.raises(ValueError, match=f" {checkpoint} .*{words}.*Remove it"):
        train(tiny_wan(), wan_data(), settings(tmp_path / "run", steps=2, ema_decay=0.9), resume="latest")
