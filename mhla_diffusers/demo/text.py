"""Tokenizers and text encoders of the tiny pipelines.

The encoders are lightly trained to tell captions apart: from the mean of an encoder's output, fixed linear heads must
read the first digit, the second digit and the motion. After that they stay as they are.
"""

import itertools
from typing import Any

import torch
from torch import nn

from ..tiny.digits import MOTIONS, Scene

MAX_TOKENS = 10
"""Length that prompts are padded to; the longest caption has eight tokens."""
TEXT_CHANNELS = 64

_STEPS = 300
_NOTHING = 10


def captions(family: str) -> list[str]:
    """Every caption of a family."""
    return [scene.caption for scene in _scenes(family)]


def _scenes(family: str) -> list[Scene]:
    pairs = [(first,) for first in range(10)] + list(itertools.product(range(10), repeat=2))
    motions = MOTIONS if family == "wan" else (None,)
    return [Scene(labels, motion) for labels in pairs for motion in motions]


def build_tokenizer(family: str) -> Any:
    """A byte-level BPE tokenizer that knows the words of the captions and spells every other word in bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    wan = family == "wan"
    special = ["<pad>", "</s>"] if wan else ["<pad>", "<bos>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions(family), trainer)
    template = "$A </s>" if wan else "<bos> $A"
    mark = special[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(mark, tokenizer.token_to_id(mark))]
    )
    marks = {"eos_token": "</s>"} if wan else {"bos_token": "<bos>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", padding_side="right", model_max_length=512, **marks
    )


def build_text_encoder(family: str, tokenizer: Any) -> Any:
    """An untrained UMT5 encoder (wan) or Gemma2 (sana) for a tokenizer's vocabulary."""
    from transformers import Gemma2Config, Gemma2Model, UMT5Config, UMT5EncoderModel

    if family == "wan":
        return UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=TEXT_CHANNELS,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_CHANNELS,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=16,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=None,
        )
    )


def train_text_encoder(family: str, tokenizer: Any, seed: int = 0) -> Any:
    """A text encoder that tells all captions of its family apart; a few seconds."""
    torch.manual_seed(seed)
    encoder = build_text_encoder(family, tokenizer)
    # random heads that stay as they are: the encoder itself has to bring what a caption says far apart
    heads = nn.functional.normalize(torch.randn(10 + 11 + len(MOTIONS) + 1, TEXT_CHANNELS), dim=1)
    scenes = _scenes(family)
    targets = torch.tensor([_target(scene) for scene in scenes])
    tokens = tokenizer([scene.caption for scene in scenes], padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(_STEPS):
        chosen = torch.randint(len(scenes), (64,))
        mask = tokens.attention_mask[chosen]
        states = encoder(input_ids=tokens.input_ids[chosen], attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        parts = (mean @ heads.T).split([10, 11, len(MOTIONS) + 1], dim=-1)
        wanted = targets[chosen].unbind(dim=-1)
        loss = torch.stack([nn.functional.cross_entropy(p, w) for p, w in zip(parts, wanted, strict=True)]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return encoder.eval().requires_grad_(False)


def _target(scene: Scene) -> tuple[int, int, int]:
    second = scene.labels[1] if len(scene.labels) == 2 else _NOTHING
    motion = MOTIONS.index(scene.motion) if scene.motion is not None else len(MOTIONS)
    return scene.labels[0], second, motion
