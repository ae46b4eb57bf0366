"""Sets of samples of the tiny pipeline, and their layouts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from mhla_diffusers.evaluation.geneval import geneval_score
from mhla_diffusers.evaluation.images import open_images
from mhla_diffusers.evaluation.layouts import (
    choose_layout,
    class_samples,
    geneval_samples,
    prompt_samples,
    read_geneval_metadata,
)
from mhla_diffusers.evaluation.sample_list import Sample
from mhla_diffusers.evaluation.samples import SampleConfig, generate_samples, prepare_folder

from .pictures import mhla, write_pictures

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
        {"seed": 3, "samples": [Sample("000000.png", "7"), Sample("000001.png", "5000")]},
    ):
        with pytest.raises((ValueError, OSError)):
            make(config(tmp_path, **changes))
    assert not list(tmp_path.glob("*.png"))
    assert make(config(tmp_path, count=1)) == [0, 1]


def test_classes_out_of_range_are_refused(tmp_path):
    drawn = ("--classes", "4", "--labels", "5000", "--label-order", "random")
    refused = mhla("eval", "samples", tmp_path, "--family", "dit", *drawn)
    assert re.search(r"'\d+' is no class of this DiT.* 0 to 9", str(refused.exception))


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


def test_classes_are_balanced_or_drawn():
    assert [s.text for s in class_samples(12, 5)] == list("012340123401")
    drawn = [s.text for s in class_samples(300, 3, "random", seed=4)]
    assert drawn == [s.text for s in class_samples(300, 3, "random", seed=4)]
    assert 70 < drawn.count("1") < 130
    with pytest.raises(ValueError, match="order='sorted'"):
        class_samples(3, 3, "sorted")


def write_metadata(file):
    entries = [{"tag": "counting", "include": [{"class": "dog", "count": 2}], "prompt": f"{n} dogs"} for n in (2, 3)]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return entries


def test_layouts_of_prompts_and_geneval(tmp_path):
    assert prompt_samples(["a", "b"], 2, ".png")[1:3] == [Sample("00000-1.png", "a"), Sample("00001-0.png", "b")]
    entries = write_metadata(tmp_path / "metadata.jsonl")
    assert read_geneval_metadata(tmp_path / "metadata.jsonl") == entries
    samples = geneval_samples(entries)
    assert len(samples) == 8
    assert samples[5] == Sample("00001/samples/0001.png", "3 dogs")
    (tmp_path / "metadata.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="Line 1.*needs prompt and tag"):
        read_geneval_metadata(tmp_path / "metadata.jsonl")


def test_one_set_at_a_time(tmp_path):
    with pytest.raises(ValueError, match="got none"):
        choose_layout("dit")
    with pytest.raises(ValueError, match="got classes and prompts"):
        choose_layout("dit", classes=3, prompts=tmp_path)
    with pytest.raises(ValueError, match="belong to VBench"):
        choose_layout("wan", classes=3, augmented=tmp_path)


def test_vbench_layout_is_found_in_the_suite(tmp_path):
    suite = tmp_path / "VBench_full_info.json"
    suite.write_text(json.dumps([{"prompt_en": "a still frame", "dimension": ["temporal_flickering"]}]))
    (tmp_path / "augmented.txt").write_text("a very still frame")
    found = choose_layout("wan", vbench=suite, augmented=tmp_path / "augmented.txt", all_flickering=True)
    assert len(found) == 25
    assert found[24] == Sample("a still frame-24.mp4", "a very still frame")


def test_command_writes_geneval_s_layout_and_adm_s_npz(tmp_path):
    write_metadata(tmp_path / "metadata.jsonl")
    (tmp_path / "metadata.jsonl").write_text('{"tag": "counting", "prompt": "a seven"}\n')
    made = mhla(
        *("eval", "samples", tmp_path / "out", "--family", "dit", "--geneval", tmp_path / "metadata.jsonl"),
        *("--set", "num_inference_steps=1", "--batch-size", "4", "--npz", tmp_path / "out.npz"),
    )
    assert made.exit_code == 0, made.output
    assert json.loads((tmp_path / "out" / "00000" / "metadata.jsonl").read_text())["tag"] == "counting"
    assert len(list((tmp_path / "out" / "00000" / "samples").glob("000?.png"))) == 4
    assert len(open_images(tmp_path / "out.npz")) == 4


def test_videos_are_written(tmp_path):
    samples = prompt_samples(["a seven moving left"], 1, ".mp4")
    assert make(config(tmp_path, family="wan", samples=samples)) == [0, 1]
    assert (tmp_path / "00000-0.mp4").stat().st_size > 500


@pytest.mark.slow
def test_processes_of_accelerate_share_the_work(tmp_path):
    script = tmp_path / "command.py"
    script.write_text("from mhla_diffusers.cli import run\nrun()\n")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [*launch, str(script), "eval", "samples", str(tmp_path / "out"), "--family", "dit", "--classes", "3"]
    command += ["--labels", "10", "--set", "num_inference_steps=2", "--npz", str(tmp_path / "out.npz")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("holds 3 samples") == 1
    make(config(tmp_path / "alone", count=3))
    assert max(differences(tmp_path / "alone", tmp_path / "out")) <= 1
    assert len(open_images(tmp_path / "out.npz")) == 3


def test_geneval_score_is_the_mean_of_six_tags(tmp_path):
    file = tmp_path / "results.jsonl"
    right = {"single_object": (3, 3), "two_object": (1, 2), "counting": (0, 5), "colors": (1, 1)}
    right |= {"position": (1, 4), "color_attr": (1, 4)}
    lines = [
        {"tag": tag, "correct": number < good, "filename": "x"}
        for tag, (good, total) in right.items()
        for number in range(total)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = geneval_score(file)
    assert scores["two_object"] == 0.5
    assert scores["overall"] == pytest.approx((1 + 0.5 + 0 + 1 + 0.25 + 0.25) / 6)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:4]))
    with pytest.raises(ValueError, match="no pictures of counting, colors, position, color_attr"):
        geneval_score(file)
    file.write_text('{"tag": "counting"}\n')
    with pytest.raises(ValueError, match="Line 1"):
        geneval_score(file)
    assert "Line 1" in str(mhla("eval", "geneval", file).exception)
