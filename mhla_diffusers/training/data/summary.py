"""What data consists of: which files are used, by bucket, and why others are left out; before and after encoding."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...families import Clip, trained_family
from ...files import read_json
from ...generation import family_of, pipeline_file
from ...generation.pipelines import (
    check_classes,
    family_named,
    pipeline_source,
    transformer_without_weights,
    usual_clip,
)
from ...reporting import progress, text_table, times
from .batches import in_workers
from .cache import INDEX_NAME, CachedSample, CachedSource, CacheIndex
from .clips import Clips
from .encode import model_header
from .media import NO_CAPTION, Media, Original, check_usable, try_read
from .sources import Source, read_sources

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""
_FIRST_FRAME = Clips(1, 1000.0, ((1, 1),))
"""Fits every file: what is read where no clip is asked for."""
_SAME_RATE = 0.005
"""Relative difference up to which two rates are one, as 29.97 and 30 frames per second."""
_MOST_SIZES, _MOST_NAMES = 12, 3
"""Sizes in a table of files that are not cut, and files that are named of those with one problem."""


@dataclass(frozen=True)
class Entry:
    """A clip, or a file that is left out or not cut, or a prompt of generated latents."""

    name: str
    caption: str = ""
    problem: str | None = None
    """Why it is left out; None if it is used."""
    original: Original | None = None
    """What it is before it is cut; None if left out or unknown."""
    size: tuple[int, ...] | None = None
    """The size that it is cut to, or its own where it is not cut; None if left out or unknown."""
    frames: int = 0
    """Its length, which with its size is its bucket; 0 where it is not cut."""
    start: float = 0.0
    """Time at which it begins in its file, in seconds."""
    latents: tuple[int, ...] | None = None
    """Shape of its latents, if known."""
    media: Media | None = None
    """Where it is read from; None in a cache."""
    sample: CachedSample | None = None
    """Its entry in the index of a cache."""

    @property
    def origin(self) -> str:
        """Its source, as the settings name it; "" for prompts, and for what a cache has left out."""
        where = self.media or self.sample
        return "" if where is None else where.origin


class DataModel:
    """A model as far as data depends on it, read without weights: its default clip, tokens and captions.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a model that is not supported.
    """

    def __init__(self, model: str) -> None:
        self.name = pipeline_source(model)
        self.family = trained_family(family_of(self.name).name)
        self.usual = usual_clip(self.name, self.family)
        self.transformer = transformer_without_weights(self.name, self.family.name)
        self.vae: dict[str, Any] = read_json(pipeline_file(self.name, "vae/config.json"))

    def fitted(self, clips: Clips) -> Clips:
        """Return clips with sizes for the model; ValueError for frames or sizes that it cannot take."""
        import diffusers

        pipeline = getattr(diffusers, str(read_json(pipeline_file(self.name, "model_index.json"))["_class_name"]), None)
        picture = pipeline is not None and self.family.calling.begins_with_picture(pipeline, self.transformer.config)
        return clips.fitted(self.family, self.transformer, self.vae, picture, self.usual)

    def latent_shape(self, clip: Clip) -> tuple[int, ...]:
        """Return the shape of the latents of a clip."""
        return self.family.inputs.latent_shape(self.transformer.config, self.vae, clip)

    def tokens(self, latents: tuple[int, ...]) -> int:
        """Return how many tokens self-attention has for latents of a shape."""
        return prod(self.family.token_grid(self.transformer, torch.empty(1, *latents, device="meta")))

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
        clips: what files are cut to; None if they are not.
        sources: folder of files, as its :class:`Media` or :class:`CachedSample` names it → how it is drawn from.
        model: counts the tokens, if given.
        index: of a folder of latents.
        refusal: why ``mhla encode`` would not begin with these files; None if it would.
    """

    def __init__(
        self,
        source: object,
        entries: Sequence[Entry],
        clips: Clips | None,
        sources: Mapping[str, CachedSource | Source],
        model: DataModel | None = None,
        index: CacheIndex | None = None,
        refusal: str | None = None,
    ) -> None:
        self.source, self.entries, self.clips, self.model, self.index = str(source), entries, clips, model, index
        self.sources, self.refusal = sources, refusal
        self.used = [entry for entry in entries if entry.problem is None]
        self.left_out = [entry for entry in entries if entry.problem is not None]

    def __str__(self) -> str:
        parts = [self.headline()]
        if self.used:
            parts += [text_table(*table, right=True) for table in self.tables()]
        if self.left_out:
            parts.append("Left out:\n" + "\n".join(f"  {line}" for line in self.reasons()))
        return "\n\n".join([*parts, self.captions()])

    def headline(self) -> str:
        """Return how many files are used, and what they are cut to."""
        clips, used = self.clips, {entry.name for entry in self.used}
        found = f"{self.source}: {len(used)} of {len({entry.name for entry in self.entries})} files are"
        if clips is None:
            return f"{found} readable; with --model, or --frames, --fps and --size, it is counted which can be used."
        sizes = ", ".join(map(times, clips.sizes)) if isinstance(clips.sizes, tuple) else clips.sizes
        if clips.lengths == (1,):
            return f"{found} used, as images of {sizes}."
        lengths = " and ".join(", ".join(map(str, clips.lengths)).rsplit(", ", 1))
        seconds = _range([f"{length / clips.fps:.3g}" for length in clips.lengths if length > 1])
        kinds = f"{lengths} frames of {sizes} at {clips.fps:g} fps ({seconds} s)"
        return f"{found} used, as {f'{len(self.used)} clips of ' * (len(self.used) > len(used))}{kinds}."

    def tables(self) -> list[Table]:
        """Return header and rows of each table: by bucket, and by source where there are several."""
        sources: dict[str, list[Entry]] = {}
        for entry in self.used:
            sources.setdefault(entry.origin, []).append(entry)
        if len(sources) < 2:
            return [self._table_of_buckets()]
        # where a source has a share, all have
        drawn = {name: self.sources[name].share or len(sources[name]) * self.sources[name].repeats for name in sources}
        rows = []
        for name, group in sources.items():
            counts = [str(len({entry.name for entry in group})), str(len(group))]
            rows.append([name, *counts, f"{drawn[name] / sum(drawn.values()):.0%}"])
        return [self._table_of_buckets(), (["source", "files", "samples", "share of an epoch"], rows)]

    def _table_of_buckets(self) -> Table:
        """Return a row per bucket, and one of all if there are several."""
        buckets = Counter((entry.frames, entry.size) for entry in self.used)
        shown = {bucket for bucket, _ in buckets.most_common(None if self.clips else _MOST_SIZES)}
        groups: dict[tuple[str, str], list[Entry]] = {}
        for entry in sorted(
            self.used, key=lambda entry: (entry.frames, -buckets[entry.frames, entry.size], entry.size or ())
        ):
            size = times(entry.size) if (entry.frames, entry.size) in shown else "others"
            groups.setdefault((size, str(entry.frames)), []).append(entry)
        if len(groups) > 1:
            groups["all", "all"] = self.used
        rows = [self._row(group) for group in groups.values()]
        several = len({entry.frames for entry in self.used}) > 1
        names = [[size, frames] if several else [size] for size, frames in groups]
        header = list(dict.fromkeys(key for row in reversed(rows) for key in row))
        cells = [[*name, *(row.get(key, "-") for key in header)] for name, row in zip(names, rows, strict=True)]
        return ["size", *["frames"] * several, *header], cells

    def _row(self, group: Sequence[Entry]) -> dict[str, str]:
        """Return column → cell of a bucket, without what is not known."""
        clips, files = self.clips, {entry.name: entry for entry in group}
        row = {"files": str(len(files))}
        if len(self.used) > len({entry.name for entry in self.used}):
            row["clips"] = str(len(group))
        cut = [(entry.original, entry.size) for entry in files.values() if entry.original and entry.size]
        videos = [original for original, _ in cut if original.seconds]
        if clips and cut:
            sizes = sorted((original.height * original.width, original.height, original.width) for original, _ in cut)
            row["of sizes"] = _range([times(size) for _, *size in sizes])
            scales = [scale for original, size in cut if (scale := original.scale_to(size)) > 1]
            row["enlarged"] = f"{len(scales)} (to {max(scales):.2g} x)" if scales else "0"
            row["cropped"] = f"to {max(original.share_cropped(size) for original, size in cut):.0%}"
        if videos:
            row["seconds"] = _range([f"{length:.3g}" for length in sorted(video.seconds for video in videos)])
            row["fps"] = _range([f"{rate:.4g}" for rate in sorted(video.fps for video in videos)])
            if clips:
                row["new rate"] = str(sum(abs(video.fps - clips.fps) > _SAME_RATE * clips.fps for video in videos))
                row["repeated"] = str(sum(video.repeats for video in videos))
            row["hours"] = f"{sum(video.seconds for video in videos) / 3600:.3g}"
        if clips and clips.lengths[-1] > 1:
            seconds = sum(entry.frames / clips.fps for entry in group if entry.frames > 1)
            row["hours used"] = f"{seconds / 3600:.3g}"
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
        alone = {name: source.prefix.strip() for name, source in self.sources.items()}
        files = {entry.name: entry for entry in self.entries}.values()
        used = [entry for entry in files if not entry.problem]
        given = [entry.caption for entry in used if entry.caption != alone.get(entry.origin, "")]
        missing = sum(entry.problem == NO_CAPTION for entry in files) + len(used) - len(given)
        counts = Counter(given)
        shared = [count for count in counts.values() if count > 1]
        text = f"Captions: {missing} missing; {sum(shared)} files share theirs with another"
        if not shared:
            return f"{text}."
        caption, count = counts.most_common(1)[0]
        return f"{text}, the most ({count}) {caption!r}."


def summarize(
    source: str | Path, clips: Clips | None = None, model: str | None = None, workers: int = 0
) -> DataSummary:
    """Summarize a folder of media, tar shards, a YAML file of sources, or a folder of latents.

    Media are read as :func:`~.encode.encode_folder` reads them, so what is left out here is left out there.

    Args:
        source: see :func:`~.sources.read_sources`, or a folder of ``mhla encode`` or ``mhla synthesize``.
        clips: what to cut out of every file; by default what the YAML file says, else the model's, and without a model
            the files are not cut.
        model: Hub id or folder of the pipeline to encode with, or of that which has encoded.
        workers: processes that read files.

    Raises:
        FileNotFoundError: no such source or model, or nothing in it.
        ValueError: damaged metadata or index, clips that the model cannot take or for a folder of latents, or
            latents of another autoencoder.
    """
    described = None if model is None else DataModel(model)
    if (Path(source) / INDEX_NAME).is_file():
        index = CacheIndex.read(Path(source))
        if clips is not None:
            raise ValueError(
                f"{source} is encoded, with {index.header['settings']}; leave out frames, fps and size, or give the "
                "folder of the files."
            )
        if not index.skipped:
            index.check_begun()
        return summarize_cache(index, described)
    sources = read_sources(source)
    clips = clips or sources.clip
    if described is not None:
        clips = described.fitted(clips or Clips.of(described.usual))
    if clips is not None and isinstance(clips.sizes, str):
        raise ValueError(f"sizes={clips.sizes!r} depend on the model; give --model too, or the sizes.")
    media, refusal = sources.media(listing=True), None
    try:
        for part in sources.sources:
            of_source = [item for item in media if item.origin == part.path]
            check_usable(part.path, of_source, needs_captions=part.missing_captions == "error")
    except (ValueError, FileNotFoundError) as error:
        refusal = str(error)
    if described is not None:
        problems = {caption: described.problem_of(caption) for caption in {item.caption for item in media}}
        wrong = [item for item in media if item.problem is None and item.offset is None and problems[item.caption]]
        refusal = refusal or (f"{wrong[0].name}: {problems[wrong[0].caption]}" if wrong else None)
        media = [replace(item, problem=item.problem or problems[item.caption]) for item in media]
    entries = []
    for item, found in progress(
        in_workers(media, partial(_look, clips or _FIRST_FRAME), workers), total=len(media), desc="read"
    ):
        for one in found:
            if isinstance(one, str):
                entries.append(Entry(item.name, item.caption, one, media=item))
                continue
            original, (frames, *size), start = one
            if clips is None:
                own = original.height, original.width
                entries.append(Entry(item.name, item.caption, None, original, own, media=item))
                continue
            latents = None
            if described is not None:
                latents = described.latent_shape(Clip(frames, clips.fps, (tuple(size),)))
            place = tuple(size), frames, start, latents
            entries.append(Entry(item.name, item.caption, None, original, *place, media=item))
    if all(entry.problem for entry in entries):
        refusal = refusal or "none of its files can be used."
    by_path = {one.path: one for one in sources.sources}
    return DataSummary(source, entries, clips, by_path, described, refusal=refusal)


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
    rules = {name: made[name] for name in ("extract", "count", "stride", "upscale") if name in made}
    clips = Clips.read({"frames": made["frames"], "fps": fps, "sizes": made["sizes"], **rules})
    entries = []
    for one in index.samples:
        frames, *size = one.bucket
        original = index.originals.get(one.source)
        place = tuple(size), frames, one.start, one.shape
        entries.append(Entry(one.source, one.caption, None, original, *place, sample=one))
    entries += [Entry(name, problem=problem) for name, problem in index.skipped.items()]
    return DataSummary(index.folder, entries, clips, index.sources, model, index)


def _look(clips: Clips, media: Media) -> Iterator[tuple[Original, tuple[int, ...], float] | str]:
    """Read a file as it would be encoded, and yield what it is, bucket and start of each clip, or a problem."""
    for clip in try_read(clips, media):
        yield clip if isinstance(clip, str) else (clip.original, clip.bucket, clip.start)


def _range(texts: Sequence[str]) -> str:
    """Return the first and the last of sorted values, or the one that both are."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
