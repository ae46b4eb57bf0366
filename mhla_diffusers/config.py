"""Settings of a patch: one of three validated, immutable, serialisable objects; and the presets.

:class:`SparseConfig` is sparse attention, :class:`MHLAConfig` the paper's MHLA, :class:`CausalConfig` MHLA with queries
that see the past alone. What all have in common is in :class:`PatchConfig`. Presets are the YAML files of the
``patches/`` folder, which also ship in the wheel.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from .attention import get_feature_map
from .attention.call import DEFAULT_DENSITY, ContentRule, Far, Order
from .attention.causal import Causal
from .attention.costs import AttentionSizes
from .attention.layout import block_count, check_blocks, fit_blocks
from .attention.mixing import MixingInit
from .attention.order import blocks_per_state
from .attention.state import Beyond
from .files import parse_yaml, read_text

CarryType = Literal["int8", "bfloat16"]
LayerChoice = str | float | Sequence[int]
"""Which self-attentions are replaced; see :func:`choose_layers`."""
AUTOMATIC = "auto:"
"""Prefix of a choice of layers by measurement, for example "auto:2/3"."""
MOST_BLOCKS = 8192
"""Maximum blocks of a patch: their mixing matrix takes 256 MB per layer or per head."""
MOST_BLOCK_SIZE = 1024
USUAL_REFRESH, FEWEST_REFRESHED = 0.2, 20
"""What refresh="auto" is, and from how many steps on (studies/carry)."""


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """What every patch has, whichever attention it runs; made as one of its three kinds."""

    attention: ClassVar[str]
    """Which attention runs, in words."""
    layers: LayerChoice = "all"
    """Which layers: "all", a fraction such as "2/3" or 0.5, a list of indices, or "auto:2/3" for that fraction, chosen
    by ``apply_mhla(..., calibration=…)``, which records the list here.
    """
    softmax_steps: int | float = 0
    """First denoising steps of a pipeline's call in which the patch is disabled and all layers use the original
    attention: a number of steps, or as a float a fraction of them, rounded up. 1 is one step, 1.0 is all steps.
    """
    softmax_last: int | float = 0
    """Last denoising steps in which it is, as ``softmax_steps``."""
    refresh: int | float | Literal["auto"] | None = None
    """After how many denoising steps the original attention runs again, from the first steps on: a number, or as a
    float a fraction of all steps. None for never; "auto" for a fifth of the steps where there are at least 20.
    """
    carry: bool = True
    """Whether what the patched attentions lose at a step of the original attention is added at the steps that follow
    (:mod:`mhla_diffusers.patching.carry`).
    """
    carry_dtype: CarryType = "int8"
    """How this is kept: "int8" with a scale per token, or "bfloat16"."""
    carry_device: Literal["model", "cpu"] = "model"
    """Where: on the device of the model, or in pinned memory of the machine, from where it is read ahead."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            object.__setattr__(self, entry.name, _plain(getattr(self, entry.name)))
        if isinstance(self.layers, list | tuple | range):
            object.__setattr__(self, "layers", tuple(self.layers))
        parse_layers(self.layers)
        for entry in fields(self):
            if entry.type is bool:
                _check_type(entry.name, getattr(self, entry.name), bool, "True or False")
        words = "a number of denoising steps such as 3, or a fraction of them from 0.0 to 1.0"
        for name in ("softmax_steps", "softmax_last"):
            steps = getattr(self, name)
            _check_type(name, steps, int | float, words)
            fits = steps >= 0 if isinstance(steps, int) else 0 <= steps <= 1
            check(fits, f"{name}={steps} must be {words}.")
        words = 'a number of denoising steps such as 10, a fraction of them such as 0.2, "auto", or None for never'
        refresh = None if self.refresh == "auto" else self.refresh
        _check_type("refresh", refresh, int | float | None, words)
        fits = refresh is None or (refresh > 0 and (isinstance(refresh, int) or refresh <= 1))
        check(fits, f"refresh={refresh} must be {words}.")
        check_choice("carry_dtype", self.carry_dtype, get_args(CarryType))
        check_choice("carry_device", self.carry_device, ("model", "cpu"))

    @property
    def has_dense_steps(self) -> bool:
        """Whether all layers run the original attention in some denoising steps, as far as these are known."""
        return bool(self.softmax_steps or self.softmax_last or self.refresh)

    @property
    def asks_for_dense_steps(self) -> bool:
        """Whether they do by more than ``refresh="auto"``, so that it is a mistake where no steps are known."""
        return bool(self.softmax_steps or self.softmax_last or self.refresh not in ("auto", None))

    @property
    def dense_words(self) -> str:
        """The settings that choose these steps, for errors and logs."""
        chosen = {name: getattr(self, name) for name in ("softmax_steps", "softmax_last", "refresh")}
        return ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value and value != "auto")

    def is_dense(self, step: "Step") -> bool:
        """Whether all layers run the original attention in a denoising step."""
        first, last = (_count_of(steps, step.count) for steps in (self.softmax_steps, self.softmax_last))
        if step.index < first or step.index >= step.count - last:
            return True
        refresh = self.refresh
        if refresh == "auto":
            refresh = USUAL_REFRESH if step.count >= FEWEST_REFRESHED else None
        if refresh is None:
            return False
        every = refresh if isinstance(refresh, int) else max(1, round(refresh * step.count))
        return (step.index - max(first, 1) + 1) % every == 0

    def shows(self, step: "Step") -> bool:
        """Whether what the patched attentions lose in a dense step is kept for later ones, or to see how it fades."""
        following = [Step(index, step.count) for index in range(step.index + 1, min(step.index + 3, step.count))]
        return self.carry and self.is_dense(step) and not all(self.is_dense(one) for one in following)

    def sizes_on(
        self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0, *, in_order: bool = False
    ) -> AttentionSizes:
        """Return what the cost of an attention with these settings depends on.

        Args:
            grid: token grid.
            heads: H.
            head_dim: D.
            extra: extra tokens.
            in_order: whether the attention before the patch sees no later token,
                :attr:`mhla_diffusers.families.Family.own_attention_is_causal`.
        """
        raise NotImplementedError

    def replace(self, **settings: Any) -> Self:
        """Return a copy with some fields changed.

        Raises:
            ValueError: unknown field, one of another attention, or value that is not allowed.
        """
        check_settings(settings, type(self))
        return replace(self, **settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON and YAML values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> "PatchConfig":
        """Invert :meth:`to_dict`: the names of the settings decide which kind of patch it is.

        Raises:
            ValueError: as :func:`kind_of`, or values that are not allowed.
        """
        return kind_of(settings)(**settings)


@dataclass(frozen=True, kw_only=True)
class SparseConfig(PatchConfig):
    """Sparse attention (:mod:`mhla_diffusers.attention.sparse`), which has no parameters and needs no training.

    Raises:
        ValueError: if a value is not allowed.
    """

    attention: ClassVar[str] = "sparse attention"
    refresh: int | float | Literal["auto"] | None = "auto"
    density: float = DEFAULT_DENSITY
    """Fraction of all pairs of uniform blocks in the lists. At 1 the attention is softmax attention."""
    block_size: int | None = None
    """Tokens per block of queries. Blocks follow a Hilbert curve through the grid
    (:mod:`mhla_diffusers.attention.layout`), so any grid works. The fused kernels take 16, 32, 64 and 128. None fits it
    to the grid of every call: 64 for videos.
    """
    key_block_size: int | None = None
    """Tokens per block of keys; must divide ``block_size``. None means ``block_size``, or fits the grid if that is None
    too."""
    order: Order = "content"
    """Which keys a block holds. "content": every head sorts the keys of each stretch of the curve, so that a block
    holds keys that are alike (:mod:`mhla_diffusers.attention.order`). "curve": neighbours, as of queries.
    """
    far: Far = "first-order"
    """How blocks that are not listed take part: "means", each as one key, its mean; "first-order", also by MHLA's
    states, mixed by content.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_size", "key_block_size"):
            size = getattr(self, name)
            _check_type(name, size, int | None, "a positive number of tokens, such as 64")
            check(
                size is None or 0 < size <= MOST_BLOCK_SIZE,
                f"{name}={size} must be a positive number of tokens, such as 64, and at most {MOST_BLOCK_SIZE}; a "
                "block that holds all tokens is softmax attention, density=1.0.",
            )
        check_choice("order", self.order, get_args(Order))
        check_choice("far", self.far, get_args(Far))
        _check_type("density", self.density, int | float, "a number in (0, 1]")
        check(
            0 < self.density <= 1,
            f"density={self.density} must be in (0, 1], a fraction of all pairs of blocks such as 0.05.",
        )
        if self.key_block_size is not None:
            check(
                self.block_size is not None and self.block_size % self.key_block_size == 0,
                f"key_block_size={self.key_block_size} must divide block_size, and block_size={self.block_size}; for "
                f"example block_size={2 * self.key_block_size}.",
            )

    def rule_on(self, grid: Sequence[int]) -> ContentRule:
        """Return how lists are chosen on a token grid."""
        return ContentRule.on(grid, self.density, self.block_size, self.key_block_size, self.order)

    def sizes_on(
        self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0, *, in_order: bool = False
    ) -> AttentionSizes:
        """Return what the cost of an attention with these settings depends on, see :meth:`PatchConfig.sizes_on`."""
        rule = self.rule_on(grid)
        queries, keys = (block_count(grid, size) for size in rule.sizes)
        stretches = -(-keys // blocks_per_state(rule.key_block_size))
        return AttentionSizes.of_sparse(
            math.prod(grid),
            heads,
            head_dim,
            queries,
            keys,
            stretches * (self.far == "first-order"),
            self.density,
            extra,
        )

    def replace(self, **settings: Any) -> Self:
        """Return a copy with some fields changed; another block size resets the key block size.

        Raises:
            ValueError: unknown field, one of another attention, or value that is not allowed.
        """
        usual: dict[str, Any] = {"key_block_size": None} if "block_size" in settings else {}
        return super().replace(**(usual | settings))


@dataclass(frozen=True, kw_only=True)
class LinearConfig(PatchConfig):
    """What MHLA and causal MHLA have in common: KV states of blocks, mixed by a learned matrix."""

    blocks: tuple[int, ...] = ()
    """Block count per axis of the token grid: (frames, height, width) or (height, width) or (length,)."""
    feature_map: str = "relu"
    """φ: relu, elu+1, softmax, identity, or a name given to ``register_feature_map``."""
    rope: Literal["after", "before"] = "after"
    """Whether RoPE acts before or after the feature map. "after", as in the paper's code, rotates the numerator alone.
    No effect in models without RoPE.
    """
    normalize: bool = True
    """Divide by the normaliser of Eq. 4."""
    eps: float = 1e-6
    """Floor that the relu and elu+1 feature maps add; softmax and identity need none."""
    mixing_init: MixingInit = "locality"
    """Mixing matrix before training: locality, uniform or identity."""
    mixing_per_head: bool = False
    """One mixing matrix per attention head instead of one per layer."""
    mixing_learnable: bool = True
    """Whether the mixing matrix takes gradients."""
    mixing_clip: bool = True
    """Whether ``register_mixing_clip`` keeps the matrix in (0, 1). False for matrices that were trained signed."""
    output_norm: bool = False
    """RMSNorm over each head's output, with one weight of head dim shared by the heads."""
    output_gate: bool = False
    """Multiply the output by SiLU of a projection of the layer's input (paper, Tab. 12)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.blocks:
            raise ValueError("MHLA needs blocks, the block count per axis, for example blocks=(7, 3, 5).")
        object.__setattr__(self, "blocks", check_blocks(self.blocks))
        count = math.prod(self.blocks)
        check(
            count <= MOST_BLOCKS,
            f"blocks={self.blocks} are {count:,} blocks, whose mixing matrix would have {count:,} rows and columns; at "
            f"most {MOST_BLOCKS:,} are allowed, and suggest_blocks() says how many a size needs.",
        )
        _check_type("feature_map", self.feature_map, str, "the name of a feature map")
        get_feature_map(self.feature_map)
        check_choice("rope", self.rope, ("after", "before"))
        check_choice("mixing_init", self.mixing_init, get_args(MixingInit))
        _check_type("eps", self.eps, int | float, "a number")
        check(0 <= self.eps <= 1, f"eps={self.eps} must be from 0 to 1, such as 1e-6.")
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

    def blocks_on(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return block counts on a token grid."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MHLAConfig(LinearConfig):
    """The paper's MHLA, of linear cost, which has to be adapted to a model that was trained with softmax.

    Raises:
        ValueError: if a value is not allowed, or two fields contradict each other.
    """

    attention: ClassVar[str] = "MHLA"
    convolution: int | None = None
    """Odd kernel size of a depth-wise convolution of the values over the token grid, added to the output (CPE)."""
    clamp_blocks: bool = False
    """Whether block counts are fitted to the grid of every call, with an interpolated mixing matrix, where an axis has
    fewer tokens than blocks, which else is an error, or the grid of N tokens less than √(2 N) blocks would do. So it is
    for the family's blocks, which ``apply_mhla`` takes where none are given.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_type("convolution", self.convolution, int | None, "an odd kernel size, or None for no convolution")
        if self.convolution is not None and (self.convolution < 1 or self.convolution % 2 == 0):
            raise ValueError(f"convolution={self.convolution} must be an odd kernel size, or None for no convolution.")

    def blocks_on(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return block counts on a token grid: those of the setting, or with ``clamp_blocks`` what suits it."""
        if not self.clamp_blocks or len(grid) != len(self.blocks):
            return self.blocks
        return fit_blocks([min(count, size) for count, size in zip(self.blocks, grid, strict=True)], grid)

    def sizes_on(
        self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0, *, in_order: bool = False
    ) -> AttentionSizes:
        """Return what the cost of an attention with these settings depends on, see :meth:`PatchConfig.sizes_on`."""
        return AttentionSizes(math.prod(grid), heads, head_dim, math.prod(self.blocks_on(grid)), extra=extra)


@dataclass(frozen=True, kw_only=True)
class CausalConfig(LinearConfig):
    """Causal MHLA (:mod:`mhla_diffusers.attention.causal`), whose queries see the past alone.

    Raises:
        ValueError: if a value is not allowed, or two fields contradict each other.
    """

    attention: ClassVar[str] = "causal MHLA"
    causal: Causal = "block"
    """Whether a query sees no later token ("token"), or no later block of the first axis, such as frames ("block")."""
    block_length: int = 0
    """Tokens per block of the first axis, such as 64 of a text or 3 latent frames of a video. The sequence is split
    into blocks of this length and may be shorter than all of them.
    """
    own: Literal["softmax", "linear"] = "softmax"
    """How the query's own block of the first axis is attended to: with softmax, or with MHLA's weights."""
    beyond: Beyond = "error"
    """What happens after the last block: "error", or "relative". Then later blocks use the last block's weights by
    distance, and everything farther back counts as one block, the mean of its KV states
    (:func:`mhla_diffusers.attention.mixing.extend_mixing`).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("causal", self.causal, get_args(Causal))
        check_choice("own", self.own, ("softmax", "linear"))
        check_choice("beyond", self.beyond, get_args(Beyond))
        length = "the tokens in a block of the first axis, such as 64 of a text or 3 latent frames"
        _check_type("block_length", self.block_length, int, length)
        check(self.block_length > 0, f"block_length={self.block_length} must be {length}.")
        check(
            self.causal == "block" or len(self.blocks) == 1,
            f"causal='token' orders the tokens of a sequence of one axis, but blocks={self.blocks} have several; "
            f"give one count, such as blocks=({self.blocks[0]},) for a text, or choose causal='block' for a video.",
        )
        check(
            self.mixing_clip or not self.needs_positive_mixing,
            f"mixing_clip=False allows entries below 0, of whose sums causal={self.causal!r} with own={self.own!r} "
            "takes the logarithm; leave it on, by which register_mixing_clip() keeps them in (0, 1) in training, or "
            "choose normalize=False with output_norm=True and own='linear'.",
        )
        if self.own == "softmax" and not (self.normalize and (self.eps > 0 or self.feature_map != "relu")):
            raise ValueError(
                "own='softmax' shares one denominator with MHLA, which must be positive. It needs normalize=True and, "
                f"with the relu feature map, eps > 0; got normalize={self.normalize}, eps={self.eps}."
            )
        check(
            self.beyond == "error" or self.blocks[0] > 1,
            f"beyond='relative' needs at least two blocks along the first axis, got blocks={self.blocks}.",
        )

    def grid_from(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return the grid of the longest sequence, of which a call's own grid is the beginning.

        Raises:
            ValueError: the sequence is longer, and ``beyond`` is "error".
        """
        trained, needed = self.blocks[0], -(-grid[0] // self.block_length)
        if needed > trained and self.beyond == "error":
            raise ValueError(
                f"The first axis has {grid[0]} tokens, more than the {trained} blocks of {self.block_length} that this "
                "patch is for. Give a shorter sequence, or beyond='relative', by which later blocks attend like the "
                "last one."
            )
        return max(trained, needed) * self.block_length, *grid[1:]

    def check_whole(self, grid: Sequence[int]) -> None:
        """Raise unless a call's first axis may have this length.

        Raises:
            ValueError: with ``causal="block"``, if it ends within a frame block.
        """
        length = self.block_length
        if self.causal == "block" and grid[0] % length:
            unit = "latent frames" if len(grid) == 3 else f"tokens along the first of {len(grid)} axes"
            raise ValueError(
                f"This patch takes whole frame blocks of {length} {unit}, and the call has {grid[0]}; allowed are "
                f"{length}, {2 * length}, {3 * length} and so on."
            )

    def blocks_on(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return block counts on the grid of :meth:`grid_from`."""
        return self.grid_from(grid)[0] // self.block_length, *self.blocks[1:]

    def sizes_on(
        self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0, *, in_order: bool = False
    ) -> AttentionSizes:
        """Return what the cost of an attention with these settings depends on, see :meth:`PatchConfig.sizes_on`."""
        tokens = math.prod(grid)
        seen = heads * (tokens * (tokens + 1) // 2) if in_order else None
        sizes = AttentionSizes(tokens, heads, head_dim, math.prod(self.blocks_on(grid)), extra=extra, seen_pairs=seen)
        length = self.block_length * math.prod(grid[1:])
        lengths = [min(length, tokens - start) for start in range(0, tokens, length)]
        own = heads * sum(n * (n + 1) // 2 if self.causal == "token" else n * n for n in lengths)
        if self.own == "softmax":
            return replace(sizes, block_pairs=own)
        return replace(sizes, own_pairs=own if self.causal == "token" else 0)

    @property
    def needs_positive_mixing(self) -> bool:
        """Whether own and earlier blocks are merged by the logarithm of their weights, which must be positive."""
        return self.normalize and (self.causal == "token" or self.own == "softmax")


KINDS: tuple[type[PatchConfig], ...] = (SparseConfig, MHLAConfig, CausalConfig)


def kind_of(settings: Iterable[str], *preferred: type[PatchConfig]) -> type[PatchConfig]:
    """Return which attention a patch runs, by the names of its settings.

    Args:
        settings: names of fields of one kind of patch.
        preferred: kinds for names that several have, the first one that fits.

    Raises:
        ValueError: unknown names, those of two kinds, or without a preferred one names that all kinds have.
    """
    settings = list(settings)
    names = {kind: [field.name for field in fields(kind)] for kind in KINDS}
    check_names(settings, list(dict.fromkeys(name for kind in KINDS for name in names[kind])), "setting of a patch")
    fitting = [kind for kind in KINDS if set(settings).issubset(names[kind])]
    if not fitting:
        kinds = {name: [kind for kind in KINDS if name in names[kind]] for name in settings}
        one, other = next((a, b) for a in settings for b in settings if not set(kinds[a]) & set(kinds[b]))
        raise ValueError(
            f"{one} belongs to {_attentions(kinds[one])}, and {other} to {_attentions(kinds[other])}; a patch runs one "
            "of them, so leave one of the two out."
        )
    for kind in preferred:
        if kind in fitting:
            return kind
    check(
        len(fitting) < len(KINDS),
        "The settings of a patch need one that says which attention it runs: density for sparse attention, or blocks "
        "for MHLA, for example blocks=(7, 3, 5).",
    )
    return fitting[0]


def check_settings(settings: Iterable[str], kind: type[PatchConfig], instead: str | None = None) -> None:
    """Raise unless all names are fields of a kind of patch.

    Args:
        settings: names.
        kind: of the patch.
        instead: what to do about names of another attention, where it is not to patch with that one.

    Raises:
        ValueError: unknown names, or those of another attention, with the way to it.
    """
    own = [field.name for field in fields(kind)]
    for name in settings:
        others = [other for other in KINDS if name in {field.name for field in fields(other)}]
        if name not in own and others:
            raise ValueError(
                f"{name} is a setting of {_attentions(others)}, and this patch runs {kind.attention}, whose settings "
                f"are {', '.join(own)}. "
                + (instead or f"For the other attention call remove_mhla() and apply_mhla(..., {name}=...).")
            )
    check_names(settings, own, f"setting of {kind.attention}")


def _attentions(kinds: Iterable[type[PatchConfig]]) -> str:
    return " or ".join(kind.attention for kind in kinds)


@dataclass(frozen=True)
class Step:
    """One step of a denoising loop."""

    index: int
    """From 0."""
    count: int
    """Number of all steps."""


def _count_of(steps: int | float, count: int) -> int:
    """Return a number of steps, given as such or as a fraction of all, rounded up."""
    return steps if isinstance(steps, int) else math.ceil(steps * count - 1e-9)


def _plain(value: Any) -> Any:
    """Numbers and arrays, for example of NumPy and torch, as plain Python values for JSON and YAML."""
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, list | tuple):
        return type(value)(_plain(one) for one in value)
    return value.tolist() if hasattr(value, "tolist") else value


def check(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless a condition holds."""
    if not condition:
        raise ValueError(message)


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ValueError, naming the allowed values, unless a setting has one of them."""
    check(value in allowed, f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, allowed))}.")


def check_names(settings: Iterable[str], allowed: Sequence[str], what: str, path: str = "") -> None:
    """Raise unless all names of settings are known.

    Args:
        settings: given names.
        allowed: known names.
        what: such as "MHLA setting".
        path: prefix of names in the error, such as "stages.0.".

    Raises:
        ValueError: an unknown name; the message has similar ones.
    """
    for name in settings:
        if name not in allowed:
            near = get_close_matches(str(name), allowed, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ValueError(f"Unknown {what} {path + str(name)!r}; {hint}allowed: {', '.join(allowed)}.")


def _check_type(name: str, value: object, wanted: Any, words: str) -> None:
    is_number_for_bool = isinstance(value, bool) and wanted is not bool
    check(isinstance(value, wanted) and not is_number_for_bool, f"{name}={value!r} must be {words}.")


def parse_layers(choice: LayerChoice) -> Fraction | tuple[int, ...]:
    """Return the choice as the fraction of layers to replace, or as indices."""
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
    """Whether layers are chosen by measurement."""
    return isinstance(choice, str) and choice.startswith(AUTOMATIC)


@dataclass(frozen=True)
class Patch:
    """One patch file.

    Attributes:
        family: name of its model family.
        base_model: Hub id that it was made for.
        description: one line.
        config: the settings.
    """

    family: str
    base_model: str
    description: str
    config: PatchConfig


def patch_folder() -> Path:
    """Find the folder of the presets: inside an installed package, or at the root of a source checkout."""
    package = Path(__file__).parent
    installed = package / "patches"
    return installed if installed.is_dir() else package.parent / "patches"


def patch_names() -> list[str]:
    """List the names of the presets."""
    return sorted(path.stem for path in patch_folder().glob("*.yaml"))


def adapted_patch_folder(name: str) -> Path | None:
    """Find the folder of an adapted patch that ships, for ``load_mhla``; None for any other name."""
    return patch_folder() / name if name in adapted_patch_names() else None


def adapted_patch_names() -> list[str]:
    """List the names of the adapted patches that ship, settings and weights, as ``save_mhla`` wrote them."""
    return sorted(path.parent.name for path in patch_folder().glob("*/mhla_config.json"))


def load_patch(name_or_path: str | Path) -> Patch:
    """Read a patch by its name or from a YAML file.

    Raises:
        ValueError: unknown name (the message has the nearest ones), or a file with unknown or missing keys.
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
            elif str(name_or_path) and path.is_dir():
                hint = f": {path} is a folder; open a saved patch with load_mhla(model, {str(name_or_path)!r})."
            raise ValueError(
                f"Unknown patch {str(name_or_path)!r}{hint} "
                f"Presets: {', '.join(patch_names())}; or give the path of a .yaml file."
            )
        path = patch_folder() / f"{name_or_path}.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"Patch file {path} does not exist.")
    try:
        return _parse_patch(parse_yaml(read_text(path), "it"))
    except ValueError as error:
        raise ValueError(f"Patch file {path}: {error}") from error


def _parse_patch(content: Any) -> Patch:
    keys = {"family", "base_model", "description", "patch"}
    found = set(content) if isinstance(content, Mapping) else set()
    if found != keys:
        raise ValueError(
            f"expected exactly the keys {', '.join(sorted(keys))}; "
            f"unknown: {', '.join(sorted(map(str, found - keys))) or 'none'}, "
            f"missing: {', '.join(sorted(keys - found)) or 'none'}."
        )
    settings = content["patch"]
    if not isinstance(settings, Mapping):
        raise ValueError(f"patch must hold settings such as density or blocks, got {settings!r}.")
    if isinstance(settings.get("eps"), str):  # YAML reads 1e-6, without a point, as text
        with suppress(ValueError):
            settings = {**settings, "eps": float(settings["eps"])}
    return Patch(content["family"], content["base_model"], content["description"], PatchConfig.from_dict(settings))
