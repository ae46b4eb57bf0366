"""What is particular to one tiny pipeline; everything else that deals with tiny pipelines asks it.

Shapes: pictures are 64 pixels high and wide, a clip has 9 frames; autoencoders make 4 channels of latents at a quarter
of the resolution, frame by frame.
"""

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .digits import FRAMES, PICTURE_SIZE, Scene, parse_caption

LATENT_CHANNELS = 4
STRIDE = 4
"""Pixels per latent along height and width."""
LATENT_SIZE = PICTURE_SIZE // STRIDE
TEXT_CHANNELS = 64
MAX_TOKENS = 10
"""Length that prompts are padded to; the longest caption has eight tokens."""


@dataclass(frozen=True)
class Phase:
    """One run of the training loop in which a transformer was made."""

    name: str
    steps: int
    batch_size: int
    learning_rate: float
    frames: int = FRAMES
    """Length of the clips; single frames teach the shapes of the digits at a fraction of the cost."""


class TinyPipeline(ABC):
    """One tiny pipeline of real diffusers classes: what it shows, how it is called, built and trained."""

    family: ClassVar[str]
    """Name of its model family."""
    digit_size: ClassVar[int] = 28
    """Height and width in pixels of a drawn digit."""
    most_digits: ClassVar[int] = 2
    motions: ClassVar[tuple[str | None, ...]] = (None,)
    """How digits move; None for pictures."""
    call_settings: ClassVar[dict[str, Any]] = {
        "num_inference_steps": 20,
        "guidance_scale": 3.0,
        "height": PICTURE_SIZE,
        "width": PICTURE_SIZE,
        "max_sequence_length": MAX_TOKENS,
    }
    """Arguments of the pipeline's call that it was trained for."""
    text_marks: ClassVar[dict[str, str]] = {}
    """Special token that the tokenizer puts before ("bos_token") or after ("eos_token") a text; empty without text."""
    autoencoder_steps: ClassVar[int] = 400
    """Updates of its autoencoder."""
    training_scenes: ClassVar[int] = 6000
    """Scenes that its transformer is trained on."""
    phases: ClassVar[tuple[Phase, ...]]
    """How its transformer is trained."""
    blocks: ClassVar[tuple[int, ...]] = (4, 4)
    """Block counts that suit its token grid."""
    mixing_per_head: ClassVar[bool] = False
    """Whether its MHLA has a mixing matrix for every head, as the presets of the family have it."""
    block_size: ClassVar[int | None] = None
    """Tokens of a block of the sparse branch that suit its token grid; None where its own attention is not softmax."""
    batch_size: ClassVar[int] = 16
    """Samples per update when a patch is adapted."""

    @property
    def is_video(self) -> bool:
        """Whether its digits move."""
        return self.motions != (None,)

    def random_scene(self, chance: random.Random) -> Scene:
        """One digit, or one or two where there is room, in motion where they move."""
        count = chance.choice((1, 1, 2)) if self.most_digits == 2 else 1
        labels = tuple(chance.randrange(10) for _ in range(count))
        return Scene(labels, chance.choice(self.motions) if self.is_video else None)

    def prompt(self, scene: Scene) -> str:
        """What the pipeline is asked for, to get a scene."""
        return scene.caption

    def scene(self, prompt: str) -> Scene | None:
        """The scene that a prompt asks for; None for one that another tiny pipeline is meant to get.

        Raises:
            ValueError: a text without digit words.
        """
        scene = parse_caption(prompt)
        return scene if (scene.motion is not None) == self.is_video else None

    @abstractmethod
    def build_transformer(self) -> Any:
        """An untrained transformer."""

    @abstractmethod
    def build_autoencoder(self) -> Any:
        """An untrained autoencoder."""

    def decode(self, autoencoder: Any, latents: torch.Tensor) -> torch.Tensor:
        """Pictures of latents, as the autoencoder's training compares them."""
        pictures: torch.Tensor = autoencoder.decode(latents, return_dict=False)[0]
        return pictures

    def record_scale(self, autoencoder: Any, latents: torch.Tensor, spread: float) -> None:
        """Write into the autoencoder's configuration what brings its latents to a standard deviation.

        Args:
            autoencoder: trained.
            latents: of many pictures, (n, 4, ...).
            spread: the standard deviation.
        """
        autoencoder.register_to_config(scaling_factor=round(spread / latents.std().item(), 4))

    def build_scheduler(self) -> Any:
        """Flow matching with shift 3."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=3.0)

    def build_text_encoder(self, tokenizer: Any) -> Any | None:
        """An untrained text encoder for a tokenizer's vocabulary; None for a model without one."""
        return None

    @abstractmethod
    def assemble(self, parts: dict[str, Any]) -> Any:
        """The pipeline of its parts, by the names of its components."""
