"""Settings of a patch, one validated, immutable, serialisable object; and the ready patches, which hold such settings.

Ready patches are the YAML files of the ``patches/`` folder, which also ship in the wheel.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from .attention import get_feature_map
from .attention.blocks import check_blocks
from .attention.causal import Causal
from .attention.mixing import MixingInit
from .attention.state import Beyond
from .attention.tiles import Cut

LayerChoice = str | float | Sequence[int]
"""Which self-attentions are replaced; see :func:`choose_layers`."""


AUTOMATIC = "auto:"
"""Begins a choice of layers that is made by measuring, for example "auto:2/3"."""

_BOOLEANS = (
    "normalize",
    "mixing_per_head",
    "mixing_learnable",
    "mixing_clip",
    "output_norm",
    "output_gate",
    "tile_means",
    "clamp_blocks",
)
_SHARED = ("calibrated", "content")
"""Choices of exact tiles that take a share."""
MOST_BLOCKS = 8192
"""Of a patch: their mixing matrix takes 256 MB in every layer, or for every head."""
MOST_BLOCK_SIZE = 1024
"""Tokens of a tile along the curve."""
DEFAULT_SHARE = 0.05
"""Of exact pairs of tiles."""


@dataclass(frozen=True)
class MHLAConfig:
    """How self-attention is replaced.

    Raises:
        ValueError: if a field has a value that is not allowed, or two fields contradict each other.
    """

    blocks: tuple[int, ...]
    """Block count per axis of the token grid: (frames, height, width) or (height, width) or (length,)."""
    layers: LayerChoice = "all"
    """Which layers: "all", a fraction such as "2/3" or 0.5, a list of indices, or "auto:2/3" for as many, chosen by
    ``apply_mhla(..., calibration=…)``, which records the list in its place.
    """
    feature_map: str = "relu"
    """φ: relu, elu+1, softmax, identity, or a name given to ``register_feature_map``."""
    rope: Literal["after", "before"] | None = None
    """Where RoPE acts, seen from the feature map. None becomes "before" with ``block_size``, whose kernels then read
    rotated queries and keys once for softmax and MHLA, else "after", as the paper's code has it. Without effect in
    models that have no RoPE.
    """
    normalize: bool = True
    """Divide by the normaliser of Eq. 4."""
    eps: float = 1e-6
    """Floor that the relu and elu+1 feature maps add."""
    mixing_init: MixingInit = "locality"
    """Mixing matrix before training: locality, uniform or identity."""
    mixing_per_head: bool = False
    """One mixing matrix for every attention head instead of one for the layer."""
    mixing_learnable: bool = True
    """Whether the mixing matrix takes gradients."""
    mixing_clip: bool = True
    """Whether ``register_mixing_clip`` keeps the matrix in (0, 1). Off for matrices that were trained signed."""
    output_norm: bool = False
    """RMSNorm over each head's output, one weight of head dim shared by the heads."""
    output_gate: bool = False
    """Multiply the output with SiLU of a projection of the layer's input (paper, Tab. 12)."""
    exact: Literal["none", "own", "calibrated", "content"] = "none"
    """Tiles of keys that a query tile attends to with softmax attention, beside MHLA over all blocks: none, its own,
    those that each head needs according to :func:`calibrate_exact_tiles`, or at every call those that their mean stands
    for worst (:func:`mhla_diffusers.attention.tile_scores.tiles_by_content`).
    """
    exact_tiles: tuple[int, ...] | None = None
    """Tile count per axis of the token grid; None for the blocks. With "content", an axis of fewer tokens than that is
    cut into single tokens.
    """
    block_size: int | None = None
    """With "content", tokens of every tile instead of ``exact_tiles``: uniform blocks along a Hilbert curve through the
    grid (:mod:`mhla_diffusers.attention.layout`), which hold on any grid. The fused kernels take 16, 32, 64 and 128.
    """
    fit_mean_bias: bool | None = None
    """With ``block_size``, whether β, which weighs the means, is fitted at every call on some of its queries, without
    any training, instead of being a parameter; None for True.
    """
    exact_share: float | None = None
    """Part of all pairs of tiles that is exact, for "calibrated" and "content"; None for 0.05."""
    tile_means: bool = True
    """Whether every tile that is not exact takes part in the softmax as one key, its mean. Without effect if there are
    no exact tiles.
    """
    convolution: int | None = None
    """Odd kernel size of a depth-wise convolution of the values over the token grid, added to the output (CPE)."""
    clamp_blocks: bool = False
    """Whether an axis of fewer tokens than blocks is cut into single tokens, with the mixing matrix interpolated to as
    many blocks, instead of an error. Tiles of "own" and "calibrated" are not clamped.
    """
    causal: Causal | None = None
    """Whether a query sees no later token ("token"), or no later block of the first axis, such as frames ("block"), see
    :mod:`mhla_diffusers.attention.causal`. ``exact`` is then "none", or "own" for the own block of the first axis.
    """
    block_length: int | None = None
    """With ``causal``, tokens in every block of the first axis, such as 64 of a text or 3 latent frames of a video:
    the sequence has blocks of this length, and may end before the last of them.
    """
    beyond: Beyond = "error"
    """With ``causal``, what comes behind the last block: "error", or "relative", by which later blocks see what the
    last one sees, by how far back it lies, and all that lies farther back counts as one block, the mean of its
    summaries (:func:`mhla_diffusers.attention.mixing.extend_mixing`).
    """
    softmax_steps: int | float = 0
    """First denoising steps of a pipeline's call in which all layers attend as before the patch: a number of steps, or
    as a float a fraction of them, rounded up. 1 is one step, and 1.0 are all.
    """

    def __post_init__(self) -> None:
        for entry in fields(self):
            object.__setattr__(self, entry.name, _plain(getattr(self, entry.name)))
        object.__setattr__(self, "blocks", check_blocks(self.blocks))
        count = math.prod(self.blocks)
        check(
            count <= MOST_BLOCKS,
            f"blocks={self.blocks} are {count:,} blocks, whose mixing matrix would have {count:,} rows and columns; at "
            f"most {MOST_BLOCKS:,} are allowed, and suggest_blocks() tells how many a size needs.",
        )
        if isinstance(self.layers, list | tuple | range):
            object.__setattr__(self, "layers", tuple(self.layers))
        parse_layers(self.layers)
        for name in _BOOLEANS:
            _check_type(name, getattr(self, name), bool, "True or False")
        _check_type("feature_map", self.feature_map, str, "the name of a feature map")
        get_feature_map(self.feature_map)
        if self.rope is None:
            object.__setattr__(self, "rope", "before" if self.block_size is not None else "after")
        check_choice("rope", self.rope, ("after", "before"))
        check_choice("mixing_init", self.mixing_init, get_args(MixingInit))
        if self.exact not in _SHARED:  # which go without causal alone, as _check_causal says
            check_choice("exact", self.exact, ("none", "own", *(_SHARED if self.causal is None else ())))
        _check_type("eps", self.eps, int | float, "a number")
        check(0 <= self.eps <= 1, f"eps={self.eps} must be from 0 to 1, a floor such as 1e-6.")
        _check_type("convolution", self.convolution, int | None, "an odd kernel size, or None for no convolution")
        if self.convolution is not None and (self.convolution < 1 or self.convolution % 2 == 0):
            raise ValueError(f"convolution={self.convolution} must be an odd kernel size, or None for no convolution.")
        self._check_softmax_steps()
        if not self.normalize and not self.output_norm:
            raise ValueError(
                "normalize=False leaves an output that grows with the number of tokens, so something else must fix "
                "its scale: set output_norm=True as well."
            )
        if self.normalize and self.feature_map == "identity":
            raise ValueError(
                "feature_map='identity' is signed, so its normaliser can vanish; "
                "use normalize=False with output_norm=True, or a positive feature map."
            )
        self._check_exact()
        self._check_causal()

    def _check_causal(self) -> None:
        check_choice("beyond", self.beyond, get_args(Beyond))
        if self.causal is None:
            check(
                self.block_length is None and self.beyond == "error",
                f"block_length={self.block_length} and beyond={self.beyond!r} have no effect without causal='token' or "
                "causal='block'.",
            )
            return
        check_choice("causal", self.causal, (*get_args(Causal), None))
        length = "the tokens in a block of the first axis, such as 64 of a text or 3 latent frames"
        _check_type("block_length", self.block_length, int, length)
        check(int(self.block_length or 0) > 0, f"block_length={self.block_length} must be {length}.")
        check(
            self.causal == "block" or len(self.blocks) == 1,
            f"causal='token' orders the tokens of a sequence of one axis, but blocks={self.blocks} have several; "
            f"give one count, such as blocks=({self.blocks[0]},) for a text, or choose causal='block' for a video.",
        )
        check(
            self.exact in ("none", "own") and self.exact_tiles is None,
            f"exact={self.exact!r} with exact_tiles={self.exact_tiles} does not go with causal={self.causal!r}; "
            "allowed are exact='none', and exact='own' for softmax within the own block of the first axis, without "
            "exact_tiles.",
        )
        check(
            self.convolution is None and not self.clamp_blocks,
            "A convolution sees later tokens, and blocks of one length are not clamped: convolution and clamp_blocks "
            f"do not go with causal={self.causal!r}.",
        )
        check(
            self.mixing_clip or not self.needs_positive_mixing,
            f"mixing_clip=False allows entries below 0, of whose sums causal={self.causal!r} with exact={self.exact!r} "
            "takes the logarithm; leave it on, by which register_mixing_clip() keeps them in (0, 1) in training, or "
            "choose normalize=False with output_norm=True and exact='none'.",
        )
        check(
            self.beyond == "error" or self.blocks[0] > 1,
            f"beyond='relative' needs at least two blocks along the first axis, got blocks={self.blocks}.",
        )

    def _check_softmax_steps(self) -> None:
        steps = self.softmax_steps
        words = "a number of denoising steps such as 3, or a fraction of them from 0.0 to 1.0"
        _check_type("softmax_steps", steps, int | float, words)
        fits = steps >= 0 if isinstance(steps, int) else 0 <= steps <= 1
        check(fits, f"softmax_steps={steps} must be {words}.")

    def _check_exact(self) -> None:
        if self.exact_tiles is not None:
            check(
                self.exact != "none",
                f"exact_tiles={self.exact_tiles} has no effect with exact='none'; choose 'own', 'calibrated' or "
                "'content', or leave the tile counts out.",
            )
            object.__setattr__(self, "exact_tiles", check_blocks(self.exact_tiles, "exact_tiles"))
            check(
                len(self.exact_tiles) == len(self.blocks),
                f"exact_tiles={self.exact_tiles} must have as many axes as blocks={self.blocks}.",
            )
        if self.block_size is not None:
            _check_type("block_size", self.block_size, int, "a positive number of tokens, such as 64")
            check(
                0 < self.block_size <= MOST_BLOCK_SIZE,
                f"block_size={self.block_size} must be a positive number of tokens, such as 64, and at most "
                f"{MOST_BLOCK_SIZE}; a tile that holds all tokens is softmax attention, exact_share=1.0.",
            )
            check(
                self.exact == "content" and self.exact_tiles is None,
                f"block_size={self.block_size} needs exact='content' without exact_tiles; got exact={self.exact!r} and "
                f"exact_tiles={self.exact_tiles}.",
            )
        fit = self.fit_mean_bias
        check(
            fit is None or isinstance(fit, bool), f"fit_mean_bias={fit!r} must be True, False, or None for the default."
        )
        check(
            not self.fit_mean_bias or (self.block_size is not None and self.tile_means),
            f"fit_mean_bias=True needs block_size and tile_means=True; got block_size={self.block_size} and "
            f"tile_means={self.tile_means}.",
        )
        if self.exact_share is not None:
            _check_type("exact_share", self.exact_share, int | float, "a number in (0, 1]")
            check(
                0 < self.exact_share <= 1,
                f"exact_share={self.exact_share} must be in (0, 1], a part of all pairs of tiles such as 0.05.",
            )
            check(
                self.exact in _SHARED,
                f"exact_share={self.exact_share} has no effect with exact={self.exact!r}; it belongs to 'calibrated' "
                "and 'content'.",
            )
        if self.exact != "none" and not (self.normalize and (self.eps > 0 or self.feature_map != "relu")):
            raise ValueError(
                f"exact={self.exact!r} shares one denominator with the far field, which must be positive. It needs "
                "normalize=True and, with the relu feature map, eps > 0; "
                f"got normalize={self.normalize}, eps={self.eps}."
            )

    def grid_from(self, grid: Sequence[int]) -> tuple[int, ...]:
        """The grid that a call's tokens begin, given its own: with ``causal`` that of the longest sequence.

        Raises:
            ValueError: the sequence is longer, and ``beyond`` is "error".
        """
        if self.causal is None or self.block_length is None:
            return tuple(grid)
        trained, needed = self.blocks[0], -(-grid[0] // self.block_length)
        if needed > trained and self.beyond == "error":
            raise ValueError(
                f"The first axis has {grid[0]} tokens, more than the {trained} blocks of {self.block_length} that this "
                "patch is for. Give a shorter sequence, or beyond='relative', by which later blocks go on as the last "
                "one."
            )
        return max(trained, needed) * self.block_length, *grid[1:]

    def check_whole(self, grid: Sequence[int]) -> None:
        """Raise unless a call's first axis may end where it does, given its own token grid.

        Raises:
            ValueError: with ``causal="block"``, if it ends within a frame block.
        """
        length = self.block_length
        if self.causal == "block" and length is not None and grid[0] % length:
            unit = "latent frames" if len(grid) == 3 else f"tokens along the first of {len(grid)} axes"
            raise ValueError(
                f"This patch takes whole frame blocks of {length} {unit}, and the call has {grid[0]}; allowed are "
                f"{length}, {2 * length}, {3 * length} and so on."
            )

    def blocks_on(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Block counts on a token grid: those of the setting, or fewer where ``clamp_blocks`` lets them be.

        With ``causal`` those of :meth:`grid_from`.
        """
        if self.causal is not None and self.block_length is not None:
            return self.grid_from(grid)[0] // self.block_length, *self.blocks[1:]
        if not self.clamp_blocks or len(grid) != len(self.blocks):
            return self.blocks
        return tuple(min(count, size) for count, size in zip(self.blocks, grid, strict=True))

    @property
    def needs_positive_mixing(self) -> bool:
        """Whether own and earlier blocks are joined by the logarithm of what they weigh, which signs would make NaN."""
        return self.causal is not None and self.normalize and (self.causal == "token" or self.exact == "own")

    @property
    def fits_mean_bias(self) -> bool:
        """Whether β is fitted at every call."""
        return self.block_size is not None and self.tile_means and self.share < 1 and self.fit_mean_bias is not False

    @property
    def cut(self) -> Cut:
        """How tiles cut the grid: into blocks of so many tokens, or by their count per axis."""
        return self.tiles if self.block_size is None else self.block_size

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tile count per axis, where tiles are boxes."""
        if self.causal is not None:
            return self.blocks[0], *(1 for _ in self.blocks[1:])
        return self.blocks if self.exact_tiles is None else self.exact_tiles

    @property
    def share(self) -> float:
        """Part of all pairs of tiles that is exact."""
        if self.exact == "none":
            return 0.0
        if self.exact == "own":
            return 1 / math.prod(self.tiles)
        return DEFAULT_SHARE if self.exact_share is None else self.exact_share

    def replace(self, **settings: Any) -> "MHLAConfig":
        """A copy with some fields changed.

        What says more of a choice that is given up goes with it: with ``exact="none"`` tile counts and share, with
        ``exact="own"`` the share, and with blocks of another number of axes the tile counts. With ``causal`` exact
        tiles become "own".

        Raises:
            ValueError: unknown field or value that is not allowed.
        """
        check_names(settings, [field.name for field in fields(self)], "MHLA setting")
        given_up: dict[str, Any] = {}
        if settings.get("causal") is not None and self.exact != "none":
            given_up |= {"exact": "own", "exact_tiles": None, "exact_share": None}
        if "causal" in settings and settings["causal"] is None:
            given_up |= {"block_length": None, "beyond": "error"}
        if settings.get("exact") in ("none", "own"):
            given_up["exact_share"] = None
        if settings.get("block_size") is not None:
            given_up["exact_tiles"] = None
            if self.block_size is None:
                given_up["rope"] = None
        elif settings.get("exact_tiles") is not None or settings.get("exact", "content") != "content":
            given_up |= {"block_size": None, "fit_mean_bias": None}
        if settings.get("tile_means") is False:
            given_up["fit_mean_bias"] = None
        blocks = settings.get("blocks", self.blocks)
        has_other_axes = isinstance(blocks, Sequence) and len(blocks) != len(self.blocks)
        if settings.get("exact") == "none" or has_other_axes:
            given_up["exact_tiles"] = None
        return replace(self, **{**given_up, **settings})

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON and YAML can hold them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "MHLAConfig":
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: unknown field, missing ``blocks``, or value that is not allowed.
        """
        settings = _without_near_field(settings)
        check_names(settings, [field.name for field in fields(cls)], "MHLA setting")
        if "blocks" not in settings:
            raise ValueError("MHLA settings need blocks, the block count per axis, for example blocks=(7, 3, 5).")
        return cls(**settings)


def _plain(value: Any) -> Any:
    """Numbers and arrays, as of NumPy and torch, as Python's own, which JSON and YAML can hold."""
    if isinstance(value, list | tuple):
        return type(value)(_plain(one) for one in value)
    return value.tolist() if hasattr(value, "tolist") else value


def _without_near_field(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of patches from before there were exact tiles, in today's words."""
    settings = dict(settings)
    if settings.pop("near_field", "none") == "softmax":
        settings |= {"exact": "own", "tile_means": False}
    return settings


def check(condition: bool, message: str) -> None:
    """Raise unless a condition holds.

    Raises:
        ValueError: with the message.
    """
    if not condition:
        raise ValueError(message)


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise unless a setting has one of the values allowed.

    Raises:
        ValueError: naming them.
    """
    check(value in allowed, f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, allowed))}.")


def check_names(settings: Iterable[str], allowed: Sequence[str], what: str, path: str = "") -> None:
    """Raise unless all names of settings are known.

    Args:
        settings: names that were given.
        allowed: names that there are.
        what: such as "MHLA setting".
        path: stands before a name in the error, such as "stages.0.".

    Raises:
        ValueError: naming an unknown one and those like it.
    """
    for name in settings:
        if name not in allowed:
            near = get_close_matches(str(name), allowed, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ValueError(f"Unknown {what} {path + str(name)!r}; {hint}Allowed: {', '.join(allowed)}.")


def _check_type(name: str, value: object, wanted: Any, words: str) -> None:
    is_number_for_bool = isinstance(value, bool) and wanted is not bool
    check(isinstance(value, wanted) and not is_number_for_bool, f"{name}={value!r} must be {words}.")


def parse_layers(choice: LayerChoice) -> Fraction | tuple[int, ...]:
    """The choice as the fraction of layers to replace, or as indices."""
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        for index in choice:
            if not isinstance(index, int) or isinstance(index, bool):
                raise ValueError(f"layers={tuple(choice)} must hold layer indices, got {index!r}.")
        return tuple(choice)
    if choice == "all":
        return Fraction(1)
    if is_automatic(choice):
        return _parse_fraction(str(choice).removeprefix(AUTOMATIC), choice)
    if isinstance(choice, int):
        raise ValueError(f"layers={choice!r} is ambiguous; write layers=[{choice!r}] for one layer, 'all' for all.")
    return _parse_fraction(choice, choice)


def _parse_fraction(text: str | float, choice: LayerChoice) -> Fraction:
    try:
        fraction = Fraction(text).limit_denominator(1000)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        fraction = Fraction(-1)
    if not 0 < fraction <= 1:
        raise ValueError(
            f"layers={choice!r} is unknown; allowed: 'all', a fraction in (0, 1] such as '2/3' or 0.5, "
            "a list of layer indices such as [0, 2, -1], or 'auto:2/3'."
        )
    return fraction


def is_automatic(choice: LayerChoice) -> bool:
    """Whether layers are to be chosen by measuring."""
    return isinstance(choice, str) and choice.startswith(AUTOMATIC)


@dataclass(frozen=True)
class Patch:
    """One patch file.

    Attributes:
        family: name of the model family that it is for.
        base_model: Hub id that it was made for.
        description: one line.
        config: the settings.
    """

    family: str
    base_model: str
    description: str
    config: MHLAConfig


def patch_folder() -> Path:
    """Where the ready patches lie: inside an installed package, or at the root of a source checkout."""
    package = Path(__file__).parent
    installed = package / "patches"
    return installed if installed.is_dir() else package.parent / "patches"


def patch_names() -> list[str]:
    """Names of the ready patches."""
    return sorted(path.stem for path in patch_folder().glob("*.yaml"))


def adapted_patch_folder(name: str) -> Path | None:
    """Where an adapted patch that ships lies, for ``load_mhla``; None for a name that is none of them."""
    return patch_folder() / name if name in adapted_patch_names() else None


def adapted_patch_names() -> list[str]:
    """Names of the adapted patches that ship, settings and weights, as ``save_mhla`` wrote them."""
    return sorted(path.parent.name for path in patch_folder().glob("*/mhla_config.json"))


def load_patch(name_or_path: str | Path) -> Patch:
    """Read a patch by its name or from a YAML file.

    Raises:
        ValueError: unknown name (the nearest ones are given), or a file with unknown or missing keys.
        FileNotFoundError: a path that does not exist.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in patch_names():
            known = [*patch_names(), *adapted_patch_names()]
            near = get_close_matches(str(name_or_path), known, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
            if adapted_patch_folder(str(name_or_path)) is not None:
                hint = f": it is adapted, with weights; load_mhla(model, {str(name_or_path)!r}) opens it, or --weights."
            elif path.is_dir():
                hint = f": {path} is a folder; open a saved patch with load_mhla(model, {str(name_or_path)!r})."
            raise ValueError(
                f"Unknown patch {str(name_or_path)!r}{hint} "
                f"Ready patches: {', '.join(patch_names())}; or give the path of a .yaml file."
            )
        path = patch_folder() / f"{name_or_path}.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"Patch file {path} does not exist.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _parse_patch(content)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"Patch file {path}: {error}") from error


def _parse_patch(content: Any) -> Patch:
    keys = {"family", "base_model", "description", "mhla"}
    found = set(content) if isinstance(content, Mapping) else set()
    if found != keys:
        raise ValueError(
            f"expected exactly the keys {', '.join(sorted(keys))}; "
            f"unknown: {', '.join(sorted(map(str, found - keys))) or 'none'}, "
            f"missing: {', '.join(sorted(keys - found)) or 'none'}."
        )
    settings = content["mhla"]
    if not isinstance(settings, Mapping):
        raise ValueError(f"mhla must hold settings such as blocks, got {settings!r}.")
    if isinstance(settings.get("eps"), str):  # YAML reads 1e-6, without a point, as text
        settings = {**settings, "eps": float(settings["eps"])}
    return Patch(content["family"], content["base_model"], content["description"], MHLAConfig.from_dict(settings))
