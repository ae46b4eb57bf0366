"""Latents and conditioning on disk: safetensors shards with an index.

::

    folder/
      index.json                  who made it, and one entry per sample
      empty.safetensors           conditioning of the empty prompt
      shard-00000.safetensors     tensors "<sample>/latents", "<sample>/encoder_hidden_states", …
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ...families import Clip, Sample
from ...files import read_json, write_json, write_tensors

INDEX_NAME = "index.json"
FORMAT_VERSION = 1
_EMPTY_NAME = "empty.safetensors"


@dataclass(frozen=True)
class CacheHeader:
    """What a cache was made with."""

    family: str
    vae: str
    """Class and configuration of the autoencoder, as text."""
    text_encoder: str
    """The same of the text encoder; "none" for DiT."""
    settings: dict[str, Any]
    """What was encoded how: frames, fps and sizes, or steps and guidance of the teacher."""


@dataclass(frozen=True)
class CachedSample:
    """One entry of the index."""

    source: str
    """File, or number of the prompt, that it was made from."""
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
    """Files that were passed over, and why."""


class LatentCache:
    """The samples of a cache; nothing is read before it is asked for.

    Args:
        folder: made by ``mhla encode`` or ``mhla synthesize``.

    Raises:
        FileNotFoundError: no cache there, or shards are missing.
        ValueError: a damaged index or no samples.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        if not self.index.samples:
            raise ValueError(f"The cache {self.folder} holds no samples.")
        missing = [name for name in sorted({s.shard for s in self.index.samples}) if not (self.folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"The cache {self.folder} lacks {', '.join(missing[:5])}; encode it again.")
        self.shapes = [sample.shape for sample in self.index.samples]
        empty = self.folder / _EMPTY_NAME
        self.empty: Sample | None = load_file(empty) if empty.is_file() else None

    def __len__(self) -> int:
        return len(self.index.samples)

    def __getitem__(self, index: int) -> Sample:
        entry = self.index.samples[index]
        try:
            with safe_open(self.folder / entry.shard, framework="pt") as shard:
                prefix = f"{index}/"
                names = [key for key in shard.keys() if key.startswith(prefix)]  # noqa: SIM118 - no mapping
                return {name.removeprefix(prefix): shard.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise ValueError(f"{self.folder / entry.shard} is damaged ({error}); encode it again.") from error

    def check_made_for(self, model: str, header: CacheHeader) -> None:
        """Raise unless the cache was made with a model's autoencoder and text encoder.

        Raises:
            ValueError: naming both.
        """
        made = self.index.header
        for what in ("family", "vae", "text_encoder"):
            if getattr(made, what) != getattr(header, what):
                raise ValueError(
                    f"The cache {self.folder} was made with {what}={getattr(made, what)!r}, but {model} has "
                    f"{getattr(header, what)!r}. Encode the data again with mhla encode --model {model}."
                )

    def check_cut_as(self, clip: Clip) -> None:
        """Raise unless the cache holds what a clip asks for.

        Raises:
            ValueError: naming frames, frames per second or sizes of both.
        """
        made = self.index.header.settings
        sizes = [list(size) for size in clip.sizes]
        fits = {
            "frames": made.get("frames") == clip.frames,
            "sizes": all(size in sizes for size in made.get("sizes", [])),
            # what a model generated has no rate of its own, and images have none
            "fps": clip.frames == 1 or made.get("fps", clip.fps) == clip.fps,
        }
        for name, fit in fits.items():
            if not fit:
                raise ValueError(
                    f"The cache {self.folder} was made with {name}={made.get(name)}, but the configuration has "
                    f"clip.{name}={getattr(clip, name)}. Encode the data again, or leave clip out to train on the "
                    "cache as it is."
                )


class CacheWriter:
    """Adds samples to a cache. A shard counts once the index names it, so a killed writer leaves a good cache.

    Args:
        folder: is made, or continued.
        header: what the cache is made with.
        shard_bytes: size at which a shard is written.

    Raises:
        ValueError: if the folder holds a cache that was made otherwise.
    """

    def __init__(self, folder: str | Path, header: CacheHeader, shard_bytes: int = 256 * 2**20) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.index = CacheIndex(header)
        if (self.folder / INDEX_NAME).is_file():
            self.index = read_index(self.folder)
            _check_same_header(self.folder, self.index.header, header)
        self._shard_bytes = shard_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._entries: list[CachedSample] = []

    @property
    def done(self) -> set[str]:
        """Sources that the cache holds or has skipped."""
        return {sample.source for sample in self.index.samples} | set(self.index.skipped)

    def set_empty(self, sample: Sample) -> None:
        """Store the conditioning of the empty prompt."""
        write_tensors({name: tensor.contiguous() for name, tensor in sample.items()}, self.folder / _EMPTY_NAME)

    def add(self, source: str, caption: str, sample: Sample) -> None:
        """Add one sample."""
        number = len(self.index.samples) + len(self._entries)
        self._tensors |= {f"{number}/{name}": tensor.cpu().contiguous() for name, tensor in sample.items()}
        shape = tuple(sample["latents"].shape)
        self._entries.append(CachedSample(source, caption, self._shard_name(), shape))
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= self._shard_bytes:
            self.flush()

    def skip(self, source: str, reason: str) -> None:
        """Note a file that cannot be used."""
        self.index.skipped[source] = reason

    def flush(self) -> None:
        """Write what was added since the last shard, then the index."""
        if self._entries:
            write_tensors(self._tensors, self.folder / self._shard_name())
            self.index.samples += self._entries
            self._tensors, self._entries = {}, []
        write_json({"format_version": FORMAT_VERSION, **asdict(self.index)}, self.folder / INDEX_NAME)

    def _shard_name(self) -> str:
        return f"shard-{len({sample.shard for sample in self.index.samples}):05d}.safetensors"


def read_index(folder: Path) -> CacheIndex:
    """Read ``index.json``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged or of an unknown format.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no latents: {INDEX_NAME} is missing. Make them with mhla encode.")
    try:
        content = read_json(path)
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {content['format_version']!r} is unknown; known: {FORMAT_VERSION}")
        samples = [CachedSample(**{**entry, "shape": tuple(entry["shape"])}) for entry in content["samples"]]
        return CacheIndex(CacheHeader(**content["header"]), samples, dict(content["skipped"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no valid index: {error}.") from error


def _check_same_header(folder: Path, found: CacheHeader, wanted: CacheHeader) -> None:
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [
        (asdict(found), asdict(wanted)),
        (found.settings, wanted.settings),
    ]
    for there, here in pairs:
        for name in here:
            if name != "settings" and there.get(name) != here[name]:
                raise ValueError(
                    f"{folder} was made with {name}={there.get(name)!r}, not {here[name]!r}; choose another folder."
                )
