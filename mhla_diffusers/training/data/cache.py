"""Latents and conditioning on disk: safetensors shards with an index.

::

    folder/
      index.json                  what made it, one entry per sample, and the SHA-256 of every file and of itself
      empty.safetensors           conditioning of the empty prompt
      shard-00000.safetensors     tensors "<key>/latents", "<key>/encoder_hidden_states", …
"""

import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from ...errors import check
from ...families import Sample
from ...files import check_hash, file_hash, read_checked_json, write_checked_json, write_tensors
from .clips import Clips

logger = logging.getLogger(__name__)

INDEX_NAME = "index.json"
FORMAT_VERSION = 4
BEGINS_WITH_PICTURE = "begins_with_picture"
"""Setting of a cache for image-to-video by a first frame without noise."""
_EMPTY_NAME = "empty.safetensors"
_FLUSH_SECONDS = 60.0
"""Time after which samples are written; what a killed process loses at most, besides the sample that it is at."""


@dataclass(frozen=True)
class CachedSample:
    """One entry of the index."""

    source: str
    """Source file, or number of the prompt."""
    caption: str
    shard: str
    shape: tuple[int, ...]
    """Shape of the latents."""
    key: str
    """Beginning of the names of its tensors in the shard."""
    bucket: tuple[int, ...] = ()
    """Frames, height and width in pixels."""
    start: float = 0.0
    """Time of its first frame in the source file, in seconds."""
    origin: str = ""
    """Its folder among :attr:`CacheIndex.sources`; "" for prompts."""


@dataclass(frozen=True)
class CachedSource:
    """A folder of files that a cache was made from."""

    path: str
    """As an absolute path."""
    share: float | None = None
    """See :class:`~.sources.Source`, as :attr:`repeats`."""
    repeats: int = 1


class CacheIndex:
    """Content of ``index.json``.

    Args:
        folder: of the cache.
        header: what it is made with: ``family``, class and configuration of ``vae`` and ``text_encoder`` as text, the
            content of all ``weights`` and of ``vae_weights`` and ``text_encoder_weights``, each None where it is
            unknown, and ``settings`` of the encoding.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.folder, self.header = folder, dict(header)
        self.samples: list[CachedSample] = []
        self.skipped: dict[str, str] = {}
        """Skipped files, and why."""
        self.contents: dict[str, str] = {}
        """Source of a sample, or skipped file → what identifies its content and its caption."""
        self.sources: dict[str, CachedSource] = {}
        """Folder of files, as the settings name it → where it is, and how often its samples are drawn."""
        self.unfinished: str | None = None
        """File that may have more clips than the index lists."""
        self.hashes: dict[str, str] = {}
        """File of the cache → SHA-256 of its content."""

    @classmethod
    def read(cls, folder: Path) -> "CacheIndex":
        """Read it; raises FileNotFoundError without one, ValueError if it is damaged."""
        path = folder / INDEX_NAME
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no latents: {INDEX_NAME} is missing. Make them with mhla encode.")
        try:
            content = read_checked_json(path)
            version = content["format_version"]
            check(version == FORMAT_VERSION, f"format version {version!r} is unknown; known: {FORMAT_VERSION}.")
            index = cls(folder, content["header"])
            index.samples = [
                CachedSample(**{**entry, "shape": tuple(entry["shape"]), "bucket": tuple(entry["bucket"])})
                for entry in content["samples"]
            ]
            index.sources = {name: CachedSource(**values) for name, values in content["sources"].items()}
            for name in ("skipped", "contents", "hashes", "unfinished"):
                setattr(index, name, content[name])
            return index
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a valid index: {error} {_remedy(folder)}") from error

    def write(self) -> None:
        """Write it whole."""
        content = {**vars(self), "format_version": FORMAT_VERSION, "folder": None}
        content["samples"] = [asdict(sample) for sample in self.samples]
        content["sources"] = {name: asdict(source) for name, source in self.sources.items()}
        write_checked_json(content, self.folder / INDEX_NAME)


def _remedy(folder: Path) -> str:
    return f"Delete {folder} and make it again with mhla encode or mhla synthesize."


def _is_same(name: str, made: Any, wanted: Any) -> bool:
    """Compare what a header says; weights of the Hub are unknown."""
    return bool(made == wanted or (name.endswith("weights") and None in (made, wanted)))


class LatentCache:
    """The samples of a cache, read lazily except for the empty prompt.

    Those of several sources alternate in proportion, so that the last ones, which are held out, are of each.

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
        self.index = index = CacheIndex.read(self.folder)
        self.settings: dict[str, Any] = index.header["settings"]
        """Settings of the encoding: frames, fps and sizes, or steps and guidance of the teacher."""
        self.content = file_hash(self.folder / INDEX_NAME)[:16]
        """Identifies all samples, because the index holds the hash of every file."""
        check(
            bool(index.samples),
            f"{self.folder} holds no samples: encoding stopped before saving any, or no file could be used. The same "
            "mhla encode or mhla synthesize command goes on.",
        )
        self._files = sorted({sample.shard for sample in index.samples} | set(index.hashes))
        self._is_checked = torch.zeros(len(self._files), dtype=torch.bool).share_memory_()
        if missing := [name for name in self._files if not (self.folder / name).is_file()]:
            raise FileNotFoundError(f"The cache {self.folder} lacks {', '.join(missing[:5])}. {_remedy(self.folder)}")
        counts, seen = Counter(sample.origin for sample in index.samples), Counter[str]()
        places = []
        for sample in index.samples:
            places.append((seen[sample.origin] + 0.5) / counts[sample.origin])
            seen[sample.origin] += 1
        self.samples = [index.samples[place] for place in sorted(range(len(places)), key=places.__getitem__)]
        self.shapes: Sequence[tuple[int, ...]] = [sample.shape for sample in self.samples]
        weights = _weights(index.sources, counts)
        self.weights: Sequence[float] | None = [weights.get(sample.origin, 1.0) for sample in self.samples]
        self.empty: Sample | None = self._read(_EMPTY_NAME) if _EMPTY_NAME in self._files else None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        """One sample; ValueError if its shard is damaged."""
        return self.read(self.samples[index])

    def read(self, sample: CachedSample) -> Sample:
        """Read a sample of the index; ValueError if its shard is damaged."""
        return self._read(sample.shard, f"{sample.key}/")

    def _read(self, name: str, prefix: str = "") -> Sample:
        """Read the tensors of a file whose names begin with a prefix, by their names without it."""
        file, place = self.folder / name, self._files.index(name)
        try:
            if not self._is_checked[place]:
                check_hash(file, self.index.hashes.get(name, ""), INDEX_NAME)
                self._is_checked[place] = True
            with safe_open(file, framework="pt") as tensors:
                keys = [key for key in tensors.keys() if key.startswith(prefix)]  # noqa: SIM118 - no mapping
                return {key.removeprefix(prefix): tensors.get_tensor(key) for key in keys}
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}. {_remedy(self.folder)}") from error
        except ValueError as error:
            raise ValueError(f"{error} {_remedy(self.folder)}") from error

    def check_made_for(self, model: str, header: Mapping[str, Any], with_picture: bool | None = None) -> None:
        """Raise ValueError unless the cache was made for a model.

        Args:
            model: its name, for messages.
            header: family, autoencoder and text encoder of the model, and the content of their weights.
            with_picture: whether videos begin with a picture in its pipeline; None if that is not known.
        """
        for what in ("family", "vae", "text_encoder", "vae_weights", "text_encoder_weights"):
            made, wanted = self.index.header.get(what), header[what]
            check(
                _is_same(what, made, wanted),
                f"The cache {self.folder} was made with {what}={made!r}, but {model} has {wanted!r}. Encode the data "
                f"again with mhla encode --model {model}.",
            )
        picture = bool(self.settings.get(BEGINS_WITH_PICTURE))
        kinds = ("text-to-video", "image-to-video")
        check(
            with_picture in (None, picture),
            f"The cache {self.folder} holds samples for {kinds[picture]}, but {model} is a pipeline for "
            f"{kinds[not picture]}. Encode the data with mhla encode --model {model} into another folder, or name the "
            f"pipeline for {kinds[picture]} as the model.",
        )

    def check_cut_as(self, clips: Clips) -> None:
        """Raise ValueError unless the cache holds clips that are cut so, with sizes for the model."""
        for name, wanted in clips.settings().items():
            made = self.settings.get(name, wanted)  # generated latents have no rate, and no rule of cutting
            fits = made == wanted or (name == "fps" and clips.lengths == (1,))
            if name == "sizes":
                fits = all(size in wanted for size in made)
            check(
                fits,
                f"The cache {self.folder} was made with {name}={made}, but the configuration has clip.{name}={wanted}. "
                "Encode the data again, or leave clip out to train on the cache as it is.",
            )


def _weights(sources: Mapping[str, CachedSource], counts: Mapping[str, int]) -> dict[str, float]:
    """Return how often each sample of a source is drawn in an epoch: the least often drawn once."""
    shares = {name: source.share / counts[name] for name, source in sources.items() if source.share and counts[name]}
    repeats = {name: float(source.repeats) for name, source in sources.items()}
    return repeats | {name: share / min(shares.values()) for name, share in shares.items()}


class CacheWriter:
    """Adds samples to a cache. A shard counts once the index lists it, so a killed writer leaves a valid cache.

    Samples are written once they fill a shard, after a minute, and at the end of a ``with`` of the writer, also if an
    error ends it, Ctrl-C, or SIGTERM, which exits with 143.

    Args:
        folder: created, or continued.
        header: model and settings of the cache, see :class:`CacheIndex`.
        shard_bytes: size at which a shard is written.

    Raises:
        ValueError: if the folder holds samples made with another header.
    """

    def __init__(self, folder: str | Path, header: Mapping[str, Any], shard_bytes: int = 256 * 2**20) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.index = CacheIndex(self.folder, header)
        if (self.folder / INDEX_NAME).is_file():
            index = CacheIndex.read(self.folder)
            if index.samples:  # an attempt that made none binds nobody
                self.index = index
            there, here = ({**one, **one["settings"], "settings": None} for one in (self.index.header, header))
            for name in here | there:  # a setting may be in one of them alone
                made, wanted = there.get(name), here.get(name)
                check(
                    _is_same(name, made, wanted),
                    f"{folder} was made with {name}={made!r}, not {wanted!r}; choose another folder.",
                )
        self._shard_bytes, self._flushed = shard_bytes, time.monotonic()
        self._tensors: dict[str, torch.Tensor] = {}
        self._entries: list[CachedSample] = []
        self._at_end = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot set a handler
            before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            self._at_end.callback(signal.signal, signal.SIGTERM, before)
        self._at_end.callback(self.flush)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._at_end.close()
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C or SIGTERM
            count = len(self.index.samples)
            logger.warning("Stopped; %s keeps %d samples, and the same command goes on.", self.folder, count)

    def set_empty(self, sample: Sample) -> None:
        """Store the conditioning of the empty prompt, unless an earlier call did."""
        file = self.folder / _EMPTY_NAME
        if not file.is_file() or file_hash(file) != self.index.hashes.get(_EMPTY_NAME):
            write_tensors({name: tensor.contiguous() for name, tensor in sample.items()}, file)
            self.index.hashes[_EMPTY_NAME] = file_hash(file)
            self.index.write()  # so that a folder whose encoding is killed before its first shard is known as one

    def drop(self, sources: Collection[str]) -> None:
        """Forget samples and skipped files; their shards are removed once no sample is left in them."""
        self.index.samples = [sample for sample in self.index.samples if sample.source not in sources]
        for source in sources:
            self.index.skipped.pop(source, None)
            self.index.contents.pop(source, None)
        if self.index.unfinished in sources:
            self.index.unfinished = None

    def skip(self, source: str, reason: str, content: str) -> None:
        """Note why a file makes no sample."""
        self.index.skipped[source], self.index.contents[source] = reason, content

    def add(
        self,
        source: str,
        caption: str,
        sample: Sample,
        content: str = "",
        *,
        bucket: tuple[int, ...] = (),
        start: float = 0.0,
        origin: str = "",
    ) -> None:
        """Add one sample; ``content`` identifies what it was made of."""
        key = str(len(self._entries))
        self._tensors |= {f"{key}/{name}": tensor.cpu().contiguous() for name, tensor in sample.items()}
        shards = sorted(self.index.hashes.keys() - {_EMPTY_NAME})
        shard = f"shard-{int(shards[-1][6:11]) + 1 if shards else 0:05d}.safetensors"
        shape = tuple(sample["latents"].shape)
        self._entries.append(CachedSample(source, caption, shard, shape, key, bucket, start, origin))
        self.index.contents[source] = content
        is_full = sum(tensor.nbytes for tensor in self._tensors.values()) >= self._shard_bytes
        if is_full or time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write a shard of the samples added since the last one, then the index; remove shards without samples."""
        if self._entries:
            name = self._entries[0].shard
            write_tensors(self._tensors, self.folder / name)
            self.index.hashes[name] = file_hash(self.folder / name)
            # without a call in between, so that no signal comes there
            self.index.samples, self._tensors, self._entries = [*self.index.samples, *self._entries], {}, []
        unused = self.index.hashes.keys() - {sample.shard for sample in self.index.samples} - {_EMPTY_NAME}
        for name in unused:
            del self.index.hashes[name]
        self.index.write()
        self._flushed = time.monotonic()
        for name in unused:
            (self.folder / name).unlink(missing_ok=True)
