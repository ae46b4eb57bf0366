"""The study at length at a still smaller size, on a CPU: all its parts, both sides of the gate, and kills."""

import csv
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ..scripts import ROOT, load_script

CPU = torch.device("cpu")
COMPILED = {
    "softmax": False,
    "MHLA": False,
    "sparse 10%": False,
    "sparse 10%, no linear branch": True,
    "sparse 10%, blocks of 16, box order": False,
}
SHORT = {"softmax": False, "softmax, trained on": True, "sparse 10%": True}
"""Rows of a test, and whether they are adapted."""


@pytest.fixture
def script(monkeypatch):
    """The script; what it imports beside it is forgotten with it."""
    monkeypatch.syspath_prepend(str(ROOT / "studies/length"))
    yield load_script("studies/length/length_study.py", monkeypatch)
    torch._dynamo.reset()
    for name in ("length_model", "length_plan", "length_scenes"):
        sys.modules.pop(name, None)


def keep(script, monkeypatch, names):
    """Make these rows alone."""
    every = script.rows_of
    monkeypatch.setattr(script, "rows_of", lambda size: [r for r in every(size) if names.get(r.name) is r.adapted])
    assert [row.name for row in script.rows_of(script.TOY)] == list(names)


def small(script, **changes):
    settings = {"training_seconds": 0.3, "classifier": (2, 4), "transfer_steps": 2, "adapted_steps": 2, "clips": 2}
    settings |= {"sampler_steps": 1, "held_out": 2, "timing_seconds": 0.001, "curriculum": ((1, 2, 0.5), (4, 2, 0.5))}
    return replace(script.TOY, **settings | changes)


def study(script, output, gate, minutes=9.0, **changes):
    """A slice of a study in a folder."""
    size = small(script, **changes)
    output.mkdir(exist_ok=True)
    script.write_json({"grid": size.grid}, output / "study.json")
    return script.Study(size, CPU, output, script.Clock(minutes, time.time(), size.compilation_seconds), gate)


def rows_in(script, output):
    return {(found["name"], found["adapted"]): found for found in script.read_rows(output)}


@pytest.mark.slow
def test_all_parts_with_the_gate_open(script, tmp_path, monkeypatch):
    keep(script, monkeypatch, COMPILED)
    sizes = {"precision": "bfloat16", "curriculum": ((4, 2, 1.0),)}
    assert script.run(study(script, tmp_path, gate=0.0, **sizes))
    rows = rows_in(script, tmp_path)
    assert list(rows) == list(COMPILED.items())
    assert not [found["failed"] for found in rows.values() if "failed" in found]
    assert all(found["loss"] > 0 and found["seconds"] > 0 for found in rows.values())
    assert all(len(found["digits"]) == 2 for found in rows.values() if found["generated"])
    assert all("compiled seconds" in found for found in rows.values() if found["adapted"])
    errors = {name: found["error"] for name, found in rows.items()}
    assert errors["softmax", False] == 0 < errors["sparse 10%", False] < errors["MHLA", False]
    # ended, it makes nothing again; what is removed is made again
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("rows/*.json")}
    assert script.run(study(script, tmp_path, gate=0.0, **sizes))
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.glob("rows/*")}
    with (tmp_path / "length.csv").open() as file:
        header, *table = csv.reader(file)
    assert len(table) == len(COMPILED)
    assert all(len(line) == len(header) for line in table)
    assert (tmp_path / "length.png").stat().st_size > 1000


@pytest.fixture
def short(script, monkeypatch):
    """Few rows, and nothing is compiled."""
    keep(script, monkeypatch, SHORT)
    monkeypatch.setattr(script.Study, "compiled", lambda self, model: model)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_a_closed_gate_leaves_the_errors_of_attention(script, tmp_path, capsys):
    assert script.run(study(script, tmp_path, gate=1.01))
    assert "errors of attention alone" in capsys.readouterr().out
    softmax, *adapted = script.read_rows(tmp_path)
    assert "digits" in softmax
    for found in adapted:
        assert 0 < found["error"] < 1
        assert not {"loss", "digits", "failed"} & set(found)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_slices_go_on_in_the_middle_of_a_row(script, tmp_path):
    """Every update ends a slice: the next begins with the update after."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert script.run(study(script, whole, gate=0.0))
    cut.mkdir()
    for name in ("classifier.safetensors", "softmax.safetensors"):
        (cut / name).write_bytes((whole / name).read_bytes())

    class Impatient(script.Clock):
        left = 1

        def call(self, graph, usual=0.0):
            if graph is None or graph[-1] == "adapted":  # an update of an adapted row
                self.left -= 1
                if self.left < 0:
                    raise script.SliceOver
            return super().call(graph, usual)

    slices = 0
    while True:
        one = study(script, cut, gate=0.0)
        one.clock = Impatient(9.0, time.time(), 0.0)
        slices += 1
        if script.run(one):
            break
    assert slices == 8, "as many as updates"
    for row, again in zip(script.read_rows(whole), script.read_rows(cut), strict=True):
        assert again["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert again["errors of layers"] == pytest.approx(row["errors of layers"], rel=1e-3)


def test_a_row_that_cannot_be_made_says_why_and_the_others_follow(script, tmp_path, monkeypatch):
    def refuse(study, row):
        raise ValueError(f"no {row.name}")

    monkeypatch.setattr(script, "patched", refuse)
    one = study(script, tmp_path, gate=0.0)
    found = script.make_row(one, script.Row("MHLA"), 0)
    assert found["failed"] == "ValueError: no MHLA"
    # one that ended its process twice is not begun a third time
    begun = tmp_path / "rows" / "plain-linear-adapted.begun"
    begun.write_text("2")
    plain = script.Row("plain linear", adapted=True)
    assert "twice" in script.make_row(one, plain, 1)["failed"]
    script.write_report(tmp_path)
    assert "no MHLA" in (tmp_path / "length.md").read_text()


def test_a_row_that_takes_the_device_with_it_fails_alone(script, tmp_path, monkeypatch):
    """All that came after it in the same process would be recorded as failed too."""

    def refuse(study, row):
        raise ValueError("an illegal memory access")

    monkeypatch.setattr(script, "patched", refuse)
    monkeypatch.setattr(script, "still_works", lambda device: False)
    one = study(script, tmp_path, gate=0.0)
    with pytest.raises(RuntimeError, match="the same command goes on"):
        script.make_row(one, script.Row("MHLA"), 0)
    (found,) = script.read_rows(tmp_path)
    assert found["failed"] == "ValueError: an illegal memory access"
    assert script.make_row(one, script.Row("MHLA"), 0) == found


def test_a_device_that_is_full_works(script, monkeypatch):
    def refuse_with(error):
        def zeros(*_, **__):
            raise error

        monkeypatch.setattr(torch, "zeros", zeros)

    assert script.still_works(CPU)
    refuse_with(torch.OutOfMemoryError("full"))
    assert script.still_works(CPU)
    refuse_with(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not script.still_works(CPU)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--minutes", "nan"], "--minutes nan.*give 9"),
        (["--gate", "60"], "--gate 60.0 must be from 0 to 1"),
        (["--gate", "nan"], "--gate nan must be from 0 to 1"),
        (["--report"], "holds no study; give the folder of one"),
    ],
)
def test_wrong_options_are_told(script, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.setattr(sys, "argv", ["length_study.py", "--device", "cpu", "--output", str(tmp_path), *options])
    monkeypatch.setattr(script, "run", lambda study: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        script.main()
    assert re.search(words, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_kill_leaves_what_is_finished(script, tmp_path):
    """kill -9 in the middle of the second row."""
    code = (
        "import sys, runpy; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:];"
        "import length_model as m; from dataclasses import replace;"
        "m.TOY = replace(m.TOY, training_seconds=0.1, classifier=(1, 2), clips=2, sampler_steps=1, held_out=2,"
        " curriculum=((4, 2, 1.0),));"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    options = ["--device", "cpu", "--gate", "0", "--compiler", "eager", "--output", str(tmp_path)]
    command = [
        sys.executable,
        "-c",
        code,
        str(ROOT / "studies/length"),
        str(ROOT / "studies/length/length_study.py"),
        *options,
    ]
    second = tmp_path / "rows" / "plain-linear.begun"
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        while not second.is_file():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    script.write_report(tmp_path)
    (found,) = script.read_rows(tmp_path)
    assert found["name"] == "softmax"
    assert "| softmax |" in (tmp_path / "length.md").read_text()
    assert second.read_text() == "1"


def test_the_clock_gives_first_calls_more_time(script):
    clock = script.Clock(9.0, time.time() - 9 * 60 + script.MARGIN + 10, 5.0)
    with clock.call(None), clock.call("one", usual=100.0):
        pass
    with pytest.raises(script.SliceOver), clock.call("one", usual=6.0):
        pytest.fail("10 seconds are left")
    with clock.call("two"):
        assert clock.compilation < 1, "as the first one was quick"
    with pytest.raises(script.SliceOver), script.Clock(9.0, time.time() - 9 * 60 + 21, 5.0).call("one"):
        pytest.fail("a second is left")


def test_boxes_of_the_grid(script):
    """Each run of as many tokens is a box."""
    grid = script.REAL.grid
    order = script.boxes_of(grid)
    assert sorted(order.tolist()) == list(range(order.numel()))
    places = torch.stack(torch.unravel_index(order, grid), dim=1)
    for size, box in ((16, [2, 2, 4]), (64, [4, 4, 4]), (128, [4, 4, 8])):
        runs = places.view(-1, size, 3)
        assert torch.equal(runs.amax(dim=1) - runs.amin(dim=1) + 1, torch.tensor(box).expand(len(runs), 3))


def test_box_order_is_what_the_attention_follows_within_it_alone(script):
    def order():
        return script.layout.layout_of((4, 8, 8), 16).order

    before = order()
    with script.box_order(active=True):
        assert torch.equal(order(), script.boxes_of((4, 8, 8)).int())
    assert torch.equal(order(), before)
    assert not torch.equal(before, script.boxes_of((4, 8, 8)).int())


def test_scenes_come_from_their_seed_and_a_short_clip_is_the_beginning_of_a_long_one(script):
    scenes = script.Scenes("held-out", 32, 4, 3, CPU)
    clips, again, other = scenes.draw(1, 2), scenes.draw(1, 2), scenes.draw(2, 2)
    assert torch.equal(clips.pixels, again.pixels)
    assert not torch.equal(clips.pixels, other.pixels)
    assert torch.equal(scenes.draw(1, 2, frames=2).pixels, clips.pixels[:, :, :2])
    assert clips.pixels.shape == (2, 3, 4, 32, 32)
    assert clips.labels.shape == (2, 3)
    large = script.Scenes("train", 64, 4, 3, CPU).draw(0, 8).pixels
    assert abs(float(large.mean())) < 0.2
    assert 0.6 < float(large.std()) < 1.2


def test_blurred_clips_have_less_detail(script):
    pixels = script.Scenes("train", 32, 2, 1, CPU).draw(0, 2).pixels
    blurred = torch.nn.functional.avg_pool3d(pixels, (1, 3, 3), stride=1, padding=(0, 1, 1))
    assert script.fine_detail(blurred) < 0.5 * script.fine_detail(pixels)


def test_three_slices_of_nine_minutes_are_enough(script):
    """As predicted, with the starts of three slices and a minute less of each."""
    plan = sys.modules["length_plan"]
    parts = plan.predict_parts(script.REAL)
    assert list(parts)[0] == "start of a slice"
    assert sum(parts.values()) + 2 * parts["start of a slice"] < 3 * (9 * 60 - script.MARGIN)
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert "".join(f"| {name} | {seconds / 60:.1f} |\n" for name, seconds in parts.items()) in page
    first = list(parts)[: list(parts).index("softmax measured, and the gate") + 1]
    assert sum(parts[name] for name in first) < 9 * 60 - script.MARGIN


def test_the_order_of_the_adapted_rows():
    sys.path.insert(0, str(ROOT / "studies/length"))
    try:
        from length_model import REAL, rows_of
    finally:
        sys.path.remove(str(ROOT / "studies/length"))
    adapted = [row.name for row in rows_of(REAL) if row.adapted]
    assert adapted == [
        "softmax, trained on",
        "sparse 5%",
        "sparse 5%, no linear branch",
        "MHLA",
        "sparse 10%",
        "plain linear",
        "sparse 5%, blocks of 128",
        "MHLA hybrid 2/3",
    ]
    grid = {
        (row.config.block_size, row.config.density, row.boxes, row.linear) for row in rows_of(REAL)[1:] if row.config
    }
    for block_size in (16, 64, 128):
        for density in (0.02, 0.05, 0.1, 0.15, 0.25):
            for boxes in (False, True):
                assert {(block_size, density, boxes, linear) for linear in ("fresh", "calibrated", "off")} <= grid
    assert 8000 <= math.prod(REAL.grid) <= 16000
    names = [row.file_name for row in rows_of(REAL)]
    assert len(set(names)) == len(names)
    assert [Path(name).name for name in names] == names, "a row in a folder below is not found again"
