"""Which denoising step a forward belongs to, and what runs in it: from the scheduler, on the host."""

import logging
from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanVideoToVideoPipeline
from PIL import Image

import mhla_diffusers as mhla
from mhla_diffusers.config import NOTHING_DENSE, SparseConfig, Step
from mhla_diffusers.patching import find_patched, in_every_step

from ..models import FAMILIES, assert_changed, inputs, output
from ..pipelines import PIPELINES, generate, quiet, wan_pipeline
from .shared import SPARSE

PLAIN = SPARSE | {"correct": False}


def clip(pipe, steps=4):
    return generate("wan", pipe, num_inference_steps=steps)


def dense_forwards(pipe, run):
    """Whether full attention ran, for every forward of each patched transformer in order."""
    found, hooks = [], []
    for handle in find_patched(pipe).values():

        def begin(*_, handle=handle):  # behind the patch's own hook
            found.append(handle.tally.sparse)

        def end(*_, handle=handle):
            found[-1] = handle.tally.sparse == found[-1]

        hooks += [handle.transformer.register_forward_pre_hook(begin), handle.transformer.register_forward_hook(end)]
    run()
    for hook in hooks:
        hook.remove()
    return found


def by_step(found, steps):
    """One value for each step, in which all forwards are alike."""
    size = len(found) // steps
    groups = [set(found[start : start + size]) for start in range(0, len(found), size)]
    assert len(groups) == steps and all(len(one) == 1 for one in groups)
    return [one.pop() for one in groups]


# Which steps are dense, by the settings


# steps, dense_first, dense_last, dense_every; dense steps; those that measure, the last two before a sparse one
DENSE_STEPS = [
    (50, 1, 0, 10, [0, 10, 20, 30, 40], [0, 10, 20, 30, 40]),
    (50, 2, 1, 10, [0, 1, 11, 21, 31, 41, 49], [0, 1, 11, 21, 31, 41]),
    (50, 0.1, 0.02, 0, [0, 1, 2, 3, 4, 49], [3, 4]),  # shares are rounded up
    (12, 0.2, 0, 0, [0, 1, 2], [1, 2]),
    (30, 0, 0, 7, [6, 13, 20, 27], [6, 13, 20, 27]),
    (10, 8, 0, 3, [0, 1, 2, 3, 4, 5, 6, 7], [6, 7]),
    (4, 0.2, 0.2, 3, [0, 3], [0]),  # in few steps a share is one step, and none is repeated
    (8, 0, 9, 0, [0, 1, 2, 3, 4, 5, 6, 7], []),
]


@pytest.mark.parametrize(("count", "first", "last", "every", "dense", "measured"), DENSE_STEPS)
def test_which_steps_are_dense(count, first, last, every, dense, measured):
    config = SparseConfig(dense_first=first, dense_last=last, dense_every=every)
    assert list(config.dense_steps(count)) == dense
    assert [index for index in range(count) if config.records_residual(Step(index, count))] == measured


# Every scheduler and solver; tests/families has the other pipelines


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
ONE, TWO = [True] * 2 + [False] * 2, [True] * 4 + [False] * 3
SCHEDULERS = {
    "dit": [
        *(("DDIMScheduler", ONE, {}), ("DDPMScheduler", ONE, {}), ("DEISMultistepScheduler", ONE, {})),
        *(("DPMSolverMultistepScheduler", ONE, {}), ("DPMSolverSinglestepScheduler", ONE, {})),
        *(("EulerAncestralDiscreteScheduler", ONE, {}), ("EulerDiscreteScheduler", ONE, {})),
        *(("HeunDiscreteScheduler", TWO, {}), ("KDPM2AncestralDiscreteScheduler", TWO, {})),
        *(("KDPM2DiscreteScheduler", TWO, {}), ("LMSDiscreteScheduler", ONE, {})),
        ("UniPCMultistepScheduler", ONE, {}),
    ],
    "wan": [
        *(("DPMSolverMultistepScheduler", ONE, FLOW), ("FlowMatchEulerDiscreteScheduler", ONE, {})),
        *(("FlowMatchHeunDiscreteScheduler", TWO, {}), ("UniPCMultistepScheduler", ONE, FLOW)),
    ],
}
"""Pipeline → its schedulers, whether every forward of four steps is dense of which two are, and settings."""


@pytest.mark.parametrize(
    ("name", "scheduler", "expected", "settings"),
    [(name, *row) for name, rows in SCHEDULERS.items() for row in rows],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_is_one_of_num_inference_steps(name, scheduler, expected, settings):
    """Two of four are dense, whatever number of forwards the scheduler's solver makes in a step."""
    unguided = {"guidance_scale": 1.0} if name == "wan" else {}
    pipe, call = PIPELINES[name].build(), PIPELINES[name].call | unguided
    own = {} if "Flow" in scheduler else pipe.scheduler.config
    mhla.apply_mhla(pipe, **PLAIN | {"dense_first": 2})
    pipe.scheduler = getattr(diffusers, scheduler).from_config(own, **settings)  # after patching
    for _ in range(2):  # another call begins anew
        assert dense_forwards(pipe, lambda: pipe(**{**call, "num_inference_steps": 4})) == expected


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 4), (0.5, 2)])
def test_a_call_that_begins_in_the_middle_of_the_schedule(strength, steps):
    """Its first step is the first that it comes to, in this call and the next."""
    components = {name: part for name, part in wan_pipeline().components.items() if name != "transformer_2"}
    pipe = mhla.apply_mhla(quiet(WanVideoToVideoPipeline(**components)), **PLAIN | {"dense_first": 1})
    embeddings = torch.zeros(1, 8, pipe.transformer.config.text_dim)  # its prompts need ftfy
    call = PIPELINES["wan"].call | {"video": [Image.new("RGB", (48, 32))] * 9, "strength": strength, "prompt": None}
    call |= {"prompt_embeds": embeddings, "negative_prompt_embeds": embeddings, "num_inference_steps": 4}
    call.pop("num_frames")
    for _ in range(2):
        found = dense_forwards(pipe, lambda: pipe(**call))
        assert by_step(found, steps) == [True] + [False] * (steps - 1)


# Whose scheduler it is


def test_the_pipeline_that_runs_is_found_whichever_was_patched():
    """One made by from_pipe, a second one with a scheduler of its own, and one whose transformer alone was patched."""
    first = mhla.apply_mhla(wan_pipeline(), **PLAIN | {"dense_first": 2})
    parts = first.components
    second = quiet(WanPipeline(**parts | {"scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0)}))
    other = quiet(WanPipeline.from_pipe(first))
    alone = wan_pipeline(mhla.apply_mhla(wan_pipeline().transformer, **PLAIN | {"dense_first": 2}))
    for pipe, steps in ((first, 5), (second, 4), (first, 4), (other, 6), (alone, 4)):
        found = dense_forwards(pipe, lambda pipe=pipe, steps=steps: clip(pipe, steps))
        assert by_step(found, steps) == [True, True] + [False] * (steps - 2)
    del first
    assert by_step(dense_forwards(second, lambda: clip(second)), 4) == [True, True, False, False]


class Loop:
    """A sampling loop that is not a diffusers pipeline, of a trainer or a node."""

    def __init__(self, transformer):
        self.transformer, self.scheduler = transformer, FlowMatchEulerDiscreteScheduler()

    def run(self):
        sample(self)


@torch.no_grad()
def sample(loop):
    loop.scheduler.set_timesteps(4)
    for timestep in loop.scheduler.timesteps:
        found = loop.transformer(**inputs("wan") | {"timestep": timestep[None].expand(2)}).sample
        loop.scheduler.step(found, timestep, inputs("wan")["hidden_states"])


@pytest.mark.parametrize("kind", [Loop, lambda model: SimpleNamespace(transformer=model, scheduler=None)])
def test_a_loop_of_ones_own(kind):
    """With any object that has a transformer and a scheduler, which may be set later."""
    loop = kind(FAMILIES["wan"].build())
    loop.scheduler = FlowMatchEulerDiscreteScheduler()
    assert mhla.apply_mhla(loop, **PLAIN | {"dense_first": 2}) is loop
    for _ in range(2):
        assert dense_forwards(loop, lambda: sample(loop)) == [True, True, False, False]
    mhla.remove_mhla(loop)
    assert not mhla.is_patched(loop.transformer)


def test_a_loop_in_a_method_whose_own_the_transformer_is():
    """While another pipeline was patched."""
    pipe = mhla.apply_mhla(wan_pipeline(), **PLAIN | {"dense_first": 1})
    assert dense_forwards(pipe, Loop(pipe.transformer).run) == [True] + [False] * 3


@pytest.mark.parametrize("settings", [{}, {"dense_first": 2}], ids=["default", "asked for"])
def test_where_no_step_can_be_known_one_warning_says_so(settings, caplog):
    model = mhla.apply_mhla(FAMILIES["wan"].build(), **settings)
    for _ in range(2):
        output(model, inputs("wan"))
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "WanTransformer3DModel is unknown" in said and "dense_every=10" in said
    assert all(f"{name}={value!r}" in said for name, value in settings.items())


def test_no_warning_where_steps_do_not_matter(caplog):
    """In training, within in_every_step(), where a patch has no dense steps, and where it is off."""
    model = mhla.apply_mhla(FAMILIES["wan"].build())
    model(**inputs("wan")).sample.sum().backward()
    with in_every_step():
        output(model, inputs("wan"))
    with mhla.mhla_disabled(model):
        output(model, inputs("wan"))
    output(mhla.change_mhla(model, **NOTHING_DENSE), inputs("wan"))
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]


class OnDevice(torch.Tensor):
    """A tensor whose values the host does not read: what would wait for a device raises."""

    READS = frozenset(
        [torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.tolist]
        + [torch.Tensor.__index__, torch.Tensor.cpu, torch.Tensor.numpy, torch.equal, torch.Tensor.nonzero]
    )  # fmt: skip

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in cls.READS:
            raise AssertionError(f"{func} reads the device")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "settings", [{"dense_first": 1}, {"density": 0.2}, {"blocks": (2, 2, 3), "dense_first": 1}], ids=str
)
def test_no_forward_waits_for_the_device(settings):
    """With residuals, dense steps and none, also of MHLA."""
    loop = Loop(FAMILIES["wan"].build())
    mhla.apply_mhla(loop, **settings if "blocks" in settings else SPARSE | settings)
    loop.scheduler.set_timesteps(20)
    for name in ("timesteps", "sigmas"):
        setattr(loop.scheduler, name, getattr(loop.scheduler, name).as_subclass(OnDevice))
    loop.transformer.condition_embedder.register_forward_pre_hook(  # from where on it is the model's own
        lambda _, args: tuple(x.as_subclass(torch.Tensor) if isinstance(x, torch.Tensor) else x for x in args)
    )
    with torch.no_grad():
        for loop.scheduler._step_index in range(6):
            timestep = loop.scheduler.timesteps[loop.scheduler._step_index][None].expand(2)
            loop.transformer(**inputs("wan") | {"timestep": timestep}, return_dict=False)
    assert find_patched(loop)["transformer"].latest_grid


# What sampling is


def test_previews_in_train_mode_are_the_clips_of_eval():
    """Dense steps follow no_grad, not transformer.training; a validation loss says in_every_step()."""
    pipe = mhla.apply_mhla(wan_pipeline(), **SPARSE | {"dense_first": 1})
    expected = clip(pipe)
    pipe.transformer.train()
    assert torch.equal(clip(pipe), expected)
    with in_every_step():
        assert_changed(clip(pipe), expected)
    pipe.transformer(**inputs("wan"))
    assert str(find_patched(pipe)["transformer"].tally) == "sparse in 4 of 4 attentions"
