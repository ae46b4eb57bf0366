"""What is particular to Flux: ids that tell the grid, two pictures, guidance that is embedded, blocks of two kinds."""

import pytest
import torch
from diffusers import FluxPipeline

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family

from ..models import relative_change
from ..refusals import refused
from .cases import ROUNDING, case_of, output, plain

flux = case_of("flux")

FAMILY = get_family("flux")
SETTINGS = plain("flux")


def places(picture: int, height: int, width: int) -> torch.Tensor:
    """Ids of a picture: (N, 3)."""
    return torch.cartesian_prod(
        torch.full((1,), float(picture)), torch.arange(height).float(), torch.arange(width).float()
    )


def with_ids(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {**flux.inputs(), "img_ids": ids, "hidden_states": torch.randn(2, ids.shape[-2], 16, generator=generator)}


@pytest.mark.parametrize(("grid", "dtype"), [((7, 5), torch.float32), ((3, 260), torch.bfloat16)], ids=str)
def test_ids_tell_the_grid(grid, dtype):
    """Those of the pipeline, also where bfloat16 rounds them, and in the form with a batch axis of earlier versions."""
    ids = FluxPipeline._prepare_latent_image_ids(1, *grid, torch.device("cpu"), dtype)
    assert FAMILY.grid(None, {"img_ids": ids}) == grid
    assert FAMILY.grid(None, {"img_ids": ids.clone()[None]}) == grid


@pytest.mark.parametrize("others", [(8, 8), (1, 1)], ids=str)
def test_another_picture_is_refused(others):
    """As Flux Kontext has; also where the tokens of both would fill a grid that reaches as far as they do."""
    arguments = with_ids(torch.cat([places(0, 4, 2), places(1, *others)]))
    model = mhla.apply_mhla(flux.transformer(), **SETTINGS)
    with refused("Flux Kontext", "remove_mhla(pipe)"):
        output(model, arguments)
    assert output(mhla.remove_mhla(model), arguments).isfinite().all()


def test_compiled_another_grid_of_as_many_tokens_raises():
    """The graph holds the grid, and nothing else in its inputs tells another one from it."""
    model = mhla.apply_mhla(flux.transformer(num_layers=1, num_single_layers=0), **SETTINGS)
    square, wide = with_ids(places(0, 8, 8)), with_ids(places(0, 4, 16))
    expected = output(model, square)
    assert output(model, wide).isfinite().all()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_change(output(compiled, square), expected) < ROUNDING
    with refused("compiled for another token grid", error=RuntimeError):
        output(compiled, wide)


def test_a_model_without_embedded_guidance_is_given_none():
    latents, conditioning = torch.zeros(1, 4, 16, 16), {"encoder_hidden_states": torch.zeros(1, 6, 32)}
    for embeds in (True, False):
        model = flux.transformer(guidance_embeds=embeds, num_layers=1, num_single_layers=1)
        arguments = FAMILY.inputs.arguments(model, latents, torch.tensor([0.5]), conditioning)
        assert ("guidance" in arguments) is embeds


@torch.no_grad()
def test_ids_that_change_in_place_are_read_again():
    """As where a graph or a server has one buffer for all sizes."""
    model = mhla.apply_mhla(flux.transformer(), blocks=(2, 2))
    arguments = flux.inputs()
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4).float(), torch.arange(16).float())
    expected = model(**arguments | {"img_ids": places}).sample
    model(**arguments)
    arguments["img_ids"].copy_(places)
    assert torch.equal(model(**arguments).sample, expected)


@torch.no_grad()
def test_arguments_by_place():
    model = mhla.apply_mhla(flux.transformer(), blocks=(2, 2))
    arguments = flux.inputs()
    names = (
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "img_ids",
        "txt_ids",
        "guidance",
    )
    assert torch.equal(model(*(arguments[name] for name in names))[0], model(**arguments)[0])
