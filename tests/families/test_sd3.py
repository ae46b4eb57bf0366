"""What is particular to Stable Diffusion 3: the second attention of 3.5's layers, text of fixed length, positions."""

import torch
from diffusers import LayerSkipConfig, apply_layer_skip
from diffusers.models.attention_processor import FusedJointAttnProcessor2_0

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family

from ..models import relative_change
from .cases import ROUNDING, case_of, output, plain

sd3 = case_of("sd3")

FAMILY = get_family("sd3")
SETTINGS = plain("sd3")


def test_normed_projections_stay_normed_when_they_are_fused():
    """diffusers' own fused processor leaves the norms out; MHLA's reads the layer itself."""
    model, arguments = sd3.transformer(qk_norm="rms_norm"), sd3.inputs()
    expected = output(mhla.apply_mhla(model, **SETTINGS), arguments)
    mhla.remove_mhla(model)
    model.fuse_qkv_projections()
    assert all(isinstance(one, FusedJointAttnProcessor2_0) for one in model.attn_processors.values())
    mhla.apply_mhla(model, **SETTINGS)
    assert relative_change(output(model, arguments), expected) < ROUNDING


def test_text_has_the_tokens_of_the_real_tokenizers():
    pipe = sd3.pipeline()
    pipe.tokenizer_max_length = pipe.tokenizer.model_max_length = pipe.tokenizer_2.model_max_length = 77
    shapes = FAMILY.inputs.conditioning_shapes(pipe.transformer.config)
    found = FAMILY.training.encode_prompt(pipe, "a red ball")
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in shapes.items()}


@torch.no_grad()
def test_a_skipped_attention_hands_on_image_and_text():
    """As diffusers' guidance skips layers, which knows no such processor of SD3's own."""
    model, arguments = mhla.apply_mhla(sd3.transformer(), **plain("sd3")), sd3.inputs()
    expected = output(model, arguments)
    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="transformer_blocks", skip_attention=True, skip_ff=False))
    assert relative_change(output(model, arguments), expected) > 1e-3
