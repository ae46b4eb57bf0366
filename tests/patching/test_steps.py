"""softmax_steps: in the first steps of a pipeline's call a patched model attends as before the patch.

Most of these tests see by the patched layers whether they rest, which they do with carry=False alone (test_carry.py).
"""

import copy
import logging
import pickle
from collections import Counter

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanVideoToVideoPipeline
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch._dynamo.testing import CompileCounterWithBackend

import mhla_diffusers as mhla
from mhla_diffusers.config import Step
from mhla_diffusers.patching import call_context, layer_sensitivity

from ..families.cases import case_of
from ..models import FAMILIES, assert_changed, inputs, output, patched
from ..pipelines import PIPELINES, quiet, sana_pipeline, wan_pipeline
from ..refusals import refused
from .shared import assert_equal_up_to_order, own_form


def steps_with_mhla(pipe, run):
    """Number of MHLA layers that run at each timestep of the transformer."""
    counts, timestep = Counter(), []
    transformers = [part for part in pipe.components.values() if hasattr(part, "config") and mhla.is_patched(part)]
    handles = [
        part.register_forward_pre_hook(
            lambda _, args, kwargs: timestep.append(float(kwargs["timestep"].float().max())), with_kwargs=True
        )
        for part in transformers
    ]
    handles += [
        layer.register_forward_pre_hook(lambda *_: counts.update([timestep[-1]]))
        for layer in mhla.mhla_layers(pipe).values()
    ]
    run()
    for handle in handles:
        handle.remove()
    return [counts[one] for one in dict.fromkeys(timestep)]


def forwards_at_rest(pipe, run):
    """Whether the patch was disabled, for every forward of a transformer in order."""
    ran = []
    layer = next(iter(mhla.mhla_layers(pipe).values()))
    handles = [
        pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(True)),
        layer.register_forward_pre_hook(lambda *_: ran.__setitem__(-1, False)),
    ]
    run()
    for handle in handles:
        handle.remove()
    return ran


def short(name):
    return PIPELINES[name].call | {"num_inference_steps": 4}


def seeded():
    return torch.Generator().manual_seed(3)


def run_of(name, pipe):
    return lambda: pipe(**short(name), generator=seeded())


def pictures(name, pipe):
    result = run_of(name, pipe)()
    return result.frames if hasattr(result, "frames") else result.images


@pytest.mark.parametrize("name", PIPELINES)
def test_the_patch_rests_in_the_first_steps_of_every_pipeline(name):
    """DiT's DDIM counts no steps, SANA's solver does, Wan tells diffusers' cache context; of Wan 2.2 both models."""
    pipe = PIPELINES[name].build()
    before = pictures(name, pipe)
    mhla.apply_mhla(pipe, blocks=PIPELINES[name].blocks, carry=False)
    found = {}

    def layers_that_run(steps):
        return steps_with_mhla(pipe, lambda: found.update({steps: pictures(name, pipe)}))

    every = layers_that_run(0)
    assert len(every) == 4 and all(every)
    for steps, resting in ((1, 1), (0.5, 2), (0.51, 3), (3, 3), (1.0, 4)):
        mhla.change_mhla(pipe, softmax_steps=steps)
        assert layers_that_run(steps) == [0] * resting + every[resting:]
    assert torch.equal(found[1.0], before)
    assert_changed(found[3], before)
    assert_changed(found[1], found[0])
    assert torch.equal(found[0.51], found[3])


def in_bfloat16(name):
    """A pipeline that tells timesteps rounded to the type of its latents, with its case."""
    case = case_of(name)
    pipe = case.pipeline()
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.bfloat16()
    mhla.apply_mhla(pipe, blocks=case.blocks, carry=False)
    return pipe, case


@pytest.mark.parametrize("name", ["flux", "hunyuan_video"])
def test_timesteps_that_are_told_in_bfloat16(name):
    """These pipelines round them to the type of their latents, and scale them then."""
    pipe, case = in_bfloat16(name)
    for steps in (1, 7, 0.75):
        mhla.change_mhla(pipe, softmax_steps=steps)
        resting = steps if isinstance(steps, int) else 15
        counts = steps_with_mhla(pipe, lambda: pipe(**case.call | {"num_inference_steps": 20}, generator=seeded()))
        assert [not count for count in counts] == [True] * resting + [False] * (20 - resting)


def test_steps_that_bfloat16_rounds_to_one_timestep():
    """As large pictures shift them: dozens of steps are then told as 1000, and the scheduler counts them."""
    pipe, case = in_bfloat16("flux")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=100.0)
    mhla.change_mhla(pipe, softmax_steps=3)
    for _ in range(2):  # another call begins anew
        found = forwards_at_rest(pipe, lambda: pipe(**case.call | {"num_inference_steps": 30}, generator=seeded()))
        assert found == [True] * 3 + [False] * 27


@given(st.integers(1, 200), st.floats(0, 1))
def test_a_fraction_is_rounded_up(count, fraction):
    steps = [Step(index, count) for index in range(count)]
    resting = sum(map(mhla.SparseConfig(softmax_steps=fraction, refresh=None).is_dense, steps))
    assert fraction * count - 1e-6 <= resting < fraction * count + 1
    assert [step for step in steps if mhla.SparseConfig(softmax_steps=1, refresh=None).is_dense(step)] == steps[:1]


@pytest.mark.parametrize("steps", [-1, 1.5, -0.1, True, "3", float("nan")])
def test_other_values_are_refused(steps):
    with refused(f"softmax_steps={steps!r}"):
        mhla.MHLAConfig(blocks=(2, 2), softmax_steps=steps)


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
ONE, TWO = [True] * 2 + [False] * 2, [True] * 4 + [False] * 3
OF_FLOW = [
    ("DPMSolverMultistepScheduler", ONE, FLOW),
    ("FlowMatchEulerDiscreteScheduler", ONE, {}),
    ("FlowMatchHeunDiscreteScheduler", TWO, {}),
    ("UniPCMultistepScheduler", ONE, FLOW),
]
SCHEDULERS = {
    "dit": [
        ("DDIMScheduler", ONE, {}),
        ("DDPMScheduler", ONE, {}),
        ("DEISMultistepScheduler", ONE, {}),
        ("DPMSolverMultistepScheduler", ONE, {}),
        ("DPMSolverSinglestepScheduler", ONE, {}),
        ("EulerAncestralDiscreteScheduler", ONE, {}),
        ("EulerDiscreteScheduler", ONE, {}),
        ("HeunDiscreteScheduler", TWO, {}),
        ("KDPM2AncestralDiscreteScheduler", TWO, {}),
        ("KDPM2DiscreteScheduler", TWO, {}),
        ("LMSDiscreteScheduler", ONE, {}),
        # Runge and Kutta's method in the first three steps, or one step that is corrected
        ("PNDMScheduler", [True] * 8 + [False] * 5, {"skip_prk_steps": False}),
        ("PNDMScheduler", [True] * 3 + [False] * 2, {"skip_prk_steps": True}),
        ("UniPCMultistepScheduler", ONE, {}),
    ],
    "sana": OF_FLOW,
    "wan": OF_FLOW,
    "flux": [("FlowMatchEulerDiscreteScheduler", ONE, {})],
    "pixart": [("DPMSolverMultistepScheduler", ONE, {}), ("HeunDiscreteScheduler", TWO, {})],
    "cogvideox": [("CogVideoXDDIMScheduler", ONE, {}), ("CogVideoXDPMScheduler", ONE, {})],
}
"""Pipeline → its schedulers, whether the patch rests in every forward of four steps of which two rest, and settings."""


def pipeline_of(name):
    """Without classifier-free guidance in a forward of its own, with its blocks and call."""
    if name in PIPELINES:
        unguided = {"guidance_scale": 1.0} if name == "wan" else {}
        return PIPELINES[name].build(), PIPELINES[name].blocks, short(name) | unguided
    case = case_of(name)
    return case.pipeline(), case.blocks, {**case.call, "num_inference_steps": 4}


@pytest.mark.parametrize(
    ("name", "scheduler", "expected", "settings"),
    [(name, *row) for name, rows in SCHEDULERS.items() for row in rows],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_is_one_of_num_inference_steps(name, scheduler, expected, settings):
    """Two of four rest, whatever number of forwards the scheduler's solver makes in a step."""
    pipe, blocks, call = pipeline_of(name)
    own = {} if "Flow" in scheduler else pipe.scheduler.config
    mhla.apply_mhla(pipe, blocks=blocks, softmax_steps=2, carry=False)
    pipe.scheduler = getattr(diffusers, scheduler).from_config(own, **settings)  # after patching
    for steps in (2, 2, 0.5):  # another call begins anew
        if steps == 0.5:
            mhla.change_mhla(pipe, softmax_steps=steps)
        assert forwards_at_rest(pipe, lambda: pipe(**call, generator=seeded())) == expected


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 4), (0.5, 2)])
def test_a_call_that_begins_in_the_middle_of_the_schedule(strength, steps):
    """Its first step is the first that it comes to, in this call and the next."""
    components = {name: part for name, part in wan_pipeline().components.items() if name != "transformer_2"}
    pipe = quiet(WanVideoToVideoPipeline(**components))
    mhla.apply_mhla(pipe, blocks=(3, 2, 1), softmax_steps=1, carry=False)
    embeddings = torch.zeros(1, 8, pipe.transformer.config.text_dim)  # its prompts need ftfy
    call = short("wan") | {"video": [Image.new("RGB", (48, 32))] * 9, "strength": strength, "prompt": None}
    call |= {"prompt_embeds": embeddings, "negative_prompt_embeds": embeddings}
    call.pop("num_frames")
    for _ in range(2):
        counts = steps_with_mhla(pipe, lambda: pipe(**call, generator=seeded()))
        assert counts == [0] + [8] * (steps - 1)


def test_timesteps_that_are_scaled_on_their_way():
    """As SANA-Sprint's are."""
    pipe = sana_pipeline()
    pipe.transformer.register_to_config(timestep_scale=0.001)
    mhla.apply_mhla(pipe, blocks=(4, 2), softmax_steps=1, carry=False)
    assert steps_with_mhla(pipe, run_of("sana", pipe)) == [0, 3, 3, 3]


def test_a_transformer_alone(caplog):
    """Wan's pipeline tells the step to the transformer; of DiT nothing does, which is said once."""
    pipe = wan_pipeline()
    mhla.apply_mhla(pipe.transformer, blocks=(3, 2, 1), softmax_steps=2, carry=False)
    assert steps_with_mhla(pipe, run_of("wan", pipe))[:3] == [0, 0, 8]
    pipe = PIPELINES["dit"].build()
    mhla.apply_mhla(pipe.transformer, blocks=(4, 2), softmax_steps=2, carry=False)
    with caplog.at_level(logging.WARNING, "mhla_diffusers"):
        assert all(steps_with_mhla(pipe, run_of("dit", pipe)))
    (warning,) = [record.message for record in caplog.records if "softmax_steps" in record.message]
    assert "of DiTTransformer2DModel is unknown, so MHLA runs in it despite softmax_steps=2" in warning
    mhla.change_mhla(pipe, backend="eager")
    assert steps_with_mhla(pipe, run_of("dit", pipe))[:2] == [0, 0], "the pipeline is known now"


def test_all_steps_need_no_telling(caplog):
    """A transformer alone, which no pipeline is known to call."""
    model = patched("sana", softmax_steps=1.0)
    assert torch.equal(output(model, inputs("sana")), output(FAMILIES["sana"].build(), inputs("sana")))
    assert not caplog.records
    mhla.change_mhla(model, softmax_steps=1)
    assert_changed(output(model, inputs("sana")), output(FAMILIES["sana"].build(), inputs("sana")))


def test_a_loop_of_ones_own():
    model = patched("wan", softmax_steps=0.5)
    arguments = inputs("wan")
    with mhla.mhla_disabled(model):
        before = output(model, arguments)
    with model.cache_context("cond", step_index=0, num_inference_steps=4):
        assert torch.equal(output(model, arguments), before)
        with call_context(in_every_step=True):
            assert_changed(output(model, arguments), before)
    with model.cache_context("cond", step_index=2, num_inference_steps=4):
        assert_changed(output(model, arguments), before)
    assert_changed(output(model, arguments), before)


def test_training_and_measuring_are_no_steps(caplog):
    """Whatever the pipeline did last: its scheduler still holds timesteps that a forward could meet by chance."""
    pipe = PIPELINES["dit"].build()
    run = run_of("dit", pipe)
    mhla.apply_mhla(pipe, density=0.2, far="means")
    expected = layer_sensitivity(pipe, run)
    mhla.change_mhla(pipe, softmax_steps=1.0)
    run()
    assert layer_sensitivity(pipe, run) == expected
    arguments = inputs("dit") | {"timestep": pipe.scheduler.timesteps[:2]}
    pipe.transformer.train()
    found = output(pipe.transformer, arguments)
    pipe.transformer.eval()
    assert_changed(found, output(pipe.transformer, arguments))
    assert not caplog.records


def test_copies_belong_to_no_pipeline(caplog):
    """A copied or unpickled transformer may be called by any; Wan's tells the step to whatever it calls."""
    pipe = wan_pipeline()
    mhla.apply_mhla(pipe, density=0.2, softmax_steps=2, carry=False)
    for other in (copy.deepcopy(pipe.transformer), pickle.loads(pickle.dumps(pipe.transformer))):  # noqa: S301
        elsewhere = wan_pipeline(other)
        assert steps_with_mhla(elsewhere, run_of("wan", elsewhere))[:3] == [0, 0, 8]
    assert not [record for record in caplog.records if "gains nothing" not in record.getMessage()]


def test_diffusers_own_form_is_refused():
    """It drops the processors of before."""
    model = own_form("wan", blocks=(2, 2, 3), softmax_steps=1)
    with refused("softmax_steps=1", "set_attn_processor"):
        output(model, inputs("wan"))
    model = own_form("wan", blocks=(2, 2, 3))
    output(model, inputs("wan"))
    with refused("softmax_steps=1", "apply_mhla()"):
        mhla.change_mhla(model, softmax_steps=1)


def test_the_backend_that_is_set_on_the_patched_model_holds():
    model = patched("wan", softmax_steps=1)
    model.set_attention_backend("_native_math")
    with model.cache_context("cond", step_index=0, num_inference_steps=2):
        output(model, inputs("wan"))
    layers = mhla.mhla_layers(model).values()
    assert {layer.original_processor._attention_backend for layer in layers} == {"_native_math"}


def test_gradient_checkpointing_recomputes_what_ran():
    """Gradients of a step in which the patch rests, after another in which it runs."""
    gradients = []
    for checkpointing in (False, True):
        model = patched("wan", softmax_steps=1, carry=False)
        if checkpointing:
            model.enable_gradient_checkpointing()
        latents = inputs("wan")["hidden_states"].requires_grad_(True)
        total = 0
        for index in range(2):
            with model.cache_context("cond", step_index=index, num_inference_steps=2):
                total = total + (index + 1) * model(**(inputs("wan") | {"hidden_states": latents})).sample.sum()
        total.backward()
        gradients.append(latents.grad)
    assert_equal_up_to_order(gradients[1], gradients[0])


@pytest.fixture
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("whole", [True, False], ids=["whole transformer", "repeated blocks"])
def test_compiled_it_takes_two_graphs_whatever_the_number_of_steps(whole):
    model, counter = patched("wan", softmax_steps=2, carry=False), CompileCounterWithBackend("eager")
    del model.blocks[1:]
    arguments = inputs("wan")
    with mhla.mhla_disabled(model):
        before = output(model, arguments)
    with call_context(in_every_step=True):
        after = output(model, arguments)
    if whole:
        model.compile(backend=counter, fullgraph=True)
    else:
        model.compile_repeated_blocks(backend=counter, fullgraph=True)
    counts = []
    for index in range(6):
        with model.cache_context("cond", step_index=index, num_inference_steps=6):
            assert_equal_up_to_order(output(model, arguments), before if index < 2 else after)
        counts.append(counter.frame_count)
    assert counts[1] == counts[0] and counts[2] > counts[1] and len(set(counts[2:])) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_graphs")
def test_compiled_where_only_the_scheduler_tells():
    """The graph breaks where the timestep is read; what comes out is right."""
    expected = None
    for compile in (lambda _: None, lambda one: one.compile(backend="eager"), compile_blocks):
        torch._dynamo.reset()
        pipe = PIPELINES["dit"].build()
        del pipe.transformer.transformer_blocks[1:]
        mhla.apply_mhla(pipe, blocks=(4, 2), softmax_steps=2, carry=False)
        compile(pipe.transformer)
        found = pictures("dit", pipe)
        expected = found if expected is None else expected
        assert_equal_up_to_order(found, expected)


@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("name", ["sana", "dit"])
def test_one_graph_of_the_whole_transformer_is_refused_by_name(name):
    pipe = PIPELINES[name].build()
    del pipe.transformer.transformer_blocks[1:]
    mhla.apply_mhla(pipe, blocks=(4, 2), softmax_steps=2)
    pipe.transformer.compile(backend="eager", fullgraph=True)
    with refused("softmax_steps", "block.compile", error=torch._dynamo.exc.Unsupported):
        pictures(name, pipe)


def compile_blocks(transformer):
    for block in transformer.transformer_blocks:
        block.compile(backend="eager", fullgraph=True)
