"""The demo from start to end, and the clips that it streams."""

import json

import pytest
import torch

from mhla_diffusers import load_mhla
from mhla_diffusers.benchmark.measure import time_interleaved
from mhla_diffusers.demo import run
from mhla_diffusers.demo.run import STREAM_HEADER, DemoConfig, run_demo, stream_cells, stream_scenes
from mhla_diffusers.tiny import TINY, load_tiny

from ..refusals import refused

SMALL = {"scenes": 2, "samples": 16, "held_out": 2}


@pytest.fixture
def hasty(monkeypatch):
    """Measure times for a moment, and sample in few steps."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run, "free_threads", lambda: 1)  # as many as are free give other last bits in another run
    monkeypatch.setattr(
        run.measure, "time_interleaved", lambda runs, device, **_: time_interleaved(runs, device, 0.05, least=1)
    )
    monkeypatch.setattr(run.speed, "GRIDS", ((1, 6, 10), (2, 6, 10)))
    for family in ("wan", "dit"):
        monkeypatch.setitem(TINY[family].call_settings, "num_inference_steps", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_demo_writes_everything_and_repeats_itself(tmp_path, capfd):
    tables = []
    for name, updates, seconds in (("first", 2, 60.0), ("second", 0, 0.0)):
        rows = run_demo(DemoConfig(tmp_path / name, "dit", updates=updates, speed_seconds=seconds, **SMALL))
        tables.append([{**vars(row), "seconds_per_step": None} for row in rows])
    assert tables[0] == tables[1]
    names = ["softmax", "plain linear", "MHLA", "MHLA hybrid 2/3", "sparse, 5 %"]
    assert [row["name"] for row in tables[0]] == names
    files = {path.name for path in (tmp_path / "first").iterdir()}
    assert {"index.html", "results.json", "samples.png", "loss.png", "speed.png", "mixing-MHLA.png"} <= files
    page = (tmp_path / "first" / "index.html").read_text()
    assert "http" not in page
    assert page.count("data:image/png;base64,") == 5
    assert page.index("Is it good?") < page.index("Is it fast?")
    measured = json.loads((tmp_path / "first" / "speed.json").read_text())
    assert [n for n, _ in measured["curves"]["MHLA"]] == [60, 120]
    assert "Is it fast?" not in (tmp_path / "second" / "index.html").read_text()
    results = json.loads((tmp_path / "first" / "results.json").read_text())
    assert len(results["rows"]) == 5
    # one of attention transfer comes before the two
    assert {name: curve[-1][0] for name, curve in results["live"].items()} == {names[1]: 3, names[2]: 3}
    assert "Loading" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_demo_of_clips_streams_longer_ones_and_samples_in_four_steps(tmp_path, monkeypatch):
    every = run.variants
    monkeypatch.setattr(run, "variants", lambda tiny: every(tiny)[:2])
    run_demo(DemoConfig(tmp_path, "wan", updates=0, speed_seconds=0, **SMALL))
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/gif;base64,") == 3
    assert "tiny-wan-4-steps samples in 4 steps" in page
    streamed = json.loads((tmp_path / "results.json").read_text())["streamed"]
    assert [len(right) for right in streamed.values()] == [9, 9, 36]
    assert {path.name for path in tmp_path.glob("*.gif")} == {"samples.gif", "stream.gif", "few-steps.gif"}


@pytest.mark.usefixtures("hasty")
def test_a_demo_that_is_stopped_leaves_no_page(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    every = run.variants
    monkeypatch.setattr(run, "draw_mixing", stop)
    monkeypatch.setattr(run, "variants", lambda tiny: every(tiny)[2:3])
    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoConfig(tmp_path, "dit", updates=0, speed_seconds=0, **SMALL))
    assert not (tmp_path / "index.html").exists()


def test_folder_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file", error=OSError):
        run_demo(DemoConfig(tmp_path / "file" / "out"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"family": "x"}, "family='x'"), ({"updates": -1}, "updates=-1"), ({"speed_seconds": -1}, "speed_seconds=-1")],
)
def test_bad_settings_are_refused(change, message):
    with refused(message):
        DemoConfig(**change)


def test_a_long_clip_is_told_in_quarters():
    short, long = stream_cells("x", [1.0] * 9), stream_cells("x", [1.0] * 9 + [0.5] * 27)
    assert short == ["x", "9", "100.0%", "", "", "", ""]
    assert long == ["x", "36", "62.5%", "100.0%", "50.0%", "50.0%", "50.0%"]
    assert len(long) == len(STREAM_HEADER)


def test_a_clip_of_the_shipped_patch_goes_on_as_its_shorter_one_began(monkeypatch):
    tiny = TINY["wan"]
    monkeypatch.setitem(tiny.call_settings, "num_inference_steps", 2)
    pipe, scenes = load_mhla(load_tiny("wan"), "tiny-wan-causal"), tiny.random_scenes(2, seed=0)
    long, short = (stream_scenes(pipe, tiny, scenes, frames, seed=0) for frames in (6, 3))
    for one, other in zip(long, short, strict=True):
        assert one.shape == (6, 64, 64) and one.isfinite().all()
        # the autoencoder's sums of other lengths
        assert torch.allclose(one[:3], other, atol=1e-4)
