"""What a dense step shows is added at the steps that follow, faded, and never where it does not belong."""

import copy
import gc
import threading
import warnings

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from hypothesis import given
from hypothesis import strategies as st
from mhla_diffusers.patching.carry import FIRST_FADING, Difference
from torch._dynamo.testing import CompileCounterWithBackend

import mhla_diffusers as mhla
from mhla_diffusers.config import MHLAConfig, SparseConfig, Step
from mhla_diffusers.patching import carry, find_patched

from ..attention.problems import relative_error
from ..models import bytes_alive
from ..pipelines import dit_pipeline, wan22_pipeline, wan_pipeline
from ..refusals import refused

DENSE = {"softmax_steps": 1, "refresh": 3}
"""Dense steps 0, 3 and 6 of eight."""
SPARSE = {"density": 0.1, "block_size": 4, "far": "means"}
CALLS = {
    "wan": {"height": 32, "width": 32, "num_frames": 9, "guidance_scale": 3.0, "num_inference_steps": 8},
    "dit": {"num_inference_steps": 8, "guidance_scale": 3.0},
}


def make(name):
    return wan_pipeline() if name == "wan" else dit_pipeline()


def sample(pipe, prompt="a cat", seed=0, **call):
    name = "dit" if type(pipe).__name__.startswith("DiT") else "wan"
    given = {"class_labels": [len(prompt) % 5]} if name == "dit" else {"prompt": prompt}
    generator = torch.Generator().manual_seed(seed)
    output = pipe(**given, **({"output_type": "np"} | CALLS[name] | call), generator=generator)
    return torch.as_tensor(output.images if name == "dit" else output.frames)


class Recorder:
    """What every self-attention returned in every forward of a run, and which forwards were dense."""

    def __init__(self, pipe):
        self.outputs = []
        transformer = pipe.transformer
        self.hooks = [transformer.register_forward_pre_hook(lambda *_: self.outputs.append([]))]
        for attn in find_patched(transformer)["transformer"].attentions.values():
            self.hooks.append(attn.register_forward_hook(self.note))

    def note(self, attn, args, output):
        self.outputs[-1].append(output.detach().clone() if isinstance(output, torch.Tensor) else output)

    def end(self):
        for hook in self.hooks:
            hook.remove()
        return self.outputs


@st.composite
def dense_settings(draw):
    count = draw(st.integers(1, 60))
    steps = st.integers(0, 8) | st.floats(0, 1)
    return count, draw(steps), draw(steps), draw(st.none() | st.integers(2, 70) | st.floats(0.01, 1))


@given(dense_settings())
def test_which_steps_are_dense(case):
    """By hand: the first, the last, and every so many from the last of the first ones on."""
    count, first, last, refresh = case
    config = SparseConfig(softmax_steps=first, softmax_last=last, refresh=refresh)
    whole = {steps: steps if isinstance(steps, int) else -int(-(steps * count - 1e-9) // 1) for steps in (first, last)}
    dense = set(range(whole[first])) | set(range(count - whole[last], count))
    if refresh is not None:
        every = refresh if isinstance(refresh, int) else max(2, round(refresh * count))
        dense |= set(range(max(whole[first], 1) - 1, count, every))
    found = {index for index in range(count) if config.is_dense(Step(index, count))}
    assert found == dense & set(range(count))
    shows = {index for index in range(count) if config.shows(Step(index, count))}
    # every run of sparse steps finds the dense step before it shown, and that the one before that
    for index in set(range(1, count)) - found:
        if index - 1 in found:
            assert index - 1 in shows and (index - 2 not in found or index - 2 in shows)
    assert shows <= found and not config.replace(carry=False).shows(Step(0, count))


@pytest.mark.parametrize("kept", ["int8", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_fades_as_measured(kept, dtype, monkeypatch):
    """Against float64: the second difference is half of the first plus something new, over four steps."""
    make = torch.Generator().manual_seed(0)
    base, first, other = (torch.randn(2, 30, 16, generator=make, dtype=torch.float64) for _ in range(3))
    second = 0.5 * first + 0.1 * other
    monkeypatch.setattr(carry, "_MOST_AT_A_TIME", 2 * 16 * 7)  # the last tokens are fewer
    shown = Difference.shown((base + first).to(dtype), base.to(dtype), 3, None, kept)
    assert shown.fading.flatten().tolist() == pytest.approx([FIRST_FADING] * 2) and shown.weight.min() == 1
    again = Difference.shown((base + second).to(dtype), base.to(dtype), 7, shown, kept)
    left = (first * second).sum((1, 2), True) / first.square().sum((1, 2), True)  # of every sample
    # half precision rounds each output once, int8 each number to 1/254 of the largest of its token
    error = (0.01 if kept == "int8" else 0.004) + (0.004 if dtype == torch.bfloat16 else 0)
    assert (again.fading / left**0.25 - 1).abs().max() < error
    output = torch.randn(2, 30, 16, generator=make, dtype=torch.float64)
    monkeypatch.setattr(carry, "_MOST_AT_A_TIME", 2**30)
    at_once = Difference.shown((base + second).to(dtype), base.to(dtype), 7, shown, kept)
    assert torch.equal(at_once.values, again.values) and torch.allclose(at_once.fading, again.fading, rtol=1e-6)
    found = again.add_to(output.to(dtype), again.values, 9)
    expected = output + left**0.5 * second
    assert found.dtype == dtype
    assert float((found - expected).norm() / expected.norm()) < 2 * error


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0, -1.0])
def test_what_has_not_lasted_is_not_added(share):
    """The new difference holds a share of the old one, and the rest is at right angles to it."""
    make = torch.Generator().manual_seed(1)
    old, other = torch.linalg.qr(torch.randn(4096, 2, generator=make, dtype=torch.float64)).Q.T.view(2, 1, 64, 64)
    new = share * old + (1 - share**2) ** 0.5 * other
    zero = torch.zeros(1, 64, 64)
    shown = Difference.shown(old.float() * 40, zero, 0, None, "bfloat16")
    again = Difference.shown(new.float() * 40, zero, 5, shown, "bfloat16")
    # |share| of the norm is explained: what is left is √(1 - share²), clearly below 1 from 0.44 on
    assert float(again.weight) == (1 if share > 0.5 else 0)
    output = torch.ones(1, 64, 64)
    assert torch.equal(again.add_to(output.clone(), again.values, 6), output) == (share <= 0.5)


@pytest.mark.parametrize("name", CALLS)
def test_dense_steps_are_the_unpatched_models_and_the_others_carry(name):
    """Bit for bit on equal inputs: before the second step only dense attention has run."""
    pipe = make(name)
    recorded = []
    mhla.apply_mhla(pipe, **SPARSE)
    for settings in ({"softmax_steps": 1.0, "carry": False}, {"softmax_steps": 0}, DENSE, {"carry": True}):
        mhla.change_mhla(pipe, **settings)
        record = Recorder(pipe)
        sample(pipe)
        recorded.append(record.end())
    dense, sparse, dropped, carried = recorded
    halves = len(dense) // 8
    for half in range(halves):
        assert all(map(torch.equal, carried[half], dense[half])) and all(map(torch.equal, dropped[half], dense[half]))
        # of the first attention, whose input is the same in the first step of all, and in the second step of the last
        lost = dense[half][0] - sparse[half][0]
        added = carried[halves + half][0] - dropped[halves + half][0]
        assert relative_error(added, FIRST_FADING * lost) < 0.01  # int8


@pytest.mark.parametrize(("name", "config"), [("wan", SparseConfig(**SPARSE)), ("dit", MHLAConfig(blocks=(2, 2)))])
def test_every_call_begins_afresh(name, config):
    """After another prompt, other sizes, an interrupted call, a failed forward and a disabled patch."""
    pipe = mhla.apply_mhla(make(name), config.replace(**DENSE))
    expected = sample(pipe)
    other = sample(pipe, "a dog surfing", seed=1)
    assert not torch.equal(expected, other) and torch.equal(sample(pipe), expected)
    if name == "wan":
        sample(pipe, height=32, width=48)
        assert torch.equal(sample(pipe), expected)
    for forward in (1, 2, 5):
        left = [forward]

        def fail(*_, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("stopped")

        hook = pipe.transformer.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="stopped"):
            sample(pipe, "a dog surfing", seed=1)
        hook.remove()
        assert torch.equal(sample(pipe), expected), forward
    first = next(iter(find_patched(pipe)["transformer"].attentions.values()))
    hook = first.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stopped"):
        sample(pipe, "a dog surfing", seed=1)
    hook.remove()
    assert torch.equal(sample(pipe), expected)
    with mhla.mhla_disabled(pipe):
        unpatched = sample(pipe)
    assert not torch.equal(unpatched, expected) and torch.equal(sample(pipe), expected)
    assert not any(run._halves and any(h.differences for h in run._halves.values()) for run in runs_of(pipe))


def runs_of(pipe):
    return [run for patched in find_patched(pipe).values() for run in patched.runs.values()]


def test_a_patch_disabled_within_a_loop_takes_nothing_and_leaves_everything():
    """A callback looks at the unpatched model between two steps."""
    pipe = mhla.apply_mhla(make("wan"), **SPARSE, **DENSE)
    expected = sample(pipe)
    seen = []

    def look(pipe, index, timestep, tensors):
        with mhla.mhla_disabled(pipe), pipe.transformer.cache_context("cond", step_index=index, num_inference_steps=8):
            arguments = {"hidden_states": tensors["latents"], "encoder_hidden_states": tensors["prompt_embeds"]}
            seen.append(pipe.transformer(**arguments, timestep=timestep[None], return_dict=False)[0])
        return {}

    again = sample(pipe, callback_on_step_end=look, callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"])
    assert len(seen) == 8 and torch.equal(again, expected)


def test_two_pipelines_share_a_transformer():
    first = mhla.apply_mhla(make("wan"), **SPARSE, **DENSE)
    second = type(first)(**first.components | {"scheduler": copy.deepcopy(first.scheduler)})
    expected = sample(first), sample(first, "a dog", seed=1)
    order = []

    def within(pipe, index, timestep, tensors):
        if index == 3 and not order:
            order.append(sample(second, "a dog", seed=1))
        return {}

    assert torch.equal(sample(second, "a dog", seed=1), expected[1])
    sample(first, callback_on_step_end=within)
    assert torch.equal(order[0], expected[1])
    assert torch.equal(sample(first), expected[0])


def test_threads_keep_apart():
    pipes = [make("wan"), None]
    mhla.apply_mhla(pipes[0], **SPARSE, **DENSE)
    pipes[1] = type(pipes[0])(**pipes[0].components | {"scheduler": copy.deepcopy(pipes[0].scheduler)})
    latents = {"output_type": "latent"}  # Wan's autoencoder holds what it has seen of a video, for all threads
    expected = [sample(pipes[0], prompt, seed, **latents) for seed, prompt in enumerate(("a cat", "a dog"))]
    found, barrier = {}, threading.Barrier(2)

    def run(seed, prompt):
        def wait(*_):
            barrier.wait(60)
            return {}

        found[seed] = sample(pipes[seed], prompt, seed, **latents, callback_on_step_end=wait)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(("a cat", "a dog"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], expected[seed]) for seed in (0, 1))


def test_both_transformers_of_wan_2_2_carry():
    pipe = mhla.apply_mhla(wan22_pipeline(), **SPARSE, **DENSE)
    expected = sample(pipe)
    assert torch.equal(sample(pipe), expected)
    mhla.change_mhla(pipe, carry=False)
    assert not torch.equal(sample(pipe), expected)


@pytest.mark.parametrize("name", CALLS)
def test_removal_leaves_nothing(name):
    pipe = make(name)
    expected = sample(pipe)
    mhla.apply_mhla(pipe, **SPARSE, **DENSE)
    stopped = {"callback_on_step_end": lambda pipe, index, *_: setattr(pipe, "_interrupt", index == 3) or {}}
    before = None
    for _ in range(3):
        sample(pipe, **(stopped if name == "wan" else {}))
        gc.collect()
        alive = bytes_alive()
        assert before is None or alive <= before
        before = alive
    mhla.remove_mhla(pipe)
    assert torch.equal(sample(pipe), expected)
    assert "mhla" not in str(vars(pipe.transformer).keys())


def test_a_finished_call_holds_no_memory():
    pipe = mhla.apply_mhla(make("wan"), **SPARSE, **DENSE)
    mhla.change_mhla(pipe, carry=False)
    sample(pipe)
    gc.collect()
    before = bytes_alive()
    mhla.change_mhla(pipe, carry=True)
    sample(pipe)
    gc.collect()
    assert bytes_alive() <= before


def test_guidance_that_ends_half_way_takes_nothing_of_the_other_half():
    """Forwards without names, the half without a caption first, which is left out from the third step on."""
    pipe = mhla.apply_mhla(make("wan"), **SPARSE, **DENSE)
    transformer = pipe.transformer
    make_noise = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, 3, 4, 4, generator=make_noise)
    with_caption, without = (torch.randn(1, 8, transformer.config.text_dim, generator=make_noise) for _ in range(2))

    @torch.no_grad()
    def run(halves):
        pipe.scheduler.set_timesteps(8)
        found = []
        for index, timestep in enumerate(pipe.scheduler.timesteps):
            for conditions in halves(index):
                arguments = {"hidden_states": latents + index / 50, "encoder_hidden_states": conditions}
                output = transformer(**arguments, timestep=timestep[None], return_dict=False)[0]
                if conditions is with_caption:
                    found.append(output)
        return found

    alone = run(lambda index: [with_caption])
    mixed = run(lambda index: [without, with_caption] if index < 2 else [with_caption])
    mhla.change_mhla(pipe, carry=False)
    dropped = run(lambda index: [with_caption])
    # each half carries its own difference while guidance lasts, then none until the next dense step
    assert all(torch.equal(mixed[index], alone[index]) for index in (0, 1))
    assert torch.equal(mixed[2], dropped[2]) and not torch.equal(mixed[2], alone[2])


def test_forwards_that_a_step_cache_skips_are_counted_by_steps():
    """Blocks that a cache leaves out at a dense step keep what was shown before, which goes on fading by steps."""
    pipe = mhla.apply_mhla(make("wan"), **SPARSE, softmax_steps=1)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    expected = sample(pipe)
    assert torch.equal(sample(pipe), expected) and expected.isfinite().all()
    pipe.transformer.disable_cache()
    assert not torch.equal(sample(pipe), expected)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_compiled_with_one_graph_per_kind_of_step(what):
    """Sparse steps, and dense ones that show: two graphs, whatever the step, and the layers share them."""
    pipe = make("wan")
    if what == "whole":
        del pipe.transformer.blocks[1:]
    mhla.apply_mhla(pipe, **SPARSE, **DENSE)
    expected = sample(pipe)
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    if what == "blocks":
        for block in pipe.transformer.blocks:
            block.compile(backend=counter, fullgraph=True)
    else:
        pipe.transformer.compile(backend=counter, fullgraph=True)
    found = sample(pipe)
    frames = counter.frame_count
    assert torch.allclose(found, expected, atol=1e-6)  # a compiled graph differs by rounding without carry, too
    assert frames == 2
    assert torch.equal(sample(pipe, seed=1), sample(pipe, seed=1)) and counter.frame_count == frames
    torch._dynamo.reset()


def test_gradients_are_refused():
    pipe = mhla.apply_mhla(make("wan"), **SPARSE, **DENSE)
    transformer = pipe.transformer
    pipe.scheduler.set_timesteps(8)
    latents = torch.randn(1, 16, 3, 4, 4, requires_grad=True)
    conditions = torch.randn(1, 8, transformer.config.text_dim)
    call = {"hidden_states": latents, "encoder_hidden_states": conditions, "timestep": pipe.scheduler.timesteps[:1]}
    with refused("carry=False"):
        transformer(**call)
    mhla.change_mhla(pipe, carry=False)
    transformer(**call).sample.sum().backward()
    assert latents.grad is not None


def test_training_takes_no_part():
    pipe = mhla.apply_mhla(make("wan"), **SPARSE, **DENSE)
    pipe.scheduler.set_timesteps(8)
    transformer = pipe.transformer.train()
    latents = torch.randn(1, 16, 3, 4, 4)
    conditions = torch.randn(1, 8, transformer.config.text_dim)
    call = {"hidden_states": latents, "encoder_hidden_states": conditions, "timestep": pipe.scheduler.timesteps[:1]}
    found = transformer(**call).sample
    mhla.change_mhla(pipe, softmax_steps=0, refresh=None)
    assert torch.equal(transformer(**call).sample, found)


def test_a_copy_carries_nothing_of_its_original():
    pipe = mhla.apply_mhla(make("wan"), **SPARSE, **DENSE)
    stopped = {"callback_on_step_end": lambda pipe, index, *_: setattr(pipe, "_interrupt", index == 3) or {}}
    sample(pipe, **stopped)
    assert runs_of(pipe)
    assert not any(patched.runs for patched in find_patched(copy.deepcopy(pipe.transformer)).values())


@pytest.mark.parametrize(
    ("settings", "offending"),
    [
        ({"refresh": 0}, "refresh=0"),
        ({"refresh": 1}, "refresh=1"),  # every step: the unpatched model
        ({"refresh": 1.5}, "refresh=1.5"),
        ({"softmax_last": -1}, "softmax_last=-1"),
        ({"softmax_last": True}, "softmax_last=True"),
        ({"carry_dtype": "fp8"}, "'fp8'...'int8'...'bfloat16'"),
        ({"carry_device": "cuda:1"}, "'cuda:1'...'model'...'cpu'"),
    ],
)
def test_settings_that_are_not_allowed(settings, offending):
    with warnings.catch_warnings(), refused(offending):
        SparseConfig(**settings)


def test_the_usual_refresh_needs_steps_enough():
    """A fifth of 20 steps and more; every setting that asks for steps asks for no more than that."""
    usual = SparseConfig()
    assert not any(usual.is_dense(Step(index, 19)) for index in range(19))
    for count in (20, 30, 50):
        found = [index for index in range(count) if usual.is_dense(Step(index, count))]
        assert found == list(range(0, count, count // 5))
    assert usual.has_dense_steps and not usual.asks_for_dense_steps
    assert not MHLAConfig(blocks=(2, 2)).has_dense_steps


def test_the_usual_refresh_of_a_pipeline():
    call = {"num_inference_steps": 20, "output_type": "latent"}
    pipe = mhla.apply_mhla(make("wan"), **SPARSE)
    found = sample(pipe, **call)
    mhla.change_mhla(pipe, refresh=4)
    assert torch.equal(sample(pipe, **call), found)
    mhla.change_mhla(pipe, refresh=None)
    assert not torch.equal(sample(pipe, **call), found)


def test_the_usual_refresh_is_silent_where_no_steps_are_known(caplog):
    """A transformer by itself, and gradients in a loop of one's own, which carrying refuses where it is asked for."""
    pipe = mhla.apply_mhla(make("wan"), **SPARSE)
    transformer = pipe.transformer
    pipe.scheduler.set_timesteps(20)
    latents = torch.randn(1, 16, 3, 4, 4, requires_grad=True)
    conditions = torch.randn(1, 8, transformer.config.text_dim)
    call = {"hidden_states": latents, "encoder_hidden_states": conditions, "timestep": pipe.scheduler.timesteps[:1]}
    transformer(**call).sample.sum().backward()
    assert latents.grad is not None
    alone = mhla.apply_mhla(copy.deepcopy(mhla.remove_mhla(pipe).transformer), **SPARSE)
    with torch.no_grad():
        alone(**call)
    assert not [record for record in caplog.records if "step" in record.getMessage()]


@pytest.mark.parametrize("carry", [True, False])
def test_a_step_cache_runs_every_block_of_a_step_that_shows_something(carry):
    """And of the first step alone where nothing is carried: its threshold is never reached."""
    pipe = mhla.apply_mhla(make("wan"), **SPARSE, **DENSE, carry=carry)
    *_, last = find_patched(pipe)["transformer"].attentions.values()
    ran = []
    pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(False))
    last.register_forward_hook(lambda *_: ran.__setitem__(-1, True))
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    sample(pipe)
    whole = (0, 3, 6) if carry else (0,)
    assert ran == [index in whole for index in range(8) for _ in ("cond", "uncond")]


def test_layers_that_are_changed_carry_their_own_differences():
    """As in a fresh patch: new layers, of other blocks, do not share what one of them shows."""
    call = {"output_type": "latent"}
    expected = sample(mhla.apply_mhla(make("wan"), blocks=(1, 2, 2), **DENSE), **call)
    pipe = mhla.apply_mhla(make("wan"), blocks=(1, 1, 2), **DENSE)
    mhla.change_mhla(pipe, blocks=(1, 2, 2))
    for layer in mhla.mhla_layers(pipe).values():
        fresh = mhla.MHLAConfig(blocks=(1, 2, 2))
        layer.mixing.data.copy_(mhla.attention.initial_mixing(fresh.blocks, fresh.mixing_init))
    assert torch.equal(sample(pipe, **call), expected)


def test_values_that_are_read_ahead_are_not_those_of_an_earlier_dense_step():
    half = carry.Half()
    forward = carry.CarriedForward(half, Step(0, 9), SparseConfig())
    half._ahead[0, 0] = torch.zeros(1), None
    forward.show(torch.ones(1, 4, 4), torch.zeros(1, 4, 4), 0, 0)
    assert not half._ahead and (0, 0) in half.differences


def test_what_ended_threads_carried_is_dropped():
    pipe = mhla.apply_mhla(dit_pipeline(), **DENSE, **SPARSE)
    runs, together = find_patched(pipe.transformer)["transformer"].runs, threading.Barrier(2)

    def stop(*_):
        raise KeyboardInterrupt

    def run(wait=None):
        with pytest.raises(KeyboardInterrupt):
            sample(pipe)
        if wait is not None:
            wait()  # so that each has a number of its own

    pipe.transformer.register_forward_hook(stop)
    threads = [threading.Thread(target=run, args=(together.wait,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 2
    run()
    assert len(runs) == 1
