import json
import os
from pathlib import Path
from statistics import fmean

import pytest
import torch

from mhla_diffusers.benchmark.timing import Budget
from mhla_diffusers.demo import run
from mhla_diffusers.demo.adaptation import (
    Adaptation,
    digit_latents,
    load_variant,
    recipe_of,
    streamed_variant,
    variants,
)
from mhla_diffusers.demo.run import DemoConfig, run_demo
from mhla_diffusers.devices import free_threads, threads
from mhla_diffusers.families import get_family
from mhla_diffusers.patching import is_patched
from mhla_diffusers.tiny import TINY, load_tiny
from mhla_diffusers.training import InMemoryData, TrainingConfig

CONFIGS = Path(__file__).parents[2] / "finetune" / "configs"


@pytest.fixture
def hasty(monkeypatch):
    """Times are measured for a moment."""
    monkeypatch.setattr(run, "Budget", lambda **_: Budget(seconds=0.05, least=1))
    monkeypatch.setattr(run.speed, "GRIDS", ((1, 6, 10), (2, 6, 10)))


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_demo_writes_everything_and_repeats_itself(tmp_path, capfd):
    pytest.importorskip("matplotlib")
    tables = []
    for name, updates, seconds in (("first", 2, 60.0), ("second", 0, 0.0)):
        small = {"scenes": 2, "samples": 16, "held_out": 2}
        config = DemoConfig(tmp_path / name, "dit", updates=updates, speed_seconds=seconds, **small)
        rows = run_demo(config)
        tables.append([{**vars(row), "seconds_per_step": None} for row in rows])
    assert tables[0] == tables[1]
    names = ["softmax", "plain linear", "MHLA", "MHLA hybrid 2/3", "MHLA, block-sparse"]
    assert [row["name"] for row in tables[0]] == names
    files = {path.name for path in (tmp_path / "first").iterdir()}
    assert {"index.html", "results.json", "samples.png", "loss.png", "speed.png", "mixing-MHLA.png"} <= files
    page = (tmp_path / "first" / "index.html").read_text()
    assert "http" not in page
    assert page.count("data:image/png;base64,") == 6
    assert page.index("Is it good?") < page.index("Is it fast?")
    measured = json.loads((tmp_path / "first" / "speed.json").read_text())
    assert [n for n, _ in measured["curves"]["MHLA"]] == [60, 120]
    assert "Is it fast?" not in (tmp_path / "second" / "index.html").read_text()
    results = json.loads((tmp_path / "first" / "results.json").read_text())
    assert len(results["rows"]) == 5
    # one of attention transfer comes before the two
    assert {name: curve[-1][0] for name, curve in results["live"].items()} == {names[1]: 3, names[4]: 3}
    printed = capfd.readouterr()
    assert "Loading" not in printed.err
    assert "divisible" not in printed.err


@pytest.mark.usefixtures("hasty")
def test_a_demo_that_is_stopped_leaves_no_page(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "draw_mixing_matrices", stop)
    monkeypatch.setattr(run, "variants", lambda tiny: variants(tiny)[2:3])
    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoConfig(tmp_path, "dit", updates=0, scenes=2, samples=16, held_out=2, speed_seconds=0))
    assert not (tmp_path / "index.html").exists()


def test_folder_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Cannot write to the output folder"):
        run_demo(DemoConfig(tmp_path / "file" / "out"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"family": "x"}, "family='x'"), ({"updates": -1}, "updates=-1"), ({"speed_seconds": -1}, "speed_seconds=-1")],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**change)


@pytest.mark.parametrize(("name", "causal"), [*((name, False) for name in TINY), ("wan", True)])
def test_adapted_with_the_shipped_recipe(name, causal):
    tiny = TINY[name]
    shipped = TrainingConfig.from_yaml(CONFIGS / f"tiny-{name}{'-causal' if causal else ''}.yaml")
    best = streamed_variant(tiny) if causal else variants(tiny)[-1]
    used = Adaptation(tiny, InMemoryData([]), 16, 0, 50, tiny.batch_size).config(
        recipe_of(best, tiny), best.patch, Path("x")
    )
    assert best.patch == shipped.patch
    for setting in ("stages", "batch_size", "prompt_dropout", "flow_shift", "validation"):
        assert getattr(used, setting) == getattr(shipped, setting)


@pytest.mark.parametrize("name", TINY)
def test_every_variant_ships_adapted(name):
    """It opens by its name, and predicts better than a fresh patch on digits that it was not adapted on."""
    tiny = TINY[name]
    data = digit_latents(load_tiny(name), tiny, 1, 4, seed=3)
    adaptation = Adaptation(tiny, data, held_out=4, seed=3, validate_every=1, batch_size=1)
    for variant in (*variants(tiny), streamed_variant(tiny)):
        if variant is None:
            continue
        adapted = load_variant(tiny, variant, "cpu")
        assert is_patched(adapted) == (variant.patch is not None)
        if variant.patch is None:
            assert not torch.equal(attention_weight(adapted), attention_weight(load_tiny(name)))
            continue
        fresh = adaptation.patched(variant.patch)
        found, before = (fmean(adaptation.held_out_losses(pipe)) for pipe in (adapted, fresh))
        assert found < before, variant.name


def attention_weight(pipe):
    attentions = get_family(pipe.transformer).self_attentions(pipe.transformer)
    return next(iter(attentions.values())).to_q.weight


def test_rows_are_named_by_what_the_family_has():
    names = {name: variants(TINY[name])[0].name for name in TINY}
    assert names == {"dit": "softmax", "sana": "own linear attention", "wan": "softmax"}


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    assert 1 <= free_threads() <= (os.cpu_count() or 1)
