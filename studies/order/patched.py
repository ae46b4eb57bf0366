"""What ``apply_mhla`` does to real attention: DINOv2-S on two photographs, every layer patched, nothing trained.

    python studies/order/patched.py WEIGHTS.onnx PHOTOS --pixels 1036

The error is that of the last hidden state of all tokens, relative to the unpatched model.
"""

import sys
from typing import Any

import torch
from real_attention import open_model

from mhla_diffusers import apply_mhla, describe, remove_mhla

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, 15 %": {"density": 0.15},
    "default with the linear branch": {"linear_branch": True},
    "blocks of 64": {"block_size": 64},
    "blocks of 64 along the curve": {"block_size": 64, "order": "curve"},
    "no pooled keys": {"pooled": False},
    "MHLA alone": {"sparse": "none"},
    "plain linear": {"sparse": "none", "blocks": (1, 1)},
}


def main() -> None:
    """Print a table of Markdown."""
    model, photos, _ = open_model(__doc__.splitlines()[0])
    sys.stdout.write("| patch | blocks of queries / keys | error |\n| --- | --- | --- |\n")
    with torch.no_grad():
        plain = [model(x).last_hidden_state for x in photos]
        for name, settings in SETTINGS.items():
            apply_mhla(model, **settings)
            found = [model(x).last_hidden_state for x in photos]
            layer = describe(model)[0]
            blocks = ""
            if layer.config is not None and layer.config.sparse == "content" and layer.grid is not None:
                rule = layer.config.rule_on(layer.grid)
                blocks = f"{rule.block_size} / {rule.key_block_size}"
            remove_mhla(model)
            error = sum(float((a - b).norm() / b.norm()) for a, b in zip(found, plain, strict=True)) / len(photos)
            sys.stdout.write(f"| {name} | {blocks} | {error:.3f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
