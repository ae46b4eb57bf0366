"""A picture of each of some samples: frames as they are trained on, and below them the decoded latents."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from ...devices import choose_device
from ...errors import check
from ...families.training import unscaled_latents
from ...generation import component_identity
from ...reporting import progress
from .cache import LatentCache
from .clips import Clips
from .media import Media, try_read
from .sources import Source, Sources
from .summary import DataModel, DataSummary, Entry

_FRAMES, _SIDE, _GAP = 5, 192, 4
"""Frames of a sheet, the longest side of each in pixels, and pixels between them."""
_SPAN = 10.0
"""Seconds that a sheet shows at most of a file that is not cut; all frames before its last are decoded."""


def write_sheets(
    summary: DataSummary, count: int, folder: Path, device: str = "auto", dtype: torch.dtype = torch.float32
) -> list[str]:
    """Write a JPEG of each of some samples, spread evenly over the buckets.

    Latents are decoded if the summary has a model, and stand below the frames that they were made of.

    Args:
        summary: of media or of latents.
        count: of samples; all if there are fewer.
        folder: gets ``0.jpg`` and so on.
        device: to decode on.
        dtype: of the autoencoder.

    Returns:
        A line per sample: picture, name, caption, and what is missing.

    Raises:
        ValueError: nothing to show, damaged latents, or latents that the autoencoder does not decode by itself.
        OSError: the folder cannot be written.
    """
    check(bool(summary.used), f"{summary.source} holds nothing to show: all of its files are left out.")
    used = sorted(summary.used, key=lambda entry: (entry.frames, entry.size or (0, 0), entry.name, entry.start))
    count = min(count, len(used))
    media = {entry.name: entry.media for entry in used if entry.media}
    index, cache, decode = summary.index, None, None
    if index is not None:
        for name, made in index.sources.items():
            begin = f"{name}/" if index.sources.keys() - {name} else ""
            found = Sources((Source(made.path),)).media(listing=True) if Path(made.path).exists() else []
            media |= {f"{begin}{item.name}": replace(item, problem=None) for item in found}
    if index is not None and summary.model is not None:
        check(
            index.header["settings"].get("steps") != 0,
            f"{summary.source} holds prompts without latents (mhla synthesize --steps 0), so nothing can be decoded; "
            "leave out --preview or --model.",
        )
        cache, decode = LatentCache(index.folder), _Decoder(summary.model, device, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in progress(range(count), desc="preview"):
        entry, missing = used[number * len(used) // count], ""
        rows: list[torch.Tensor] = []
        if entry.name in media:
            source = _pixels(entry, summary.clips, media[entry.name])
            rows, missing = ([], source) if isinstance(source, str) else ([source], "")
        elif index is None or index.sources:
            missing = "the file is not where it was encoded from"
        if cache is not None and decode is not None and entry.sample is not None:
            rows.append(decode(cache.read(entry.sample)["latents"]))
        file = folder / f"{number}.jpg"
        if rows:
            _sheet(rows).save(file, quality=90)
        remark = f" (no source: {missing})" if missing else ""
        lines.append(f"{file if rows else 'no picture'}: {entry.name}{remark}: {entry.caption}")
    return lines


def _pixels(entry: Entry, clips: Clips | None, media: Media) -> torch.Tensor | str:
    """Read the frames of a sample, or of a file that is not cut, small frames of its first seconds; or say why not."""
    if clips is None:
        original = entry.original
        assert original is not None  # without clips every file was read
        scale = _SIDE / max(original.height, original.width)
        size = max(1, round(original.height * scale)), max(1, round(original.width * scale))
        fps = (_FRAMES - 1) / (0.7 * min(original.seconds, _SPAN)) if original.seconds else 1.0
        clips = Clips(_FRAMES if original.seconds else 1, fps, (size,), upscale=True)
    else:  # of one length, but begun where they are with all lengths
        clips = replace(clips, frames=(entry.frames, clips.lengths[-1]))
    for clip in try_read(clips, media):
        if isinstance(clip, str):
            return clip
        if not entry.frames or (clip.start, clip.bucket[0]) == (entry.start, entry.frames):
            return clip.pixels
    return f"it has no {entry.frames} frames from {entry.start:.4g} s on any more"


def _sheet(clips: list[torch.Tensor]) -> Image.Image:
    """Arrange evenly spaced frames of clips, uint8 (3, F, H, W) each, in a row per clip."""
    rows = []
    for clip in clips:
        shown = torch.linspace(0, clip.shape[1] - 1, min(_FRAMES, clip.shape[1])).round().int().tolist()
        rows.append([Image.fromarray(clip[:, number].permute(1, 2, 0).numpy()) for number in shown])
        for picture in rows[-1]:
            picture.thumbnail((_SIDE, _SIDE))
    width, height = rows[0][0].width + _GAP, rows[0][0].height + _GAP
    sheet = Image.new("RGB", (max(map(len, rows)) * width - _GAP, len(rows) * height - _GAP), "white")
    for line, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            sheet.paste(picture, (column * width, line * height))
    return sheet


class _Decoder:
    """Decodes latents of a cache with the autoencoder of a model, the only part of it that is loaded.

    Raises:
        OSError: the model has no such weights.
    """

    def __init__(self, model: DataModel, device: str, dtype: torch.dtype) -> None:
        import diffusers

        self._model, self._device = model, choose_device(device)
        cls = getattr(diffusers, component_identity(model.name, "vae").split(" ")[0])
        self._vae: Any = cls.from_pretrained(model.name, subfolder="vae", torch_dtype=dtype).to(self._device)
        self._takes_frames = any(isinstance(module, nn.Conv3d) for module in self._vae.modules())

    @torch.no_grad()
    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (C, F, H, W) or (C, H, W), without the channels of a picture, to uint8 (3, frames, H, W)."""
        vae, config = self._vae, self._vae.config
        channels = config["z_dim"] if "z_dim" in config else config["latent_channels"]
        check(
            channels in (len(latents), self._model.transformer.config.get("out_channels")),
            f"Latents of {len(latents)} channels are not those of {type(vae).__name__}, which has {channels}: "
            f"{self._model.family.name} changes them after encoding. Leave out --model to see the source alone.",
        )
        frames = latents[:channels] if latents.ndim == 4 else latents[:channels, None]
        batch = unscaled_latents(vae, frames[None] if self._takes_frames else frames.transpose(0, 1))
        # the time of a decoder that also removes noise: none is left
        time = {"temb": torch.zeros(1, device=self._device)} if config.get("timestep_conditioning") else {}
        decoded = vae.decode(batch.to(self._device, vae.dtype), **time).sample.float()
        pixels = decoded[0] if self._takes_frames else decoded.transpose(0, 1)
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
