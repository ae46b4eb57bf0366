"""What ``mhla analyze`` does, and the command."""

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from mhla_diffusers import apply_mhla
from mhla_diffusers.analysis.run import analyze
from mhla_diffusers.cli import app
from mhla_diffusers.tiny import load_tiny

from .tiny import run_tiny


def mhla(*arguments):
    """The command within this process; errors of users are in ``exception``."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_everything_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    pipe = load_tiny("dit")
    apply_mhla(pipe, sparse="none", blocks=(4, 4), layers=[1, 2])
    result = analyze(pipe, run_tiny(pipe), tmp_path)
    assert [layer.attention for layer in result.layers] == ["softmax", "MHLA", "MHLA", "softmax"]
    assert set(result.sensitivity) == {"transformer_blocks.1.attn1", "transformer_blocks.2.attn1"}
    assert [picture.name for picture in result.pictures] == ["attention-maps.png", "mixing-matrices.png"]
    assert all(picture.stat().st_size > 5000 for picture in result.pictures)
    assert json.loads((tmp_path / "analysis.json").read_text())["grid"] == [8, 8]
    one = analyze(pipe, run_tiny(pipe), tmp_path / "one", layers=[1]).pictures[1]
    # a layer of two makes a picture half as wide; of an unpatched one there is no mixing
    assert Image.open(one).width < Image.open(result.pictures[1]).width
    assert len(analyze(pipe, run_tiny(pipe), tmp_path / "none", layers=[0]).pictures) == 1
    with pytest.raises(ValueError, match="token=64 is out of range.*0 to 63"):
        analyze(pipe, run_tiny(pipe), tmp_path, token=64)
    with pytest.raises(ValueError, match="Layer 4 is out of range"):
        analyze(pipe, run_tiny(pipe), tmp_path, layers=[4])


def test_command(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "patch.yaml").write_text(
        "family: dit\nbase_model: tiny-dit\ndescription: half\nmhla:\n  blocks: [4, 4]\n  layers: [0, 3]\n"
    )
    patch = ("--patch", tmp_path / "patch.yaml")
    shown = mhla("analyze", "dit", "seven", *patch, "--output", tmp_path / "out", "--set", "num_inference_steps=2")
    assert shown.exit_code == 0, shown.output
    assert "mixing-matrices.png" in shown.output
    assert (tmp_path / "out" / "analysis.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "'' is no class"),
        (("1001",), "'1001' is no class"),
        (("seven", "--device", "tpu9"), "device='tpu9'"),
        (("seven", "--set", "num_inference_step=2"), "did you mean 'num_inference_steps'"),
        (("seven", "--seed", "-1"), "seed -1 is out of range"),
        (("seven", "--model", "docs"), "docs is no diffusers pipeline: model_index.json is missing"),
    ],
)
def test_command_refuses_what_cannot_be(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    shown = mhla("analyze", "dit", *arguments, "--output", "out")
    assert isinstance(shown.exception, ValueError | OSError)
    assert message in str(shown.exception)
    assert not Path("out").exists()


def test_command_needs_a_folder_to_write_to(tmp_path):
    (tmp_path / "file").touch()
    shown = mhla("analyze", "dit", "seven", "--output", tmp_path / "file")
    assert isinstance(shown.exception, NotADirectoryError)
    assert str(shown.exception) == f"The output {tmp_path / 'file'} is a file; give a folder."
