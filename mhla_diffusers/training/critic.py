"""The critic of few steps: it learns the distribution of the student's samples, and begins as the teacher."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..families import NoisedBatch, get_family, predict
from ..patching import is_patched, remove_mhla
from .config import FewStepsConfig, StageConfig
from .teacher import unpatched
from .trainable import CRITIC, adapter_active, add_adapters, is_lora


class AdapterCritic:
    """The transformer itself, without its patch and with a LoRA of the critic's own in place of the student's.

    It costs the memory of that LoRA. The model's own weights must be the teacher's, as they are where nothing but LoRA
    and MHLA's own parameters is trained.

    Args:
        transformer: the student, perhaps patched, on any device.
        rank: of the LoRA, on every linear layer of the blocks.
        seed: of its initial weights, which change no output.
    """

    def __init__(self, transformer: nn.Module, rank: int, seed: int) -> None:
        self._transformer = transformer
        add_adapters(transformer, rank, seed + 1, "blocks", CRITIC)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its weights by name."""
        return {name: x for name, x in self._transformer.named_parameters() if is_lora(name) and f".{CRITIC}." in name}

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within the context the transformer is the critic; leave it only after the backward pass.

        With gradient checkpointing a backward pass runs the transformer again, as what it is at that moment.
        """
        with unpatched(self._transformer), adapter_active(self._transformer, CRITIC):
            yield

    def predict(self, batch: NoisedBatch) -> torch.Tensor:
        """Prediction for a batch, within :meth:`at_work`."""
        return predict(self._transformer, batch)


class CopiedCritic:
    """A copy of the unpatched model, for models so small that a copy does not matter.

    Args:
        transformer: the student with the original weights, perhaps patched.
    """

    def __init__(self, transformer: Any) -> None:
        self._copy = copy.deepcopy(transformer)
        if is_patched(self._copy):
            remove_mhla(self._copy)
        self._copy.float().train()
        get_family(transformer).prepare_for_training(self._copy)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its weights by name."""
        return dict(self._copy.named_parameters())

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Nothing changes, because the copy is a model of its own."""
        yield

    def predict(self, batch: NoisedBatch) -> torch.Tensor:
        """Prediction for a batch."""
        return predict(self._copy, batch)


Critic = AdapterCritic | CopiedCritic


def make_critic(transformer: nn.Module, stage: StageConfig, few_steps: FewStepsConfig, seed: int) -> Critic:
    """The critic of a stage; before anything is trained or loaded."""
    if stage.trainable == "all":
        return CopiedCritic(transformer)
    return AdapterCritic(transformer, few_steps.critic_rank or stage.lora_rank or 1, seed)
