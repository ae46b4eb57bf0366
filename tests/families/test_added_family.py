"""A family from outside of the package, the one that the page "Add a model" shows."""

import inspect

import pytest
import torch

from mhla_diffusers import apply_mhla, families, remove_mhla
from mhla_diffusers.families import Clip, get_family, predict, register_family
from mhla_diffusers.families.processes import VelocityDDPM
from mhla_diffusers.generation import PipelineChoice

from ..models import assert_changed, relative_change
from . import cogview3plus
from .cogview3plus import CogView3PlusFamily
from .cogview3plus_tiny import CALL, cogview3plus_pipeline, cogview3plus_transformer, save_cogview3plus


@pytest.fixture(autouse=True)
def family(monkeypatch) -> CogView3PlusFamily:
    """CogView3-Plus, known to the package during one test."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    known = CogView3PlusFamily()
    register_family(known)
    return known


def generate(pipe, **settings):
    generator = torch.Generator().manual_seed(3)
    return pipe("the red dog", generator=generator, **{**CALL, "output_type": "pt", **settings}).images


def test_class_is_short_enough_to_be_read():
    assert len(inspect.getsource(CogView3PlusFamily).splitlines()) <= 60
    assert len(inspect.getsource(cogview3plus).splitlines()) <= 60


def test_all_pairs_listed_are_its_own_attention():
    pipe = cogview3plus_pipeline()
    before = generate(pipe, output_type="latent")
    apply_mhla(pipe, blocks=(1, 1), sparse="content", density=1.0)
    # float32 sums in another order, through all denoising steps
    assert relative_change(generate(pipe, output_type="latent"), before) < 1e-4


def test_patch_rests_in_the_first_step():
    """Which the timestep tells."""
    pipe = cogview3plus_pipeline()
    before = generate(pipe, output_type="latent")
    apply_mhla(pipe, sparse="none", blocks=(2, 2), softmax_steps=1)
    assert relative_change(generate(pipe, output_type="latent"), before) > 1e-4  # of one short step
    apply_mhla(remove_mhla(pipe), sparse="none", blocks=(2, 2), softmax_steps=2)
    torch.testing.assert_close(generate(pipe, output_type="latent"), before, rtol=0, atol=0)


def test_prompt_becomes_what_the_pipeline_gives_its_transformer(family):
    pipe, given = cogview3plus_pipeline(), {}

    def note(_, args, kwargs):
        given.update(kwargs)

    handle = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    generate(pipe, guidance_scale=1.0)
    handle.remove()
    sample = family.encode_prompt(pipe, "the red dog", {"max_sequence_length": 8})
    torch.testing.assert_close(sample["encoder_hidden_states"][None], given["encoder_hidden_states"])


def test_shapes_of_the_conditioning_are_those_that_it_has(family):
    pipe = cogview3plus_pipeline()
    found = family.encode_prompt(pipe, "")
    shapes = family.conditioning_shapes(pipe.transformer.config)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in shapes.items()}


def test_training_loss_reaches_every_weight(family):
    pipe = cogview3plus_pipeline()
    transformer = apply_mhla(pipe.transformer, sparse="none", blocks=(2, 2))
    process = get_family(transformer).process(transformer, flow_shift=1.0)
    assert isinstance(process, VelocityDDPM)
    clip = Clip(frames=1, fps=1.0, sizes=((64, 96),))
    pixels = torch.rand(2, 3, 1, 64, 96) * 2 - 1
    latents = family.encode_pixels(pipe, pixels).detach()
    assert latents.shape[1:] == family.latent_shape(transformer.config, pipe.vae.config, clip)
    samples = [family.encode_prompt(pipe, text) for text in ("the red dog", "")]
    conditioning = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    batch = process.make_batch(latents, torch.randn_like(latents), torch.tensor([0.2, 0.7]), conditioning)
    process.loss(predict(transformer, batch), batch).sum().backward()
    without = [name for name, x in transformer.named_parameters() if x.grad is None]
    assert without == []


def test_calls_are_those_of_the_pipeline(family):
    pipe = cogview3plus_pipeline()
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    one, other = family.call(pipe, ["the red dog", "a cat"], generators, **CALL, output_type="pt")
    torch.testing.assert_close(one, generate(pipe)[0], rtol=1e-4, atol=1e-4)
    assert_changed(other, one)


def test_latents_are_those_that_the_autoencoder_gets(family):
    pipe = cogview3plus_pipeline()
    clip = Clip(frames=1, fps=1.0, sizes=((64, 64),))
    found = family.generate_latents(pipe, "the red dog", clip, 2, 5.0, torch.Generator().manual_seed(3))
    expected = generate(pipe, output_type="latent", max_sequence_length=224)[0]
    assert found.shape == family.latent_shape(pipe.transformer.config, pipe.vae.config, clip)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_folder_of_the_pipeline_can_be_chosen_as_a_model(tmp_path):
    choice = PipelineChoice("cogview3plus", model=str(save_cogview3plus(tmp_path)), settings=CALL)
    choice.check()
    (image,) = choice.call(choice.load(), ["the red dog"], [torch.Generator().manual_seed(3)])
    assert image.size == (64, 64)


def test_measured_models_can_be_built(family):
    tiny = next(model for model in family.models if model.is_tiny)
    built = cogview3plus_transformer().config
    for name, value in tiny.settings.items():
        assert built[name] == value
    assert len(family.self_attentions(cogview3plus_transformer())) == tiny.layers + sum(tiny.more_layers.values())
