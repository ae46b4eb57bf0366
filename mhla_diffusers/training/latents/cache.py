"""Latents and conditioning on disk: safetensors shards with an index.

::

    folder/
      index.json                  what made it, one entry per sample, and the SHA-256 of every file
      empty.safetensors           conditioning of the empty prompt
      shard-00000.safetensors     tensors "<sample>/latents", "<sample>/encoder_hidden_states", …
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...config import check
from ...families import Clip, Sample
from ...files import check_hash, file_hash, read_json, write_json, write_tensors

INDEX_NAME = "index.json"
FORMAT_VERSION = 1
BEGINS_WITH_PICTURE = "begins_with_picture"
"""Setting of a cache for image-to-video by a first frame without noise."""
_EMPTY_NAME = "empty.safetensors"


@dataclass(frozen=True)
class CacheHeader:
    """What a cache was made with."""

    family: str
    vae: str
    """Class and configuration of the autoencoder, as text."""
    text_encoder: str
    """The same for the text encoder; "none" for DiT."""
    settings: dict[str, Any]
    """Settings of the encoding: frames, fps and sizes, or steps and guidance of the teacher."""


@dataclass(frozen=True)
class CachedSample:
    """One entry of the index."""

    source: str
    """Source file, or number of the prompt."""
    caption: str
    shard: str
    shape: tuple[int, ...]
    """Of the latents."""


@dataclass
class CacheIndex:
    """Content of ``index.json``."""

    header: CacheHeader
    samples: list[CachedSample] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Skipped files, and why."""
    hashes: dict[str, str] = field(default_factory=dict)
    """File of the cache → SHA-256 of its content; empty in caches of earlier versions."""

    @classmethod
    def read(cls, folder: Path) -> "CacheIndex":
        """Read ``index.json``."""
        path = folder / INDEX_NAME
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no latents: {INDEX_NAME} is missing. Make them with mhla encode.")
        try:
            content = read_json(path)
            version = content["format_version"]
            check(version == FORMAT_VERSION, f"format version {version!r} is unknown; known: {FORMAT_VERSION}")
            samples = [CachedSample(**{**entry, "shape": tuple(entry["shape"])}) for entry in content["samples"]]
            skipped, hashes = dict(content["skipped"]), dict(content.get("hashes", {}))
            return cls(CacheHeader(**content["header"]), samples, skipped, hashes)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no valid index: {error}.") from error


class LatentCache:
    """The samples of a cache, read lazily except for the empty prompt.

    Before a file is first read, its content is compared with its hash. Copies in data workers share which files have
    been checked.

    Args:
        folder: made by ``mhla encode`` or ``mhla synthesize``.

    Raises:
        FileNotFoundError: no cache there, or files are missing.
        ValueError: a damaged index or empty prompt, or no samples.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = CacheIndex.read(self.folder)
        self._way_out = f"Delete {self.folder} and make it again with mhla encode or mhla synthesize."
        check(bool(self.index.samples), f"The cache {self.folder} holds no samples.")
        self._files = sorted({sample.shard for sample in self.index.samples} | set(self.index.hashes))
        self._is_checked = torch.zeros(len(self._files), dtype=torch.bool).share_memory_()
        missing = [name for name in self._files if not (self.folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"The cache {self.folder} lacks {', '.join(missing[:5])}. {self._way_out}")
        self.shapes = [sample.shape for sample in self.index.samples]
        self.empty: Sample | None = self._read(_EMPTY_NAME) if (self.folder / _EMPTY_NAME).is_file() else None

    def __len__(self) -> int:
        return len(self.index.samples)

    def __getitem__(self, index: int) -> Sample:
        """One sample; ValueError if its shard is damaged."""
        return self._read(self.index.samples[index].shard, f"{index}/")

    def _read(self, name: str, prefix: str = "") -> Sample:
        """The tensors of a file whose names begin with a prefix, by their names without it."""
        file, hashes = self.folder / name, self.index.hashes
        try:
            if name in hashes and not self._is_checked[self._files.index(name)]:
                check_hash(file, hashes[name], INDEX_NAME)
                self._is_checked[self._files.index(name)] = True
            with safe_open(file, framework="pt") as tensors:
                keys = [key for key in tensors.keys() if key.startswith(prefix)]  # noqa: SIM118 - no mapping
                return {key.removeprefix(prefix): tensors.get_tensor(key) for key in keys}
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}. {self._way_out}") from error
        except ValueError as error:
            raise ValueError(f"{error} {self._way_out}") from error

    def check_made_for(self, model: str, header: CacheHeader) -> None:
        """Raise ValueError unless the cache was made with a model's autoencoder and text encoder."""
        for what in ("family", "vae", "text_encoder"):
            made, wanted = getattr(self.index.header, what), getattr(header, what)
            check(
                made == wanted,
                f"The cache {self.folder} was made with {what}={made!r}, but {model} has {wanted!r}. Encode the data "
                f"again with mhla encode --model {model}.",
            )

    def check_begins(self, model: str, with_picture: bool) -> None:
        """Raise ValueError unless samples begin with a picture where a model's pipeline does, and only there."""
        made = bool(self.index.header.settings.get(BEGINS_WITH_PICTURE))
        kinds = {True: "image-to-video", False: "text-to-video"}
        check(
            made == with_picture,
            f"The cache {self.folder} holds samples for {kinds[made]}, but {model} is a pipeline for "
            f"{kinds[with_picture]}. Encode the data with mhla encode --model {model} into another folder, or name the "
            f"pipeline for {kinds[made]} as the model.",
        )

    def cut_as(self, default: Clip) -> Clip:
        """The frames, frames per second and sizes of the cache, and the default's where it does not tell."""
        made = self.index.header.settings
        sizes = tuple((int(height), int(width)) for height, width in made.get("sizes", default.sizes))
        return Clip(made.get("frames", default.frames), made.get("fps", default.fps), sizes)

    def check_cut_as(self, clip: Clip) -> None:
        """Raise ValueError unless the cache holds the frames, frames per second and sizes of a clip."""
        made = self.index.header.settings
        sizes = [list(size) for size in clip.sizes]
        fits = {
            "frames": made.get("frames") == clip.frames,
            "sizes": all(size in sizes for size in made.get("sizes", [])),
            # generated latents and images have no frame rate
            "fps": clip.frames == 1 or made.get("fps", clip.fps) == clip.fps,
        }
        for name, fit in fits.items():
            check(
                fit,
                f"The cache {self.folder} was made with {name}={made.get(name)}, but the configuration has clip.{name}="
                f"{getattr(clip, name)}. Encode the data again, or leave clip out to train on the cache as it is.",
            )


class CacheWriter:
    """Adds samples to a cache. A shard counts once the index lists it, so a killed writer leaves a valid cache.

    Args:
        folder: created, or continued.
        header: model and settings of the cache.
        shard_bytes: size at which a shard is written.

    Raises:
        ValueError: if the folder holds a cache with another header.
    """

    def __init__(self, folder: str | Path, header: CacheHeader, shard_bytes: int = 256 * 2**20) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.index = CacheIndex(header)
        if (self.folder / INDEX_NAME).is_file():
            self.index = CacheIndex.read(self.folder)
            there, here = (vars(of) | of.settings for of in (self.index.header, header))
            for name in here | there:  # a setting may be in one of them alone
                made, wanted = there.get(name), here.get(name)
                check(
                    name == "settings" or made == wanted,
                    f"{folder} was made with {name}={made!r}, not {wanted!r}; choose another folder.",
                )
        self._shard_bytes = shard_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._entries: list[CachedSample] = []

    @property
    def done(self) -> set[str]:
        """Sources that are in the cache or were skipped."""
        return {sample.source for sample in self.index.samples} | set(self.index.skipped)

    def set_empty(self, sample: Sample) -> None:
        """Store the conditioning of the empty prompt, unless an earlier call did."""
        file = self.folder / _EMPTY_NAME
        if not file.is_file() or file_hash(file) != self.index.hashes.get(_EMPTY_NAME):
            write_tensors({name: tensor.contiguous() for name, tensor in sample.items()}, file)
            self.index.hashes[_EMPTY_NAME] = file_hash(file)

    def add(self, source: str, caption: str, sample: Sample) -> None:
        """Add one sample."""
        number = len(self.index.samples) + len(self._entries)
        self._tensors |= {f"{number}/{name}": tensor.cpu().contiguous() for name, tensor in sample.items()}
        self._entries.append(CachedSample(source, caption, self._shard_name(), tuple(sample["latents"].shape)))
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= self._shard_bytes:
            self.flush()

    def skip(self, source: str, reason: str) -> None:
        """Note a file that cannot be used."""
        self.index.skipped[source] = reason

    def flush(self) -> None:
        """Write a shard of the samples added since the last one, then the index."""
        if self._entries:
            name = self._shard_name()
            write_tensors(self._tensors, self.folder / name)
            self.index.hashes[name] = file_hash(self.folder / name)
            self.index.samples += self._entries
            self._tensors, self._entries = {}, []
        write_json({"format_version": FORMAT_VERSION, **asdict(self.index)}, self.folder / INDEX_NAME)

    def _shard_name(self) -> str:
        return f"shard-{len({sample.shard for sample in self.index.samples}):05d}.safetensors"
