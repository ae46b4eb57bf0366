"""Settings of a patch, of one kind of attention; profiles, and presets, the YAML files of the ``patches/`` folder."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool, StrictFloat, StrictInt

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
from .settings import Count, PositiveInteger, Settings, read_yaml

LayerChoice = str | float | tuple[int, ...]
"""Which self-attentions are replaced; see :func:`choose_layers`."""
USUAL_STEPS = 50
"""Denoising steps of a call, where their number is unknown."""
FEW_STEPS = 10
"""With fewer denoising steps a share of first or last ones is one step, and none is repeated."""


def _layers(choice: Any) -> Any:
    if isinstance(choice, list | tuple | range) and all(type(index) is int for index in choice):
        return tuple(choice)
    with suppress(ValueError, ZeroDivisionError, OverflowError):
        # 1 might be meant for one layer
        if choice == "all" or (isinstance(choice, str | float) and 0 < Fraction(choice) <= 1):
            return choice
    raise ValueError(f"layers={choice!r} must be 'all', a fraction such as '2/3', or indices such as [0, 2, -1].")


_Steps = Count | Annotated[StrictFloat, Field(ge=0, le=1)]
_Size = Annotated[StrictInt, Field(gt=0, le=1024)] | None


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
        """The settings that choose these steps, for errors and logs; empty for none."""
        chosen = {name: getattr(self, name) for name in ("dense_first", "dense_last", "dense_every")}
        return ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value)

    def is_dense(self, step: "Step") -> bool:
        """Whether all layers run the original attention in a denoising step; beyond the last one none is patched."""
        count = step.count or USUAL_STEPS
        largest_share = count if count >= FEW_STEPS else 1
        first, last = (
            steps if isinstance(steps, int) else min(math.ceil(steps * count - 1e-9), largest_share)
            for steps in (self.dense_first, self.dense_last)
        )
        if step.index < first or (step.count and step.index >= step.count - last):
            return True
        return bool(self.dense_every and count >= FEW_STEPS and (step.index - first + 1) % self.dense_every == 0)

    def dense_steps(self, count: int) -> tuple[int, ...]:
        """Return the indices of the dense steps in a call of ``count`` steps."""
        return tuple(index for index in range(count) if self.is_dense(Step(index, count)))

    def call_speedup(self, dense: float, patched: float, count: int) -> float:
        """Return an upper bound on the speedup of a call of ``count`` steps, by the cost of dense and other ones."""
        dense_steps = len(self.dense_steps(count))
        return count * dense / (dense_steps * dense + (count - dense_steps) * patched)

    def records_residual(self, step: "Step") -> bool:
        """Whether a dense step measures residuals, to correct later steps or to see how they fade."""
        following = (Step(step.index + ahead, step.count) for ahead in (1, 2))
        return self.is_dense(step) and not all(map(self.is_dense, following))

    def sizes_on(self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0) -> AttentionSizes:
        """Return what the cost of an attention on a token grid depends on; ``extra`` counts extra tokens."""
        raise NotImplementedError

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; ValueError for one of another attention, or a value not allowed."""
        kind_of([*type(self).model_fields, *changes])
        return super().replace(**changes)


class SparseConfig(PatchConfig):
    """Settings of sparse attention (:mod:`mhla_diffusers.attention.sparse`), which needs no training."""

    attention: ClassVar[str] = "sparse attention"
    dense_first: _Steps = 0.2
    dense_last: _Steps = 1
    dense_every: Count = 10
    dense_layers: Count = 1
    """First self-attentions, in the order of execution, that stay as they are."""
    correct: StrictBool = True
    """Whether the error that dense steps measure corrects later steps (:mod:`mhla_diffusers.patching.residual`)."""
    density: Annotated[StrictFloat, Field(gt=0, le=1)] = DEFAULT_DENSITY
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

    def _check(self) -> None:
        self.rule_on((1,))  # raises if the sizes do not divide each other

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
        sizes = math.prod(grid), heads, head_dim, queries, keys, states
        return AttentionSizes.of_sparse(*sizes, self.density, extra)


class LinearConfig(PatchConfig):
    """Settings that MHLA and causal MHLA share: KV states of blocks, mixed by a learned matrix."""

    blocks: Annotated[tuple[int, ...], PlainValidator(lambda blocks: check_grid(blocks, "blocks"))]
    """Block count per axis of the token grid: (frames, height, width) or (height, width) or (length,)."""
    feature_map: str = "relu"
    """φ: relu, elu+1, softmax, identity, or a name given to ``register_feature_map``."""
    rope: Literal["after", "before"] = "after"
    """Whether RoPE acts before or after the feature map; "after", as the paper's code, rotates the numerator alone."""
    normalize: StrictBool = True
    """Divide by the normaliser of Eq. 4."""
    eps: Annotated[StrictFloat, Field(ge=0, le=1)] = 1e-6
    """Floor that the relu and elu+1 feature maps add."""
    mixing_init: MixingInit = "locality"
    """Mixing matrix before training."""
    mixing_per_head: StrictBool = False
    """One mixing matrix per attention head instead of one per layer."""
    mixing_learnable: StrictBool = True
    mixing_clip: StrictBool = True
    """Whether ``register_mixing_clip`` keeps the matrix in (0, 1). False for matrices that were trained signed."""
    output_norm: StrictBool = False
    """RMSNorm over each head's output, with one weight of head dim shared by the heads."""
    output_gate: StrictBool = False
    """Multiply the output by SiLU of a projection of the layer's input (paper, Tab. 12)."""

    def _check(self) -> None:
        get_feature_map(self.feature_map)  # raises for an unknown one
        check(
            self.normalize or self.output_norm,
            "With normalize=False the output grows with the number of tokens; set output_norm=True as well.",
        )
        check(
            not (self.normalize and self.feature_map == "identity"),
            "feature_map='identity' is signed, so its normaliser can vanish; use normalize=False with "
            "output_norm=True, or a positive feature map.",
        )

    def layout_on(self, grid: Sequence[int]) -> tuple[Shape, Shape]:
        """Return the grid that is cut into blocks, and the block counts; ValueError if they do not fit.

        The grid of a call is this grid, or the beginning of it.
        """
        return check_layout(grid, self.blocks)

    def sizes_on(self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0) -> AttentionSizes:
        """As :meth:`PatchConfig.sizes_on`."""
        return AttentionSizes(math.prod(grid), heads, head_dim, math.prod(self.layout_on(grid)[1]), extra=extra)


class MHLAConfig(LinearConfig):
    """Settings of the paper's MHLA; a model trained with softmax must be adapted to it."""

    attention: ClassVar[str] = "MHLA"
    convolution: Literal[3, 5, 7] | None = None
    """Kernel size of a depth-wise convolution of the values over the token grid, added to the output (CPE)."""
    clamp_blocks: StrictBool = False
    """Whether block counts are fitted to the grid of every call, with an interpolated mixing matrix, where an axis has
    fewer tokens than blocks (else an error), or √(2 N) blocks would do for N tokens. ``apply_mhla`` sets it with the
    family's blocks."""

    def layout_on(self, grid: Sequence[int]) -> tuple[Shape, Shape]:
        """As :meth:`LinearConfig.layout_on`."""
        if self.clamp_blocks and len(grid) == len(self.blocks):
            return check_layout(grid, fit_blocks(self.blocks, grid))
        return super().layout_on(grid)


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

    def _check(self) -> None:
        super()._check()
        check(
            self.mixing_clip or not self.needs_positive_mixing,
            f"mixing_clip=False allows negative entries, but causal={self.causal!r} with own={self.own!r} takes the "
            "logarithm of their sums. Use mixing_clip=True, or normalize=False with output_norm=True and "
            "own='linear'.",
        )

    def layout_on(self, grid: Sequence[int]) -> tuple[Shape, Shape]:
        """As :meth:`LinearConfig.layout_on`: the grid of the longest sequence."""
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
        count = max(trained, needed)
        return check_layout((count * length, *grid[1:]), (count, *self.blocks[1:]))

    def sizes_on(self, grid: Sequence[int], heads: int, head_dim: int, extra: int = 0) -> AttentionSizes:
        """As :meth:`PatchConfig.sizes_on`."""
        sizes, length = super().sizes_on(grid, heads, head_dim, extra), self.block_length * math.prod(grid[1:])
        lengths = [min(length, sizes.tokens - start) for start in range(0, sizes.tokens, length)]
        own = heads * sum(n * (n + 1) // 2 if self.causal == "token" else n * n for n in lengths)
        if self.own == "softmax":
            return replace(sizes, block_pairs=own)
        return replace(sizes, own_pairs=own if self.causal == "token" else 0)

    @property
    def needs_positive_mixing(self) -> bool:
        """Whether own and earlier blocks are merged by the logarithm of their weights, which must be positive."""
        return self.normalize and (self.causal == "token" or self.own == "softmax")


READ_PATCH = BeforeValidator(lambda given: kind_of(given)(**given) if isinstance(given, Mapping) else given)
"""Validator for fields that take settings of any kind of patch; in a mapping the names decide which kind."""
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
    known = {kind: list(kind.model_fields) for kind in (usual, *KINDS)}
    every = dict.fromkeys(name for names in known.values() for name in names)
    check_names(settings, list(every), "setting of a patch")
    kind = max(known, key=lambda kind: sum(name in known[kind] for name in settings))
    other = ", ".join(name for name in settings if name not in known[kind])
    check(
        not other,
        f"{kind.attention} has no {other}, and a patch runs one attention; leave out the settings of one, or call "
        "remove_mhla() before apply_mhla() with another.",
    )
    return kind


@dataclass(frozen=True)
class Step:
    """One step of a denoising loop."""

    index: int
    """From 0."""
    count: int
    """Number of all steps; 0 if it is unknown, where a share is one of :data:`USUAL_STEPS`."""


class Patch(Settings):
    """Content of a preset's file, or a profile."""

    family: str = ""
    """Name of a model family; "" for any."""
    base_model: str = ""
    """Hub id."""
    description: str
    patch: Annotated[PatchConfig, READ_PATCH]


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
        return Patch(description=f"the profile {name!r} of sparse attention", patch=PROFILES[name])
    if name in patch_names():
        path = patch_folder() / f"{name}.yaml"
    if path.suffix in (".yaml", ".yml"):
        return read_yaml(Patch, read_text(path), path)
    if name in adapted_patches() or (name and path.is_dir()):
        raise ValueError(f"Patch {name!r} is a folder; open a saved patch with load_mhla(model, {name!r}).")
    if len(path.parts) > 1:
        raise ValueError(f"{name} does not exist; a run that begins with the result of another comes after it.")
    known = [*PROFILES, *patch_names(), *adapted_patches()]
    raise ValueError(f"Unknown patch {name!r}; {where_it_went(name) or said_allowed(name, known, 'mhla info')}")
