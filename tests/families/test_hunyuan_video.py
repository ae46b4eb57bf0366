"""What is particular to HunyuanVideo 1.5: three kinds of tokens as text, and guidance as a component."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, get_family
from mhla_diffusers.training.config import ObjectiveWeights, StageConfig, TrainingConfig
from mhla_diffusers.training.estimate import estimate

from ..models import relative_change
from .cases import ROUNDING, all_listed, case_of, output
from .recording import forwards

CASE = case_of("hunyuan_video15")

CLIP = Clip(7, 24.0, ((16, 24),))


def real_lengths(pipe):
    """The tiny pipeline with texts as long as those of the real one."""
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 1000, 256, 729
    pipe.text_encoder.config.max_position_embeddings = 1024
    return pipe


@torch.no_grad()
def test_forward_is_called_as_by_the_pipeline():
    pipe = real_lengths(CASE.pipeline())
    family = get_family(pipe.transformer)
    call = CASE.call | {"num_inference_steps": 1, "output_type": "latent"}
    given, _ = forwards(pipe, **call)
    conditioning = {key: x[None] for key, x in family.training.encode_prompt(pipe, call["prompt"]).items()}
    shapes = {key: (x.shape, x.dtype) for key, x in family.forward.conditioning_shapes(pipe.transformer.config).items()}
    for encoded in (family.training.encode_prompt(pipe, call["prompt"]), family.training.encode_prompt(pipe, "")):
        assert {key: (x.shape, x.dtype) for key, x in encoded.items()} == shapes
        assert encoded["encoder_attention_mask"].any()  # without a token the model would divide by their number
    # masks are floats in the pipeline, and taken for bool by the transformer
    assert {x.dtype for key, x in conditioning.items() if "mask" in key} == {torch.int64}
    assert all(0 < x.sum() < x.numel() for key, x in conditioning.items() if "mask" in key)
    latents = given["hidden_states"][:, :4]
    made = family.forward.arguments(pipe.transformer, latents, given["timestep"], conditioning)
    assert {key for key in given if given[key] is not None} == {*made, "return_dict"}
    for key, argument in made.items():
        assert torch.equal(argument.to(given[key].dtype), given[key])


@pytest.mark.parametrize("masked", [False, True])
def test_softmax_in_place_of_mhla_with_an_image(masked):
    """The image's tokens then take part; with a mask of no text but the image's, all others are behind them."""
    model, arguments = CASE.transformer(), CASE.inputs()
    arguments["image_embeds"] = torch.randn(arguments["image_embeds"].shape, generator=torch.manual_seed(2))
    if masked:
        arguments["encoder_attention_mask_2"] = torch.zeros_like(arguments["encoder_attention_mask_2"])
    expected = output(model, arguments)
    mhla.apply_mhla(model, **all_listed("hunyuan_video15"))
    assert relative_change(output(model, arguments), expected) < ROUNDING


def test_guidance_of_generated_latents():
    pipe = CASE.pipeline()
    family, guider = get_family(pipe.transformer), pipe.guider
    found = {
        scale: family.training.generate_latents(pipe, "a dog", CLIP, 1, scale, torch.Generator().manual_seed(1))
        for scale in (1.0, 6.0)
    }
    assert pipe.guider is guider
    call = {"num_frames": 7, "height": 16, "width": 24, "num_inference_steps": 1, "output_type": "latent"}
    expected = pipe("a dog", generator=torch.Generator().manual_seed(1), **call).frames[0]
    assert torch.equal(found[6.0], expected)
    assert not torch.equal(found[1.0], expected)


@torch.no_grad()
def test_as_many_tokens_without_values_as_with_them():
    """Values tell which tokens take part, not how many there are."""
    shapes = []
    for device in ("meta", "cpu"):
        model = CASE.transformer().to(device)
        model.transformer_blocks[0].register_forward_hook(lambda *call: shapes.append([x.shape for x in call[2]]))
        with get_family(model).forward.without_values():
            model(**{key: x.to(device) for key, x in CASE.inputs().items()})
    assert shapes[0] == shapes[1]


def test_training_is_estimated_without_values():
    model = mhla.apply_mhla(CASE.transformer(), blocks=(2, 2, 3)).to("meta")
    sample = {"latents": torch.empty(CASE.latents), **get_family(model).forward.conditioning_shapes(model.config)}
    stage = StageConfig(1, 1e-3, "attention", ObjectiveWeights(diffusion=1.0))
    assert estimate(model, sample, TrainingConfig("unused", (stage,))).stages[0].flops > 0
