"""Configuration of a classifier's training: the model, the pictures, and kinds of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import MHLAConfig, check, check_names
from ..comparing import check_file_names
from ..recipe import Recipe, check_counts
from ..settings import read_settings
from .models import FRESH, SOFTMAX, Variant

DIGITS = "digits"


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(Recipe):
    """What is trained, on what, and how.

    Raises:
        ValueError: an unknown kind of attention or data, or numbers that are not allowed.
    """

    model: str
    """"vit" of transformers, "pooled-vit", a ViT without a class token, of which "deit-t" and "deit-s" are the paper's
    sizes, "vlt" with "vlt-t" and "vlt-s"; or a classifier of the Hub or a folder to begin from.
    """
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration class, beside its ready ones; nothing for a model to begin from."""
    data: str | dict[str, str] = DIGITS
    """"digits", or ``train`` and ``held_out``, folders with a subfolder per class."""
    size: int
    """Height and width of a picture in pixels."""
    variants: dict[str, Variant]
    """Name → kind of attention."""
    ablations: dict[str, dict[str, Variant]] = field(default_factory=dict)
    """Name of a table → names of its rows → kind of attention, or the name of a variant."""
    smoothing: float = 0.0
    """Part of a label that all classes share."""
    mixup: float = 0.0
    """α of the Beta distribution by which pictures are blended; 0 for none."""
    cutmix: float = 0.0
    """α of the one by which they are pasted into each other; 0 for none."""
    held_out: int = 1000
    """Pictures of digits that are judged; of folders it is all."""
    analysed: int = 8
    """Held-out pictures whose attention matrices are looked at."""
    workers: int = 0
    """Processes that read pictures."""
    save_every: int = 1000
    """Steps between two checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, 1, "size", "held_out", "analysed", "save_every")
        check_counts(self, 0, "workers")
        check(0 <= self.smoothing < 1, f"smoothing={self.smoothing} must be from 0 to 1, such as 0.1.")
        for name in ("mixup", "cutmix"):
            value = getattr(self, name)
            check(value >= 0, f"{name}={value} must be 0 for none, or the α of a Beta distribution such as 0.8.")
        check(
            not (self.settings and self.model not in FRESH),
            f"settings are those of a model with random weights, and model={self.model!r} has its own; leave them out, "
            f"or choose one of {', '.join(FRESH)}.",
        )
        if isinstance(self.data, str):
            check(self.data == DIGITS, f"data={self.data!r} is unknown; allowed: {DIGITS!r}, or train and held_out.")
        else:
            check_names(self.data, ("train", "held_out"), "setting", "data.")
            missing = [name for name in ("train", "held_out") if name not in self.data]
            check(not missing, f"data, folders with a subfolder per class, lacks {', '.join(missing)}.")
        check(bool(self.variants), "variants is empty; give at least one, such as 'softmax: softmax'.")
        for name, variant in self.all_variants().items():
            self._check_variant(name, variant)
        check_file_names(self.all_variants())
        check_file_names(self.ablations, taken=("comparison",))
        for table, rows in self.ablations.items():
            for row, variant in rows.items():
                check(
                    not isinstance(variant, str) or variant in self.variants,
                    f"{row!r} of the ablation {table!r} is {variant!r}, which is none of the variants "
                    f"{', '.join(self.variants)}; give the name of one, or settings of a patch.",
                )

    def all_variants(self) -> dict[str, Variant]:
        """Those of the comparison, and then those of the ablations that are none of these, by a name of their own."""
        found = dict(self.variants)
        for table, rows in self.ablations.items():
            found |= {f"{table}, {row}": variant for row, variant in rows.items() if not isinstance(variant, str)}
        return found

    def rows_of(self, table: str) -> dict[str, str]:
        """Rows of an ablation → names in :meth:`all_variants`."""
        return {
            row: variant if isinstance(variant, str) else f"{table}, {row}"
            for row, variant in self.ablations[table].items()
        }

    def _check_variant(self, name: str, variant: Variant) -> None:
        if isinstance(variant, str):
            check(variant == SOFTMAX, f"variant {name!r} is {variant!r}; allowed: {SOFTMAX!r}, or settings of a patch.")
        elif not self.model.startswith("vlt"):
            MHLAConfig.from_dict(variant)


def load_classify_config(file: Path, overrides: Sequence[str] = ()) -> ClassifyConfig:
    """Read a configuration, with ``key=value`` overrides; raises what :func:`read_settings` raises."""
    return read_settings(ClassifyConfig, file, overrides)
