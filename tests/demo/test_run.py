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
    assert {"index.html", "results.json", "samples.png", "loss.png"} <= files
    page = (tmp_path / "first" / "index.html").read_text()
    assert "http" not in page
    assert page.count("data:image/png;base64,") == 2
    results = json.loads((tmp_path / "first" / "results.json").read_text())
    assert len(results["rows"]) == 5
    # one of attention transfer comes before the two
    assert {name: curve[-1][0] for name, curve in results["live"].items()} == {names[1]: 3, names[2]: 3}
    assert "Loading" not in capfd.readouterr().err


def test_what_cannot_run_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file", error=OSError):
        run_demo(DemoConfig(tmp_path / "file" / "out"))
    for change, message in (({"family": "x"}, "family='x'"), ({"updates": -1}, "updates=-1")):
        with refused(message):
            DemoConfig(**change)
