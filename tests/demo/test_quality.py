"""The script that compares the quality of all attentions on a tiny pipeline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_script_adapts_samples_and_compares(tmp_path):
    pytest.importorskip("matplotlib")
    small = ("--scenes", 16, "--held-out", 3, "--steps", 1, "--samples", 10, "--inference-steps", 1)
    command = [sys.executable, ROOT / "finetune" / "quality.py", "--output", tmp_path, *small]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([str(part) for part in command], check=True, env=environment)
    written = json.loads((tmp_path / "report" / "comparison.json").read_text())["variants"]
    names = ["softmax", "MHLA-hybrid", "MHLA-auto", "MHLA", "MHLA-exact", "linear", "softmax-untouched"]
    assert list(written) == names
    assert len({variant["scores"]["held_out_loss"] for variant in written.values()}) == len(names)
    assert set(written["MHLA"]["differences"]) == {"held_out_loss", "fid", "digits recognised"}
    configs = {
        name: json.loads((tmp_path / "training" / name / "result" / "mhla_config.json").read_text())
        for name in ("MHLA-hybrid", "MHLA-auto")
    }
    layers = {name: config["transformers"]["transformer"]["mhla"]["layers"] for name, config in configs.items()}
    assert layers["MHLA-hybrid"] == "2/3"
    assert len(layers["MHLA-auto"]) == 2
    assert (tmp_path / "report-MHLA-hybrid-and-MHLA-auto" / "report.md").is_file()
    assert (tmp_path / "report" / "samples.png").is_file()
