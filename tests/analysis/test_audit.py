"""An audit as files, and ``mhla audit``."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mhla_diffusers import apply_mhla, audit
from mhla_diffusers.analysis import draw_audit, write_audit
from mhla_diffusers.cli import app
from mhla_diffusers.tiny import load_tiny

from .. import models
from ..pipelines import generate, wan22_pipeline
from .tiny import run_tiny


def mhla(*arguments):
    """The command within this process; errors of users are in ``exception``."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_files_hold_what_was_found(tmp_path):
    pytest.importorskip("matplotlib")
    pipe = apply_mhla(load_tiny("dit"), block_size=4)
    found = audit(pipe, run_tiny(pipe))
    assert [file.name for file in write_audit(found, tmp_path / "new")] == ["audit.json", "audit.png"]
    assert json.loads((tmp_path / "new" / "audit.json").read_text()) == found.to_dict()


def test_the_picture_shows_where_the_error_is_and_what_did_not_run(tmp_path):
    pytest.importorskip("matplotlib")
    model = models.patched("dit")
    found = audit(model, lambda: models.output(model, models.inputs("dit")))
    for layer in found.layers:
        layer.errors[:] = 0
    dark = brightness(draw_audit(found, tmp_path / "dark.png"))
    found.layers[0].errors[:] = found.layers[0].squares
    assert brightness(draw_audit(found, tmp_path / "bright.png")) > dark + 5
    pipe = apply_mhla(wan22_pipeline(), sparse="none", blocks=(1, 1, 1))
    of_two = audit(pipe, lambda: generate("wan22", pipe))
    with Image.open(draw_audit(of_two, tmp_path / "two.png")) as image:
        grey = sum(count for count, colour in image.convert("RGB").getcolors(10**6) if colour == (204, 204, 204))
        assert grey > 0.05 * image.width * image.height


def brightness(file):
    with Image.open(file) as image:
        pixels = torch.tensor(list(image.convert("L").tobytes()), dtype=torch.float32)
    return float(pixels.mean())


def test_command(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "patch.yaml").write_text(
        "family: dit\nbase_model: tiny-dit\ndescription: half\n"
        "mhla:\n  blocks: [4, 4]\n  sparse: content\n  block_size: 4\n"
    )
    shown = mhla("audit", "dit", "seven", "--patch", tmp_path / "patch.yaml", "--output", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    for text in ("worst head", "mass kept", "together the patch moves", "audit.png"):
        assert text in shown.output
    assert len(json.loads((tmp_path / "out" / "audit.json").read_text())["rests"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --patch or --weights"),
        (("--patch", "sana-0.6b"), "This patch is for the 'sana' family"),
        (("--patch", "dit-xl-2-256", "--set", "num_inference_step=2"), "did you mean 'num_inference_steps'"),
    ],
)
def test_command_refuses_what_cannot_be(tmp_path, arguments, message):
    shown = mhla("audit", "dit", "seven", *arguments, "--output", tmp_path / "out")
    assert isinstance(shown.exception, ValueError)
    assert message in str(shown.exception)
    assert not (tmp_path / "out").exists()
