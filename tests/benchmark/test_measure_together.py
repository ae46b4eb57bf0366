"""The script that times a patch beside a step cache, LoRA and fewer steps, on the tiny pipeline."""

import runpy
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model_state_dict

from mhla_diffusers.tiny import load_tiny, pipeline_folder

from ..refusals import refused

SCRIPT = str(Path(__file__).parents[2] / "pipelines/measure_together.py")


def run(monkeypatch, *more):
    size = ("--frames", "6", "--height", "64", "--width", "64", "--repetitions", "1")
    arguments = ("a seven", "--model", str(pipeline_folder("wan")), "--weights", "tiny-wan-sparse", *size, *more)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
    runpy.run_path(SCRIPT, run_name="__main__")


def test_each_addition_with_and_without_the_patch(monkeypatch, capsys, tmp_path):
    pytest.importorskip("torchmetrics")
    pipe = load_tiny("wan")
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    pipe.save_lora_weights(tmp_path, get_peft_model_state_dict(pipe.transformer))
    monkeypatch.setenv("COLUMNS", "200")
    more = ("--cache", "firstblock=100", "--lora", str(tmp_path), "--steps", "3", "1")
    run(monkeypatch, *more)
    _, *lines = capsys.readouterr().out.splitlines()
    rows = {name.strip(): values for name, *values in (line.rsplit(maxsplit=4) for line in lines)}
    additions = ("", " + firstblock=100", f" + {tmp_path}", " + 1 steps")
    assert list(rows) == [patch + added for patch in ("unpatched", "tiny-wan-sparse") for added in additions]
    # a guided step is two forwards; this cache computes the first of each alone
    assert [values[1] for values in rows.values()] == ["6", "2", "6", "2"] * 2
    assert rows["unpatched"][2:] == ["100.0", "1.000"]
    assert all(float(values[2]) < 100 for name, values in rows.items() if name != "unpatched")


def test_an_unknown_cache_is_refused(monkeypatch):
    with refused("'teacache=1'"):
        run(monkeypatch, "--cache", "teacache=1")
