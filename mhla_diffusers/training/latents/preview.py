"""One HTML page of data: its numbers, and frames of some samples as they are trained on, beside their latents."""

from dataclasses import replace
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from ...devices import choose_device
from ...families.training import unscaled_latents
from ...files import write_text
from ...generation import component_identity
from ...reporting import data_url, html_page, html_table, progress, times
from ...settings import check
from .cache import LatentCache
from .clips import Clips
from .media import Media, try_read
from .sources import Source, Sources
from .summary import DataModel, DataSummary, Entry

_FRAMES, _SIDE, _GAP = 5, 192, 4
"""Frames of a contact sheet, the longest side of each in pixels, and pixels between them."""
_SPAN = 10.0
"""Seconds that a contact sheet shows at most of a file that is not cut; all frames before its last are decoded."""


def write_preview(
    summary: DataSummary, count: int, file: Path, device: str = "auto", dtype: torch.dtype = torch.float32
) -> int:
    """Write a self-contained page of a summary and of samples spread evenly over its buckets.

    Latents are decoded if the summary has a model, and shown beside the files that they were made of.

    Args:
        summary: of media or of latents.
        count: of samples; all if there are fewer.
        file: the page.
        device: to decode on.
        dtype: of the autoencoder.

    Returns:
        How many samples it shows.

    Raises:
        ValueError: nothing to show, damaged latents, or latents that the autoencoder does not decode by itself.
        OSError: the page cannot be written.
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
            "leave out the preview or the model.",
        )
        cache, decode = LatentCache(index.folder), _Decoder(summary.model, device, dtype)
    parts = [f"<p>{escape(summary.headline())}</p>", *(html_table(*table) for table in summary.tables())]
    parts += [f"<p>{escape(summary.captions())}</p>"]
    if summary.left_out:
        parts.append(f"<h2>Left out</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in summary.reasons())}</ul>")
    parts.append(f"<h2>{count} of {len(used)} samples</h2>")
    for number in progress(range(count), desc="preview"):
        entry = used[number * len(used) // count]
        parts.append(f"<h3>{escape(entry.name)}</h3><p>{escape(_facts(entry, summary.clips))}</p>")
        parts.append(f"<blockquote>{escape(entry.caption)}</blockquote>")
        source: torch.Tensor | str = "the file is not where it was encoded from"
        if entry.name in media:
            source = _pixels(entry, summary.clips, media[entry.name])
        if index is None or index.sources:
            parts.append(_figure("source", source))
        if cache is not None and decode is not None and entry.sample is not None:
            pixels = decode(cache.read(entry.sample)["latents"])
            parts.append(_figure(f"decoded latents{_distance(source, pixels)}", pixels))
    write_text(html_page(f"Data in {summary.source}", "".join(parts)), file)
    return count


def _facts(entry: Entry, clips: Clips | None) -> str:
    """Return what a file was and what it is cut to."""
    parts, original, size = [], entry.original, entry.size
    if original is not None:
        video = f", {original.fps:.4g} fps, {original.seconds:.3g} s" if original.seconds else ""
        parts.append(f"{original.height}x{original.width}{video}")
    if clips is not None:
        frames, rate = (f"{entry.frames} frames of ", f" at {clips.fps:g} fps") if entry.frames > 1 else ("", "")
        begin = f" from {entry.start:.4g} s" if entry.start else ""
        parts.append(f"cut to {frames}{times(size)}{rate}{begin}")
    if clips is not None and original is not None and size is not None:
        scale = original.scale_to(size)
        parts += [f"enlarged {scale:.2g} times"] * (scale > 1)
        parts += [f"{original.share_cropped(size):.0%} cropped", *["frames repeated"] * original.repeats]
    return "; ".join(parts)


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


def _figure(title: str, pixels: torch.Tensor | str) -> str:
    """Make a contact sheet of a clip, uint8 (3, F, H, W), or say why there is none."""
    if isinstance(pixels, str):
        return f"<p>No {escape(title)}: {escape(pixels)}.</p>"
    frames = pixels.shape[1]
    shown = sorted({round(place * (frames - 1) / (_FRAMES - 1)) for place in range(_FRAMES)})
    pictures = [Image.fromarray(pixels[:, number].permute(1, 2, 0).numpy()) for number in shown]
    for picture in pictures:
        picture.thumbnail((_SIDE, _SIDE))
    width, height = pictures[0].size
    sheet = Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height), "white")
    for column, picture in enumerate(pictures):
        sheet.paste(picture, (column * (width + _GAP), 0))
    file = BytesIO()
    sheet.save(file, "JPEG", quality=90)
    caption = escape(f"{title}, frames {', '.join(map(str, shown))}" if frames > 1 else title)
    return (
        f'<figure style="margin: 0.5rem 0"><img src="{data_url(file.getvalue(), "image/jpeg")}" alt="{caption}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _distance(source: torch.Tensor | str, decoded: torch.Tensor) -> str:
    """Return the PSNR of decoded latents, if the source is there and has as many frames."""
    if isinstance(source, str) or source.shape != decoded.shape:
        return ""
    error = (source.float() - decoded.float()).square().mean().clamp(min=1e-6)
    return f" (PSNR {10 * (255**2 / error).log10():.1f} dB)"


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
            f"{self._model.family.name} changes them after encoding. Leave out --model to preview the source alone.",
        )
        frames = latents[:channels] if latents.ndim == 4 else latents[:channels, None]
        batch = unscaled_latents(vae, frames[None] if self._takes_frames else frames.transpose(0, 1))
        # the time of a decoder that also removes noise: none is left
        time = {"temb": torch.zeros(1, device=self._device)} if config.get("timestep_conditioning") else {}
        decoded = vae.decode(batch.to(self._device, vae.dtype), **time).sample.float()
        pixels = decoded[0] if self._takes_frames else decoded.transpose(0, 1)
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
