"""A video frame block after frame block: equal to all of it at once, of one size however long, and its errors."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SkyReelsV2Transformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st

import mhla_diffusers as mhla
from mhla_diffusers import VideoStream

from ..models import assert_changed, bytes_alive, output, relative_change, wan

_SIDES = (4, 6)
_TOKENS = _SIDES[0] * _SIDES[1]
_LENGTH = 2
_SETTINGS: dict[str, Any] = {"blocks": (4, 2, 3), "causal": "block", "block_length": _LENGTH}

# float32 sums in another order, through all layers
_ROUNDING = 1e-5


def _wan(**config: Any) -> Any:
    return wan(num_layers=2, rope_max_seq_len=256, **config)


def _skyreels() -> Any:
    return wan(SkyReelsV2Transformer3DModel, num_layers=2, rope_max_seq_len=256)


def _arguments(model: Any, frames: int, per_frame: bool = True, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = {
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


def _some(arguments: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Those of some frames."""
    times = arguments["timestep"]
    if times.ndim == 2:
        per_frame = times.shape[1] // arguments["hidden_states"].shape[2]
        times = times[:, first * per_frame : last * per_frame]
    return arguments | {"hidden_states": arguments["hidden_states"][:, :, first:last], "timestep": times}


@torch.no_grad()
def _streamed(stream: VideoStream, arguments: dict[str, Any], cuts: tuple[int, ...], tries: int = 0) -> torch.Tensor:
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
@pytest.mark.parametrize("sparse", ["none", "own"])
@pytest.mark.parametrize("per_frame", [False, True], ids=["one-time", "own-times"])
def test_frame_blocks_one_after_another_are_all_frames_at_once(
    build: Callable[[], Any], sparse: str, per_frame: bool
) -> None:
    model = build()
    mhla.apply_mhla(model, **_SETTINGS, sparse=sparse, mixing_per_head=True)
    arguments = _arguments(model, 8, per_frame)
    stream = VideoStream(model)
    found = _streamed(stream, arguments, (2,) * 4, tries=1)
    assert relative_change(found, output(model, arguments)) < _ROUNDING
    assert stream.frames == 8


@pytest.mark.parametrize("sparse", ["none", "own"])
def test_a_video_longer_than_the_blocks_of_the_patch(sparse: str) -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse=sparse, beyond="relative")
    arguments = _arguments(model, 16)
    assert relative_change(_streamed(VideoStream(model), arguments, (2,) * 8), output(model, arguments)) < _ROUNDING


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 2**16))
@settings(max_examples=8, deadline=None)
def test_any_cut_into_whole_frame_blocks(blocks: list[int], seed: int) -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own", beyond="relative")
    cuts = tuple(_LENGTH * count for count in blocks)
    arguments = _arguments(model, sum(cuts), seed=seed)
    assert relative_change(_streamed(VideoStream(model), arguments, cuts), output(model, arguments)) < _ROUNDING


def test_what_is_kept_is_of_one_size_however_long_the_video() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own", beyond="relative")
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


def test_what_came_before_matters_and_reset_forgets_it() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    arguments, stream = _arguments(model, 4), VideoStream(model)
    later = _some(arguments, 2, 4)
    alone = output(model, later)
    _streamed(stream, arguments, (2,))
    with torch.no_grad():
        assert_changed(stream(**later, keep=False, return_dict=False)[0], alone)
        stream.reset()
        assert torch.equal(stream(**later, return_dict=False)[0], alone)


def test_samples_of_a_stream_can_be_picked() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    arguments, stream = _arguments(model, 4), VideoStream(model)
    _streamed(stream, arguments, (2,))
    stream.reorder(torch.tensor([1, 1]))
    picked = {name: x[[1, 1]] for name, x in arguments.items()}
    with torch.no_grad():
        found = stream(**_some(picked, 2, 4), return_dict=False)[0]
    assert relative_change(found, output(model, picked)[:, :, 2:]) < _ROUNDING


def test_threads_have_videos_of_their_own_beside_calls_without_a_stream() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    videos = [_arguments(model, 8, seed=seed) for seed in range(3)]
    expected, found = [output(model, video) for video in videos], [torch.empty(0)] * 3

    def run(place: int) -> None:
        found[place] = _streamed(VideoStream(model), videos[place], (2,) * 4) if place else output(model, videos[place])

    threads = [threading.Thread(target=run, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        assert relative_change(one, other) < _ROUNDING


def test_a_copy_of_the_layer_that_an_adapter_brings() -> None:
    from peft import LoraConfig

    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    model.add_adapter(LoraConfig(target_modules=["to_q"], modules_to_save=["mhla"], init_lora_weights=False))
    arguments = _arguments(model, 4)
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            layer.mixing.mul_(torch.rand_like(layer.mixing))
    assert relative_change(_streamed(VideoStream(model), arguments, (2, 2)), output(model, arguments)) < _ROUNDING


def test_gradients_reach_what_was_kept() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    arguments, stream = _arguments(model, 4), VideoStream(model)
    first = _some(arguments, 0, 2)
    first["hidden_states"].requires_grad_()
    stream(**first)
    stream(**_some(arguments, 2, 4))[0].square().sum().backward()
    assert first["hidden_states"].grad is not None and first["hidden_states"].grad.abs().sum() > 0


@torch.no_grad()
def test_the_past_is_mixed_once_for_all_denoising_steps() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    arguments, stream = _arguments(model, 4), VideoStream(model)
    stream(**_some(arguments, 0, 2))
    stream(**_some(arguments, 2, 4), keep=False)
    mixtures = [state._earlier for state in stream._states.values()]
    found = stream(**_some(arguments, 2, 4), keep=False, return_dict=False)[0]
    assert all(state._earlier is one for state, one in zip(stream._states.values(), mixtures, strict=True))
    assert None not in mixtures and stream.frames == 2
    assert relative_change(found, output(model, arguments)[:, :, 2:]) < _ROUNDING


def test_after_an_error_a_stream_goes_on_where_it_was() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    arguments, stream = _arguments(model, 8), VideoStream(model)
    found = [_streamed(stream, arguments, (2,))]

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.blocks[1].attn1.register_forward_hook(fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
        stream(**_some(arguments, 2, 4))
    handle.remove()
    with torch.no_grad():
        found.append(stream(**_some(arguments, 2, 8), return_dict=False)[0])
    assert relative_change(torch.cat(found, dim=2), output(model, arguments)) < _ROUNDING


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"blocks": (2, 2, 3), "sparse": "none"}, r"blocks\.0\.attn1 has causal=None.*causal='block'"),
        (_SETTINGS | {"sparse": "own", "layers": [0]}, r"softmax attention.*1 of 2: blocks\.1\.attn1.*layers='all'"),
        (_SETTINGS | {"sparse": "own", "softmax_steps": 1}, r"softmax_steps=1 .*softmax_steps=0"),
        (None, r"2 of 2: blocks\.0\.attn1, blocks\.1\.attn1"),
    ],
    ids=["not causal", "hybrid", "softmax steps", "not patched"],
)
def test_patches_that_leave_no_state_behind_are_refused(patch: dict[str, Any] | None, message: str) -> None:
    model = _wan()
    if patch is not None:
        mhla.apply_mhla(model, **patch)
    with pytest.raises(ValueError, match=message):
        VideoStream(model)


def test_a_transformer_that_takes_one_time_for_all_frames_is_refused() -> None:
    from diffusers import WanVACETransformer3DModel

    model = wan(WanVACETransformer3DModel, num_layers=2, vace_layers=[0], vace_in_channels=12)
    with pytest.raises(
        ValueError, match=r"WanVACETransformer3DModel cannot.*'wan' tells that of WanTransformer3DModel"
    ):
        VideoStream(model)


def test_frames_that_do_not_go_on_are_refused() -> None:
    model = wan(num_layers=2, rope_max_seq_len=8)
    mhla.apply_mhla(model, **_SETTINGS, sparse="own", beyond="relative")
    stream, arguments = VideoStream(model), _arguments(model, 10)
    _streamed(stream, arguments, (2,))
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"whole frame blocks of 2 latent frames.* has 1; allowed are 2, 4, 6"):
            stream(**_some(arguments, 2, 3))
        wide = _arguments(model, 2)
        wide["hidden_states"] = torch.cat([wide["hidden_states"]] * 2, dim=3)
        with pytest.raises(ValueError, match=r"4x6 tokens each, and these have 8x6; reset\(\)"):
            stream(**wide | {"timestep": torch.tensor([1, 2])})
        with pytest.raises(ValueError, match=r"state is of a batch of 2"):
            stream(**{name: x[:1] for name, x in _some(arguments, 2, 4).items()})
        with mhla.mhla_disabled(model), pytest.raises(ValueError, match=r"blocks\.0\.attn1.* did not attend with MHLA"):
            stream(**_some(arguments, 2, 4))
        for first in (2, 4, 6):
            stream(**_some(arguments, first, first + 2))
        with pytest.raises(ValueError, match=r"RoPE for 8 latent frames.*would be 9 to 10.*rope_max_seq_len"):
            stream(**_some(arguments, 8, 10))
    assert stream.frames == 8


def test_a_clip_that_the_blocks_do_not_fit_is_refused_in_words_of_frames() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    refused = r"whole frame blocks of 2 latent frames, and the call has 5; allowed are 2, 4, 6"
    with torch.no_grad(), pytest.raises(ValueError, match=refused):
        model(**_arguments(model, 5))
    with pytest.raises(ValueError, match=refused):
        mhla.describe(model, grid=(5, *_SIDES))
    mhla.describe(model)  # the grid of the call that failed is no error
    with pytest.raises(ValueError, match=r"width axis.*use at most 2 on that axis\.$"):
        mhla.describe(model, grid=(4, 4, 2))


def test_beyond_the_blocks_of_a_patch_without_a_rule_for_it() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    stream, arguments = VideoStream(model), _arguments(model, 10)
    _streamed(stream, arguments, (2,) * 4)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"in a patch more blocks, or a larger block_length.*beyond='relative'"),
    ):
        stream(**_some(arguments, 8, 10))


def test_gradient_checkpointing_is_refused_where_it_would_run_a_block_again() -> None:
    model = _wan()
    mhla.apply_mhla(model, **_SETTINGS, sparse="own")
    model.enable_gradient_checkpointing()
    stream, arguments = VideoStream(model), _arguments(model, 2)
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        stream(**arguments)
    with torch.no_grad():
        stream(**arguments)
