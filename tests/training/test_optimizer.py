"""AdamW with moments of 8 bits."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from mhla_diffusers.training import TrainingConfig, read_metrics, train
from mhla_diffusers.training.finetune import finetune

from .models import one_stage, wan_data


def test_missing_bitsandbytes_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = one_stage(tmp_path / "run", optimizer="adamw8bit", model="nowhere", data="nowhere")
    with pytest.raises(ImportError, match=r"pip install mhla_diffusers\[adamw8bit\], or set optimizer: adamw"):
        finetune(config)
    assert not (tmp_path / "run").exists()


def test_8bit_moments_train_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="an extra that make test does not install")

    def run(output: Path, optimizer: str) -> TrainingConfig:
        return one_stage(output, steps=6, optimizer=optimizer, checkpoint_every=3, learning_rate=1e-3)

    torch.manual_seed(0)
    for optimizer in ("adamw", "adamw8bit"):
        train(_wide_wan(), wan_data(), run(tmp_path / optimizer, optimizer))
    exact, small = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("adamw", "adamw8bit"))
    assert [record["loss"] for record in small] == pytest.approx([record["loss"] for record in exact], rel=0.05)
    sizes = [
        (tmp_path / name / "checkpoints" / "step-00000006" / "optimizer.safetensors").stat().st_size
        for name in ("adamw", "adamw8bit")
    ]
    assert sizes[1] < 0.5 * sizes[0]
    shutil.rmtree(tmp_path / "adamw8bit" / "checkpoints" / "step-00000006")
    train(_wide_wan(), wan_data(), run(tmp_path / "adamw8bit", "adamw8bit"), resume="latest")
    assert read_metrics(tmp_path / "adamw8bit" / "metrics.jsonl") == small


def _wide_wan() -> torch.nn.Module:
    """With matrices of more than 4096 values, which alone are kept in 8 bits."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=96,
        num_layers=1,
        rope_max_seq_len=32,
    )
