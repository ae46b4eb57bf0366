"""What dense steps measure corrects the steps that follow, is freed with its call, and never goes to another one."""

import copy
import logging
import threading

import pytest
import torch
from diffusers import FirstBlockCacheConfig

import mhla_diffusers as mhla
from mhla_diffusers.patching import find_patched
from mhla_diffusers.patching.residual import FIRST_FADING, RANK, Residual

from ..models import bytes_alive, relative_change
from ..pipelines import PIPELINES, wan22_pipeline, wan_pipeline
from .shared import COPIES, SPARSE, in_threads, seen_by

DENSE = SPARSE | {"dense_first": 1, "dense_every": 3}
"""Dense steps 0, 3, 6 and 9 of eleven."""
NAMES = ["wan", "dit"]


def sample(pipe, seed=0, **call):
    """Latents of Wan, or a picture of DiT."""
    name, kind = ("dit", "np") if type(pipe).__name__.startswith("DiT") else ("wan", "latent")
    usual = PIPELINES[name].call | {"guidance_scale": 3.0, "num_inference_steps": 11, "output_type": kind}
    output = pipe(**usual | call, generator=torch.Generator().manual_seed(seed))
    return torch.as_tensor(output.images if name == "dit" else output.frames)


# What is measured


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_fades_as_measured(dtype):
    """Against float64: the second is half of the first plus something new, over four steps."""
    base, first, other = (drawn(2, 30, 16, seed=seed) for seed in range(3))
    second = 0.5 * first + 0.1 * other
    before = Residual.measured((base + first).to(dtype), base.to(dtype), 3, None)
    assert before.fading.flatten().tolist() == pytest.approx([FIRST_FADING] * 2) and before.weight.min() == 1
    found = Residual.measured((base + second).to(dtype), base.to(dtype), 7, before)
    left = (first * second).sum((1, 2), True) / first.square().sum((1, 2), True)  # of every sample
    # bfloat16 rounds each number to 1/256 of it, in both factors and in the outputs
    assert (found.fading / left**0.25 - 1).abs().max() < 0.01
    output, expected = drawn(2, 30, 16, seed=4), left**0.5 * second
    corrected = found.add_to(output.to(dtype), 9)
    assert corrected.dtype == dtype and relative_change(corrected, output + expected) < 0.01
    norms = [float(x.norm()) for x in (second, second - FIRST_FADING**4 * first, base + second)]
    assert found.error.tolist() == pytest.approx([norms[0] / norms[2], norms[1] / norms[2]], rel=0.02)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0, -1.0])
def test_what_has_not_lasted_is_not_added(share):
    """The new residual holds a share of the old one, and the rest is at right angles to it."""
    old, other = torch.linalg.qr(drawn(4096, 2, seed=1)).Q.T.view(2, 1, 64, 64)
    new, zero = share * old + (1 - share**2) ** 0.5 * other, torch.zeros(1, 64, 64)
    before = Residual.measured(old.float() * 40, zero, 0, None)
    found = Residual.measured(new.float() * 40, zero, 5, before)
    # |share| of the norm is explained: what is left is √(1 - share²), clearly below 0.9 from 0.44 on
    assert float(found.weight) == (1 if share > 0.5 else 0)
    assert torch.equal(found.add_to(torch.ones(1, 64, 64), 6), torch.ones(1, 64, 64)) == (share <= 0.5)


def test_what_is_kept_is_the_best_of_its_rank():
    """One power step comes near the error of the best approximation, if the singular values fall."""
    left, right = (torch.linalg.qr(drawn(size, 96, seed=size)).Q for size in (300, 128))
    values = 0.95 ** torch.arange(96, dtype=torch.float64)
    residual = (left * values) @ right.T
    kept = Residual.measured(residual.float()[None], torch.zeros(1, 300, 128), 0, None)
    assert kept.left.shape == (1, 300, RANK) and kept.left.dtype == kept.right.dtype == torch.bfloat16
    found = kept.left.double() @ kept.right.double()
    best = values[RANK:].norm()
    assert best <= (found - residual).norm() <= 1.2 * best
    nothing = Residual.measured(torch.ones(1, 8, 8), torch.ones(1, 8, 8), 0, None)
    assert torch.equal(nothing.add_to(torch.ones(1, 8, 8), 1), torch.ones(1, 8, 8))


# What it does


@pytest.mark.parametrize("name", NAMES)
def test_dense_steps_are_the_unpatched_models_and_the_next_ones_are_corrected(name):
    """Shown on the first attention, whose input in the second step is the same with and without correction."""
    pipe, seen = mhla.apply_mhla(PIPELINES[name].build(), **DENSE), {}
    for correct in (True, False):
        mhla.change_mhla(pipe, correct=correct)
        seen[correct] = seen_by(pipe.transformer, lambda: sample(pipe))
    corrected, dropped = seen[True][0].output, seen[False][0].output
    (handle,) = find_patched(pipe).values()
    mhla.change_mhla(pipe, dense_first=0, dense_every=0)
    sparse = seen_by(pipe.transformer, lambda: sample(pipe))[0]
    residual = sparse.exact() - sparse.output  # of the first step, which was dense
    assert torch.equal(seen[True][0].query, seen[False][0].query) and handle is not None
    assert relative_change(corrected - dropped, FIRST_FADING * residual) < 0.02  # bfloat16, and what it takes off


# Whose it is, and when it ends


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", NAMES)
def test_every_call_begins_afresh_and_leaves_nothing(name):
    """After another seed and size, a failed forward, an interrupt in a layer, and a patch that was off."""
    pipe = mhla.apply_mhla(PIPELINES[name].build(), **DENSE)
    expected, other = sample(pipe), sample(pipe, seed=1)
    if name == "wan":
        sample(pipe, width=32)
        sample(pipe, num_inference_steps=5)
    assert not torch.equal(expected, other) and torch.equal(sample(pipe), expected)
    before = bytes_alive()
    layers = list(find_patched(pipe)["transformer"].attentions.values())
    for place, forwards in ((pipe.transformer, 1), (pipe.transformer, 5), (layers[0], 4), (layers[-1], 7)):
        left = [forwards]

        def fail(*_, left=left):
            left[0] -= 1
            return stop() if left[0] < 0 else None

        hook = place.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            sample(pipe, seed=1)
        hook.remove()
        assert torch.equal(sample(pipe), expected), forwards
    with mhla.mhla_disabled(pipe):
        sample(pipe)
    assert torch.equal(sample(pipe), expected)
    assert bytes_alive() <= before


def held_in(pipe, **call):
    """Bytes of tensors alive behind every step of a call, beyond those before it and those of an uncorrected call."""
    found = {}
    for correct in (False, True):
        mhla.change_mhla(pipe, correct=correct)
        alive = []
        before = bytes_alive()
        sample(pipe, callback_on_step_end=lambda *_, alive=alive: alive.append(bytes_alive()) or {}, **call)
        found[correct] = [*alive, bytes_alive(), before]
    return [one - other for one, other in zip(found[True], found[False], strict=True)]


def test_a_running_call_holds_what_describe_says_and_a_finished_one_nothing():
    pipe = mhla.apply_mhla(wan_pipeline(), **DENSE)
    layers = mhla.describe(pipe, height=32, width=48, num_frames=9)
    told = 2 * sum(layer.residual_bytes for layer in layers)  # both branches of the guidance
    *running, last, finished, _ = held_in(pipe)
    small = 2 * len(layers) * 64  # fading, weight and error of each
    assert all(told <= held <= told + small for held in running), (told, running)
    assert finished <= small and last <= small
    described = str(mhla.describe(pipe, height=32, width=48, num_frames=9))
    assert "residuals of these take" in described and "error of an attention at the latest dense step" in described


def test_the_first_expert_of_wan_2_2_keeps_nothing_behind_its_boundary():
    """Steps 0 to 4 are those of the first transformer."""
    pipe = mhla.apply_mhla(wan22_pipeline(), **DENSE)
    expected = sample(pipe)
    assert torch.equal(sample(pipe), expected)
    held = held_in(pipe)
    assert max(held[:-3]) <= 1.1 * held[0] and held[-2] <= 64 * 16
    assert not torch.equal(sample(mhla.change_mhla(pipe, correct=False)), expected)


def test_guidance_that_ends_takes_its_residuals_with_it():
    """And the other branch goes on with its own."""
    pipe, held, found = mhla.apply_mhla(wan_pipeline(), **SPARSE | {"dense_first": 1}), [], []

    def end_guidance(pipe, index, timestep, tensors):
        if index == 2:
            pipe._guidance_scale = 1.0
        held.append(bytes_alive())
        if index == 5:
            found.append(tensors["latents"].clone())
        return {}

    sample(pipe, callback_on_step_end=end_guidance)
    both = held[2] - held[-1]
    assert 0 < held[2] - held[4] < both  # the branch without the caption is gone, the other is there
    sample(mhla.change_mhla(pipe, correct=False), callback_on_step_end=end_guidance)
    assert not torch.equal(*found)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_made_within_a_call_is_of_no_call(copied):
    pipe, copies = mhla.apply_mhla(wan_pipeline(), **DENSE), []
    expected = sample(pipe)
    sample(pipe, callback_on_step_end=lambda pipe, index, *_: copies.append(copied(pipe.transformer)) or {})
    assert all(torch.equal(sample(wan_pipeline(one)), expected) for one in (copies[1], copies[4]))


def counts(caplog):
    """The lines that calls have ended with; the same one twice in a row is logged once."""
    return [line for line in caplog.messages if line.startswith("MHLA: sparse in")]


def test_threads_keep_apart(caplog):
    pipe = mhla.apply_mhla(wan_pipeline(), **DENSE)
    second = type(pipe)(**pipe.components | {"scheduler": copy.deepcopy(pipe.scheduler)})
    with caplog.at_level(logging.INFO):
        expected = [sample(pipe, seed) for seed in (0, 1)]
    counted, found, barrier = counts(caplog), {}, threading.Barrier(2)
    mhla.change_mhla(pipe)

    def wait(*_):
        barrier.wait(60)
        return {}

    def run(one, seed):
        found[seed] = sample(one, seed, callback_on_step_end=wait)

    with caplog.at_level(logging.INFO):
        in_threads(lambda: run(pipe, 0), lambda: run(second, 1))
    assert caplog.text.count("corrected from") == 4
    assert counts(caplog) == counted * 2 and len(counted) == 1  # each call counts its own attentions
    assert all(torch.equal(found[seed], expected[seed]) for seed in (0, 1))


# Step caches, which leave blocks out


@pytest.mark.parametrize("correct", [True, False])
def test_a_step_cache_runs_every_block_of_a_step_that_measures(correct):
    """And of the first step alone where nothing is measured: its threshold is never reached."""
    pipe = mhla.apply_mhla(wan_pipeline(), **DENSE, correct=correct)
    *_, last = find_patched(pipe)["transformer"].attentions.values()
    ran = []
    pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(False))
    last.register_forward_hook(lambda *_: ran.__setitem__(-1, True))
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    first = sample(pipe)
    whole = (0, 3, 6, 9) if correct else (0,)
    assert ran == [index in whole for index in range(11) for _ in ("cond", "uncond")]
    assert torch.equal(sample(pipe), first)
