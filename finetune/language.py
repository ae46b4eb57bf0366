"""Language models with MHLA: train one, or compare kinds of attention from scratch, adapted and in longer texts.

python finetune/language.py compare --config finetune/configs/language-tiny.yaml --output outputs/language
python finetune/language.py train --config finetune/configs/language-tiny.yaml --variant MHLA --output outputs/one
Settings of a configuration are overridden by key=value, for example: steps=100 warmup=10
"""

import command_line

if __name__ == "__main__":
    command_line.read_language(__doc__)  # before the imports that take seconds

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import torch
import trainer
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mhla_diffusers import CausalConfig, apply_mhla, change_mhla, mhla_layers
from mhla_diffusers.attention.gated_linear import GATE_RANK, gated_linear, log_decay
from mhla_diffusers.families import get_family
from mhla_diffusers.lazy import installing
from mhla_diffusers.reporting import mean_and_spread, write_table
from mhla_diffusers.settings import Settings, allow, check

Variant = Mapping[str, Any] | str
"""Settings of a patch, "softmax" or "gated linear"."""
Row = dict[str, torch.Tensor]
"""``input_ids`` and ``labels``, (N,)."""

SOFTMAX, GATED, PYTHON_TOPICS = "softmax", "gated linear", "python-topics"


# --- configuration ---


@dataclass(frozen=True)
class HubText(Settings):
    """A data set of the Hub, and the tokenizer for its texts."""

    name: str
    tokenizer: str
    subset: str | None = None


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(trainer.Recipe):
    """What is trained, on what, and how.

    Raises:
        ValueError: an unknown kind of attention, text or precision, nothing to adapt, or numbers that are not allowed.
    """

    model: dict[str, Any]
    """Arguments of transformers' ``LlamaConfig``."""
    length: int = field(metadata=allow(at_least=2))
    """Tokens of a row."""
    variants: dict[str, Variant]
    """Name → kind of attention: settings of a patch, "softmax" or "gated linear"."""
    text: Literal["python-topics"] | HubText = PYTHON_TOPICS
    """Text of the pages of Python's help, or of a data set of the Hub."""
    adapt: dict[str, Variant] = field(default_factory=dict)
    """What the model that was trained with softmax is adapted to."""
    adapt_steps: int = field(default=0, metadata=trainer.ZERO_OR_MORE)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(not self.adapt or self.adapt_steps > 0, f"adapt_steps={self.adapt_steps} must be above 0 to adapt.")
        for variants in (self.variants, self.adapt):
            trainer.check_file_names(variants)
            for name, variant in variants.items():
                if isinstance(variant, str):
                    allowed = f"{SOFTMAX!r}, {GATED!r}, or settings of a patch."
                    check(variant in (SOFTMAX, GATED), f"variant {name!r} is {variant!r}; allowed: {allowed}")
                else:
                    get_family("llama").complete(variant)
        check(
            not self.adapt or SOFTMAX in self.variants.values(),
            f"adapt changes the model that was trained with softmax, and variants, {', '.join(self.variants)}, has "
            "none; add 'softmax: softmax' to variants, or leave adapt out.",
        )


# --- data ---


class Rows(Dataset[Row]):
    """Rows of ``length`` tokens, cut from tokens (n,); what does not fill the last row is left out."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].unflatten(0, (-1, length))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def python_topics(length: int, held_out: bool) -> Rows:
    """The pages of Python's own ``help()`` as bytes: every tenth page, or all others."""
    pages = [topics[name] for index, name in enumerate(sorted(topics)) if (index % 10 == 9) == held_out]
    return Rows(torch.tensor(list("\n\n".join(pages).encode())), length)


class StreamedRows(IterableDataset[Row]):
    """Rows of ``length`` tokens, cut from texts as they come; what does not fill the last row is left out.

    Args:
        texts: gives the texts from their begin.
        encode: a text as tokens, its end marked.
        length: tokens of a row.
    """

    def __init__(self, texts: Callable[[], Iterable[str]], encode: Callable[[str], list[int]], length: int) -> None:
        self.texts, self.encode, self.length = texts, encode, length

    def __iter__(self) -> Iterator[Row]:
        rest: list[int] = []
        for text in self.texts():
            rest += self.encode(text)
            while len(rest) >= self.length:
                row, rest = torch.tensor(rest[: self.length]), rest[self.length :]
                yield {"input_ids": row, "labels": row}


def hub_texts(name: str, subset: str | None, tokenizer: str, length: int) -> StreamedRows:
    """Rows of a data set of the Hub that is read while it is trained on.

    Raises:
        ValueError: the package ``datasets`` is not installed, or the tokenizer knows no end of a text.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"Data sets of the Hub are read with the package datasets; {installing('language')}."
        ) from error
    cutter = AutoTokenizer.from_pretrained(tokenizer)
    check(
        cutter.eos_token_id is not None,
        f"The tokenizer of {tokenizer} marks no end of a text; choose one that has an eos_token.",
    )
    return StreamedRows(
        lambda: (sample["text"] for sample in load_dataset(name, subset, split="train", streaming=True)),
        lambda text: [*cutter(text)["input_ids"], cutter.eos_token_id],
        length,
    )


def held_out_rows(config: LanguageConfig, length: int) -> torch.Tensor:
    """What is judged on, (rows, N); raises ValueError if nothing of the text is held out."""
    check(
        isinstance(config.text, str),
        "Nothing of a data set of the Hub is held out here; judge with lm-eval, see docs/language.md.",
    )
    return python_topics(length, held_out=True).rows


# --- model ---


class GatedLinearAttention(nn.Module):
    """Gated linear attention in the place of Llama's, to be compared with: GLA (Yang et al., 2024).

    It takes Llama's projections and adds a gate of the state, a norm over each head and a gate of the output; no RoPE.

    Args:
        attn: the attention whose projections it takes.
    """

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.head_dim = int(attn.head_dim)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj
        width, inner, keys = attn.q_proj.in_features, attn.q_proj.out_features, attn.k_proj.out_features
        self.decay = nn.Sequential(nn.Linear(width, GATE_RANK, bias=False), nn.Linear(GATE_RANK, keys))
        self.norm = nn.RMSNorm(self.head_dim)
        self.gate = nn.Linear(width, inner, bias=False)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """(B, N, hidden size), as Llama's attention is called; masks, positions and caches have no place here."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        decay = log_decay(self.decay(hidden_states)).unflatten(-1, (-1, self.head_dim))
        groups = query.shape[2] // key.shape[2]
        key, value, decay = (x.repeat_interleave(groups, dim=2) for x in (key, value, decay))
        output = self.norm(gated_linear(query, key, value, decay)).flatten(2)
        return self.o_proj(output * nn.functional.silu(self.gate(hidden_states))), None


def build(config: LanguageConfig, variant: Variant, seed: int) -> Any:
    """A fresh model of a variant; all variants of a seed begin with the same weights, as far as they have them."""
    torch.manual_seed(seed)
    return as_variant(LlamaForCausalLM(LlamaConfig(**config.model)), variant)


def as_variant(model: Any, variant: Variant) -> Any:
    """A model with softmax attention, changed to attend in another way."""
    if variant == GATED:
        for layer in model.model.layers:
            layer.self_attn = GatedLinearAttention(layer.self_attn).to(layer.self_attn.q_proj.weight)
    elif not isinstance(variant, str):
        apply_mhla(model, **variant)
    return model


# --- training ---


def train(model: Any, config: LanguageConfig, seed: int, steps: int, output: Path | None = None) -> float:
    """Train a model in place; the CPU seconds that it took, see :func:`trainer.run_trainer`."""
    if isinstance(config.text, str):
        data: Any = python_topics(config.length, held_out=False)
    else:
        data = hub_texts(config.text.name, config.text.subset, config.text.tokenizer, config.length)
    use_cache, model.config.use_cache = model.config.use_cache, False  # as Trainer has it too, for good
    try:
        return trainer.run_trainer(model, config, data, seed=seed, steps=steps, output=output)
    finally:
        model.config.use_cache = use_cache  # else it would be saved, and the model generate without a cache


def train_one(config: LanguageConfig, name: str | None, output: Path) -> Path:
    """Train one variant with the first seed, from the last checkpoint in the folder if there is one, and save it.

    Returns:
        The folder of the result: the patch with all weights, or the model as transformers saves it.

    Raises:
        ValueError: no such variant, or the folder is of another configuration.
    """
    if name not in config.variants:
        raise ValueError(f"variant {name!r} is unknown; allowed: {', '.join(config.variants)}.")
    variant, seed = config.variants[name], config.seeds[0]
    trainer.start(output, trainer.settings_of_one(config, variant, ("adapt", "adapt_steps")))
    model = build(config, variant, seed)
    train(model, config, seed, config.steps, output)
    return trainer.save_result(model, output / "result")


# --- evaluation ---


@torch.no_grad()
def losses_by_place(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Mean loss of every place of rows (rows, N), float64 (N - 1,)."""
    losses = []
    for batch in rows.split(8):
        given = batch.to(model.device)
        logits = model(given, use_cache=False).logits[:, :-1].float()
        losses.append(nn.functional.cross_entropy(logits.mT, given[:, 1:], reduction="none").double().cpu())
    return torch.cat(losses).mean(dim=0)


def perplexity(losses: torch.Tensor) -> float:
    """Return the perplexity of losses of single tokens."""
    return math.exp(float(losses.mean()))


def judged(model: Any, config: LanguageConfig) -> dict[str, Any]:
    """Held-out perplexity, and by place in texts of four times the length that was trained."""
    length = config.length
    within = perplexity(losses_by_place(model, held_out_rows(config, length)))
    patch = next((layer.config for layer in mhla_layers(model).values()), None)
    if isinstance(patch, CausalConfig) and patch.blocks[0] > 1:
        change_mhla(model, beyond="relative")
    far = losses_by_place(model, held_out_rows(config, 4 * length))
    places = [far[:length], far[length : 2 * length], far[2 * length :]]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"perplexity": within, "by place": [perplexity(one) for one in places], "parameters": parameters}


# --- comparison ---


def compare(config: LanguageConfig, output: Path) -> str:
    """Train and adapt every variant with every seed; seeds that are finished are kept.

    Args:
        config: of the comparison.
        output: folder of ``seed-<n>.json``, and of the tables.

    Returns:
        The tables as Markdown.

    Raises:
        ValueError: nothing of the text is held out, or the folder has seeds of another configuration.
    """
    held_out_rows(config, config.length)  # before all the training
    settings = trainer.settings_of(config)
    results = trainer.results_of(
        [
            trainer.Part(output / f"seed-{seed}.json", settings, partial(train_and_judge, config, seed))
            for seed in config.seeds
        ]
    )

    def spread(kind: str, name: str, key: str, style: str = ".3f") -> str:
        return mean_and_spread([one[kind][name][key] for one in results], style)

    scratch = [
        [
            name,
            f"{results[0]['scratch'][name]['parameters']:,}",
            spread("scratch", name, "perplexity"),
            spread("scratch", name, "seconds", ".0f"),
        ]
        for name in config.variants
    ]
    header = ["attention", "parameters", f"perplexity after {config.steps} steps", "CPU seconds"]
    tables = [write_table(header, scratch, output, "scratch")]
    if config.adapt:
        header = ["trained with softmax, then", "before adaptation", f"after {config.adapt_steps} steps"]
        adapted = [
            [one, spread("adapted", one, "before"), spread("adapted", one, "perplexity")] for one in config.adapt
        ]
        tables.append(write_table(header, adapted, output, "adapted"))
    ends = [0, config.length, 2 * config.length, 4 * config.length]
    places = [f"tokens {start + 1} to {end}" for start, end in zip(ends, ends[1:], strict=False)]
    beyond = []
    for name in config.variants:
        by_place = zip(*(one["scratch"][name]["by place"] for one in results), strict=True)
        beyond.append([name, *(mean_and_spread(found, ".3f") for found in by_place)])
    tables.append(write_table(["attention", *places], beyond, output, "beyond"))
    return "\n".join(tables)


def train_and_judge(config: LanguageConfig, seed: int, checkpoints: Path) -> dict[str, Any]:
    """The result of one seed: every variant from scratch, and what the one with softmax is adapted to."""
    scratch: dict[str, Any] = {}
    adapted: dict[str, Any] = {}
    for name, variant in config.variants.items():
        model = build(config, variant, seed)
        seconds = train(model, config, seed, config.steps, checkpoints / "scratch" / trainer.file_name_of(name))
        scratch[name] = judged(model, config) | {"seconds": seconds}
        if variant == SOFTMAX:
            for other, one in config.adapt.items():
                changed = as_variant(copy.deepcopy(model), one)
                before = perplexity(losses_by_place(changed, held_out_rows(config, config.length)))
                folder = checkpoints / "adapted" / trainer.file_name_of(other)
                seconds = train(changed, config, seed + 1, config.adapt_steps, folder)
                adapted[other] = judged(changed, config) | {"seconds": seconds, "before": before}
    return {"seed": seed, "scratch": scratch, "adapted": adapted}


# --- main ---


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments and do what they ask for."""
    given = command_line.read_language(__doc__, arguments)
    try:
        config = LanguageConfig.from_yaml(given.config, given.overrides)
        if given.command == "compare":
            sys.stdout.write(compare(config, given.output))
        else:
            sys.stdout.write(f"{train_one(config, given.variant, given.output)}\n")
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
