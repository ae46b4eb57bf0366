import json
from pathlib import Path

import pytest
import torch

from mhla_diffusers.analysis import mean_entropy, mean_rank
from mhla_diffusers.demo.adaptation import Adaptation
from mhla_diffusers.demo.run import DemoConfig, run_demo, shipped_recipe, variants
from mhla_diffusers.generation import PipelineChoice
from mhla_diffusers.tiny import TINY
from mhla_diffusers.training import InMemoryData, TrainingConfig

CONFIGS = Path(__file__).parents[2] / "finetune" / "configs"


def test_rank_and_entropy_of_known_matrices():
    identity = {"a": torch.eye(8, dtype=torch.float64)[None, None]}
    uniform = {"a": torch.full((1, 1, 8, 8), 1 / 8, dtype=torch.float64)}
    assert mean_rank(identity) == 8
    assert mean_rank(uniform) == 1
    assert mean_entropy(identity) == 0
    assert mean_entropy(uniform) == pytest.approx(torch.tensor(8.0).log().item())


@pytest.mark.slow
def test_demo_writes_everything_and_repeats_itself(tmp_path):
    pytest.importorskip("matplotlib")
    tables = []
    for name in ("first", "second"):
        config = DemoConfig(tmp_path / name, "dit", steps=4, scenes=3, samples=32, held_out=4)
        rows = run_demo(config)
        tables.append([{**vars(row), "seconds_per_step": 0} for row in rows])
    assert tables[0] == tables[1]
    assert [row["name"] for row in tables[0]] == ["softmax", "plain linear", "MHLA", "MHLA hybrid 2/3"]
    files = {path.name for path in (tmp_path / "first").iterdir()}
    assert {"index.html", "results.json", "samples.png", "loss.png", "mixing-MHLA.png"} <= files
    page = (tmp_path / "first" / "index.html").read_text()
    assert "http" not in page
    assert page.count("data:image/png;base64,") == 4
    results = json.loads((tmp_path / "first" / "results.json").read_text())
    assert len(results["rows"]) == 4
    # the row and the end of the curve are two ways to the same number
    for row in results["rows"][1:]:
        assert results["losses"][row["name"]][-1] == [4, pytest.approx(row["held_out_loss"], rel=1e-5)]


def test_folder_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Cannot write to the output folder"):
        run_demo(DemoConfig(tmp_path / "file" / "out"))


@pytest.mark.parametrize(("change", "message"), [({"family": "x"}, "family='x'"), ({"steps": 0}, "steps=0")])
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**change)


@pytest.mark.parametrize("name", TINY)
def test_demo_adapts_with_the_shipped_recipe(name):
    shipped = TrainingConfig.from_yaml(CONFIGS / f"tiny-{name}.yaml")
    tiny, family = TINY[name], PipelineChoice(name).of_family
    mhla = variants(tiny, family)[2]
    recipe = shipped_recipe(family, sum(stage.steps for stage in shipped.stages))
    used = Adaptation(tiny, InMemoryData([]), 16, 0, 50, tiny.batch_size).config(recipe, mhla.patch, Path("x"))
    assert mhla.patch == shipped.patch
    for setting in ("stages", "batch_size", "prompt_dropout", "flow_shift", "validation"):
        assert getattr(used, setting) == getattr(shipped, setting)


def test_rows_are_named_by_what_the_family_has():
    names = {name: variants(TINY[name], PipelineChoice(name).of_family)[0].name for name in TINY}
    assert names == {"dit": "softmax", "sana": "own linear attention", "wan": "softmax"}
