"""Readers of the token grid, in tokens: functions of a transformer and of the named arguments of its forward.

Values of a tensor are read once, because that waits for the device; a compiled graph checks them on the device.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache, wraps
from operator import floordiv
from typing import Any, TypeVar

import torch
from torch import Tensor

Arguments = Mapping[str, Any]
Grid = tuple[int, ...]
Found = TypeVar("Found")

_KEPT = "_mhla_kept"
_IMAGE = 2
"""Ideogram 4's indicator of an image's token."""


def named_arguments(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's forward by name; those of ``*args`` are numbered."""
    if not args:
        return {**kwargs}
    names = _names_of_arguments(type(model).forward)
    return {**{names[i] if i < len(names) else f"args{i}": value for i, value in enumerate(args)}, **kwargs}


@cache
def _names_of_arguments(method: Any) -> tuple[str, ...]:
    parameters = inspect.signature(method).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in parameters if one.kind in kinds)[1:]


# The grid is the latents' shape


def patch_of(transformer: Any, axes: int) -> tuple[int, ...]:
    """Return latents per token and axis, by ``patch_size`` and ``patch_size_t`` of the configuration."""
    size = transformer.config.patch_size
    if not isinstance(size, int):
        return tuple(size)
    frames = getattr(transformer.config, "patch_size_t", None) or 1
    return (size, size) if axes == 2 else (frames, size, size)


def grid_of_size(transformer: Any, size: tuple[int, ...], patch: tuple[int, ...] | None = None) -> Grid:
    """Return the token grid of latents (H, W) or (F, H, W); ValueError for frames that do not fill the last token."""
    patch = patch or patch_of(transformer, len(size))
    if len(size) == 3 and size[0] % patch[0]:
        raise ValueError(
            f"{size[0]} latent frames are not divisible by {patch[0]}, the latent frames per token of this "
            f"{type(transformer).__name__}; give a multiple of {patch[0]}."
        )
    return tuple(map(floordiv, size, patch))


def latents(transformer: Any, arguments: Arguments) -> Grid:
    """Latents are (B, C, H, W) or (B, C, F, H, W)."""
    return grid_of_size(transformer, arguments["hidden_states"].shape[2:])


def frames_first(transformer: Any, arguments: Arguments) -> Grid:
    """Latents are (B, F, C, H, W)."""
    _, frames, _, *size = arguments["hidden_states"].shape
    return grid_of_size(transformer, (frames, *size))


def each_frame(transformer: Any, arguments: Arguments) -> Grid:
    """Latents are (B, C, F, H, W), and every frame attends to itself."""
    return grid_of_size(transformer, arguments["hidden_states"].shape[3:])


def channels_last(transformer: Any, arguments: Arguments) -> Grid:
    """Latents are (B, F, H, W, C)."""
    return grid_of_size(transformer, arguments["hidden_states"].shape[1:-1])


def list_of_images(transformer: Any, arguments: Arguments) -> Grid:
    """``x`` is a list of images (C, 1, H, W); ValueError for several sizes."""
    patch, sizes = arguments.get("patch_size", 2), {tuple(image.shape[1:]) for image in arguments["x"]}
    (frames, height, width), *others = sizes
    if others or frames != 1:
        raise ValueError(
            f"x has latents of the sizes (frames, height, width) {sorted(sizes)}, but a patch needs single frames of "
            "one size. Run each size by itself."
        )
    return height // patch, width // patch


# The grid is passed as numbers


def numbers(transformer: Any, arguments: Arguments) -> Grid:
    """The grid is ``num_frames``, ``height`` and ``width``; ValueError unless all of them are given."""
    found = [arguments[name] for name in ("num_frames", "height", "width") if arguments.get(name) is not None]
    if len(found) != 3:
        raise ValueError(
            f"Only {len(found)} of num_frames, height and width were passed; a patch needs all three, in latents."
        )
    return tuple(found)


def coordinates_or_numbers(transformer: Any, arguments: Arguments) -> Grid:
    """The grid is that of ``video_coords`` (B, 3, N), if given, else numbers."""
    if (coordinates := arguments.get("video_coords")) is None:
        return numbers(transformer, arguments)
    return _compiled_for(_grid_of_coordinates(coordinates), coordinates[0].T)


def image_shapes(transformer: Any, arguments: Arguments) -> Grid:
    """``img_shapes`` holds the grid of every picture, alike for the batch; ValueError unless they are one picture."""
    first = arguments["img_shapes"][0]
    pictures = first if isinstance(first, list) else [first]
    (frames, height, width), *others = pictures
    if others or frames != 1:
        raise ValueError(
            f"img_shapes={pictures} has {len(pictures)} images of {frames} frame(s), but a patch supports one of one. "
            "Run Qwen-Image-Edit and Qwen-Image-Layered without it: remove_mhla(pipe)."
        )
    return height, width


# The grid is read from the places of tokens: time, or number of the picture, row and column


def image_ids(transformer: Any, arguments: Arguments) -> Grid:
    """``img_ids`` (N, 3 or 4) or (B, N, 3 or 4) are the places of every token of one picture."""
    return _grid_of_ids(arguments["img_ids"], 0)


def position_ids(transformer: Any, arguments: Arguments) -> Grid:
    """``position_ids`` (N, 3) are those of the text, then the places of the image's tokens."""
    return _grid_of_ids(arguments["position_ids"], arguments["encoder_hidden_states"].shape[1])


def _grid_of_ids(ids: Tensor, first: int) -> Grid:
    places = ids[0] if ids.ndim == 3 else ids
    return _compiled_for(_grid_from(ids, first), places)


def ideogram4(transformer: Any, arguments: Arguments) -> Grid:
    """Every row ends in one image, whose places ``position_ids`` gives; ValueError for several images in a row."""
    places, *others = (arguments[name] for name in ("position_ids", "indicator", "segment_ids"))
    return _compiled_for(_grid_of_images(places, *others), places[0])


def minimax_h3(transformer: Any, arguments: Arguments) -> Grid:
    """The rows end in the generated video, whose places ``position_ids`` gives; ValueError for another layout."""
    places, *others = (arguments[name] for name in ("position_ids", "video_indices", "timestep_indices"))
    return _compiled_for(_grid_of_rows(places, *others), places)


# Reading values


def read_once(read: Callable[..., Found]) -> Callable[..., Found]:
    """Decorator: cache on the first argument what is read of tensors' values; a constant in a compiled graph.

    Values are read again once any argument has changed.
    """

    @wraps(read)
    def reading(tensor: Any, *others: Any) -> Found:
        kept, state = getattr(tensor, _KEPT, None), _state(tensor, *others)
        if kept is not None and kept[0] == state:
            found: Found = kept[1]
            return found
        found = read(tensor, *others)
        keep_with(tensor, found, *others)
        return found

    # the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it
    vars(reading)["_dynamo_marked_constant"] = True
    return reading


def keep_with(tensor: Tensor, found: Any, *others: Any) -> None:
    """Store on a tensor what a :func:`read_once` function would read from it, for tensors without values."""
    setattr(tensor, _KEPT, (_state(tensor, *others), found, others))  # which live as long, so that ids stay theirs


def _state(*arguments: Any) -> list[Any]:
    """Return what differs once an argument is another or has changed."""
    return [(id(one), _version(one)) if isinstance(one, Tensor) else one for one in arguments]


def _version(tensor: Tensor) -> Any:
    if not tensor.is_inference():
        return tensor._version
    return None if tensor.is_meta else object()  # whether it has changed is not known


def in_line(time: Tensor, row: Tensor, column: Tensor) -> Grid:
    """Return frames, height and width, given which tokens share time, row and column with the first: bool (N,)."""
    return tuple(torch.stack([(row & column).sum(), (time & column).sum(), (time & row).sum()]).tolist())


def _compiled_for(grid: Grid, places: Tensor) -> Grid:
    """Return the grid; a compiled graph checks in every call that the tokens still lie on it."""
    if torch.compiler.is_compiling():
        torch._assert_async(_lie_on(grid, places), "compiled for another token grid")
    return grid


def _lie_on(grid: Grid, places: Tensor) -> Tensor:
    """Whether the last tokens of places (N, 3 or more) are whole frames of a grid in raster order: bool ()."""
    sizes = (1,) * (3 - len(grid)) + grid
    time, row, column = places[len(places) - math.prod(grid) :, :3].T.unflatten(1, sizes)
    return (time == time[:, :1, :1]).all() & (row == row[:1, :, :1]).all() & (column == column[:1, :1]).all()


def _grid_of_places(places: Tensor, axes: int) -> Grid:
    """Return the grid of all places (N, 3 or more), by those in line with the first; ValueError unless it is one."""
    frames, *size = in_line(*(places[:, :3] == places[:1, :3]).T)
    grid = tuple(size) if axes == 2 and frames == 1 else (frames, *size)
    if len(grid) != axes or math.prod(grid) != len(places) or not (len(places) and _lie_on(grid, places)):
        raise ValueError(
            f"The positions of {len(places)} tokens are not one grid in raster order. A patch supports neither "
            "reference images, as in Flux Kontext, nor packed samples; call remove_mhla(pipe)."
        )
    return grid


@read_once
def _grid_from(ids: Tensor, first: int) -> Grid:
    return _grid_of_places((ids[0] if ids.ndim == 3 else ids)[first:], axes=2)


@read_once
def _grid_of_coordinates(coordinates: Tensor) -> Grid:
    """Return the grid of coordinates (B, 3, N) from the first token of time 0 on; conditioning frames come before."""
    places = coordinates[0].T.cpu()
    at_zero = (places[:, 0] == 0).nonzero()
    return _grid_of_places(places[int(at_zero[0]) if len(at_zero) else len(places) :], axes=3)


@read_once
def _grid_of_images(places: Tensor, indicator: Tensor, segments: Tensor) -> Grid:
    is_image = indicator == _IMAGE
    first = places.shape[1] - int(is_image[0].sum())
    fits = is_image[:, first:].all() & ~is_image[:, :first].any() & (places[:, first:] == places[0, first:]).all()
    if not fits & ((segments == segments[:, -1:]) | (indicator == 0)).all():
        raise ValueError(
            "Each row must have text and then one image, all of one size. Several samples packed into a row cannot be "
            "patched: run one at a time, or call remove_mhla(transformer)."
        )
    return _grid_of_places(places[0, first:], axes=2)


@read_once
def _grid_of_rows(places: Tensor, video: Tensor, times: Tensor) -> Grid:
    """Read the grid of the generated rows: last, without a gap, of one time; rows of given videos have another."""
    rows = torch.arange(len(places) - len(video), len(places), device=video.device)
    others = ((video != rows) | (times[video] != times[-1])).nonzero()
    return _grid_of_places(places[int(others[-1]) + 1 - len(video) if len(others) else -len(video) :], axes=3)
