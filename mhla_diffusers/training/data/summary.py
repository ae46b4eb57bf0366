"""What data consists of: which clips are used, by bucket and source, and why files are left out; pictures of some."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from ...reporting import progress, text_table, times
from .cache import INDEX_NAME, CachedClip, CachedFile, read_index
from .clips import Clips
from .media import ClipRead, Media, read_clips, read_files
from .model import DataModel
from .sources import read_sources

_MOST_REASONS = 20
"""Files that are named of those left out."""
_FRAMES, _SIDE = 5, 192
"""Frames of a picture, and its height in pixels at most."""


@dataclass(frozen=True)
class DataSummary:
    """Files and their clips; as text a table."""

    source: str
    files: Sequence[CachedFile]
    model: DataModel | None = None
    """Counts tokens, if given."""
    shares: Mapping[str, float] | None = None
    """Source → its share of an epoch."""

    def __str__(self) -> str:
        used = [file for file in self.files if file.clips]
        clips = [clip for file in used for clip in file.clips]
        lines = [f"{self.source}: {len(used)} of {len(self.files)} files are used, as {len(clips)} clips."]
        header = ["size", "frames", "clips", *["latents", "tokens"] * (self.model is not None)]
        rows = []
        for bucket, count in sorted(Counter(clip.bucket for clip in clips).items()):
            rows.append([times(bucket[1:]), str(bucket[0]), str(count)])
            if self.model is not None:
                latents = self.model.latent_shape(bucket)
                rows[-1] += [times(latents), str(self.model.tokens(latents))]
        if rows:
            lines.append(text_table(header, rows, right=True))
        counts = Counter(file.origin for file in used for _ in file.clips)
        if len(counts) > 1:
            drawn = {name: (self.shares or counts)[name] for name in counts}
            rows = [[name, str(counts[name]), f"{drawn[name] / sum(drawn.values()):.0%}"] for name in counts]
            lines.append(text_table(["source", "clips", "share of an epoch"], rows, right=True))
        if left_out := [f"  {file.name}: {file.problem}" for file in self.files if file.problem is not None]:
            more = [f"  and {len(left_out) - _MOST_REASONS} more"] * (len(left_out) > _MOST_REASONS)
            lines.append("\n".join(["Left out:", *left_out[:_MOST_REASONS], *more]))
        return "\n\n".join(lines)


def summarize(source: str | Path, clips: Clips | None = None, model: str | None = None) -> DataSummary:
    """Summarize a folder of latents, or one of media (or a YAML file of sources) as it would be encoded.

    ``clips`` are by default those of the YAML file, else the model's own. FileNotFoundError or ValueError as of
    :func:`~.encode.encode_folder`.
    """
    data = None if model is None else DataModel(model)
    if (Path(source) / INDEX_NAME).is_file():
        header, files = read_index(Path(source))
        return DataSummary(str(source), files, data, header["shares"])
    media, clips, shares = _media_and_clips(source, clips, data)
    found = read_files(media, clips, lambda _, clip: CachedClip(clip.bucket, clip.start))
    return DataSummary(str(source), list(progress(found, total=len(media), desc="read")), data, shares)


def write_pictures(source: Path, count: int, folder: Path, clips: Clips | None, model: str | None) -> list[str]:
    """Write a JPEG of the first clip of some files, evenly over all, as it is trained on: frames in a row.

    Returns a line per clip: picture, name and caption. Raises what :func:`summarize` does.
    """
    media, clips, _ = _media_and_clips(source, clips, None if model is None else DataModel(model))
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for item in media[:: max(1, len(media) // count)][:count]:
        clip = next(read_clips(item, clips))
        if isinstance(clip, ClipRead):
            file = folder / f"{len(lines)}.jpg"
            _row(clip.pixels).save(file, quality=90)
            lines.append(f"{file}: {item.name}: {item.caption}")
    return lines


def _media_and_clips(
    source: str | Path, clips: Clips | None, model: DataModel | None
) -> tuple[list[Media], Clips, dict[str, float]]:
    sources = read_sources(source)
    clips, media = clips or sources.clip, sources.media()
    if model is not None:
        clips = model.fitted(clips)
        model.check_captions(caption for item in media if item.problem is None for caption in item.captions)
    if clips is None or isinstance(clips.sizes, str):
        raise ValueError(f"What is cut out of {source} depends on the model; give --model, or frames, fps and size.")
    return media, clips, sources.shares


def _row(clip: torch.Tensor) -> Image.Image:
    """Arrange evenly spaced frames of a clip, uint8 (3, F, H, W), in a row."""
    shown = torch.linspace(0, clip.shape[1] - 1, min(_FRAMES, clip.shape[1])).round().int().tolist()
    row = Image.fromarray(clip[:, shown].permute(2, 1, 3, 0).flatten(1, 2).numpy())
    row.thumbnail((_FRAMES * _SIDE, _SIDE))
    return row
