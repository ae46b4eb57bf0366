"""A tiny CogView3-Plus with random weights, built without a download, as a case of the contract."""

from pathlib import Path

from diffusers import CogVideoXDDIMScheduler

from .cases import MAKERS, Case, kl_autoencoder, parts, pipeline, t5, text
from .cogview3plus import COGVIEW3PLUS

_STEPS = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "snr_shift_scale": 4.0}
MAKERS["cogview3plus"] = pipeline(
    "CogView3PlusPipeline",
    lambda: parts(kl_autoencoder(), CogVideoXDDIMScheduler(prediction_type="v_prediction", **_STEPS), text(t5())),
)


CASE = Case(
    "cogview3plus",
    {"height": 128, "width": 128, "num_inference_steps": 2, "max_sequence_length": 8, "prompt": "the red dog"}
    | {"output_type": "pt"},
    tuple(f"transformer_blocks.{layer}.attn1" for layer in range(4)),
    {"sample_size": 16},
    extra=(8, 0),
    family=COGVIEW3PLUS,
)
"""A picture of 8x8 tokens."""


def save_cogview3plus(folder: Path) -> Path:
    """Write the pipeline into a folder for ``--model``, which is returned."""
    CASE.pipeline().save_pretrained(folder)
    return folder
