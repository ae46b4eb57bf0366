"""Latte: frames that attend by themselves are a batch to the patch, and a video to all else."""

import torch

import mhla_diffusers as mhla
from mhla_diffusers.benchmark.cases import Case, models, small_case
from mhla_diffusers.benchmark.correctness import check_patched
from mhla_diffusers.benchmark.forward import MHLA, with_attention
from mhla_diffusers.training import InMemoryData
from mhla_diffusers.training.checks import check_fits

from ..models import assert_changed, output, relative_change
from ..refusals import refused
from ..training.models import one_stage
from .cases import ROUNDING, all_listed, case_of, plain

CASE = case_of("latte")

PLAIN = plain("latte")


def test_without_temporal_attentions():
    """For a single frame too, which the model takes as a picture."""
    model, arguments = CASE.transformer(), CASE.inputs()
    single = {**arguments, "hidden_states": arguments["hidden_states"][:, :, :1]}
    for changed in ({**arguments, "enable_temporal_attentions": False}, single):
        expected = output(model, changed)
        mhla.apply_mhla(model, **all_listed("latte"))
        assert relative_change(output(model, changed), expected) < ROUNDING
        mhla.remove_mhla(model)
        mhla.apply_mhla(model, **PLAIN)
        assert_changed(output(model, changed), expected)
        mhla.remove_mhla(model)


def test_training_takes_latents_of_videos():
    model = mhla.apply_mhla(CASE.transformer(), **PLAIN)
    sample = {"latents": torch.zeros(CASE.latents)}
    check_fits(model, InMemoryData([sample]), one_stage("unused", patch={"blocks": [4, 2]}, batch_size=1))
    picture, config = torch.zeros(4, 16, 16), one_stage("unused", patch={"blocks": [4, 2]}, batch_size=1)
    with refused((4, 16, 16), 4, 3):
        check_fits(model, InMemoryData([{"latents": picture}]), config)


def test_measured_at_any_number_of_frames():
    """The model has a table of as many positions; the small input that is checked first has one frame."""
    case = Case(models()["tiny-latte"], 64, 96, 5, layers=1)
    transformer = case.build(torch.device("cpu"), torch.float32)
    assert transformer.config.video_length == 5
    inputs = small_case(case.model).inputs(transformer, torch.float32)
    check_patched(with_attention(case, transformer, MHLA), inputs)
    assert case.grid == (4, 6)
