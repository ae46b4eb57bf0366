"""How the token grid is read, and what a forward may hold that a patch does not take: refused by name."""

import math
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers import AutoencoderDC
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, find_family, get_family, trained_family
from mhla_diffusers.families.models import strides_of
from mhla_diffusers.families.refused import REFUSED

from ..models import assert_changed, output, relative_change, wan
from ..pipelines import sana_pipeline, wan_pipeline
from ..refusals import refused
from .cases import ALL_LISTED, ROUNDING, SPARSE, case_of, drawer, giving, handle, kl_autoencoder, tally

Given = dict[str, Any]


def places(*sizes: int, first: float = 0) -> torch.Tensor:
    """Picture, row and column of every token."""
    return torch.cartesian_prod(torch.tensor([float(first)]), *(torch.arange(size).float() for size in sizes))


def coordinates(*frames: list[float]) -> torch.Tensor:
    """(B, 3, N) of pieces of video, of which the times of the frames are given; 4x6 tokens in each."""
    pieces = [
        torch.cartesian_prod(torch.tensor(times), *(32.0 * torch.arange(size) for size in (4, 6))) for times in frames
    ]
    return torch.cat(pieces).T.expand(2, -1, -1).contiguous()


def located(given: Given, where: torch.Tensor) -> Given:
    """Arguments as of ``LTXConditionPipeline``, whose grid nothing but coordinates tells."""
    told = ("num_frames", "height", "width", "rope_interpolation_scale")
    latents = drawer(2, 1)(where.shape[2], given["hidden_states"].shape[2])
    rest = {key: x for key, x in given.items() if key not in told}
    return {**rest, "hidden_states": latents, "video_coords": where}


def appended(given: Given, count: int = 24) -> Given:
    """Arguments as of ``LTX2ConditionPipeline``, which appends keyframes with places and times of their own."""
    case, draw = case_of("ltx2"), drawer(2, 7)
    tokens = math.prod(case.grid)
    on_grid = case.transformer().rope.prepare_video_coords(2, *case.grid, "cpu")
    further = draw(3, count, 1).abs().expand(-1, -1, -1, 2) * torch.tensor([1.0, 1.5])
    times = given["timestep"][:, None].repeat(1, tokens + count).float()
    times[:, tokens:] = 0
    latents = torch.cat([given["hidden_states"], draw(count, 8)], dim=1)
    where = {"video_coords": torch.cat([on_grid, further], dim=2), "hidden_states": latents}
    return {**given, **where, "timestep": times, "audio_timestep": given["timestep"]}


_LAYOUT = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")


def with_pictures(given: Given, anchors: tuple[str, ...], sound: int = 3) -> Given:
    """Arguments as MiniMax-H3's pipeline packs them, with the first or last frame given, and its rows nearly clean."""
    frames, height, width = case_of("minimax_h3").grid
    tags, sizes = torch.ones(6, dtype=torch.int64), (frames, 2 * height, 2 * width, sound, (1, 2, 2), 2, 2, 0)
    made = MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *sizes, anchors)
    layout, count, draw = dict(zip(_LAYOUT, made, strict=False)), made[5], drawer(1, 2)
    times = torch.zeros(len(layout["position_ids"]), dtype=torch.int64)
    times[layout["video_indices"][:count]] = 1
    rows = torch.cat([draw(count, 96), given["hidden_states"][:1]], dim=1)
    heard = {"audio_hidden_states": draw(2 * sound, 32), "encoder_hidden_states": given["encoder_hidden_states"][:1]}
    own = {"hidden_states": rows, "timestep_indices": times, "timestep": torch.tensor([0.2, 0.999])}
    return {**given, **layout, **heard, **own}


GRID = [0.0, 1.0, 9.0, 17.0]
# case, what differs, the grid, and tokens before and after it
READ: dict[str, tuple[str, Callable[[Given], Given], tuple[int, ...], tuple[int, int]]] = {
    "ltx, coordinates": ("ltx", lambda given: located(given, coordinates(GRID)), (4, 4, 6), (0, 0)),
    "ltx, a frame before": ("ltx", lambda given: located(given, coordinates([12.0], GRID)), (4, 4, 6), (24, 0)),
    "ltx, pieces before": (
        "ltx",
        lambda given: located(given, coordinates([8.0, 16.0], [24.0], GRID)),
        (4, 4, 6),
        (72, 0),
    ),
    "ltx2, keyframes": ("ltx2", appended, (4, 4, 6), (0, 24)),
    "minimax, first": ("minimax_h3", lambda given: with_pictures(given, ("first",), 0), (37, 2, 3), (12, 0)),
    "minimax, last": ("minimax_h3", lambda given: with_pictures(given, ("last",)), (37, 2, 3), (18, 0)),
    "minimax, both": ("minimax_h3", lambda given: with_pictures(given, ("first", "last")), (37, 2, 3), (24, 0)),
    "wide flux": ("flux", giving(img_ids=places(4, 16)), (4, 16), (6, 0)),
}


@pytest.mark.parametrize(("name", "change", "grid", "extra"), READ.values(), ids=READ)
def test_the_grid_and_the_tokens_beside_it(name: str, change: Any, grid: Any, extra: Any) -> None:
    """All queries of extra tokens attend exactly, so the first attention gives these what it gives without a patch."""
    case = case_of(name)
    model, arguments, seen = case.transformer(), change(case.inputs()), []
    expected = output(model, arguments)
    mhla.apply_mhla(model, **ALL_LISTED)
    assert torch.equal(output(model, arguments), expected)
    mhla.change_mhla(model, **SPARSE)
    with handle(model).watched(lambda one: seen.append((one, one.exact())) or one.output):
        assert_changed(output(model, arguments), expected)
    (one, exact), *_ = seen
    assert (one.grid, one.extra) == (grid, extra)
    before, tokens = extra[0], math.prod(grid)
    for rows in (slice(0, before), slice(before + tokens, None)):
        torch.testing.assert_close(one.output[:, rows], exact[:, rows], rtol=1e-4, atol=1e-5)
    assert_changed(one.output[:, before : before + tokens], exact[:, before : before + tokens])


def test_ids_tell_the_grid_where_bfloat16_rounds_them() -> None:
    """Also in the form with a batch axis."""
    read, ids = get_family("flux").grid, places(3, 260).bfloat16()
    assert read(None, {"img_ids": ids}) == read(None, {"img_ids": ids.clone()[None]}) == (3, 260)


def test_ids_that_change_in_place_are_read_again() -> None:
    """As where a graph or a server has one buffer for all sizes; and arguments may come by place."""
    case = case_of("flux")
    model, arguments = mhla.apply_mhla(case.transformer(), **SPARSE), case.inputs()
    expected = output(model, {**arguments, "img_ids": places(4, 16)})
    output(model, arguments)
    arguments["img_ids"].copy_(places(4, 16))
    assert torch.equal(output(model, arguments), expected)
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    with torch.no_grad():
        assert torch.equal(model(*(arguments[name] for name in names), arguments["guidance"])[0], expected)


def test_what_else_the_grid_is_read_from_is_looked_at_again() -> None:
    """Here two samples packed into a row, whose positions were read before."""
    given, read = case_of("ideogram4").inputs(), get_family("ideogram4").grid
    read(None, given)
    packed = given["segment_ids"].clone()
    packed[:, len(packed[0]) // 2 :] += 1
    with refused("packed"):
        read(None, {**given, "segment_ids": packed})


def test_tables_of_rope_tell_the_grid_whatever_was_read_before() -> None:
    """A buffer that is filled again, and a part of a table that was read as a whole."""
    model = wan()
    attention, read = model.blocks[0].attn1, get_family("wan").mhla.grid_of
    whole, other = (model.rope(torch.empty(1, 16, *size)) for size in ((3, 8, 12), (3, 12, 8)))
    assert read(attention, whole) == (3, 4, 6) and read(attention, [table[:, :48] for table in whole]) == (2, 4, 6)
    buffers = [table.clone() for table in whole]
    assert read(attention, buffers) == (3, 4, 6)
    for buffer, table in zip(buffers, other, strict=True):
        buffer.copy_(table)
    assert read(attention, buffers) == (3, 6, 4)


COMPILED: dict[str, tuple[str, Callable[[Given], Given], Callable[[Given], Given]]] = {
    "krea2, a longer text": ("krea2", giving(), lambda _: case_of("krea2").inputs(max_sequence_length=9)),
    "flux": ("flux", giving(), giving(img_ids=places(4, 16))),
    "ltx": (
        "ltx",
        lambda given: located(given, coordinates([12.0], GRID)),
        lambda given: located(given, coordinates([12.0, 13.0], GRID[:3])),
    ),
}


@pytest.mark.parametrize(("name", "usual", "other"), COMPILED.values(), ids=COMPILED)
def test_a_compiled_model_follows_the_grid_of_every_call(name: str, usual: Any, other: Any) -> None:
    """Nothing else in its inputs tells another grid of as many tokens from it."""
    case = case_of(name)
    model, arguments = mhla.apply_mhla(case.short(), **SPARSE), usual(case.inputs())
    expected = output(model, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(output(compiled, arguments), expected)
    wide = other(case.inputs())
    assert torch.equal(output(compiled, wide), output(model, wide))


# What is refused


def _two_videos(given: Given) -> Given:
    where, tokens = given["position_ids"].clone(), math.prod(case_of("minimax_h3").grid)
    where[-tokens:] = where[-tokens // 2 :].repeat(2, 1)
    return {**given, "position_ids": where}


def _other_text(given: Given) -> Given:
    segments = given["segment_ids"].clone()
    segments[0, :3] = 2
    return {**given, "segment_ids": segments}


def _seen_with(picture: torch.Tensor, channels: int) -> Callable[[Given], Given]:
    """Ids of a picture and of another one beside it."""
    ids = torch.cat([places(4, 2), picture])
    return giving(img_ids=ids, hidden_states=drawer(2, 0)(len(ids), channels))


PICTURES: tuple[list[tuple[int, ...]], ...] = ([(1, 8, 8), (1, 7, 5)], [(2, 8, 8)])
REFUSALS: dict[str, tuple[str, Callable[[Given], Given], tuple[Any, ...]]] = {
    "flux, kontext": ("flux", _seen_with(places(8, 8, first=1), 16), ("Flux Kontext", "remove_mhla(pipe)")),
    "flux, small kontext": ("flux", _seen_with(places(1, 1, first=1), 16), ("Flux Kontext", "remove_mhla(pipe)")),
    "flux2, cached": ("flux2", giving(kv_cache_mode="extract"), ("kv_cache_mode",)),
    "flux3": ("flux3", giving(image_cond_hidden_states=drawer(2, 3)(4, 16)), ("image_cond", "remove_mhla(pipe)")),
    "kandinsky5": ("kandinsky5", giving(sparse_params={"to_fractal": True}), ("sparse_params", "remove_mhla(pipe)")),
    "longcat": ("longcat_image", _seen_with(places(8, 8, first=2), 64), ("72 tokens", "remove_mhla(pipe)")),
    "cogview4": ("cogview4", giving(image_rotary_emb=[]), ("image_rotary_emb",)),
    "qwen, edit": (
        "qwenimage",
        giving(img_shapes=[PICTURES[0]] * 2, hidden_states=drawer(2, 0)(99, 16)),
        ("Qwen-Image-Edit", "remove_mhla(pipe)"),
    ),
    "qwen, layered": (
        "qwenimage",
        giving(img_shapes=[PICTURES[1]] * 2, hidden_states=drawer(2, 0)(128, 16)),
        ("Qwen-Image-Layered", "remove_mhla(pipe)"),
    ),
    "z-image, sizes": ("z_image", lambda given: {**given, "x": [given["x"][0], drawer(4, 0)(1, 14, 10)]},
                       ("(1, 14, 10)", "(1, 16, 16)")),
    "z-image, omni": ("z_image", giving(image_noise_mask=[[1]] * 2), ("image_noise_mask", "remove_mhla(pipe)")),
    "ideogram, packed": ("ideogram4", _other_text, ("Several", "remove_mhla(transformer)")),
    "minimax, two videos": ("minimax_h3", _two_videos, ("not one grid",)),
    "ltx, no size": ("ltx", giving(height=None), ("num_frames, height and width",)),
    "ltx, no beginning": ("ltx", lambda given: located(given, coordinates([1.0, 9.0])), ("0 tokens", "not one grid")),
    "ltx, a token too few": ("ltx", lambda given: located(given, coordinates(GRID)[:, :, :-1]), ("95 tokens",)),
    "ltx, columns first": ("ltx", lambda given: located(given, coordinates(GRID)[:, [0, 2, 1]]), ("96 tokens",)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), REFUSALS.values(), ids=REFUSALS)
def test_forwards_that_a_patch_does_not_take(name: str, change: Any, words: tuple[Any, ...]) -> None:
    """The next forward runs."""
    case = case_of(name)
    model = mhla.apply_mhla(case.transformer(), **SPARSE)
    with refused(*words):
        output(model, change(case.inputs()))
    assert output(model, case.inputs()).isfinite().all()


def test_masks_between_tokens_stay_dense() -> None:
    """As LTX-2's of references that are to be seen more or less, and diffusion forcing without one does not."""
    case = case_of("ltx2")
    model, arguments = case.transformer(), case.inputs()
    tokens = math.prod(case.grid)
    arguments["video_self_attention_mask"] = torch.rand(2, tokens, tokens, generator=torch.manual_seed(0))
    expected = output(model, arguments)
    mhla.apply_mhla(model, **SPARSE)
    assert torch.equal(output(model, arguments), expected)
    assert tally(model) == (0, {"a mask between tokens": 3})
    model, arguments = mhla.apply_mhla(case_of("skyreels_v2").transformer(), **SPARSE), case_of("skyreels_v2_forcing")
    output(model, arguments.inputs())
    assert tally(model) == (3, {})


def test_a_float_mask_is_added_to_the_scores_as_diffusers_adds_it() -> None:
    """Chroma's pipeline gives one, which raises what is not padding; queries of padding have rows of their own."""
    case = case_of("chroma")
    model, arguments = case.transformer(), case.inputs()
    masked = output(model, arguments)
    arguments["attention_mask"] = arguments["attention_mask"].float()
    expected = output(model, arguments)
    assert_changed(masked, expected)
    mhla.apply_mhla(model, **ALL_LISTED)
    assert relative_change(output(model, arguments), expected) < ROUNDING  # e to a bias multiplies weights


# Classes


@pytest.mark.parametrize("name", REFUSED)
def test_classes_refused_by_name(name: str) -> None:
    for kind in (name, getattr(diffusers, name)):
        with refused(name):
            get_family(kind)


@pytest.mark.parametrize("settings", [{}, {"grid": (2, 2, 2)}], ids=["by family", "any model"])
def test_a_class_whose_attention_has_no_grid(settings: dict[str, Any]) -> None:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 16, "text_dim": 16}
    model = diffusers.AnyFlowFARTransformer3DModel(**sizes, freq_dim=16)
    with refused("AnyFlowFARTransformer3DModel", "AnyFlowPipeline"):
        mhla.apply_mhla(model, **settings)
    assert not mhla.is_patched(model)


def test_a_class_of_another_library_is_known_by_its_attentions() -> None:
    """As a copy of diffusers' own; else it is another model of that name."""
    model = type("WanTransformer3DModel", (torch.nn.Module,), {"__module__": __name__})()
    assert find_family(model) is None
    with refused("WanTransformer3DModel", "grid="):
        mhla.apply_mhla(model)
    model.blocks = wan(num_layers=1).blocks
    assert get_family(model).name == "wan"


def test_a_subclass_is_of_the_family_of_its_base() -> None:
    base = type(wan(num_layers=1))
    longer = type("Longer", (base,), {"__module__": __name__})
    assert get_family(longer).name == "wan" and mhla.is_patched(mhla.apply_mhla(wan(longer), **SPARSE))


def test_a_family_without_training_says_so() -> None:
    with refused("'z_image'", "Training()"):
        trained_family(case_of("z_image").transformer())


# Sizes


def test_latent_frames_of_minimax_are_those_of_the_pipeline() -> None:
    for frames, latent in ((124, 37), (125, 42), (141, 42), (22, 7)):
        assert get_family("minimax_h3").latent_frames(None, frames, 1) == latent


def test_what_does_not_fill_a_token_and_clips_that_cannot_be() -> None:
    model = case_of("cogvideox_two_frames").transformer()
    with refused("3 latent frames", 2):
        get_family(model).token_grid(model, torch.empty(1, 4, 3, 8, 12))
    for values in ({"fps": 0}, {"fps": -1.0}, {"frames": 0}, {"sizes": ()}, {"sizes": ((0, 8),)}):
        with refused(next(iter(values))):
            Clip(**{"frames": 1, "fps": 1.0, "sizes": ((8, 8),), **values})


def test_strides_are_those_of_the_autoencoder() -> None:
    ltx = case_of("ltx").pipeline().vae
    assert strides_of(ltx.config) == (ltx.temporal_compression_ratio, ltx.spatial_compression_ratio) == (4, 16)
    assert strides_of({**ltx.config, "spatial_compression_ratio": 8}) == (4, 8)
    assert strides_of(kl_autoencoder().config) == (1, 8)
    assert strides_of(case_of("mochi").pipeline().vae.config) == (6, 8)  # which expands by stages
    assert isinstance(sana_pipeline().vae, AutoencoderDC)
    assert strides_of(sana_pipeline().vae.config) == (1, sana_pipeline().vae_scale_factor)
    config = dict(wan_pipeline().vae.config)  # diffusers' first configurations of it told no strides
    told = config.pop("scale_factor_temporal"), config.pop("scale_factor_spatial")
    stages = {"dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]}
    assert strides_of({**config, **stages}) == told == (4, 8)
    for config, of_videos in ((kl_autoencoder().config, True), ({}, False)):  # an image's stride of frames is 1
        with refused("strides"):
            strides_of(config, of_videos=of_videos)
