"""Settings of a patch, of one kind of attention; profiles, and presets, the YAML files of the ``patches/`` folder."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from .attention import get_feature_map
from .attention.call import DEFAULT_DENSITY, ContentRule, Far, Order
from .attention.causal import Causal
from .attention.costs import AttentionSizes
from .attention.layout import Shape, block_count, check_grid, check_layout, fit_blocks
from .attention.mixing import MixingInit
from .attention.order import blocks_per_state
from .attention.state import Beyond
from .errors import check, check_names, said_allowed
from .files import read_text
from .moved import where_it_went
from .settings import Count, Flag, Integer, Number, PositiveInteger, Settings, read_yaml, settings

LayerChoice = str | float | tuple[int, ...]
"""Which self-attentions are replaced; see :func:`choose_layers`."""
USUAL_STEPS = 50
"""Denoising steps of a call, where their number is unknown."""
FEW_STEPS = 10
"""With fewer denoising steps a share of first or last ones is one step, and none is repeated."""


def _layers(choice: Any) -> LayerChoice:
    if isinstance(choice, list | tuple | range) and all(type(index) is int for index in choice):
        return tuple(choice)
    try:
        is_share = isinstance(choice, str | float) and 0 < Fraction(choice) <= 1  # 1 might be meant for one layer
    except (ValueError, ZeroDivisionError, OverflowError):
        is_share = False
    if not is_share and choice != "all":
        raise ValueError(f"layers={choice!r} must be 'all', a fraction such as '2/3', or indices such as [0, 2, -1].")
    share: LayerChoice = choice
    return share


def _feature_map(name: str) -> str:
    get_feature_map(name)
    return name


_Steps = Count | Annotated[Number, Field(ge=0, le=1)]
_Size = Annotated[Integer, Field(gt=0, le=1024)] | None


@settings(kw_only=True)
class PatchConfig(Settings):
    """Settings that all three kinds of patch share."""

    attention: ClassVar[str]
    """Which attention runs, in words."""
    layers: Annotated[LayerChoice, PlainValidator(_layers)] = "all"
    """Which layers: "all", a fraction such as "2/3" or 0.5, or a list of indices."""
    dense_first: _Steps = 0
    """First steps of a call with the original attention in all layers: a number, or as a float a share, rounded up."""
    dense_last: _Steps = 0
    """Last steps, likewise."""
    dense_every: Count = 0
    """After the first ones, one dense step every this many; 0 for never."""

    def __post_init__(self) -> None:
        shares = sum(steps for steps in (self.dense_first, self.dense_last) if isinstance(steps, float))
        check(
            shares < 1 and self.dense_every != 1,
            f"{self.dense_words} makes every step dense, so the patch never runs; lower it, or remove the patch.",
        )

    @property
    def short_name(self) -> str:
        """Name for tables."""
        return self.attention.removesuffix(" attention")

    @property
    def has_dense_steps(self) -> bool:
        """Whether any denoising step is dense."""
        return bool(self.dense_first or self.dense_last or self.dense_every)

    @property
    def dense_words(self) -> str:
        """The settings that choose these steps, for errors and logs."""
        chosen = {name: getattr(self, name) for name in ("dense_first", "dense_last", "dense_every")}
        return ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value) or "no dense step"

    def is_dense(self, step: "Step") -> bool:
        """Whether all layers run the original attention in a denoising step."""
        first, last = _count_of(self.dense_first, step.count), _count_of(self.dense_last, step.count)
        if step.index < first or (last and step.count and step.index >= step.count - last):
            return True
        is_repeated = self.dense_every and (not step.count or step.count >= FEW_STEPS)
        return bool(is_repeated and (step.index - first + 1) % self.dense_every == 0)

    def dense_steps(self, count: int) -> tuple[int, ...]:
        """Return the indices of the dense steps in a call of ``count`` steps."""
        return tuple(index for index in range(count) if self.is_dense(Step(index, count)))

    def call_speedup(self, dense: float, patched: float, count: int) -> float:
        """Return an upper bound on the speedup of a call of ``count`` steps, by the cost of dense and other ones."""
        dense_steps = len(self.dense_steps(count))
        return count * dense / (dense_steps * dense + (count - dense_steps) * patched)

    def records_residual(self, step: "Step") -> bool:
        """Whether a dense step measures residuals, to correct later steps or to see how they fade."""
        last = step.count or math.inf
        one, two = Step(step.index + 1, step.count), Step(step.index + 2, step.count)
        is_followed = (one.index < last and not self.is_dense(one)) or (two.index < last and not self.is_dense(two))
        return self.is_dense(step) and is_followed

    def sizes_on(self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0) -> AttentionSizes:
        """Return what the cost of an attention on a token grid depends on; ``extra`` counts extra tokens."""
        raise NotImplementedError

    def replace(self, **settings: Any) -> Self:
        """Return a copy with some fields changed; ValueError for one of another attention, or a value not allowed."""
        kind = kind_of(settings, type(self))
        check(
            kind is type(self),
            f"{', '.join(settings)} needs {kind.attention}, and this patch runs {self.attention}; call remove_mhla(), "
            "then apply_mhla() with it.",
        )
        return replace(self, **settings)

    @classmethod
    def read(cls, content: Any) -> Self:
        """Invert ``to_dict``; the names of the settings decide which kind of patch it is, as :func:`kind_of`."""
        if cls is PatchConfig and isinstance(content, Mapping):
            cls = kind_of(content)  # type: ignore[assignment]
        return super().read(content)


@settings(kw_only=True)
class SparseConfig(PatchConfig):
    """Settings of sparse attention (:mod:`mhla_diffusers.attention.sparse`), which needs no training."""

    attention: ClassVar[str] = "sparse attention"
    dense_first: _Steps = 0.2
    dense_last: _Steps = 1
    dense_every: Count = 10
    dense_layers: Count = 1
    """First self-attentions, in the order of execution, that stay as they are."""
    correct: Flag = True
    """Whether the error that dense steps measure corrects later steps (:mod:`mhla_diffusers.patching.residual`)."""
    density: Annotated[Number, Field(gt=0, le=1)] = DEFAULT_DENSITY
    """Fraction of all pairs of blocks that are listed. At 1 the attention is softmax attention."""
    block_size: _Size = None
    """Tokens per block of queries, which follow a Hilbert curve through any grid. The fused kernels take 16, 32, 64 and
    128. None fits it to the grid of every call: 64 for videos."""
    key_block_size: _Size = None
    """Tokens per block of keys; must divide ``block_size``. None: ``block_size``, or fitted to the grid with it."""
    order: Order = "content"
    """Keys of a block: alike, sorted per head within a stretch of the curve ("content"), or neighbours ("curve")."""
    far: Far = "second-order"
    """How pooled blocks take part: "means", each as its mean key; "second-order", also by the spread of its keys and by
    MHLA's states, mixed by content."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule_on((1,))  # raises if the sizes do not divide each other

    @property
    def profile(self) -> str:
        """Name of the profile with these settings; "" for none."""
        return next((name for name, config in PROFILES.items() if config == self), "")

    def rule_on(self, grid: Sequence[int]) -> ContentRule:
        """Return the rule that chooses lists on a token grid."""
        return ContentRule.on(grid, self.density, self.block_size, self.key_block_size, self.order)

    def summary(self, density: float, blocks: str = "blocks") -> str:
        """Describe the attention in a line, at a density of pairs of ``blocks``."""
        if density == 1:
            return f"{self.attention}: all pairs listed, which is softmax attention"
        blocks += ", keys sorted by content" if self.order == "content" else " along a curve"
        far = "means, spread and mixed states" if self.far == "second-order" else "means"
        return f"{self.attention}: {density:.1%} of the pairs of {blocks}; the others through their {far}"

    def sizes_on(self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0) -> AttentionSizes:
        """As :meth:`PatchConfig.sizes_on`."""
        rule = self.rule_on(grid)
        queries, keys = (block_count(grid, size) for size in rule.sizes)
        states = -(-keys // blocks_per_state(rule.key_block_size)) if self.far == "second-order" else 0
        tokens = math.prod(grid)
        return AttentionSizes.of_sparse(tokens, heads, head_dim, queries, keys, states, self.density, extra)

    def replace(self, **settings: Any) -> Self:
        """Return a copy with some fields changed; another block size resets the key block size."""
        usual: dict[str, Any] = {"key_block_size": None} if "block_size" in settings else {}
        return super().replace(**(usual | settings))


@settings(kw_only=True)
class LinearConfig(PatchConfig):
    """Settings that MHLA and causal MHLA share: KV states of blocks, mixed by a learned matrix."""

    blocks: Annotated[tuple[int, ...], PlainValidator(partial(check_grid, name="blocks"))]
    """Block count per axis of the token grid: (frames, height, width) or (height, width) or (length,)."""
    feature_map: Annotated[str, AfterValidator(_feature_map)] = "relu"
    """φ: relu, elu+1, softmax, identity, or a name given to ``register_feature_map``."""
    rope: Literal["after", "before"] = "after"
    """Whether RoPE acts before or after the feature map; "after", as the paper's code, rotates the numerator alone."""
    normalize: Flag = True
    """Divide by the normaliser of Eq. 4."""
    eps: Annotated[Number, Field(ge=0, le=1)] = 1e-6
    """Floor that the relu and elu+1 feature maps add."""
    mixing_init: MixingInit = "locality"
    """Mixing matrix before training."""
    mixing_per_head: Flag = False
    """One mixing matrix per attention head instead of one per layer."""
    mixing_learnable: Flag = True
    mixing_clip: Flag = True
    """Whether ``register_mixing_clip`` keeps the matrix in (0, 1). False for matrices that were trained signed."""
    output_norm: Flag = False
    """RMSNorm over each head's output, with one weight of head dim shared by the heads."""
    output_gate: Flag = False
    """Multiply the output by SiLU of a projection of the layer's input (paper, Tab. 12)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.normalize or self.output_norm,
            "With normalize=False the output grows with the number of tokens; set output_norm=True as well.",
        )
        check(
            not (self.normalize and self.feature_map == "identity"),
            "feature_map='identity' is signed, so its normaliser can vanish; use normalize=False with "
            "output_norm=True, or a positive feature map.",
        )

    def grid_from(self, grid: Sequence[int]) -> Shape:
        """Return the grid that is cut into blocks; a call's grid is this grid, or the beginning of it."""
        return tuple(grid)

    def blocks_on(self, grid: Sequence[int]) -> Shape:
        """Return block counts on a token grid."""
        raise NotImplementedError

    def layout_on(self, grid: Sequence[int]) -> tuple[Shape, Shape]:
        """Return the grid that is cut into blocks, and the block counts; ValueError if they do not fit."""
        return check_layout(self.grid_from(grid), self.blocks_on(grid))


@settings(kw_only=True)
class MHLAConfig(LinearConfig):
    """Settings of the paper's MHLA; a model trained with softmax must be adapted to it."""

    attention: ClassVar[str] = "MHLA"
    convolution: PositiveInteger | None = None
    """Odd kernel size of a depth-wise convolution of the values over the token grid, added to the output (CPE)."""
    clamp_blocks: Flag = False
    """Whether block counts are fitted to the grid of every call, with an interpolated mixing matrix, where an axis has
    fewer tokens than blocks (else an error), or √(2 N) blocks would do for N tokens. ``apply_mhla`` sets it with the
    family's blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check((self.convolution or 1) % 2 == 1, f"convolution={self.convolution} must be odd, or None.")

    def blocks_on(self, grid: Sequence[int]) -> Shape:
        """Return block counts on a token grid."""
        if not self.clamp_blocks or len(grid) != len(self.blocks):
            return self.blocks
        return fit_blocks([min(count, size) for count, size in zip(self.blocks, grid, strict=True)], grid)

    def sizes_on(self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0) -> AttentionSizes:
        """As :meth:`PatchConfig.sizes_on`."""
        return AttentionSizes(math.prod(grid), heads, head_dim, math.prod(self.blocks_on(grid)), extra=extra)


@settings(kw_only=True)
class CausalConfig(LinearConfig):
    """Settings of causal MHLA (:mod:`mhla_diffusers.attention.causal`), whose queries see only the past."""

    attention: ClassVar[str] = "causal MHLA"
    causal: Causal = "block"
    """Whether a query sees no later token ("token"), or no later block of the first axis, such as frames ("block")."""
    block_length: PositiveInteger
    """Tokens per block of the first axis, such as 64 of a text or 3 latent frames of a video."""
    own: Literal["softmax", "linear"] = "softmax"
    """How the query's own block of the first axis is attended to: with softmax, or with MHLA's weights."""
    beyond: Beyond = "error"
    """What happens after the last block: "error"; or "relative", by which later blocks use the last block's weights by
    distance, and all that is farther back is one block (:func:`mhla_diffusers.attention.mixing.extend_mixing`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.mixing_clip or not self.needs_positive_mixing,
            f"mixing_clip=False allows negative entries, but causal={self.causal!r} with own={self.own!r} takes the "
            "logarithm of their sums. Use mixing_clip=True, or normalize=False with output_norm=True and "
            "own='linear'.",
        )

    def grid_from(self, grid: Sequence[int]) -> Shape:
        """Return the grid of the longest sequence; ValueError for a call that is longer or ends within a block."""
        length, trained, needed = self.block_length, self.blocks[0], -(-grid[0] // self.block_length)
        check(
            self.causal == "token" or grid[0] % length == 0,
            f"The patch takes whole blocks of {length} along the first axis, such as latent frames, but this call has "
            f"{grid[0]}; allowed are {length}, {2 * length}, {3 * length} and so on.",
        )
        check(
            needed <= trained or self.beyond != "error",
            f"The first axis has {grid[0]} tokens, more than the patch's {trained} blocks of {length}. Give a shorter "
            "sequence, or use beyond='relative', which lets later blocks attend like the last one.",
        )
        return max(trained, needed) * length, *grid[1:]

    def blocks_on(self, grid: Sequence[int]) -> Shape:
        """Return block counts on a token grid."""
        return self.grid_from(grid)[0] // self.block_length, *self.blocks[1:]

    def sizes_on(self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0) -> AttentionSizes:
        """As :meth:`PatchConfig.sizes_on`."""
        tokens = math.prod(grid)
        sizes = AttentionSizes(tokens, heads, head_dim, math.prod(self.blocks_on(grid)), extra=extra)
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


AnyPatch = Annotated[PatchConfig, BeforeValidator(lambda x: PatchConfig.read(x) if isinstance(x, Mapping) else x)]
"""Field for settings of any kind; in a mapping their names say which."""
PROFILES = {
    "faithful": SparseConfig(),
    "balanced": SparseConfig(density=0.05, dense_first=0.1, dense_last=0, dense_layers=0),
    "fast": SparseConfig(density=0.025, dense_first=1, dense_last=0, dense_layers=0),
}
"""Name → settings of a profile; the first profile is the default (docs/settings.md)."""
NOTHING_DENSE: dict[str, Any] = {"dense_first": 0, "dense_last": 0, "dense_every": 0, "dense_layers": 0}
"""Settings of :class:`SparseConfig` by which it runs in every step and layer."""
KINDS: tuple[type[PatchConfig], ...] = (SparseConfig, MHLAConfig, CausalConfig)


def kind_of(settings: Collection[str], usual: type[PatchConfig] = SparseConfig) -> type[PatchConfig]:
    """Return the kind of patch that has settings of these names; ``usual`` if all kinds do.

    ValueError for unknown names, or those of two kinds.
    """
    known = {kind: [one.name for one in fields(kind)] for kind in (usual, *KINDS)}
    check_names(settings, list(dict.fromkeys(chain(*known.values()))), "setting of a patch")
    kind = max(known, key=lambda kind: sum(name in known[kind] for name in settings))
    other = [name for name in settings if name not in known[kind]]
    check(not other, f"{', '.join(settings)} cannot be set together: {kind.attention} has no {', '.join(other)}.")
    return kind


@dataclass(frozen=True)
class Step:
    """One step of a denoising loop."""

    index: int
    """From 0."""
    count: int
    """Number of all steps; 0 if it is unknown, where a share is one of :data:`USUAL_STEPS`."""


def _count_of(steps: int | float, count: int) -> int:
    if isinstance(steps, int):
        return steps
    count = count or USUAL_STEPS
    return min(1, math.ceil(steps - 1e-9)) if count < FEW_STEPS else math.ceil(steps * count - 1e-9)


@settings()
class Patch(Settings):
    """Content of a preset's file, or a profile."""

    family: str
    """Name of a model family; "" for a profile."""
    base_model: str
    """Hub id."""
    description: str
    patch: AnyPatch


def patch_folder() -> Path:
    """Return the folder of the presets, in an installed package or at the root of a checkout."""
    installed = Path(__file__).with_name("patches")
    return installed if installed.is_dir() else installed.parents[1] / "patches"


def patch_names() -> list[str]:
    """List the names of the presets."""
    return sorted(path.stem for path in patch_folder().glob("*.yaml"))


def adapted_patches() -> dict[str, Path]:
    """Return name → folder of the adapted patches that ship, saved by ``save_mhla``."""
    return {path.parent.name: path.parent for path in sorted(patch_folder().glob("*/mhla.safetensors"))}


def load_patch(name_or_path: str | Path) -> Patch:
    """Read a profile or a preset by its name, or a patch from a YAML file."""
    name, path = str(name_or_path), Path(name_or_path)
    if name in PROFILES:
        return Patch("", "", f"the profile {name!r} of sparse attention", PROFILES[name])
    if name in patch_names():
        path = patch_folder() / f"{name}.yaml"
    if path.suffix in (".yaml", ".yml"):
        return read_yaml(Patch, read_text(path), path)
    if gone := where_it_went(name):
        raise ValueError(f"Patch {name!r} was removed.{gone}")
    if name in adapted_patches() or (name and path.is_dir()):
        raise ValueError(f"Patch {name!r} is a folder; open a saved patch with load_mhla(model, {name!r}).")
    if len(path.parts) > 1:
        raise ValueError(f"{name} does not exist; a run that is to begin with the result of another comes after it.")
    known = [*PROFILES, *patch_names(), *adapted_patches()]
    raise ValueError(f"Unknown patch {name!r}; {said_allowed(name, known, 'mhla info')}")
