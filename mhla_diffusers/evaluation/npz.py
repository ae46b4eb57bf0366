"""The sample file of the ADM suite: an npz with ``arr_0``, uint8 (n, H, W, 3). Read and written piece by piece."""

import io
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

_ARRAY = "arr_0.npy"


@contextmanager
def open_array(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """The stream of ``arr_0``, standing behind its header, and its shape.

    Raises:
        ValueError: no npz file, or one without such an array.
    """
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is no npz file: {error}.") from error
    with archive:
        if _ARRAY not in archive.namelist():
            raise ValueError(f"{path} holds no array arr_0, only {', '.join(archive.namelist())}.")
        with archive.open(_ARRAY) as stream:
            yield stream, _read_header(stream, path)


def _read_header(stream: IO[bytes], path: Path) -> tuple[int, ...]:
    from numpy.lib import format as npy

    read = npy.read_array_header_1_0 if npy.read_magic(stream) == (1, 0) else npy.read_array_header_2_0
    shape, column_major, dtype = read(stream)
    if dtype != "uint8" or len(shape) != 4 or shape[3] != 3 or column_major:
        raise ValueError(f"{path} must hold arr_0 as uint8 (n, H, W, 3), got {dtype} {shape}.")
    return tuple(shape)


def write_array(batches: Iterable[torch.Tensor], count: int, path: Path) -> None:
    """Write images of one resolution.

    Args:
        batches: uint8, each (B, 3, H, W).
        count: images in all batches together.
        path: where to.

    Raises:
        ValueError: images of several resolutions.
        OSError: the file cannot be written.
    """
    aside = path.with_name(f".{path.name}")
    shape: tuple[int, ...] | None = None
    with zipfile.ZipFile(aside, "w") as archive, archive.open(_ARRAY, "w", force_zip64=True) as stream:
        for batch in batches:
            pixels = batch.permute(0, 2, 3, 1).contiguous()
            if shape is None:
                shape = tuple(pixels.shape[1:])
                stream.write(_header((count, *shape)))
            if tuple(pixels.shape[1:]) != shape:
                raise ValueError(
                    f"An npz holds images of one size, but there are {shape[0]}x{shape[1]} and "
                    f"{pixels.shape[1]}x{pixels.shape[2]}."
                )
            stream.write(pixels.numpy().tobytes())
    aside.replace(path)


def _header(shape: tuple[int, ...]) -> bytes:
    from numpy.lib import format as npy

    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return header.getvalue()
