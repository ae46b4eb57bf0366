"""The mhla command, run as a user runs it."""

import subprocess
import sys

import pytest
from safetensors.torch import save_file

from mhla_diffusers import load_mhla, mhla_layers, patch_names, save_mhla
from mhla_diffusers.config import patch_folder
from mhla_diffusers.info import info_command
from mhla_diffusers.patching.record import read_record

from . import models
from .patching.test_conversion import paper_checkpoint


def mhla(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from mhla_diffusers.cli import run; run()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_info_lists_what_there_is():
    shown = mhla("info")
    assert shown.returncode == 0, shown.stderr
    words = shown.stdout.split()
    for word in ("diffusers", "WanVACETransformer3DModel", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", *patch_names()):
        assert word in words, "whole, although this is no terminal"


def test_info_on_one_patch():
    shown = mhla("info", "--patch", "wan2.1-t2v-1.3b-hybrid")
    assert "[7, 3, 5]" in shown.stdout
    assert "2/3" in shown.stdout


def test_info_on_a_saved_patch(tmp_path, capsys):
    """In this process, since the other tests show that the command prints."""
    model = models.patched("wan", output_gate=True)
    model.blocks[1].attn1.to_q.weight.data.mul_(1.5)
    save_mhla(model, tmp_path, weights="changed", base=models.wan(), base_model="someone/base")
    record = read_record(tmp_path)
    info_command(str(tmp_path))
    shown = capsys.readouterr().out
    for words in (
        "someone/base",
        "changed",
        record.file,
        f"{record.sha256}, fits",
        "[2, 2, 3]",
        "WanTransformer3DModel",
    ):
        assert words in shown
    count = sum(p.numel() for layer in mhla_layers(model).values() for p in layer.parameters())
    assert f"12 tensors of MHLA with {count:,} values, 1 of the model with 576" in shown
    info_command("tiny-wan-exact")
    shown = capsys.readouterr().out
    assert (
        str(patch_folder() / "tiny-wan-exact") in shown and read_record(patch_folder() / "tiny-wan-exact").file in shown
    )
    (tmp_path / record.file).write_bytes(b"short")
    with pytest.raises(ValueError, match="is damaged or was changed"):
        info_command(str(tmp_path))


def test_info_counts_what_exact_tiles_cost(tmp_path):
    """Softmax attention is 4 N² D H; 21 of 420 tiles are exact; 1 of 105, without means."""
    path = tmp_path / "patch.yaml"
    head = "family: wan\nbase_model: a\ndescription: b\nmhla:\n  blocks: [7, 3, 5]\n"
    path.write_text(head + "  exact: calibrated\n  exact_tiles: [7, 6, 10]\n")
    shown = mhla("info", "--patch", str(path))
    assert shown.returncode == 0, shown.stderr
    assert "7x6x10 = 420" in shown.stdout and "5.0%" in shown.stdout
    (at_480p,) = [line for line in shown.stdout.splitlines() if "wan2.1-1.3b-480p" in line]
    (at_720p,) = [line for line in shown.stdout.splitlines() if "wan2.1-1.3b-720p" in line]
    assert "21x30x50" in at_480p and "420 of 75 " in at_480p
    assert "420 of 168-192" in at_720p
    softmax, linear, exact = (float(cell.replace(",", "")) for cell in at_480p.split()[-3:])
    assert softmax == pytest.approx(4 * 31_500**2 * 128 * 12 / 1e9, abs=1)
    assert exact - linear == pytest.approx(softmax / 20 + 4 * 31_500 * 420 * 128 * 12 / 1e9, abs=1)
    path.write_text(head + "  exact: own\n  tile_means: false\n")
    (at_480p,) = [line for line in mhla("info", "--patch", str(path)).stdout.splitlines() if "1.3b-480p" in line]
    softmax, linear, exact = (float(cell.replace(",", "")) for cell in at_480p.split()[-3:])
    assert exact - linear == pytest.approx(softmax / 105, abs=0.1)


def test_user_errors_have_no_traceback():
    shown = mhla("info", "--patch", "wan2.1-t2v-1.3")
    assert shown.returncode == 1
    assert "did you mean 'wan2.1-t2v-1.3b'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_convert(tmp_path):
    save_file(paper_checkpoint(models.wan(), [1], True, False), tmp_path / "paper.safetensors")
    made = mhla("convert", str(tmp_path / "paper.safetensors"), str(tmp_path / "patch"), "--blocks", "2,2,3")
    assert made.returncode == 0, made.stderr
    load_mhla(models.wan(), tmp_path / "patch")


def test_import_brings_nothing_heavy_beyond_diffusers():
    """diffusers itself imports triton, through torch; what counts is what this package adds."""
    script = """
import sys, torch, diffusers
before = set(sys.modules)
import mhla_diffusers
heavy = ("transformers", "triton", "peft", "accelerate", "diffusers.pipelines", "diffusers.models", "typer", "rich")
added = [name for name in set(sys.modules) - before if name.startswith(heavy)]
sys.exit(", ".join(added) or 0)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
