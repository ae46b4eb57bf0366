"""The demo from start to end."""

import json

import pytest

from mhla_diffusers.benchmark.measure import time_interleaved
from mhla_diffusers.demo import run
from mhla_diffusers.demo.run import DemoConfig, run_demo
from mhla_diffusers.tiny import TINY

from ..refusals import refused

SMALL = {"scenes": 2, "samples": 16, "held_out": 2}


@pytest.fixture
def hasty(monkeypatch):
    """Measure times for a moment, and sample in few steps."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        run.measure, "time_interleaved", lambda runs, device, **_: time_interleaved(runs, device, 0.05, least=1)
    )
    for family in ("wan", "dit"):
        monkeypatch.setitem(TINY[family].call_settings, "num_inference_steps", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_demo_writes_everything_and_repeats_itself(tmp_path, capfd):
    tables = []
    for name, updates in (("first", 2), ("second", 0)):
        rows = run_demo(DemoConfig(tmp_path / name, "dit", updates=updates, **SMALL))
        tables.append([{**vars(row), "seconds_per_step": None} for row in rows])
    assert tables[0] == tables[1]
    names = ["softmax", "plain linear", "MHLA", "MHLA hybrid 2/3", "sparse, 5 %"]
    assert [row["name"] for row in tables[0]] == names
    files = {path.name for path in (tmp_path / "first").iterdir()}
    assert {"index.html", "results.json", "samples.png", "loss.png", "mixing-MHLA.png"} <= files
    page = (tmp_path / "first" / "index.html").read_text()
    assert "http" not in page
    assert page.count("data:image/png;base64,") == 4
    results = json.loads((tmp_path / "first" / "results.json").read_text())
    assert len(results["rows"]) == 5
    # one of attention transfer comes before the two
    assert {name: curve[-1][0] for name, curve in results["live"].items()} == {names[1]: 3, names[2]: 3}
    assert "Loading" not in capfd.readouterr().err


@pytest.mark.usefixtures("hasty")
def test_a_patch_with_a_matrix_per_head_is_drawn(tmp_path, monkeypatch):
    every = run.variants
    monkeypatch.setattr(run, "variants", lambda tiny: every(tiny)[2:3])
    run_demo(DemoConfig(tmp_path, "wan", updates=0, **SMALL))
    assert (tmp_path / "mixing-MHLA.png").exists()


@pytest.mark.usefixtures("hasty")
def test_a_demo_that_is_stopped_leaves_no_page(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    every = run.variants
    monkeypatch.setattr(run, "draw_mixing", stop)
    monkeypatch.setattr(run, "variants", lambda tiny: every(tiny)[2:3])
    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoConfig(tmp_path, "dit", updates=0, **SMALL))
    assert not (tmp_path / "index.html").exists()


def test_folder_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file", error=OSError):
        run_demo(DemoConfig(tmp_path / "file" / "out"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"family": "x"}, "family='x'"), ({"updates": -1}, "updates=-1")],
)
def test_bad_settings_are_refused(change, message):
    with refused(message):
        DemoConfig(**change)
