"""Models as data: the configurations that ``mhla bench`` builds, real and tiny, and their sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..settings import Settings, allow


@dataclass(frozen=True)
class Clip(Settings):
    """Frames and size of a video, or of an image, which has one frame."""

    frames: int = field(metadata=allow(above=0))
    """1 for images."""
    fps: float = field(metadata=allow(above=0))
    """Frames per second that a video is sampled at."""
    sizes: tuple[tuple[int, int], ...] = field(metadata=allow(above=0, is_filled=True))
    """(height, width) in pixels."""


@dataclass(frozen=True)
class Model:
    """A configuration of a transformer, and the sizes at which it is measured."""

    name: str
    """For example "wan2.1-1.3b". Names that begin with "tiny" are for trying commands out: these have random weights
    and fewer layers than the trained pipeline of the same name; only tiny-wan has that pipeline's shape.
    """
    transformer: str
    """Class name."""
    heads: int
    head_dim: int
    layers: int
    blocks: tuple[int, ...]
    """Block counts of MHLA."""
    sizes: tuple[tuple[int, int], ...]
    """Heights and widths in pixels to measure by default; on a CPU only the smallest."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class that differ from its defaults, beside heads, head dim and layers."""
    stride: int = 8
    """Pixels per latent along height and width."""
    patch: int = 2
    """Latents per token along height and width."""
    frames: int | None = None
    """Frames of a video; None for an image."""
    temporal_stride: int = 1
    """Frames per latent frame, after the first one."""
    temporal_patch: int = 1
    """Latent frames per token."""
    layers_argument: str = "num_layers"
    """Argument of the class that takes :attr:`layers`."""
    more_layers: Mapping[str, int] = field(default_factory=dict)
    """Arguments of the class that count other layers; building fewer layers also builds fewer of these."""
    has_rope: bool = True
    """Whether self-attentions have RoPE, which is then measured with them."""
    source: str = ""
    """Hub id of the pipeline whose transformer it is, for a dry run of its recipe without the Hub."""

    @property
    def is_video(self) -> bool:
        """Whether inputs have frames."""
        return self.frames is not None

    @property
    def is_tiny(self) -> bool:
        """Whether it is only for trying commands out."""
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
    """Return the frames per latent frame after the first one, and pixels per latent along height and width.

    Args:
        vae: configuration of an autoencoder, with the strides or with stages that each halve.
        of_videos: whether the first is needed; otherwise 1 where it is unknown, as for autoencoders of images.

    Raises:
        ValueError: it holds neither.
    """
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
            f"The configuration of this autoencoder has no strides{' of frames' if spatial else ''}; implement "
            "strides() in the family."
        )
    return int(temporal or 1), int(spatial)
