"""Configuration of a language model's training, and the training itself, by transformers' ``Trainer``."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import MHLAConfig, check, check_names
from ...patching import apply_mhla
from ..comparing import check_file_names, settings_of_one
from ..output import train_into
from ..recipe import Job, Recipe, check_counts, run_trainer
from ..settings import read_settings
from .gated_linear import give_gated_linear
from .texts import PYTHON_TOPICS, Rows, StreamedRows, hub_texts, python_topics

Variant = Mapping[str, Any] | str
"""Settings of a patch, "softmax" or "gated linear"."""
SOFTMAX, GATED = "softmax", "gated linear"


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(Recipe):
    """What is trained, on what, and how.

    Raises:
        ValueError: an unknown kind of attention, text or precision, nothing to adapt, or numbers that are not allowed.
    """

    model: dict[str, Any]
    """Arguments of transformers' ``LlamaConfig``."""
    length: int
    """Tokens of a row."""
    variants: dict[str, Variant]
    """Name → kind of attention: settings of a patch, "softmax" or "gated linear"."""
    text: str | dict[str, str] = PYTHON_TOPICS
    """"python-topics", or ``name``, ``subset`` and ``tokenizer`` of a data set of the Hub."""
    adapt: dict[str, Variant] = field(default_factory=dict)
    """What the model that was trained with softmax is adapted to."""
    adapt_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, 2, "length")
        check_counts(self, 1 if self.adapt else 0, "adapt_steps")
        self._check_text()
        for names in (self.variants, self.adapt):
            check_file_names(names)
        for name, variant in (*self.variants.items(), *self.adapt.items()):
            if isinstance(variant, str):
                check(
                    variant in (SOFTMAX, GATED),
                    f"variant {name!r} is {variant!r}; allowed: {SOFTMAX!r}, {GATED!r}, or settings of a patch.",
                )
            else:
                MHLAConfig.from_dict(variant)
        check(
            not self.adapt or SOFTMAX in self.variants.values(),
            f"adapt changes the model that was trained with softmax, and variants, {', '.join(self.variants)}, has "
            "none; add 'softmax: softmax' to variants, or leave adapt out.",
        )

    def _check_text(self) -> None:
        if isinstance(self.text, str):
            allowed = f"allowed: {PYTHON_TOPICS!r}, or name, subset and tokenizer of a data set"
            check(self.text == PYTHON_TOPICS, f"text={self.text!r} is unknown; {allowed}.")
            return
        check_names(self.text, ("name", "subset", "tokenizer"), "setting", "text.")
        missing = [name for name in ("name", "tokenizer") if name not in self.text]
        check(not missing, f"text, a data set of the Hub, lacks {', '.join(missing)}.")


def load_language_config(file: Path, overrides: Sequence[str] = ()) -> LanguageConfig:
    """Read a configuration, with ``key=value`` overrides; raises what :func:`read_settings` raises."""
    return read_settings(LanguageConfig, file, overrides)


def build(config: LanguageConfig, variant: Variant, seed: int) -> Any:
    """A fresh model of a variant; all variants of a seed begin with the same weights, as far as they have them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return as_variant(LlamaForCausalLM(LlamaConfig(**config.model)), variant)


def as_variant(model: Any, variant: Variant) -> Any:
    """A model with softmax attention, changed to attend in another way."""
    if variant == GATED:
        give_gated_linear(model)
    elif not isinstance(variant, str):
        apply_mhla(model, MHLAConfig.from_dict(variant))
    return model


def rows_of(config: LanguageConfig, held_out: bool = False) -> Rows | StreamedRows:
    """What is trained on, or judged on.

    Raises:
        ValueError: nothing of the text is held out.
    """
    if not isinstance(config.text, str):
        check(
            not held_out, "Nothing of a data set of the Hub is held out here; judge with lm-eval, see docs/language.md."
        )
        return hub_texts(config.text["name"], config.text.get("subset"), config.text["tokenizer"], config.length)
    return python_topics(config.length, held_out)


def train(model: Any, config: LanguageConfig, seed: int, steps: int, output: Path | None = None) -> float:
    """Train a model in place.

    Args:
        model: from :func:`build`, or one that is adapted.
        config: of the training.
        seed: of the order of rows.
        steps: of the optimizer.
        output: folder of transformers' checkpoints, from the last of which it goes on; None for none.

    Returns:
        CPU seconds, see :func:`run_trainer`.

    Raises:
        ValueError: several GPUs and no launcher.
    """
    job = Job(data=rows_of(config), seed=seed, steps=steps)
    use_cache, model.config.use_cache = model.config.use_cache, False  # as Trainer has it too, for good
    try:
        return run_trainer(model, config, job, output)
    finally:
        model.config.use_cache = use_cache  # else it would be saved, and the model generate without a cache


def train_one(config: LanguageConfig, name: str | None, output: Path) -> Path:
    """Train one variant, from the last checkpoint in the folder if there is one, and save it.

    Args:
        config: of the training; its first seed is taken.
        name: of the variant.
        output: folder of the checkpoints, and of ``result``: the patch with all weights, or the model as transformers
            saves it.

    Returns:
        The folder of the result.

    Raises:
        ValueError: no such variant, or the folder is of another configuration.
    """
    if name not in config.variants:
        raise ValueError(f"variant {name!r} is unknown; allowed: {', '.join(config.variants)}.")
    variant, seed = config.variants[name], config.seeds[0]

    def trained(folder: Path) -> Any:
        model = build(config, variant, seed)
        train(model, config, seed, config.steps, folder)
        return model

    return train_into(output, settings_of_one(config, variant, ("adapt", "adapt_steps")), trained)


@torch.no_grad()
def losses_by_place(model: Any, rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Mean loss of every place of a row, float64 (N - 1,).

    Args:
        model: which.
        rows: (N,) each.
    """
    losses = []
    for batch in torch.stack(list(rows)).split(8):
        given = batch.to(model.device)
        logits = model(given, use_cache=False).logits[:, :-1].float()
        losses.append(nn.functional.cross_entropy(logits.mT, given[:, 1:], reduction="none").double().cpu())
    return torch.cat(losses).mean(dim=0)
