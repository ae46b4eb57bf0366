"""Tokenizers and text encoders of the tiny pipelines.

The encoders are lightly trained to tell captions apart: from the mean of an encoder's output, fixed linear heads must
read the first digit, the second digit and the motion. After that they stay as they are.
"""

import itertools
from typing import Any

import torch
from torch import nn

from ..tiny import TinyPipeline
from ..tiny.base import TEXT_CHANNELS
from ..tiny.digits import MOTIONS, Scene

_STEPS = 300
_NOTHING = 10


def all_scenes(tiny: TinyPipeline) -> list[Scene]:
    """Every scene that a caption can ask of a pipeline: one or two digits with each motion."""
    pairs = [(first,) for first in range(10)] + list(itertools.product(range(10), repeat=2))
    return [Scene(labels, motion) for labels in pairs for motion in tiny.motions]


def build_tokenizer(tiny: TinyPipeline) -> Any:
    """A byte-level BPE tokenizer that knows the words of the captions and spells every other word in bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    ((kind, mark),) = tiny.text_marks.items()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", mark],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([scene.caption for scene in all_scenes(tiny)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{mark} $A" if kind == "bos_token" else f"$A {mark}",
        special_tokens=[(mark, tokenizer.token_to_id(mark))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", padding_side="right", model_max_length=512, **{kind: mark}
    )


def train_text_encoder(tiny: TinyPipeline, tokenizer: Any, seed: int = 0) -> Any:
    """A text encoder that tells all captions of its pipeline apart; a few seconds."""
    torch.manual_seed(seed)
    encoder: Any = tiny.build_text_encoder(tokenizer)
    # random heads that stay as they are: the encoder itself has to bring what a caption says far apart
    heads = nn.functional.normalize(torch.randn(10 + 11 + len(MOTIONS) + 1, TEXT_CHANNELS), dim=1)
    scenes = all_scenes(tiny)
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
