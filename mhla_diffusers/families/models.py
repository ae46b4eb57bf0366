"""Models as data: the configurations that ``mhla bench`` builds, real and tiny, and their sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from ..settings import Positive, PositiveInteger, Settings

Size = tuple[PositiveInteger, PositiveInteger]
Sizes = Annotated[tuple[Size, ...], Field(min_length=1)]


class Clip(Settings):
    """Frames and size of a video, or of an image, which has one frame."""

    frames: PositiveInteger
    fps: Positive
    """Frames per second that a video is sampled at."""
    sizes: Sizes


@dataclass(frozen=True)
class Model:
    """A configuration of a transformer, and the sizes at which it is measured."""

    name: str
    """Names that begin with "tiny" are for trying commands out; only tiny-wan has its trained pipeline's shape."""
    transformer: str
    heads: int
    head_dim: int
    layers: int
    blocks: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    """Heights and widths in pixels to measure by default; on a CPU only the smallest."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class that differ from its defaults, beside heads, head dim and layers."""
    stride: int = 8
    patch: int = 2
    frames: int | None = None
    temporal_stride: int = 1
    temporal_patch: int = 1
    layers_argument: str = "num_layers"
    more_layers: Mapping[str, int] = field(default_factory=dict)
    """Arguments of the class that count other layers."""
    has_rope: bool = True
    """Whether self-attentions have RoPE, which is then measured with them."""

    @property
    def is_video(self) -> bool:
        """Whether inputs have frames."""
        return self.frames is not None

    @property
    def is_tiny(self) -> bool:
        """Whether it is a tiny model for trying out commands."""
        return self.name.startswith("tiny")


def squares(*sides: int) -> tuple[tuple[int, int], ...]:
    """Return sizes of square images."""
    return tuple((side, side) for side in sides)


def image_model(name: str, transformer: str, heads: int, head_dim: int, layers: int, **different: Any) -> Model:
    """Return a text-to-image model of 16 pixels per token at 1024, 2048 and 4096 pixels; arguments override."""
    usual = {"blocks": (4, 4), "sizes": squares(1024, 2048, 4096)}
    return Model(name, transformer, heads, head_dim, layers, **{**usual, **different})


def tiny_image(name: str, transformer: str, settings: Mapping[str, Any], **different: Any) -> Model:
    """Return a tiny image model: 3 layers of 2 heads of 12 channels, at 64 pixels; arguments override."""
    usual = {"heads": 2, "head_dim": 12, "layers": 3, "blocks": (2, 2), "sizes": squares(64)}
    return Model(f"tiny-{name}", transformer, settings=settings, **{**usual, **different})


def tiny_video(name: str, transformer: str, settings: Mapping[str, Any], **different: Any) -> Model:
    """Return a tiny video model: the same, at 9 frames of 64x96 pixels."""
    usual = {"blocks": (1, 2, 2), "sizes": ((64, 96),), "frames": 9, "temporal_stride": 4}
    return tiny_image(name, transformer, settings, **{**usual, **different})


def strides_of(vae: Mapping[str, Any], *, of_videos: bool = False) -> tuple[int, int]:
    """Return an autoencoder's frames per latent frame after the first one, and pixels per latent."""
    temporal = vae.get("scale_factor_temporal") or vae.get("temporal_compression_ratio")
    spatial = vae.get("scale_factor_spatial") or vae.get("spatial_compression_ratio")
    stages = vae.get("encoder_block_out_channels") or vae.get("block_out_channels")
    if "spatio_temporal_scaling" in vae:  # LTX-Video's halves patches along all axes
        halved = 2 ** sum(vae["spatio_temporal_scaling"])
        temporal, spatial = temporal or vae["patch_size_t"] * halved, spatial or vae["patch_size"] * halved
    elif "spatial_expansions" in vae:  # Mochi's
        temporal = temporal or math.prod(vae["temporal_expansions"])
        spatial = spatial or math.prod(vae["spatial_expansions"])
    elif "dim_mult" in vae:  # Wan's and Qwen-Image's
        temporal = temporal or 2 ** sum(vae["temperal_downsample"])
        spatial = spatial or 2 ** (len(vae["dim_mult"]) - 1)
    elif stages:
        spatial = spatial or 2 ** (len(stages) - 1)
    if spatial is None or (of_videos and temporal is None):
        raise ValueError(
            f"This autoencoder's configuration has no strides{' of frames' if spatial else ''}; override "
            "Calling.grid() in the family."
        )
    return int(temporal or 1), int(spatial)


_SANA, _SANA_VIDEO = "SanaTransformer2DModel", "SanaVideoTransformer3DModel"
_DIT, _PIXART, _FLUX, _SD3 = (f"{name}Transformer2DModel" for name in ("DiT", "PixArt", "Flux", "SD3"))
_QWEN_IMAGE, _WAN, _SKYREELS = "QwenImageTransformer2DModel", "WanTransformer3DModel", "SkyReelsV2Transformer3DModel"
_HUNYUAN_VIDEO, _LTX = "HunyuanVideoTransformer3DModel", "LTXVideoTransformer3DModel"
_COGVIDEOX = "CogVideoXTransformer3DModel"


def _sana(name: str, heads: int, layers: int, cross_heads: int, cross_head_dim: int) -> Model:
    settings = {"num_cross_attention_heads": cross_heads, "cross_attention_head_dim": cross_head_dim}
    settings["cross_attention_dim"] = heads * 32
    sizes = squares(512, 1024, 2048, 4096)
    shape = name, _SANA, heads, 32, layers, (4, 4), sizes, settings
    return Model(*shape, stride=32, patch=1, has_rope=False)


def _dit(name: str, heads: int, head_dim: int, layers: int, **different: Any) -> Model:
    sizes = squares(256, 512, 1024, 2048, 4096)
    return Model(name, _DIT, heads, head_dim, layers, (4, 4), sizes, {"out_channels": 8}, **different, has_rope=False)


def _sd3(name: str, heads: int, layers: int, **settings: Any) -> Model:
    # the table of positions is larger than those of the checkpoints, so that 4096 px can be measured
    usual = {"caption_projection_dim": 64 * heads, "qk_norm": "rms_norm", "pos_embed_max_size": 512}
    return image_model(name, _SD3, heads, 64, layers, settings={**usual, **settings}, has_rope=False)


def _wan(name: str, heads: int, ffn_dim: int, layers: int, **different: Any) -> Model:
    usual = {"transformer": _WAN, "blocks": (7, 3, 5), "sizes": ((480, 832), (720, 1280)), "frames": 81}
    shape = {"heads": heads, "head_dim": 128, "layers": layers, "temporal_stride": 4}
    return Model(name, settings={"ffn_dim": ffn_dim}, **{**shape, **usual, **different})


def _ltx(name: str, head_dim: int, layers: int) -> Model:
    sizes, settings = ((512, 704), (704, 1216)), {"cross_attention_dim": 32 * head_dim}
    return Model(name, _LTX, 32, head_dim, layers, (7, 3, 4), sizes, settings, frames=161, **_LTX_STRIDES)


def _cogvideox(name: str, heads: int, layers: int, frames: int, size: tuple[int, int], **different: Any) -> Model:
    shape = name, _COGVIDEOX, heads, 64, layers, (4, 3, 5), (size,)
    return Model(*shape, frames=frames, temporal_stride=4, **different)


_TINY_SANA = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32}
_TINY_SANA |= {"caption_channels": 8, "in_channels": 4}
_TINY_SANA_VIDEO = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24}
_TINY_SANA_VIDEO |= {"caption_channels": 8, "rope_max_seq_len": 32}
_ALPHA = {"caption_channels": 4096}
_SIGMA = {**_ALPHA, "use_additional_conditions": False}
_TINY_FLUX = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "pooled_projection_dim": 12, "in_channels": 16}
_TINY_SD3 = {"caption_projection_dim": 24, "joint_attention_dim": 32, "pooled_projection_dim": 12}
_TINY_SD3 |= {"in_channels": 4, "out_channels": 4}
_TINY_QWEN = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "in_channels": 16, "out_channels": 4}
_TINY_WAN = {"ffn_dim": 384, "text_dim": 64, "freq_dim": 256, "in_channels": 4, "out_channels": 4}
_TINY_SKYREELS = {"ffn_dim": 32, "text_dim": 32, "freq_dim": 16}
_SKYREELS_SIZES: dict[str, Any] = {"transformer": _SKYREELS, "blocks": (8, 3, 6), "frames": 97}
_SKYREELS_SIZES["sizes"] = ((544, 960), (720, 1280))
_TINY_HUNYUAN: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 16}
_TINY_HUNYUAN |= {"pooled_projection_dim": 12, "rope_axes_dim": (4, 4, 4)}
_LTX_STRIDES: dict[str, Any] = {"stride": 32, "patch": 1, "temporal_stride": 8, "has_rope": False}
_TINY_LTX = {"cross_attention_dim": 32, "caption_channels": 24, "in_channels": 8, "out_channels": 8}
_ROPE = {"use_rotary_positional_embeddings": True}
# 300 is what diffusers' conversion script writes: the longest side of the RoPE tables, not a usual size
_VERSION_1_5 = {**_ROPE, "sample_height": 300, "sample_width": 300, "patch_size_t": 2, "patch_bias": False}
_TINY_COG = {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32, "max_text_seq_length": 8}
_ONE_SINGLE: dict[str, Any] = {"layers": 2, "more_layers": {"num_single_layers": 1}}

MODELS: dict[str, tuple[Model, ...]] = {
    "sana": (
        _sana("sana-0.6b", 36, 28, 16, 72),
        _sana("sana-1.6b", 70, 20, 20, 112),
        tiny_image("sana", _SANA, _TINY_SANA, head_dim=16, sizes=squares(256), stride=32, patch=1, has_rope=False),
    ),
    "sana_video": (
        # as diffusers' conversion script sets it; the rest are the class's defaults
        Model(
            *("sana-video-2b", _SANA_VIDEO, 20, 112, 20, (7, 3, 5), ((480, 832),), {"mlp_ratio": 3.0}),
            frames=81,
            temporal_stride=4,
        ),
        tiny_video("sana_video", _SANA_VIDEO, _TINY_SANA_VIDEO),
    ),
    "dit": (
        _dit("dit-s-2", 6, 64, 12),
        _dit("dit-xl-2", 16, 72, 28),
        tiny_image("dit", _DIT, {"out_channels": 8}, has_rope=False),
    ),
    "pixart": (
        image_model("pixart-alpha-xl-2", _PIXART, 16, 72, 28, settings=_ALPHA, has_rope=False),
        image_model("pixart-sigma-xl-2", _PIXART, 16, 72, 28, settings=_SIGMA, has_rope=False),
        tiny_image("pixart", _PIXART, {"cross_attention_dim": 24, "caption_channels": 32}, has_rope=False),
    ),
    "flux": (
        image_model(
            *("flux-dev", _FLUX, 24, 128, 19), settings={"guidance_embeds": True}, more_layers={"num_single_layers": 38}
        ),
        tiny_image("flux", _FLUX, _TINY_FLUX, head_dim=16, **_ONE_SINGLE),
    ),
    "sd3": (
        _sd3("sd3.5-medium", 24, 24, dual_attention_layers=tuple(range(13))),
        _sd3("sd3.5-large", 38, 38),
        tiny_image("sd3", _SD3, _TINY_SD3, has_rope=False),
    ),
    "qwenimage": (
        image_model("qwen-image", _QWEN_IMAGE, 24, 128, 60),
        tiny_image("qwenimage", _QWEN_IMAGE, _TINY_QWEN, head_dim=16),
    ),
    "wan": (
        _wan("wan2.1-1.3b", 12, 8960, 30),
        _wan("wan2.1-14b", 40, 13824, 40),
        # transformer and tokens of the tiny pipeline of this name, with RoPE for larger sizes
        tiny_video(
            "wan", _WAN, _TINY_WAN, heads=3, head_dim=32, layers=4, sizes=squares(64), stride=4, temporal_stride=1
        ),
    ),
    # numbers of diffusers' script that converts the checkpoints
    "skyreels_v2": (
        _wan("skyreels-v2-1.3b", 12, 8960, 30, **_SKYREELS_SIZES),
        _wan("skyreels-v2-14b", 40, 13824, 40, **_SKYREELS_SIZES),
        tiny_video("skyreels_v2", _SKYREELS, _TINY_SKYREELS),
    ),
    "hunyuan_video": (
        Model(
            *("hunyuan-video", _HUNYUAN_VIDEO, 24, 128, 20, (11, 3, 5), ((720, 1280),)),
            frames=129,
            temporal_stride=4,
            more_layers={"num_single_layers": 40},
        ),
        tiny_video("hunyuan_video", _HUNYUAN_VIDEO, _TINY_HUNYUAN, **_ONE_SINGLE),
    ),
    # the class's defaults, and for the 13B models of 0.9.7 heads of 128 channels in 48 layers
    "ltx": (
        _ltx("ltx-video-2b", 64, 28),
        _ltx("ltx-video-13b", 128, 48),
        tiny_video("ltx", _LTX, _TINY_LTX, head_dim=16, sizes=((128, 192),), **_LTX_STRIDES),
    ),
    # numbers as in diffusers' conversion script; the pipeline of 1.5 generates 85 frames when asked for 81
    "cogvideox": (
        _cogvideox("cogvideox-2b", 30, 30, 49, (480, 720)),
        _cogvideox("cogvideox-5b", 48, 42, 49, (480, 720), settings=_ROPE),
        _cogvideox("cogvideox1.5-5b", 48, 42, 85, (768, 1360), settings=_VERSION_1_5, temporal_patch=2),
        tiny_video("cogvideox", _COGVIDEOX, {**_TINY_COG, **_ROPE}, head_dim=16),
    ),
}
