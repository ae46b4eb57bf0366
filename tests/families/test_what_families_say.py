"""What families say of RoPE, sizes and pictures, against diffusers' own modules."""

from collections.abc import Callable

import pytest
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.transformers import (
    transformer_flux,
    transformer_flux2,
    transformer_lumina2,
    transformer_qwenimage,
    transformer_z_image,
)
from diffusers.models.transformers.transformer_chronoedit import ChronoEditRotaryPosEmbed
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoRotaryPosEmbed
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15RotaryPosEmbed
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

import mhla_diffusers as mhla
from mhla_diffusers.attention.rope import axial_table, rotary_of_complex, rotary_table, table_of_tokens
from mhla_diffusers.families import Clip, get_family

from ..models import relative_change
from .cases import ROUNDING, all_exact, case_of, output

GRID = (2, 4, 3)
_PICTURE = (1, 4, 3)
_PLACES = torch.cartesian_prod(*(torch.arange(size).float() for size in _PICTURE))

_PLACES_OF_FOUR = torch.cat([_PLACES, torch.zeros(len(_PLACES), 1)], dim=1)


def _z_image() -> torch.Tensor:
    ids = transformer_z_image.ZImageTransformer2DModel.create_coordinate_grid(_PICTURE, (65, 0, 0)).flatten(0, 2)
    return transformer_z_image.RopeEmbedder(256.0, [32, 48, 48], [128, 32, 32])(ids)


def _lumina2() -> torch.Tensor:
    rope = transformer_lumina2.Lumina2RotaryPosEmbed(10000, [32, 32, 32])
    return rope(torch.empty(1, 4, 8, 6), torch.ones(1, 5, dtype=torch.long))[2]


def _qwenimage() -> torch.Tensor:
    return transformer_qwenimage.QwenEmbedRope(10000, [16, 56, 56], scale_rope=True)([_PICTURE], max_txt_seq_len=5)[0]


ROPE: dict[str, tuple[str, int, Callable]] = {
    **{
        f"wan-{dim}": ("wan", dim, lambda dim=dim: WanRotaryPosEmbed(dim, (1, 2, 2), 16)(torch.empty(1, 4, 2, 8, 6)))
        for dim in (12, 20, 128)
    },
    **{
        f"chronoedit-{dim}": (
            "chronoedit",
            dim,
            lambda dim=dim: ChronoEditRotaryPosEmbed(dim, (1, 2, 2), 16)(torch.empty(1, 4, 2, 8, 6)),
        )
        for dim in (12, 128)
    },
    **{
        f"cogvideox-{dim}": (
            "cogvideox",
            dim,
            lambda dim=dim: get_3d_rotary_pos_embed(dim, ((0, 0), (4, 3)), (4, 3), 2),
        )
        for dim in (16, 64)
    },
    "hunyuan_video": (
        "hunyuan_video",
        128,
        lambda: HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56])(torch.empty(1, 16, 2, 8, 6)),
    ),
    "hunyuan_video15": (
        "hunyuan_video15",
        128,
        lambda: HunyuanVideo15RotaryPosEmbed(1, 1, [16, 56, 56])(torch.empty(1, 16, *GRID)),
    ),
    "flux": ("flux", 128, lambda: transformer_flux.FluxPosEmbed(10000, (16, 56, 56))(_PLACES)),
    "flux2": ("flux2", 128, lambda: transformer_flux2.Flux2PosEmbed(2000, (32,) * 4)(_PLACES_OF_FOUR)),
    "qwenimage": ("qwenimage", 128, _qwenimage),
    "z_image": ("z_image", 128, _z_image),
    "lumina2": ("lumina2", 96, _lumina2),
}


@pytest.mark.parametrize(("name", "head_dim", "table"), ROPE.values(), ids=ROPE)
def test_rope_turns_channels_with_one_axis_each(name, head_dim, table):
    """What kernels read, a row for every place on an axis, is the table that the real model gives its attentions."""
    found, axes = table(), get_family(name).rotary_axes(head_dim)
    if isinstance(found, torch.Tensor):
        rotary = rotary_of_complex(found)
    else:
        rotary = tuple(one if one.ndim == 4 else one[None, :, None] for one in found)
    grid, axes = (GRID, axes) if len(axes) == 3 else (_PICTURE, (0, *axes))
    assert torch.equal(table_of_tokens(axial_table(rotary, grid), grid, axes), rotary_table(rotary))


@pytest.mark.parametrize(("name", "head_dim"), [("chronoedit", 16), ("hunyuan_video", 12), ("flux", 16), ("sd3", 64)])
def test_other_tables_are_read_whole(name, head_dim):
    """Of 16 channels diffusers cuts ChronoEdit's inside a pair, (6, 5, 5)."""
    assert get_family(name).rotary_axes(head_dim) is None


SIZES = {
    "cogvideox": [((9, 64, 96), (3, 4, 6)), ((49, 480, 720), (13, 30, 45))],
    "cogvideox_two_frames": [((9, 64, 96), (2, 4, 6))],
    "hunyuan_video": [((9, 64, 96), (3, 4, 6)), ((129, 720, 1280), (33, 45, 80))],
    "hunyuan_video15": [((7, 16, 24), (4, 4, 6))],
    "ltx2": [((13, 64, 96), (4, 4, 6)), ((121, 512, 768), (31, 32, 48))],
    "mochi": [((19, 64, 96), (4, 4, 6)), ((163, 480, 848), (28, 30, 53))],
    "skyreels_v2": [((97, 544, 960), (25, 34, 60)), ((121, 720, 1280), (31, 45, 80))],
}


@pytest.mark.parametrize("name", SIZES)
def test_grid_of_a_size(name):
    pipe = case_of(name).pipeline()
    for (frames, height, width), grid in SIZES[name]:
        assert {one.grid for one in mhla.describe(pipe, height=height, width=width, num_frames=frames)} == {grid}


@pytest.mark.parametrize(
    ("name", "height", "width"),
    [("cogvideox", 480, 720), ("hunyuan_video", 720, 1280), ("mochi", 480, 848), ("skyreels_v2", 544, 960)],
)
def test_suggested_blocks_at_the_usual_size_are_the_defaults(name, height, width):
    pipe = case_of(name).pipeline()
    assert mhla.suggest_blocks(pipe, height, width) == get_family(name).default_config.blocks


WITH_PICTURES = {
    "cogvideox": ("cogvideox", {"in_channels": 8}, "hidden_states"),
    "hunyuan_video, beside": (
        "hunyuan_video",
        {"in_channels": 9, "image_condition_type": "latent_concat"},
        "hidden_states",
    ),
    "hunyuan_video, in place": ("hunyuan_video", {"image_condition_type": "token_replace"}, "hidden_states"),
    "hunyuan_video15": ("hunyuan_video15", {"task_type": "i2v"}, "hidden_states"),
}


@pytest.mark.parametrize(("name", "settings", "latents"), WITH_PICTURES.values(), ids=WITH_PICTURES)
def test_image_to_video_is_patched(name, settings, latents):
    case = case_of(name)
    pipe, arguments = case.pipeline(**settings), case.inputs()
    model, axis = pipe.transformer, 2 if name == "cogvideox" else 1
    given = arguments[latents]
    arguments[latents] = torch.cat([given] * 3, dim=axis).narrow(axis, 0, model.config.in_channels)
    expected = output(model, arguments)
    mhla.apply_mhla(pipe, **all_exact(name))
    assert relative_change(output(model, arguments), expected) < ROUNDING


def test_image_to_video_of_hunyuan_video_15_is_not_trained():
    case = case_of("hunyuan_video15")
    pipe, family = case.pipeline(task_type="i2v"), case.of_family
    for refused in (lambda: family.encode_prompt(pipe, "a"), lambda: family.process(pipe.transformer, 7.0)):
        with pytest.raises(ValueError, match="conditioned on pictures"):
            refused()


@pytest.mark.parametrize("values", [{"fps": 0}, {"fps": -1.0}, {"frames": 0}, {"sizes": ()}, {"sizes": ((0, 8),)}])
def test_clips_that_cannot_be(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Clip(**{"frames": 1, "fps": 1.0, "sizes": ((8, 8),), **values})
