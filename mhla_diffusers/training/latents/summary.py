"""What data consists of: which files are used, by bucket, and why others are left out; before and after encoding."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...families import Clip
from ...files import read_json
from ...generation import family_of, pipeline_file
from ...generation.pipelines import check_classes, family_named, transformer_without_weights
from ...reporting import progress, text_table, times
from .cache import INDEX_NAME, CacheIndex
from .data import in_workers
from .encode import check_clip, model_header
from .media import NO_CAPTION, Media, Original, list_media, try_read

_FIRST_FRAME = Clip(1, 1000.0, ((64, 64),))
"""Fits every file: what is read where no clip is asked for."""
_SAME_RATE = 0.005
"""Relative difference up to which two rates are one, as 29.97 and 30 frames per second."""
_MOST_SIZES, _MOST_NAMES = 12, 3
"""Sizes in a table of files that are not cut, and files that are named of those with one problem."""


@dataclass(frozen=True)
class Entry:
    """A file or a member of a shard, or a prompt of generated latents."""

    name: str
    caption: str = ""
    problem: str | None = None
    """Why it is left out; None if it is used."""
    original: Original | None = None
    """What it is before it is cut; None if left out or unknown."""
    size: tuple[int, int] | None = None
    """Its bucket: the size that it is cut to, or its own where it is not cut; None if left out or unknown."""
    latents: tuple[int, ...] | None = None
    """Shape of its latents, if known."""
    media: Media | None = None
    """Where it is read from; None in a cache."""
    place: int = 0
    """Number of its sample in the cache."""


class DataModel:
    """A model as far as data depends on it, read without weights: its default clip, tokens and captions.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a model that is not supported.
    """

    def __init__(self, model: str) -> None:
        self.name, self.family = model, family_of(model)
        self.transformer = transformer_without_weights(model, self.family.name)
        self.vae: dict[str, Any] = read_json(pipeline_file(model, "vae/config.json"))

    def check_clip(self, clip: Clip) -> None:
        """Raise ValueError unless the model can take the frames and sizes."""
        import diffusers

        pipeline = getattr(diffusers, str(read_json(pipeline_file(self.name, "model_index.json"))["_class_name"]), None)
        picture = pipeline is not None and self.family.training.keeps_first_frame(pipeline, self.transformer.config)
        check_clip(self.family, self.transformer, self.vae, clip, picture)

    def latent_shape(self, clip: Clip, size: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the latents of a clip of one size."""
        return self.family.forward.latent_shape(self.transformer.config, self.vae, replace(clip, sizes=(size,)))

    def tokens(self, latents: tuple[int, ...]) -> int:
        """Return how many tokens self-attention has for latents of a shape."""
        return prod(self.family.forward.token_grid(self.transformer, torch.empty(1, *latents, device="meta")))

    def problem_of(self, caption: str) -> str | None:
        """Return why a caption cannot be used; None for any text, unless the model takes classes."""
        try:
            check_classes(self.name, self.family.name, [caption])
        except ValueError as error:
            return str(error)
        return None

    def check_made(self, index: CacheIndex) -> None:
        """Raise ValueError unless latents were made with the autoencoder of the model."""
        made, wanted = index.header.get("vae"), model_header(self.name, self.family)["vae"]
        if made != wanted:
            raise ValueError(
                f"{index.folder} was made with vae={made!r}, but {self.name} has {wanted!r}; give the --model that it "
                "was encoded with."
            )


class DataSummary:
    """Numbers of a folder of media or of latents.

    Args:
        source: its name.
        entries: all that was found.
        clip: what files are cut to; None if they are not.
        model: counts the tokens, if given.
        index: of a folder of latents.
    """

    def __init__(
        self,
        source: object,
        entries: Sequence[Entry],
        clip: Clip | None,
        model: DataModel | None = None,
        index: CacheIndex | None = None,
    ) -> None:
        self.source, self.entries, self.clip, self.model, self.index = str(source), entries, clip, model, index
        self.used = [entry for entry in entries if entry.problem is None]
        self.left_out = [entry for entry in entries if entry.problem is not None]

    def __str__(self) -> str:
        parts = [self.headline()]
        if self.used:
            parts.append(text_table(*self.table(), right=True))
        if self.left_out:
            parts.append("Left out:\n" + "\n".join(f"  {line}" for line in self.reasons()))
        return "\n\n".join([*parts, self.captions()])

    def headline(self) -> str:
        """Return how many files are used, and what they are cut to."""
        found = f"{self.source}: {len(self.used)} of {len(self.entries)} files are"
        if self.clip is None:
            return f"{found} readable; with --model, or --frames, --fps and --size, it is counted which can be used."
        sizes = ", ".join(map(times, self.clip.sizes))
        if self.clip.frames == 1:
            return f"{found} used, as images of {sizes}."
        seconds = self.clip.frames / self.clip.fps
        return f"{found} used, as {self.clip.frames} frames of {sizes} at {self.clip.fps:g} fps ({seconds:.3g} s)."

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of a table: a row per bucket, and one of all if there are several."""
        counts = Counter(entry.size for entry in self.used)
        shown = set(counts) if self.clip else {size for size, _ in counts.most_common(_MOST_SIZES)}
        groups: dict[str, list[Entry]] = {}
        for entry in sorted(self.used, key=lambda entry: (-counts[entry.size], entry.size or (0, 0))):
            groups.setdefault(times(entry.size) if entry.size in shown else "others", []).append(entry)
        if len(groups) > 1:
            groups["all"] = self.used
        rows = {name: self._row(group) for name, group in groups.items()}
        header = list(dict.fromkeys(key for row in reversed(rows.values()) for key in row))
        return ["size", *header], [[name, *(row.get(key, "-") for key in header)] for name, row in rows.items()]

    def _row(self, group: Sequence[Entry]) -> dict[str, str]:
        """Return column → cell of a bucket, without what is not known."""
        clip, row = self.clip, {"files": str(len(group))}
        cut = [(entry.original, entry.size) for entry in group if entry.original and entry.size]
        videos = [original for original, _ in cut if original.seconds]
        if clip and cut:
            sizes = sorted((original.height * original.width, original.height, original.width) for original, _ in cut)
            row["of sizes"] = _range([times(size) for _, *size in sizes])
            scales = [scale for original, size in cut if (scale := original.scale_to(size)) > 1]
            row["enlarged"] = f"{len(scales)} (to {max(scales):.2g} x)" if scales else "0"
            row["cropped"] = f"to {max(original.share_cropped(size) for original, size in cut):.0%}"
        if videos:
            row["seconds"] = _range([f"{length:.3g}" for length in sorted(video.seconds for video in videos)])
            row["fps"] = _range([f"{rate:.4g}" for rate in sorted(video.fps for video in videos)])
            if clip:
                row["new rate"] = str(sum(abs(video.fps - clip.fps) > _SAME_RATE * clip.fps for video in videos))
                row["repeated"] = str(sum(video.repeats for video in videos))
            row["hours"] = f"{sum(video.seconds for video in videos) / 3600:.3g}"
        if clip and clip.frames > 1:
            row["hours used"] = f"{len(group) * clip.frames / clip.fps / 3600:.3g}"
        shapes = {entry.latents for entry in group if entry.latents}
        if len(shapes) == 1:
            row["latents"] = times(*shapes)
        if self.model and shapes:
            row["tokens"] = _range([str(count) for count in sorted(map(self.model.tokens, shapes))])
        return row

    def reasons(self) -> list[str]:
        """Return a line per kind of problem: how many files, one problem in full, and the first names."""
        groups: dict[str, list[Entry]] = {}
        for entry in self.left_out:
            groups.setdefault(str(entry.problem).partition(":")[0], []).append(entry)
        lines = []
        for group in sorted(groups.values(), key=len, reverse=True):
            names = ", ".join(entry.name for entry in group[:_MOST_NAMES]) + ", …" * (len(group) > _MOST_NAMES)
            lines.append(f"{len(group)}  {names}: {str(group[0].problem).rstrip('.')}")
        return lines

    def captions(self) -> str:
        """Return how many captions are missing, and how many files share theirs with another."""
        missing = sum(entry.problem == NO_CAPTION for entry in self.entries)
        counts = Counter(entry.caption for entry in self.used if entry.caption)
        shared = [count for count in counts.values() if count > 1]
        text = f"Captions: {missing} missing; {sum(shared)} files share theirs with another"
        if not shared:
            return f"{text}."
        caption, count = counts.most_common(1)[0]
        return f"{text}, the most ({count}) {caption!r}."


def summarize(source: str | Path, clip: Clip | None = None, model: str | None = None, workers: int = 0) -> DataSummary:
    """Summarize a folder of media, tar shards, or a folder of latents.

    Media are read as :func:`~.encode.encode_folder` reads them, so what is left out here is left out there.

    Args:
        source: see :func:`~.media.find_media`, or a folder of ``mhla encode`` or ``mhla synthesize``.
        clip: what to cut out of every file; by default the model's, and without a model the files are not cut.
        model: Hub id or folder of the pipeline to encode with, or of that which has encoded.
        workers: processes that read files.

    Raises:
        FileNotFoundError: no such source or model, or nothing in it.
        ValueError: damaged metadata or index, a clip that the model cannot take or for a folder of latents, or
            latents of another autoencoder.
    """
    described = None if model is None else DataModel(model)
    if (Path(source) / INDEX_NAME).is_file():
        index = CacheIndex.read(Path(source))
        if clip is not None:
            raise ValueError(
                f"{source} is encoded, with {index.header['settings']}; leave out frames, fps and size, or give the "
                "folder of the files."
            )
        return summarize_cache(index, described)
    if described is not None:
        clip = clip or described.family.default_clip
        described.check_clip(clip)
    media = list_media(source)
    if described is not None:
        problems = {caption: described.problem_of(caption) for caption in {item.caption for item in media}}
        media = [replace(item, problem=item.problem or problems[item.caption]) for item in media]
    entries = []
    looking = in_workers(media, partial(_look, clip or _FIRST_FRAME), workers)
    for item, problem, original in progress(looking, total=len(media), desc="read"):
        size = latents = None
        if original is not None:
            shape = original.height, original.width
            size = shape if clip is None else clip.size_for(*shape)
            latents = None if described is None or clip is None else described.latent_shape(clip, size)
        entries.append(Entry(item.name, item.caption, problem, original, size, latents, item))
    return DataSummary(source, entries, clip, described)


def summarize_cache(index: CacheIndex, model: DataModel | None = None) -> DataSummary:
    """Summarize latents; files are not read again.

    Raises:
        ValueError: they were made with another model's autoencoder.
    """
    if model is not None:
        model.check_made(index)
    made = index.header["settings"]
    # generated latents have no rate of their own
    fps = made["fps"] if "fps" in made else family_named(index.header["family"]).default_clip.fps
    clip = Clip(made["frames"], fps, tuple((height, width) for height, width in made["sizes"]))
    entries = []
    for place, sample in enumerate(index.samples):
        original = index.originals.get(sample.source)
        size = None
        if original is not None:
            size = clip.size_for(original.height, original.width)
        elif len(clip.sizes) == 1:
            size = clip.sizes[0]
        entries.append(Entry(sample.source, sample.caption, None, original, size, sample.shape, place=place))
    entries += [Entry(name, problem=problem) for name, problem in index.skipped.items()]
    return DataSummary(index.folder, entries, clip, model, index)


def _look(clip: Clip, media: Media) -> tuple[Media, str | None, Original | None]:
    """Read a file as it would be encoded, and return why it cannot be, or what it is, without the pixels."""
    item, pixels, original = try_read(clip, media)
    return item, pixels if isinstance(pixels, str) else None, original


def _range(texts: Sequence[str]) -> str:
    """Return the first and the last of sorted values, or the one that both are."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
