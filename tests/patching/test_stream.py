"""A video frame block after frame block: equal to all of it at once, of one size however long, and its errors."""

import threading

import pytest
import torch
from diffusers import SkyReelsV2Transformer3DModel, WanVACETransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

import mhla_diffusers as mhla
from mhla_diffusers import VideoStream

from ..models import assert_changed, bytes_alive, output, relative_change, wan
from ..refusals import refused

_SIDES = (4, 6)
_TOKENS = _SIDES[0] * _SIDES[1]
_LENGTH = 2
_SETTINGS = {"blocks": (4, 2, 3), "causal": "block", "block_length": _LENGTH}

# float32 sums in another order, through all layers
_ROUNDING = 1e-5


def _wan():
    return wan(num_layers=2, rope_max_seq_len=256)


def _skyreels():
    return wan(SkyReelsV2Transformer3DModel, num_layers=2, rope_max_seq_len=256)


def _arguments(model, frames, per_frame=True, seed=1):
    generator = torch.Generator().manual_seed(seed)
    arguments = {
        "hidden_states": torch.randn(2, 16, frames, *(2 * side for side in _SIDES), generator=generator),
        "timestep": torch.tensor([500, 250]),
        "encoder_hidden_states": torch.randn(2, 6, 32, generator=generator),
    }
    if per_frame:
        times = torch.randint(0, 1000, (2, frames), generator=generator)
        is_wan = type(model).__name__.startswith("Wan")
        arguments["timestep"] = times.repeat_interleave(_TOKENS, dim=1) if is_wan else times
        arguments |= {} if is_wan else {"enable_diffusion_forcing": True}
    return arguments


def _patched(**settings):
    """A model of Wan, and its patch of blocks that see no later ones."""
    return mhla.apply_mhla(_wan(), **_SETTINGS, **settings)


def _some(arguments, first, last):
    """Those of some frames."""
    times = arguments["timestep"]
    if times.ndim == 2:
        per_frame = times.shape[1] // arguments["hidden_states"].shape[2]
        times = times[:, first * per_frame : last * per_frame]
    return arguments | {"hidden_states": arguments["hidden_states"][:, :, first:last], "timestep": times}


@torch.no_grad()
def _streamed(stream, arguments, cuts, tries=0):
    outputs, first = [], 0
    for count in cuts:
        some = _some(arguments, first, first + count)
        for _ in range(tries):
            noisy = some | {"hidden_states": torch.randn_like(some["hidden_states"])}
            stream(**noisy, keep=False)
        outputs.append(stream(**some, return_dict=False)[0])
        first += count
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize("build", [_wan, _skyreels], ids=["wan", "skyreels_v2"])
@pytest.mark.parametrize("own", ["linear", "softmax"])
@pytest.mark.parametrize("per_frame", [False, True], ids=["one-time", "own-times"])
def test_frame_blocks_one_after_another_are_all_frames_at_once(build, own, per_frame):
    model = build()
    mhla.apply_mhla(model, **_SETTINGS, own=own, mixing_per_head=True)
    arguments = _arguments(model, 8, per_frame)
    stream = VideoStream(model)
    found = _streamed(stream, arguments, (2,) * 4, tries=1)
    assert relative_change(found, output(model, arguments)) < _ROUNDING
    assert stream.frames == 8


@pytest.mark.parametrize("own", ["linear", "softmax"])
def test_a_video_longer_than_the_blocks_of_the_patch(own):
    model = _patched(own=own, beyond="relative")
    arguments = _arguments(model, 16)
    assert relative_change(_streamed(VideoStream(model), arguments, (2,) * 8), output(model, arguments)) < _ROUNDING


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 2**16))
@settings(max_examples=8, deadline=None)
def test_any_cut_into_whole_frame_blocks(blocks, seed):
    model = _patched(beyond="relative")
    cuts = tuple(_LENGTH * count for count in blocks)
    arguments = _arguments(model, sum(cuts), seed=seed)
    assert relative_change(_streamed(VideoStream(model), arguments, cuts), output(model, arguments)) < _ROUNDING


def test_what_is_kept_is_of_one_size_however_long_the_video():
    model = _patched(beyond="relative")
    arguments, stream, taken = _arguments(model, _LENGTH), VideoStream(model), []
    with torch.no_grad():
        for count in range(1, 101):
            stream(**arguments)
            if count in (10, 100):
                taken.append((stream.nbytes, bytes_alive()))
    (of_ten, alive_at_ten), (of_hundred, alive_at_hundred) = taken
    assert of_ten == of_hundred
    assert alive_at_hundred <= alive_at_ten  # less where something of another test was freed meanwhile
    assert stream.frames == 100 * _LENGTH
    stream.reset()
    assert stream.nbytes == stream.frames == 0


def test_what_came_before_matters_and_reset_forgets_it():
    model = _patched()
    arguments, stream = _arguments(model, 4), VideoStream(model)
    later = _some(arguments, 2, 4)
    alone = output(model, later)
    _streamed(stream, arguments, (2,))
    with torch.no_grad():
        assert_changed(stream(**later, keep=False, return_dict=False)[0], alone)
        stream.reset()
        assert torch.equal(stream(**later, return_dict=False)[0], alone)


def test_samples_of_a_stream_can_be_picked():
    model = _patched()
    arguments, stream = _arguments(model, 4), VideoStream(model)
    _streamed(stream, arguments, (2,))
    stream.reorder(torch.tensor([1, 1]))
    picked = {name: x[[1, 1]] for name, x in arguments.items()}
    with torch.no_grad():
        found = stream(**_some(picked, 2, 4), return_dict=False)[0]
    assert relative_change(found, output(model, picked)[:, :, 2:]) < _ROUNDING


def test_threads_have_videos_of_their_own_beside_calls_without_a_stream():
    model = _patched()
    videos = [_arguments(model, 8, seed=seed) for seed in range(3)]
    expected, found = [output(model, video) for video in videos], [torch.empty(0)] * 3

    def run(place):
        found[place] = _streamed(VideoStream(model), videos[place], (2,) * 4) if place else output(model, videos[place])

    threads = [threading.Thread(target=run, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        assert relative_change(one, other) < _ROUNDING


def test_a_copy_of_the_layer_that_an_adapter_brings():
    model = _patched()
    model.add_adapter(LoraConfig(target_modules=["to_q"], modules_to_save=["mhla"], init_lora_weights=False))
    arguments = _arguments(model, 4)
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            layer.mixing.mul_(torch.rand_like(layer.mixing))
    assert relative_change(_streamed(VideoStream(model), arguments, (2, 2)), output(model, arguments)) < _ROUNDING


def test_gradients_reach_what_was_kept():
    model = _patched()
    arguments, stream = _arguments(model, 4), VideoStream(model)
    first = _some(arguments, 0, 2)
    first["hidden_states"].requires_grad_()
    stream(**first)
    stream(**_some(arguments, 2, 4))[0].square().sum().backward()
    assert first["hidden_states"].grad is not None and first["hidden_states"].grad.abs().sum() > 0


def test_after_an_error_a_stream_goes_on_where_it_was():
    model = _patched()
    arguments, stream = _arguments(model, 8), VideoStream(model)
    found = [_streamed(stream, arguments, (2,))]

    def fail(*_):
        raise RuntimeError("out of memory")

    handle = model.blocks[1].attn1.register_forward_hook(fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
        stream(**_some(arguments, 2, 4))
    handle.remove()
    with torch.no_grad():
        found.append(stream(**_some(arguments, 2, 8), return_dict=False)[0])
    assert relative_change(torch.cat(found, dim=2), output(model, arguments)) < _ROUNDING


_ONE_TIME = {"num_layers": 2, "vace_layers": [0], "vace_in_channels": 12}
"""Arguments of a model that takes one time for all frames."""
_REFUSED = {
    "not causal": (_wan, {"blocks": (2, 2, 3)}, "blocks.0.attn1...MHLA...causal='block'"),
    "sparse": (_wan, {}, "blocks.0.attn1...sparse...causal='block'"),
    "hybrid": (_wan, _SETTINGS | {"layers": [0]}, "1 of 2: blocks.1.attn1"),
    "softmax steps": (_wan, _SETTINGS | {"softmax_steps": 1}, "softmax_steps=1"),
    "not patched": (_wan, None, "2 of 2: blocks.0.attn1, blocks.1.attn1"),
    "one time": (lambda: wan(WanVACETransformer3DModel, **_ONE_TIME), None, "WanVACETransformer3DModel"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_leaves_no_state_behind_is_refused(case):
    build, patch, value = _REFUSED[case]
    model = build()
    if patch is not None:
        mhla.apply_mhla(model, **patch)
    with refused(value):
        VideoStream(model)


def test_frames_that_do_not_go_on_are_refused():
    model = wan(num_layers=2, rope_max_seq_len=8)
    mhla.apply_mhla(model, **_SETTINGS, beyond="relative")
    stream, arguments = VideoStream(model), _arguments(model, 10)
    _streamed(stream, arguments, (2,))
    with torch.no_grad():
        with refused(1, "2, 4, 6"):
            stream(**_some(arguments, 2, 3))
        wide = _arguments(model, 2)
        wide["hidden_states"] = torch.cat([wide["hidden_states"]] * 2, dim=3)
        with refused("4x6", "8x6", "reset()"):
            stream(**wide | {"timestep": torch.tensor([1, 2])})
        with refused("batch of 2"):
            stream(**{name: x[:1] for name, x in _some(arguments, 2, 4).items()})
        with mhla.mhla_disabled(model), refused("blocks.0.attn1", "blocks.1.attn1"):
            stream(**_some(arguments, 2, 4))
        for first in (2, 4, 6):
            stream(**_some(arguments, first, first + 2))
        with refused(8, "9 to 10", "rope_max_seq_len"):
            stream(**_some(arguments, 8, 10))
    assert stream.frames == 8


def test_a_clip_that_the_blocks_do_not_fit_is_refused_in_words_of_frames():
    model = _patched()
    allowed = "5; allowed are 2, 4, 6"
    with torch.no_grad(), refused(allowed):
        model(**_arguments(model, 5))
    with refused(allowed):
        mhla.describe(model, grid=(5, *_SIDES))
    mhla.describe(model)  # the grid of the call that failed is not an error
    with refused("width", "at most 2"):
        mhla.describe(model, grid=(4, 4, 2))
    stream, arguments = VideoStream(model), _arguments(model, 10)
    _streamed(stream, arguments, (2,) * 4)
    with torch.no_grad(), refused("block_length", "beyond='relative'"):
        stream(**_some(arguments, 8, 10))


def test_gradient_checkpointing_is_refused_where_it_would_run_a_block_again():
    model = _patched()
    model.enable_gradient_checkpointing()
    stream, arguments = VideoStream(model), _arguments(model, 2)
    with refused("torch.no_grad()"):
        stream(**arguments)
    with torch.no_grad():
        stream(**arguments)
