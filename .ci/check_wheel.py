"""Run in an environment that has only the wheel: its single top-level name, a patch by name, the tiny pipelines."""

import importlib.metadata
from pathlib import Path

from diffusers import WanTransformer3DModel

from mhla_diffusers import apply_mhla, load_mhla, mhla_layers
from mhla_diffusers.config import patch_names
from mhla_diffusers.tiny import call_settings, load_tiny

files = importlib.metadata.files("mhla_diffusers") or []
tops = {Path(str(file)).parts[0] for file in files if not str(file).startswith("..")}
tops = {top for top in tops if not top.endswith(".dist-info")}
if tops != {"mhla_diffusers"}:
    raise SystemExit(f"top-level names in the wheel: {sorted(tops)}; wanted mhla_diffusers alone")
if len(patch_names()) < 9:
    raise SystemExit(f"patches in the wheel: {patch_names()}; at least nine are promised")

transformer = WanTransformer3DModel(
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=8,
    freq_dim=16,
    ffn_dim=32,
    num_layers=3,
)
apply_mhla(transformer, "wan2.1-t2v-1.3b-hybrid")
if len(mhla_layers(transformer)) != 2:
    raise SystemExit(f"the hybrid patch replaced {len(mhla_layers(transformer))} of 3 layers; 2 are promised")

load_mhla(load_tiny("wan"), "tiny-wan-sparse")
for family in ("dit", "sana", "wan"):
    what = {"class_labels": [7]} if family == "dit" else {"prompt": "a seven moving left"}
    load_tiny(family)(**what, **{**call_settings(family), "num_inference_steps": 1})
