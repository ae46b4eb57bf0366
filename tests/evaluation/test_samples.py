"""Sets of samples of the tiny pipelines."""

import json

import pytest
from PIL import Image, ImageChops

from mhla_diffusers.evaluation.samples import (
    SampleConfig,
    class_samples,
    generate_samples,
    prepare_folder,
    prompt_samples,
)
from mhla_diffusers.generation.record import Sample

from .pictures import write_pictures

FAST = {"num_inference_steps": 2}


def config(output, count=5, **changes):
    return SampleConfig(
        **{"family": "dit", "samples": class_samples(count, 10), "output": output, "settings": FAST, **changes}
    )


def make(chosen, process=0, processes=1):
    prepare_folder(chosen)
    return list(generate_samples(chosen, process, processes))


def differences(first, second):
    """Largest difference of any pixel between the files of two folders."""
    names = sorted(file.name for file in first.glob("*.png"))
    assert names == sorted(file.name for file in second.glob("*.png"))
    pairs = [[Image.open(folder / name) for folder in (first, second)] for name in names]
    return [max(high for _, high in ImageChops.difference(*pair).getextrema()) for pair in pairs]


def test_samples_do_not_depend_on_batch_size_and_processes(tmp_path):
    assert make(config(tmp_path / "one")) == [0, 1, 2, 3, 4, 5]
    assert make(config(tmp_path / "batched", batch_size=3)) == [0, 3, 5]
    assert make(config(tmp_path / "shared", batch_size=2), 0, 2) == [0, 2, 3]
    assert make(config(tmp_path / "shared", batch_size=2), 1, 2) == [0, 2]
    # a batched matrix product may round differently in the last bit
    assert max(differences(tmp_path / "one", tmp_path / "batched")) <= 1
    assert max(differences(tmp_path / "one", tmp_path / "shared")) <= 1
    make(config(tmp_path / "other", seed=1))
    assert min(differences(tmp_path / "one", tmp_path / "other")) > 10


def test_a_stopped_run_goes_on_and_a_longer_one_too(tmp_path):
    make(config(tmp_path))
    kept = (tmp_path / "000000.png").stat().st_mtime_ns
    (tmp_path / "000003.png").unlink()
    assert make(config(tmp_path)) == [4, 5]
    assert make(config(tmp_path, count=6)) == [5, 6]
    assert (tmp_path / "000000.png").stat().st_mtime_ns == kept
    assert json.loads((tmp_path / "samples.json").read_text())[5] == {"file": "000005.png", "text": "5"}


def test_a_folder_of_other_samples_is_refused(tmp_path):
    make(config(tmp_path, count=2))
    for changes, message in (
        ({"seed": 1}, "seed=0, now 1"),
        ({"settings": {}}, "num_inference_steps"),
        ({"samples": class_samples(4, 3, "random", 7)}, "holds another set: 00000"),
        ({"samples": class_samples(1, 10)}, "holds another set: 000001.png shows '1', but this one has 'no such file'"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_folder(config(tmp_path, **changes))
    with pytest.raises(ValueError, match="unknown origin, such as 0000.png"):
        prepare_folder(config(write_pictures(tmp_path / "foreign", 1)))


def test_a_run_that_failed_does_not_bind_the_folder(tmp_path):
    for changes in (
        {"settings": {"num_inference_step": 2}},
        {"patch": "nope"},
        {"weights": str(tmp_path / "nowhere")},
        {"seed": 3, "samples": [Sample("000000.png", "7"), Sample("000001.png", "5000")]},
    ):
        with pytest.raises((ValueError, OSError)):
            make(config(tmp_path, **changes))
    assert not list(tmp_path.iterdir())
    assert make(config(tmp_path, count=1)) == [0, 1]


def test_classes_are_balanced_or_drawn_and_prompts_numbered():
    assert [s.text for s in class_samples(12, 5)] == list("012340123401")
    drawn = [s.text for s in class_samples(300, 3, "random", seed=4)]
    assert drawn == [s.text for s in class_samples(300, 3, "random", seed=4)]
    assert 70 < drawn.count("1") < 130
    made = prompt_samples(["a", "b"], 2, ".png")
    assert made[1:3] == [Sample("00000-1.png", "a"), Sample("00001-0.png", "b")]
    with pytest.raises(ValueError, match="order='sorted'"):
        class_samples(3, 3, "sorted")
    with pytest.raises(ValueError, match="per_prompt=0"):
        prompt_samples(["a"], 0, ".png")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "flux"}, "family='flux'"),
        ({"device": "tpu9"}, "device='tpu9'"),
        ({"samples": []}, "no samples"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"samples": [Sample("a.mp4", "1")]}, "dit generates .png files, but the samples are such as 'a.mp4'"),
    ],
)
def test_bad_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_videos_are_written(tmp_path):
    samples = prompt_samples(["a seven moving left"], 1, ".mp4")
    assert make(config(tmp_path, family="wan", samples=samples)) == [0, 1]
    assert (tmp_path / "00000-0.mp4").stat().st_size > 500
