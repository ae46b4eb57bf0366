"""What a forward of a family may hold and MHLA does not take is refused by name, with the way out."""

import diffusers
import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family, trained_family
from mhla_diffusers.families.refused import REFUSED

from ..refusals import refused
from .cases import case_of, drawer, output

LONGCAT = case_of("longcat_image").inputs()
SECOND = LONGCAT["img_ids"] + torch.tensor([1.0, 0, 0])  # a reference picture, as LongCat-Image-Edit has


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("flux3", {"image_cond_hidden_states": drawer(2, 3)(4, 16)}, "image_cond_hidden_states"),
        ("kandinsky5", {"sparse_params": {"to_fractal": True}}, "sparse_params"),
        (
            "longcat_image",
            {"img_ids": torch.cat([LONGCAT["img_ids"], SECOND]), "hidden_states": drawer(2, 3)(128, 64)},
            "128",
        ),
    ],
)
def test_pictures_and_orders_that_are_not_taken(name, arguments, words):
    case = case_of(name)
    model = mhla.apply_mhla(case.transformer(), density=0.2, block_size=4)
    with refused(words, "remove_mhla(pipe)"):
        output(model, {**case.inputs(), **arguments})
    assert output(model, case.inputs()).isfinite().all()


def test_several_samples_in_a_row_of_ideogram():
    case = case_of("ideogram4")
    model, arguments = mhla.apply_mhla(case.transformer()), case.inputs()
    arguments["segment_ids"][0, :3] = 2  # text of another sample
    with pytest.raises(ValueError, match=r"Several.*remove_mhla\(transformer\)"):
        output(model, arguments)


def test_the_refiner_of_hunyuan_image():
    model = case_of("hunyuan_image").transformer(patch_size=(1, 1, 1), rope_axes_dim=(4, 4, 4))
    with refused("patch_size=(1, 1, 1)"):
        mhla.apply_mhla(model)
    assert not mhla.is_patched(model)


@pytest.mark.parametrize("name", REFUSED)
def test_classes_refused_by_name(name):
    for kind in (name, getattr(diffusers, name)):
        with pytest.raises(ValueError, match=name):
            get_family(kind)


@pytest.mark.parametrize("settings", [{}, {"grid": (2, 2, 2)}], ids=["by family", "any model"])
def test_a_class_whose_attention_has_no_grid(settings):
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 16, "text_dim": 16}
    model = diffusers.AnyFlowFARTransformer3DModel(**sizes, freq_dim=16)
    with refused("AnyFlowFARTransformer3DModel", "AnyFlowPipeline"):
        mhla.apply_mhla(model, **settings)
    assert not mhla.is_patched(model)


def test_longcats_prompts_are_not_rewritten():
    assert case_of("longcat_image").of_family.calling.settings == {"enable_prompt_rewrite": False}


def test_a_family_without_training_says_so():
    with refused("'z_image'", "Training()", "calibration"):
        trained_family(case_of("z_image").transformer())
