import io
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel

from mhla_diffusers import MHLAConfig, SparseConfig, apply_mhla
from mhla_diffusers.training import InMemoryData, TrainingDivergedError, ValidationConfig, read_metrics, train
from mhla_diffusers.training.data.batches import BatchOrder

from ..refusals import refused
from .models import dit_data, poisoned_wan_data, settings, tiny_dit, tiny_wan, wan_data
from .pipelines import write_frames, write_image

GUIDED: dict[str, Any] = {"objectives": {"distillation": 1.0}, "guidance": 3.0}
PATCH, SPARSE = MHLAConfig(blocks=(2, 2, 2)), SparseConfig(density=0.5, block_size=2)


def _patched() -> Any:
    return apply_mhla(tiny_wan(), PATCH)


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


def test_weights_that_no_loss_depends_on_are_looked_at_too(tmp_path: Path) -> None:
    """The embedding of a class that no sample has, so that every loss is finite."""
    transformer = tiny_dit()
    with torch.no_grad():
        transformer.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight[9] = float("inf")
    with pytest.raises(TrainingDivergedError):
        train(transformer, dit_data(8), settings(tmp_path))
    assert not (tmp_path / "result").exists()


def test_the_last_checkpoint_before_the_divergence_is_named_and_resumes(tmp_path: Path) -> None:
    """A sample that is not finite in the last update: mended, the run goes on to the end as if nothing had been."""
    usual: dict[str, Any] = {"steps": 8, "learning_rate": 1e-3, "checkpoint_every": 3, "keep_checkpoints": 9}
    last = BatchOrder([(4, 2, 8, 8)] * 16, batch_size=2, seed=0)[7][0]
    _diverges(tmp_path / "run", "step 7 .*/step-00000006", poisoned_wan_data(last), **usual)
    train(tiny_wan(), wan_data(), settings(tmp_path / "run", **usual), resume="latest")
    train(tiny_wan(), wan_data(), settings(tmp_path / "alone", **usual))
    resumed, alone = (next((tmp_path / name / "result").glob("*.safetensors")) for name in ("run", "alone"))
    assert resumed.read_bytes() == alone.read_bytes()


def test_from_scratch_and_reload(tmp_path: Path) -> None:
    transformer = tiny_wan()
    validation = ValidationConfig(samples=4, every=10)
    result = train(transformer, wan_data(), settings(tmp_path, steps=20, validation=validation, learning_rate=5e-3))
    losses = [record["validation_loss"] for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" not in record]
    assert len(losses) == 3 and losses[-1] < losses[0]
    loaded = WanTransformer3DModel.from_pretrained(result.result)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, transformer.get_parameter(name))


def test_result_has_the_moving_average_and_old_checkpoints_are_removed(tmp_path: Path) -> None:
    transformer = tiny_wan()
    config = settings(tmp_path, steps=5, ema_decay=0.99, checkpoint_every=1, keep_checkpoints=2)
    loaded = WanTransformer3DModel.from_pretrained(train(transformer, wan_data(), config).result)
    assert not torch.equal(loaded.proj_out.weight, transformer.proj_out.weight)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]


def test_order_of_samples_covers_every_epoch_and_keeps_shapes_apart() -> None:
    shapes = [(4, 8, 8)] * 6 + [(4, 4, 16)] * 3
    order = BatchOrder(shapes, batch_size=2, seed=0)
    epoch = [order[step] for step in range(order.batches_per_epoch)]
    assert sorted({index for batch in epoch for index in batch}) == list(range(9))
    assert all(len({shapes[index] for index in batch}) == 1 for batch in epoch)
    assert BatchOrder(shapes, batch_size=2, seed=0)[7] == order[7]
    assert [order[step + order.batches_per_epoch] for step in range(len(epoch))] != epoch


def test_dit_labels_are_dropped_by_prompt_dropout_alone(tmp_path: Path) -> None:
    train(tiny_dit(), dit_data(), settings(tmp_path / "a", steps=2))
    torch.manual_seed(123)
    train(tiny_dit(), dit_data(), settings(tmp_path / "b", steps=2))
    assert read_metrics(tmp_path / "a" / "metrics.jsonl") == read_metrics(tmp_path / "b" / "metrics.jsonl")


def _board(folder: Path) -> Any:
    """What TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = {path.parent for path in folder.rglob("events.out.tfevents*")}
    shown = EventAccumulator(str(place))
    shown.Reload()
    return shown


def test_tensorboard_gets_what_the_metrics_file_gets_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run goes on from before its last points."""
    validation = ValidationConfig(samples=2, every=2, timesteps=1)
    config = settings(
        tmp_path / "run", steps=6, tracker="tensorboard", validation=validation, checkpoint_every=2, keep_checkpoints=9
    )
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(ImportError):
            train(tiny_wan(), wan_data(), config)
        assert not (tmp_path / "run").exists()
    for resume in (None, "latest"):
        train(tiny_wan(), wan_data(), config, resume=resume)
        shown, records = _board(tmp_path), read_metrics(tmp_path / "run" / "metrics.jsonl")
        for name in ("loss", "learning_rate", "gradient_norm", "validation_loss"):
            found = [(event.step, event.value) for event in shown.Scalars(name)]
            written = [(record["step"], record[name]) for record in records if name in record]
            assert [step for step, _ in found] == [step for step, _ in written]
            assert [value for _, value in found] == pytest.approx([value for _, value in written])
        assert len(records) == 6 + 4 and all(event.value > 0 for event in shown.Scalars("tokens_per_second"))
        time.sleep(1)  # the names of the files have their second
        shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")


def test_validation_shows_the_unpatched_loss_the_samples_and_the_memory(tmp_path: Path) -> None:
    """Also after a resumption, when the weights are no longer those of the unpatched model."""
    from PIL import Image

    frames = np.random.default_rng(0).integers(0, 255, (5, 32, 48, 3), dtype=np.uint8)

    def sample(_: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_frames(folder / "01.mp4", frames)
        write_image(folder / "00.png")

    usual: dict[str, Any] = {"validation": ValidationConfig(samples=3, every=2), "steps": 4, "learning_rate": 1e-2}
    train(tiny_wan(), wan_data(), settings(tmp_path / "unpatched", **usual))
    shown = {**usual, "patch": PATCH, "checkpoint_every": 2, "keep_checkpoints": 9, "tracker": "tensorboard"}
    config = settings(tmp_path / "patched", **shown)
    train(_patched(), wan_data(), config, sampler=sample)
    expected = read_metrics(tmp_path / "unpatched" / "metrics.jsonl")[0]["validation_loss"]

    def check() -> None:
        records = [x for x in read_metrics(tmp_path / "patched" / "metrics.jsonl") if "validation_loss" in x]
        assert [record["step"] for record in records] == [0, 2, 4]
        assert all(record["unpatched_validation_loss"] == expected != record["validation_loss"] for record in records)

    check()
    board = _board(tmp_path / "patched")
    for name in ("samples/00", "samples/01"):
        assert [event.step for event in board.Images(name)] == [0, 2, 4]
    video = Image.open(io.BytesIO(board.Images("samples/01")[0].encoded_image_string))
    assert video.width * video.height >= frames[..., 0].size, "all frames, side by side"
    assert all(event.value > 1e6 for event in board.Scalars("host_memory"))
    shutil.rmtree(tmp_path / "patched/checkpoints/step-00000004")
    train(_patched(), wan_data(), config, resume="latest", sampler=sample)
    check()


def test_progress_without_a_terminal_is_no_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_wan(), wan_data(), settings(tmp_path, steps=2))
    assert capsys.readouterr().err == "", "of what takes no half minute"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two updates with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("finished")
    train(tiny_wan(), wan_data(), settings(folder / "run", steps=2, checkpoint_every=1, ema_decay=0.9))
    return folder


@pytest.mark.parametrize(
    ("changes", "resume", "error", "words"),
    [
        ({}, None, ValueError, "step-00000002"),
        ({}, "{first}", ValueError, "step-00000002.*--resume latest.*output="),
        ({}, "nowhere", FileNotFoundError, "nowhere.*latest"),
        ({"output": "x", "patch": PATCH}, None, ValueError, "not patched"),
        ({"output": "x", "make": _patched}, None, ValueError, "patch=None"),
        (
            {"output": "x", "make": lambda: apply_mhla(tiny_wan(), SPARSE), "patch": SPARSE, "trainable": "mhla"},
            None,
            ValueError,
            r"trainable='mhla' .*'attention', 'lora' or 'all'",
        ),
        ({"output": "x", "validation": ValidationConfig(16)}, None, ValueError, "validation.samples=16"),
        ({"output": "x", "prompt_dropout": 0.1, "empty": None}, None, ValueError, "prompt_dropout=0.1"),
        ({"output": "x", **GUIDED, "empty": None}, None, ValueError, "guidance=3.0"),
        (
            {"output": "x", "batch_size": 100, "validation": ValidationConfig(10)},
            None,
            ValueError,
            "batch_size=100 .*validation.samples=10 .* 16 ",
        ),
    ],
)
def test_what_is_refused_before_training(
    changes: dict[str, Any], resume: str | None, error: type[Exception], words: str, finished: Path
) -> None:
    given: dict[str, Any] = {"output": "run", "steps": 2, "make": tiny_wan, "empty": wan_data().empty, **changes}
    resume = resume and resume.format(first=finished / "run/checkpoints/step-00000001")
    output, transformer = finished / given.pop("output"), given.pop("make")()
    data = InMemoryData([wan_data()[index] for index in range(16)], given.pop("empty"))
    with pytest.raises(error, match=words):
        train(transformer, data, settings(output, **{"ema_decay": 0.9, **given}), resume=resume)
    assert [path.name for path in finished.iterdir()] == ["run"]


_FILES = "weights.safetensors", "average.safetensors", "optimizer.bin"


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "harm", "error"),
    [
        *((name, _flip, ValueError) for name in _FILES),
        *((name, Path.unlink, FileNotFoundError) for name in _FILES),
        ("average.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-1]), ValueError),
        *(("state.json", lambda file, x=x: file.write_text(x), ValueError) for x in ("{", "[]", "{}")),
    ],
)
def test_checkpoint_that_lacks_a_file_or_is_damaged_names_the_file_and_an_earlier_one(
    name: str, harm: Callable[[Path], object], error: type[Exception], finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    config = settings(tmp_path / "run", steps=2, ema_decay=0.9)
    first, last = (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" for step in (1, 2))
    for checkpoint, ending in ((last, f"Remove it.* {first.name}"), (first, "no earlier one")):
        harm(checkpoint / name)
        with pytest.raises(error, match=f" {checkpoint} .*{name}.*{ending}"):
            train(tiny_wan(), wan_data(), config, resume="latest")
        shutil.rmtree(checkpoint)


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    file = tmp_path / "run/checkpoints/step-00000002/state.json"
    state = json.loads(file.read_text())
    old = {name: value for name, value in state.items() if name != "format_version"}
    file.write_text(json.dumps({**old, "config": {"output": "x", "stages": []}}))
    with refused("earlier version", "patch: …/result"):
        train(tiny_wan(), wan_data(), settings(tmp_path / "run", steps=2, ema_decay=0.9), resume="latest")
