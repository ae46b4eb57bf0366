"""``mhla analyze`` and ``mhla audit``, and what analyze does."""

import json
from pathlib import Path

import pytest
from PIL import Image

from mhla_diffusers import apply_mhla
from mhla_diffusers.analysis.analyze import analyze
from mhla_diffusers.tiny import load_tiny

from ..evaluation.pictures import mhla
from ..refusals import refused
from .tiny import run_tiny

HEAD = "family: dit\nbase_model: tiny-dit\ndescription: half\npatch:\n"


def test_an_analysis_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    pipe = load_tiny("dit")
    apply_mhla(pipe, blocks=(4, 4), layers=[1, 2])
    run = run_tiny(pipe, steps=1)
    layers, pictures = analyze(pipe, run, tmp_path)
    assert [layer.attention for layer in layers] == ["softmax", "MHLA", "MHLA", "softmax"]
    assert [layer.moves is not None for layer in layers] == [False, True, True, False]
    assert [picture.name for picture in pictures] == ["attention-maps.png", "mixing-matrices.png"]
    assert all(picture.stat().st_size > 5000 for picture in pictures)
    assert json.loads((tmp_path / "analysis.json").read_text())["grid"] == [8, 8]
    # a layer of two makes a picture half as wide; of an unpatched one there is no mixing
    one = analyze(pipe, run, tmp_path / "one", layers=[1])[1][1]
    assert Image.open(one).width < Image.open(pictures[1]).width
    assert len(analyze(pipe, run, tmp_path / "none", layers=[0])[1]) == 1
    for wrong, message in (({"token": 64}, "token=64...63"), ({"layers": [4]}, "layers.0=4")):
        with refused(message):
            analyze(pipe, run, tmp_path, **wrong)


@pytest.mark.parametrize(
    ("command", "settings", "said", "written"),
    [
        (
            "analyze",
            "  blocks: [4, 4]\n  layers: [0, 3]\n",
            ("mixing-matrices.png", "softmax", "MHLA"),
            "analysis.json",
        ),
        (
            *("audit", "  density: 0.1\n  block_size: 4\n"),
            ("worst head", "mass kept", "together the patch moves", "audit.png"),
            "audit.json",
        ),
    ],
)
def test_commands(tmp_path, command, settings, said, written):
    pytest.importorskip("matplotlib")
    (tmp_path / "patch.yaml").write_text(HEAD + settings)
    asked = ("--patch", tmp_path / "patch.yaml", "--output", tmp_path / "out", "--set", "num_inference_steps=2")
    shown = mhla(command, "dit", "seven", *asked)
    assert shown.exit_code == 0, shown.output
    assert all(text in shown.output for text in said)
    found = json.loads((tmp_path / "out" / written).read_text())
    assert Image.open(next((tmp_path / "out").glob("*.png"))).width > 100
    assert command == "analyze" or len(found["disabled"]) == 2


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("analyze", ("",), "'' is not a class"),
        ("analyze", ("seven", "--seed", "-1"), "seed=-1"),
        ("analyze", ("seven", "--model", "docs"), "model_index.json"),
        ("analyze", ("seven", "--output", "file"), "file"),
        ("audit", ("seven",), "--patch"),
        ("audit", ("seven", "--patch", "sana-0.6b"), "'sana'"),
    ],
)
def test_commands_refuse_what_cannot_be(tmp_path, monkeypatch, command, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("file").touch()
    shown = mhla(command, "dit", *(arguments if "--output" in arguments else (*arguments, "--output", "out")))
    assert isinstance(shown.exception, ValueError | OSError)
    assert message in str(shown.exception)
    assert not Path("out").exists()
