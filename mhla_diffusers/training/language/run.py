"""Configuration of a language model's training, and the training itself, by transformers' ``Trainer``."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ...config import MHLAConfig, check, check_choice, check_names
from ...files import read_text
from ...patching import apply_mhla, is_patched, register_mixing_clip
from .gated_linear import give_gated_linear
from .texts import PYTHON_TOPICS, Rows, StreamedRows, hub_texts, python_topics

Variant = Mapping[str, Any] | str
"""Settings of a patch, "softmax" or "gated linear"."""
SOFTMAX, GATED = "softmax", "gated linear"


@dataclass(frozen=True)
class LanguageConfig:
    """What is trained, on what, and how.

    Raises:
        ValueError: an unknown kind of attention, text or precision, or nothing to adapt.
    """

    model: dict[str, Any]
    """Arguments of transformers' ``LlamaConfig``."""
    length: int
    """Tokens of a row."""
    variants: dict[str, Variant]
    """Name → kind of attention: settings of a patch, "softmax" or "gated linear"."""
    steps: int
    batch_size: int
    """Rows of a step and process."""
    learning_rate: float
    text: str | dict[str, str] = PYTHON_TOPICS
    """"python-topics", or ``name``, ``subset`` and ``tokenizer`` of a data set of the Hub."""
    accumulate: int = 1
    """Batches of an optimizer step."""
    mixing_learning_rate: float | None = None
    """Of MHLA's own parameters; None for that of all others."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Norm that gradients are clipped to."""
    warmup: int = 0
    """Steps in which the learning rate grows."""
    seeds: tuple[int, ...] = (0,)
    precision: str = "no"
    """"no", "bf16" or "fp16"."""
    adapt: dict[str, Variant] = field(default_factory=dict)
    """What the model that was trained with softmax is adapted to."""
    adapt_steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        check_choice("precision", self.precision, ("no", "bf16", "fp16"))
        self._check_text()
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


def load_language_config(file: Path) -> LanguageConfig:
    """Read a configuration.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no YAML of one, unknown or missing names, or values that are not allowed.
    """
    content = yaml.safe_load(read_text(file))
    check(isinstance(content, Mapping), f"{file} holds no settings by name.")
    known = fields(LanguageConfig)
    check_names(content, [entry.name for entry in known], "setting", f"{file}: ")
    missing = [
        name for name in ("model", "length", "variants", "steps", "batch_size", "learning_rate") if name not in content
    ]
    check(not missing, f"{file} lacks {', '.join(missing)}.")
    return LanguageConfig(**content)


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


def optimizer_of(model: nn.Module, config: LanguageConfig) -> torch.optim.Optimizer:
    """AdamW; norms, biases and what is MHLA's own do not decay, and mixing matrices stay in (0, 1)."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    own = [parameter for name, parameter in trained if ".mhla." in name]
    others = [parameter for name, parameter in trained if ".mhla." not in name]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in others if one.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [one for one in others if one.ndim < 2], "weight_decay": 0.0},
        {"params": own, "weight_decay": 0.0, "lr": config.mixing_learning_rate or config.learning_rate},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate)
    if is_patched(model):
        register_mixing_clip(optimizer, model)
    return optimizer


def train(model: Any, config: LanguageConfig, seed: int, steps: int, output: Path | None = None) -> Any:
    """Train a model in place.

    Args:
        model: from :func:`build`, or one that is adapted.
        config: of the training.
        seed: of the order of rows.
        steps: of the optimizer.
        output: folder of transformers' checkpoints; None for none.

    Returns:
        The model.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments, get_cosine_schedule_with_warmup

    optimizer = optimizer_of(model, config)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(config.warmup, steps // 10), steps)
    with tempfile.TemporaryDirectory() as aside:
        arguments = TrainingArguments(
            output_dir=str(output or aside),
            max_steps=steps,
            per_device_train_batch_size=config.batch_size,
            gradient_accumulation_steps=config.accumulate,
            max_grad_norm=config.clip,
            seed=seed,
            data_seed=seed,
            bf16=config.precision == "bf16",
            fp16=config.precision == "fp16",
            save_strategy="no" if output is None else "steps",
            logging_steps=100,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        use_cache, model.config.use_cache = model.config.use_cache, False  # as Trainer has it too, for good
        try:
            trainer = Trainer(model, arguments, train_dataset=rows_of(config), optimizers=(optimizer, schedule))
            if output is None:
                trainer.remove_callback(PrinterCallback)
            trainer.train()
        finally:
            model.config.use_cache = use_cache  # else it would be saved, and the model generate without a cache
    return model.eval()


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
