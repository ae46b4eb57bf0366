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
            f"{size[0]} latent frames do not divide by {patch[0]}, the latent frames per token of this "
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


def kandinsky(transformer: Any, arguments: Arguments) -> Grid:
    """Latents are (B, F, H, W, C); ValueError for attention in another order of the tokens."""
    if arguments.get("sparse_params") is not None:
        raise ValueError(
            "sparse_params select Kandinsky's own sparse attention (nabla), as in the 10-second models. Run this "
            "pipeline without the patch: remove_mhla(pipe)."
        )
    return grid_of_size(transformer, arguments["hidden_states"].shape[1:-1])


def cogview4(transformer: Any, arguments: Arguments) -> Grid:
    """Latents are (B, C, H, W); ValueError for samples of several sizes in one row."""
    others = sorted((arguments.get("attention_kwargs") or {}).keys() - {"scale"})
    if others or isinstance(arguments.get("image_rotary_emb"), list):
        raise ValueError(
            f"attention_kwargs={others} and lists of RoPE tables pack samples of several sizes into one batch, which "
            "a patch does not support. Run each size by itself, or call remove_mhla(transformer)."
        )
    return latents(transformer, arguments)


def list_of_images(transformer: Any, arguments: Arguments) -> Grid:
    """``x`` is a list of images (C, F, H, W); ValueError for several of a sample, of several sizes, or of a video."""
    images, patch = arguments["x"], arguments.get("patch_size", 2)
    if isinstance(images[0], list):
        raise ValueError(
            f"x has {len(images[0])} pictures per sample, but a patch supports one, unlike Z-Image-Omni. Run this "
            "pipeline without the patch: remove_mhla(pipe)."
        )
    sizes = {tuple(image.shape[1:]) for image in images}
    (frames, height, width), *others = sizes
    if others or frames != 1:
        raise ValueError(
            f"x has images of the latent sizes (frames, height, width) {sorted(sizes)}, but a patch needs one size of "
            "one frame per batch. Run each size by itself."
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
    grid = _grid_of_coordinates(coordinates)
    return compiled_for(grid, lambda: _lie_on(grid, coordinates[0]))


def image_shapes(transformer: Any, arguments: Arguments) -> Grid:
    """``img_shapes`` holds the grid of every picture, alike for the batch; ValueError unless they are one picture."""
    first = arguments["img_shapes"][0]
    pictures = first if isinstance(first, list) else [first]
    (frames, height, width), *others = pictures
    if others or frames != 1:
        raise ValueError(
            f"img_shapes={pictures} are {len(pictures)} pictures of {frames} frame(s), but a patch supports one, "
            "unlike Qwen-Image-Edit and Qwen-Image-Layered. Run this pipeline without the patch: remove_mhla(pipe)."
        )
    return height, width


# The grid is read from the places of tokens


def image_ids(transformer: Any, arguments: Arguments) -> Grid:
    """``img_ids`` (N, 3 or 4) or (B, N, 3 or 4) are picture, row and column of every token of one picture."""
    for name in ("kv_cache_mode", "image_cond_hidden_states"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name} passes reference pictures, which a patch does not support. Run this pipeline without the "
                "patch: remove_mhla(pipe)."
            )
    return grid_of_ids(arguments["img_ids"])


def position_ids(transformer: Any, arguments: Arguments) -> Grid:
    """``position_ids`` (N, 3) are those of the text, then picture, row and column of the image's tokens."""
    return grid_of_ids(arguments["position_ids"], arguments["encoder_hidden_states"].shape[1])


def ideogram4(transformer: Any, arguments: Arguments) -> Grid:
    """Every row ends in one image, whose places ``position_ids`` gives; ValueError for several images in a row."""
    places, *others = (arguments[name] for name in ("position_ids", "indicator", "segment_ids"))
    grid = _grid_of_images(places, *others)
    return compiled_for(grid, lambda: _lie_on((1, *grid), places[0].T))


def minimax_h3(transformer: Any, arguments: Arguments) -> Grid:
    """The rows end in the generated video, whose places ``position_ids`` gives; ValueError for another layout."""
    places, *others = (arguments[name] for name in ("position_ids", "video_indices", "timestep_indices"))
    grid = _grid_of_rows(places, *others)
    return compiled_for(grid, lambda: _lie_on(grid, places.T))


# Reading values


def read_once(read: Callable[..., Found]) -> Callable[..., Found]:
    """Decorator: cache what is read of a tensor's values on it until they change; a constant in a compiled graph."""

    @wraps(read)
    def reading(tensor: Any, *others: Any) -> Found:
        version, kept = _version(tensor), getattr(tensor, _KEPT, None)
        if kept is not None and kept[0] == version and (version is not None or tensor.is_meta):
            found: Found = kept[1]
            return found
        found = read(tensor, *others)
        keep_with(tensor, found)
        return found

    # the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it
    vars(reading)["_dynamo_marked_constant"] = True
    return reading


def keep_with(tensor: Tensor, found: Any) -> None:
    """Store on a tensor what a :func:`read_once` function would read from it, for tensors without values."""
    setattr(tensor, _KEPT, (_version(tensor), found))


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def compiled_for(grid: tuple[int, ...], lie_on_it: Callable[[], Tensor]) -> tuple[int, ...]:
    """Return the grid; a compiled graph checks in every call that the tokens still lie on it: bool ()."""
    if torch.compiler.is_compiling():
        torch._assert_async(lie_on_it(), "compiled for another token grid")
    return grid


def grid_of_ids(ids: Tensor, first: int = 0) -> tuple[int, int]:
    """Return the height and width of ids of one picture, which begin with token ``first``; see :func:`_grid_of_ids`."""
    height, width = _grid_of_ids(ids, first)
    compiled_for((height, width), lambda: (_lengths(ids, first) == ids.new_tensor([width, height])).all())
    return height, width


def _lengths(ids: Tensor, first: int) -> Tensor:
    tokens = (ids[0] if ids.ndim == 3 else ids)[first:]
    return (tokens == tokens[0]).sum(dim=0)[1:3]


@read_once
def _grid_of_ids(ids: Tensor, first: int) -> tuple[int, int]:
    """Return height and width of ids (N, 3 or more) or (B, N, 3 or more), by the tokens of the first row and column."""
    width, height = _lengths(ids, first).tolist()
    if height * width != ids.shape[-2] - first:
        raise ValueError(
            f"The ids of {ids.shape[-2] - first} tokens ({width} in the first row, {height} in the first column) are "
            "not one picture in raster order; a patch supports no reference pictures, as Flux Kontext and Flux.2 "
            "pass them. Run this pipeline without the patch: remove_mhla(pipe)."
        )
    return height, width


@read_once
def _grid_of_coordinates(coordinates: Tensor) -> tuple[int, ...]:
    """Return the grid of coordinates (B, 3, N) from the first token of time 0 on; conditioning frames come before."""
    places = coordinates[0].cpu()
    at_zero = (places[0] == 0).nonzero()
    grid = _grid_of_places(places[:, int(at_zero[0]) if len(at_zero) else places.shape[1] :])
    if grid is None:
        raise ValueError(
            f"video_coords of {places.shape[1]} tokens are not a token grid; from the first token of time 0 they must "
            "be whole frames in raster order, as in LTXConditionPipeline."
        )
    return grid


def _grid_of_places(places: Tensor) -> tuple[int, ...] | None:
    """Return the grid of tokens from their (3, N) times, rows and columns; None unless they are in raster order."""
    width = _rising(places[2])
    height = _rising(places[1, ::width])
    grid = places.shape[1] // (height * width), height, width
    return grid if 0 < places.shape[1] == math.prod(grid) and bool(_lie_on(grid, places)) else None


def _lie_on(grid: tuple[int, ...], places: Tensor) -> Tensor:
    """Whether the last tokens of places (3, N) are whole frames of a grid in raster order: bool ()."""
    time, row, column = places[:, places.shape[1] - math.prod(grid) :].unflatten(1, grid)
    rising = (row.diff(dim=1) > 0).all() & (column.diff(dim=2) > 0).all()
    return rising & (time == time[:, :1, :1]).all() & (row == row[:1, :, :1]).all() & (column == column[:1, :1]).all()


def _rising(values: Tensor) -> int:
    """Return the length of the strictly increasing run at the start; at least 1."""
    falls = (values.diff() <= 0).nonzero()
    return int(falls[0]) + 1 if len(falls) else max(1, len(values))


@read_once
def _grid_of_images(places: Tensor, indicator: Tensor, segments: Tensor) -> tuple[int, int]:
    is_image = indicator == _IMAGE
    tokens = int(is_image[0].sum())
    image, own = places[:, places.shape[1] - tokens :], segments == segments[:, -1:]
    grid = _grid_of_places(image[0].T)
    fits = is_image[:, len(is_image[0]) - tokens :].all() & (is_image.sum(dim=1) == tokens).all()
    if grid is None or grid[0] > 1 or not (fits & (image == image[0]).all() & (own | (indicator == 0)).all()):
        raise ValueError(
            "Each row must have text and then one image in raster order, all of one size. Several samples packed "
            "into a row cannot be patched: run one at a time, or call remove_mhla(transformer)."
        )
    return grid[1], grid[2]


@read_once
def _grid_of_rows(places: Tensor, video: Tensor, times: Tensor) -> tuple[int, ...]:
    """Read the grid of the generated rows: last, without a gap, of one time; rows of given videos have another."""
    rows = torch.arange(len(places) - len(video), len(places), device=video.device)
    others = ((video != rows) | (times[video] != times[-1])).nonzero()
    generated = places[int(others[-1]) + 1 - len(video) if len(others) else -len(video) :]
    grid = _grid_of_places(generated.T)
    if grid is None or len(generated[:, 0].unique()) < grid[0]:
        raise ValueError(
            "The sequence must end with one token grid in raster order, as MiniMax-H3's pipeline makes it. Several "
            "videos in one sequence cannot be patched: run one at a time, or call remove_mhla(transformer)."
        )
    return grid
