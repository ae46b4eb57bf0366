"""What data consists of: which clips are used, by bucket and source, and why files are left out; pictures of some."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from ...devices import choose_device
from ...errors import check
from ...families import Clip, trained_family
from ...families.training import unscaled_latents
from ...files import read_json
from ...generation.pipelines import (
    check_classes,
    component_identity,
    family_of,
    pipeline_file,
    pipeline_source,
    transformer_without_weights,
    usual_clip,
)
from ...reporting import progress, text_table, times
from .cache import INDEX_NAME, CachedSample, CachedSource, CacheIndex, LatentCache
from .clips import Clips
from .encode import model_header
from .media import Media, read_ahead, try_read
from .sources import Source, read_sources

_MOST_REASONS = 20
"""Files that are named of those left out."""
_FRAMES, _SIDE, _GAP = 5, 192, 4
"""Frames of a picture, the longest side of each in pixels, and pixels between them."""


class DataModel:
    """A model as far as data depends on it, read without weights: its default clip, tokens and captions.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a model that is not supported.
    """

    def __init__(self, model: str) -> None:
        import diffusers

        self.name = pipeline_source(model)
        self.family = trained_family(family_of(self.name).name)
        self.usual = usual_clip(self.name, self.family)
        self.transformer = transformer_without_weights(self.name, self.family.name)
        self.vae: dict[str, Any] = read_json(pipeline_file(self.name, "vae/config.json"))

        pipeline = getattr(diffusers, str(read_json(pipeline_file(self.name, "model_index.json"))["_class_name"]), None)
        self.begins_with_picture: bool | None = None
        """Whether its pipeline gives the first frame to the transformer; None for a user's own pipeline."""
        if pipeline is not None:
            config = self.transformer.config
            self.begins_with_picture = self.family.calling.begins_with_picture(pipeline, config)

    def fitted(self, clips: Clips) -> Clips:
        """Return clips with sizes for the model; ValueError for frames or sizes that it cannot take."""
        picture = bool(self.begins_with_picture)
        return clips.fitted(self.family, self.transformer, self.vae, picture, self.usual)

    def latent_shape(self, bucket: tuple[int, ...], fps: float) -> tuple[int, ...]:
        """Return the shape of the latents of a clip."""
        frames, height, width = bucket
        return self.family.inputs.latent_shape(self.transformer.config, self.vae, Clip(frames, fps, ((height, width),)))

    def tokens(self, latents: tuple[int, ...]) -> int:
        """Return how many tokens self-attention has for latents of a shape."""
        return prod(self.family.token_grid(self.transformer, torch.empty(1, *latents, device="meta")))


@dataclass(frozen=True)
class Entry:
    """A clip, or a file that is left out."""

    name: str
    caption: str
    problem: str | None = None
    """Why it is left out; None if it is used."""
    bucket: tuple[int, ...] = ()
    """Frames, height and width."""
    start: float = 0.0
    """Time at which it begins in its file, in seconds."""
    origin: str = ""
    """Its source, as the settings name it."""
    media: Media | None = None
    """Where it is read from; None in a cache."""
    sample: CachedSample | None = None
    """Its entry in the index of a cache."""


@dataclass(frozen=True)
class DataSummary:
    """Numbers of a folder of media or of latents; as text a table."""

    source: str
    entries: Sequence[Entry]
    clips: Clips
    """What files are cut to."""
    sources: Mapping[str, CachedSource | Source]
    """Name of a source → how it is drawn from."""
    model: DataModel | None = None
    """Counts tokens, if given."""

    @property
    def used(self) -> list[Entry]:
        """The clips."""
        return [entry for entry in self.entries if entry.problem is None]

    def __str__(self) -> str:
        names, used = {entry.name for entry in self.entries}, {entry.name for entry in self.used}
        lines = [f"{self.source}: {len(used)} of {len(names)} files are used, as {len(self.used)} clips."]
        if used:
            lines += self._tables()
        if left_out := [entry for entry in self.entries if entry.problem is not None]:
            shown = [f"  {entry.name}: {entry.problem}" for entry in left_out[:_MOST_REASONS]]
            more = [f"  and {len(left_out) - len(shown)} more"] * (len(left_out) > len(shown))
            lines.append("\n".join(["Left out:", *shown, *more]))
        captions = Counter({entry.name: entry.caption for entry in self.used}.values())
        shared = sum(count for count in captions.values() if count > 1)
        return "\n\n".join([*lines, f"Captions: {shared} files share theirs with another."])

    def _tables(self) -> list[str]:
        """Return a table of buckets, and one of sources where there are several."""
        buckets: dict[tuple[int, ...], list[Entry]] = {}
        for entry in sorted(self.used, key=lambda entry: entry.bucket):
            buckets.setdefault(entry.bucket, []).append(entry)
        header = ["size", "frames", "files", "clips", "hours", *["latents", "tokens"] * (self.model is not None)]
        rows = []
        for bucket, group in buckets.items():
            frames, *size = bucket
            hours = len(group) * frames / self.clips.fps / 3600 if frames > 1 else 0
            row = [times(size), str(frames), str(len({entry.name for entry in group})), str(len(group)), f"{hours:.3g}"]
            if self.model is not None:
                latents = self.model.latent_shape(bucket, self.clips.fps)
                row += [times(latents), str(self.model.tokens(latents))]
            rows.append(row)
        tables = [text_table(header, rows, right=True)]
        counts = Counter(entry.origin for entry in self.used)
        if len(counts) > 1:
            # where a source has a share, all have
            drawn = {
                name: self.sources[name].share or count * self.sources[name].repeats for name, count in counts.items()
            }
            rows = [[name, str(counts[name]), f"{drawn[name] / sum(drawn.values()):.0%}"] for name in counts]
            tables.append(text_table(["source", "clips", "share of an epoch"], rows, right=True))
        return tables


def summarize(
    source: str | Path, clips: Clips | None = None, model: str | None = None, workers: int = 1
) -> DataSummary:
    """Summarize a folder of media, a YAML file of sources, or a folder of latents.

    Media are read as by :func:`~.encode.encode_folder`, so both leave out the same files.

    Args:
        source: see :func:`~.sources.read_sources`, or a folder of ``mhla encode`` or ``mhla synthesize``.
        clips: what to cut out of every file; by default what the YAML file says, else the model's.
        model: Hub id or folder of the pipeline to encode with, or of that which has encoded.
        workers: threads that read files.

    Raises:
        FileNotFoundError: no such source or model, or nothing in it.
        ValueError: damaged metadata or index, no clips or such that the model cannot take or for a folder of latents,
            captions that are not a class of the DiT, or latents of another autoencoder.
    """
    described = None if model is None else DataModel(model)
    if (Path(source) / INDEX_NAME).is_file():
        index = LatentCache(source).index
        check(
            clips is None,
            f"{source} is encoded, with {index.header['settings']}; leave out frames, fps and size, or give the folder "
            "of the files.",
        )
        return summarize_cache(index, described)
    sources = read_sources(source)
    clips = clips or sources.clip
    if described is not None:
        clips = described.fitted(clips or Clips.of(described.usual))
    if clips is None or isinstance(clips.sizes, str):
        raise ValueError(f"What is cut out of {source} depends on the model; give --model, or frames, fps and size.")
    media = sources.media()
    if described is not None:
        check_classes(described.name, described.family.name, {item.caption for item in media if item.problem is None})
    entries = []
    for item, found in progress(read_ahead(media, clips, workers), total=len(media), desc="read"):
        for clip in found:
            if isinstance(clip, str):
                entries.append(Entry(item.name, item.caption, clip, origin=item.origin, media=item))
            else:
                entries.append(Entry(item.name, item.caption, None, clip.bucket, clip.start, item.origin, item))
    return DataSummary(str(source), entries, clips, {one.path: one for one in sources.sources}, described)


def summarize_cache(index: CacheIndex, model: DataModel | None = None) -> DataSummary:
    """Summarize latents; files are not read again.

    Raises:
        ValueError: they were made with another model's autoencoder.
    """
    if model is not None:
        made, wanted = index.header.get("vae"), model_header(model.name, model.family)["vae"]
        check(
            made == wanted,
            f"{index.folder} was made with vae={made!r}, but {model.name} has {wanted!r}; give the --model that it was "
            "encoded with.",
        )
    made = index.header["settings"]
    clips = Clips(tuple(made["frames"]), made.get("fps", 1.0), made["sizes"])
    entries = [
        Entry(one.source, one.caption, None, one.bucket, one.start, one.origin, sample=one) for one in index.samples
    ]
    entries += [Entry(name, "", problem) for name, problem in index.skipped.items()]
    return DataSummary(str(index.folder), entries, clips, index.sources, model)


def write_pictures(
    summary: DataSummary, count: int, folder: Path, device: str = "auto", dtype: torch.dtype = torch.float32
) -> list[str]:
    """Write a JPEG of each of some clips, evenly over the buckets: frames as they are trained on, or decoded latents.

    Args:
        summary: of media, or of latents with their model.
        count: of clips; all if there are fewer.
        folder: gets ``0.jpg`` and so on.
        device: to decode on.
        dtype: of the autoencoder.

    Returns:
        A line per clip: picture, name and caption.

    Raises:
        ValueError: nothing to show, damaged latents, or latents that the autoencoder does not decode by itself.
        OSError: the folder cannot be written.
    """
    used = sorted(summary.used, key=lambda entry: (entry.bucket, entry.name, entry.start))
    check(bool(used), f"{summary.source} holds nothing to show: all of its files are left out.")
    cache = decode = None
    if used[0].media is None:
        check(summary.model is not None, "Latents are decoded with the model that encoded them; give --model.")
        cache, decode = LatentCache(summary.source), _Decoder(summary.model, device, dtype)  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    lines, count = [], min(count, len(used))
    for number in progress(range(count), desc="preview"):
        entry, file = used[number * len(used) // count], folder / f"{number}.jpg"
        if cache is not None and decode is not None and entry.sample is not None:
            pixels = decode(cache.read(entry.sample)["latents"])
        else:
            assert entry.media is not None
            found = (clip for clip in try_read(summary.clips, entry.media) if not isinstance(clip, str))
            pixels = next(clip for clip in found if (clip.start, clip.bucket) == (entry.start, entry.bucket)).pixels
        _row(pixels).save(file, quality=90)
        lines.append(f"{file}: {entry.name}: {entry.caption}")
    return lines


def _row(clip: torch.Tensor) -> Image.Image:
    """Arrange evenly spaced frames of a clip, uint8 (3, F, H, W), in a row."""
    shown = torch.linspace(0, clip.shape[1] - 1, min(_FRAMES, clip.shape[1])).round().int().tolist()
    pictures = [Image.fromarray(clip[:, number].permute(1, 2, 0).numpy()) for number in shown]
    for picture in pictures:
        picture.thumbnail((_SIDE, _SIDE))
    width = pictures[0].width + _GAP
    row = Image.new("RGB", (len(pictures) * width - _GAP, pictures[0].height), "white")
    for column, picture in enumerate(pictures):
        row.paste(picture, (column * width, 0))
    return row


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
            f"{self._model.family.name} changes them after encoding, and they cannot be shown.",
        )
        frames = latents[:channels] if latents.ndim == 4 else latents[:channels, None]
        batch = unscaled_latents(vae, frames[None] if self._takes_frames else frames.transpose(0, 1))
        # the time of a decoder that also removes noise: none is left
        time = {"temb": torch.zeros(1, device=self._device)} if config.get("timestep_conditioning") else {}
        decoded = vae.decode(batch.to(self._device, vae.dtype), **time).sample.float()
        pixels = decoded[0] if self._takes_frames else decoded.transpose(0, 1)
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
