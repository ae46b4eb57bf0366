"""Sets of samples: their lists, and mhla eval samples with a subcommand for each kind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhla_diffusers.evaluation.images import require_samples
from mhla_diffusers.generation.record import read_record

from .pictures import mhla, write_pictures, write_set

FAST = ("--set", "num_inference_steps=1")


def samples(kind, *arguments):
    return mhla("eval", "samples", kind, *arguments)


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        (None, FileNotFoundError, "samples.json"),
        (["a", "a"], FileNotFoundError, " 1 of 2 .* 0001.png"),
        ("[]", ValueError, "samples.json .*empty folder"),
    ],
)
def test_sets_that_are_not_whole_are_refused(tmp_path, texts, error, message):
    folder = write_pictures(tmp_path, 1)
    if isinstance(texts, str):
        (folder / "samples.json").write_text(texts)
    elif texts is not None:
        write_set(folder, texts)
    with pytest.raises(error, match=message):
        require_samples(folder)


def test_classes_are_those_of_the_model(tmp_path):
    """The tiny DiT has room for a thousand, and names for ten."""
    asked = (tmp_path / "out", "--family", "dit", *FAST, "--batch-size", "12")
    made = samples("classes", *asked, "--count", "2")
    assert made.exit_code == 0, made.output
    kept = (tmp_path / "out" / "000000.png").stat().st_mtime_ns
    more = samples("classes", *asked, "--count", "12")
    assert "holds 12 samples" in more.output
    assert (tmp_path / "out" / "000000.png").stat().st_mtime_ns == kept
    assert [one.text for one in read_record(tmp_path / "out").samples] == [*map(str, range(10)), "0", "1"]
    assert "made otherwise" in str(samples("classes", *asked, "--count", "3", "--seed", "1").exception)
    assert "sana takes text" in str(samples("classes", tmp_path, "--family", "sana", "--count", 12).exception)


def test_geneval_s_evaluator_finds_what_it_reads(tmp_path):
    for tag in ("colors", "counting"):
        (tmp_path / "metadata.jsonl").write_text(json.dumps({"tag": tag, "prompt": "a seven"}) + "\n")
        asked = (tmp_path / "out", tmp_path / "metadata.jsonl", "--family", "dit", *FAST, "--batch-size", "4")
        made = samples("geneval", *asked)
        assert made.exit_code == 0, made.output
        assert json.loads((tmp_path / "out" / "00000" / "metadata.jsonl").read_text())["tag"] == tag
    assert len(list((tmp_path / "out" / "00000" / "samples").glob("000?.png"))) == 4


def test_vbench_s_videos_are_named_after_its_prompts(tmp_path):
    suite = tmp_path / "VBench_full_info.json"
    suite.write_text(json.dumps([{"prompt_en": "a seven", "dimension": ["color"]}]))
    asked = (tmp_path / "out", suite, *FAST, "--batch-size", "5")
    made = samples("vbench", *asked, "--family", "wan")
    assert made.exit_code == 0, made.output
    assert sorted(file.name for file in (tmp_path / "out" / "videos").iterdir()) == [
        f"a seven-{n}.mp4" for n in range(5)
    ]
    one = read_record(tmp_path / "out").samples[4]
    assert (one.file, one.text) == ("videos/a seven-4.mp4", "a seven")
    refused = samples("vbench", *asked, "--family", "sana")
    assert "sana generates .png files, not 'videos/a seven-0.mp4'" in str(refused.exception)


@pytest.mark.slow
def test_processes_of_accelerate_share_the_work_and_go_on(tmp_path):
    script = tmp_path / "command.py"
    script.write_text("from mhla_diffusers.cli import run\nrun()\n")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    asked = ("classes", tmp_path / "out", "--family", "dit", *FAST, "--count")
    command = [*launch, script, "eval", "samples", *asked, "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    assert samples(*asked, 1).exit_code == 0
    kept = (tmp_path / "out" / "000000.png").stat().st_mtime_ns
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("holds 3 samples") == 1
    assert (tmp_path / "out" / "000000.png").stat().st_mtime_ns == kept
