"""DiT: ``DiTTransformer2DModel``.

Softmax self-attention only; positions are added to the tokens once, before the first block. What conditions it is a
class, given by number or by a name of the pipeline's labels.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..config import MHLAConfig
from .base import Family
from .processes import DiffusionProcess, LearnedVarianceDDPM
from .sizes import Clip, Model
from .structure import Sample

_SHOWN_LABELS = 12
"""How many names of classes an error lists; ImageNet has a thousand."""


def _model(name: str, heads: int, head_dim: int, layers: int, **more: Any) -> Model:
    settings = {"num_attention_heads": heads, "attention_head_dim": head_dim, "out_channels": 8}
    sizes = tuple((side, side) for side in (256, 512, 1024, 2048, 4096))
    return Model(
        name, "DiTTransformer2DModel", settings, heads, head_dim, layers, (4, 4), stride=8, patch=2, sizes=sizes, **more
    )


_TINY = Model(
    "tiny-dit",
    "DiTTransformer2DModel",
    {"num_attention_heads": 2, "attention_head_dim": 12, "out_channels": 8},
    2,
    12,
    3,
    blocks=(2, 2),
    stride=8,
    patch=2,
    sizes=((64, 64),),
)


class DiTFamily(Family):
    """Class-conditional image transformers with a (height, width) token grid."""

    name = "dit"
    transformers = ("DiTTransformer2DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    # of 256 tokens at 256 px uniform blocks of 64 would be too few to choose among
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content", block_size=16)
    squares_only = True
    lacks_processor_methods = True
    default_clip = Clip(frames=1, fps=1.0, sizes=((256, 256),))
    prompts_are_classes = True
    measured_unasked = True
    models = (
        _model("dit-s-2", 6, 64, 12),
        _model("dit-xl-2", 16, 72, 28, grids={f"{16 * side}px": (side, side) for side in (32, 64, 128)}),
        _TINY,
    )

    def self_attention_processor(self) -> Any:
        """``AttnProcessor2_0``."""
        from diffusers.models.attention_processor import AttnProcessor2_0

        return AttnProcessor2_0()

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """A thousand steps of DDPM with learned variance."""
        return LearnedVarianceDDPM()

    def prepare_for_training(self, transformer: nn.Module) -> None:
        """DiT's label dropout draws numbers that would differ between processes; ``prompt_dropout`` replaces it."""
        for module in transformer.modules():
            if type(module).__name__ == "LabelEmbedding":
                module.eval()

    def parts_to_gather(self, transformer: nn.Module) -> list[nn.Module]:
        """The last layer asks the embeddings that lie in the first block."""
        from diffusers.models.embeddings import CombinedTimestepLabelEmbeddings

        return [module for module in transformer.modules() if isinstance(module, CombinedTimestepLabelEmbeddings)]

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``class_labels`` (); the empty prompt is the class after the last, which stands for none."""
        if not prompt:
            return {"class_labels": torch.tensor(int(pipe.transformer.config.num_embeds_ada_norm))}
        return {"class_labels": torch.tensor(class_label(pipe, prompt))}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``class_labels`` ()."""
        return {"class_labels": torch.empty((), dtype=torch.int64, device="meta")}

    def class_count(self, index: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """Those with names; all that the transformer has room for if none has a name."""
        return len(index.get("id2label") or {}) or int(config["num_embeds_ada_norm"])

    def check_prompt(self, pipe: Any, prompt: str) -> None:
        """Raise unless the pipeline has the class.

        Raises:
            ValueError: it does not.
        """
        class_label(pipe, prompt)

    def prompt_arguments(self, pipe: Any, prompts: Sequence[str]) -> dict[str, Any]:
        """``class_labels``."""
        return {"class_labels": [class_label(pipe, prompt) for prompt in prompts]}

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """The pipeline's own sampling up to the autoencoder, which it does not offer to leave out."""
        transformer, device = pipe.transformer, pipe.vae.device
        size, channels = transformer.config.sample_size, transformer.config.in_channels
        latents = torch.randn(1, channels, size, size, generator=generator).to(device, transformer.dtype)
        labels = torch.stack([self.encode_prompt(pipe, text)["class_labels"] for text in (prompt, "")]).to(device)
        pipe.scheduler.set_timesteps(steps)
        for time in pipe.scheduler.timesteps:
            inputs = pipe.scheduler.scale_model_input(torch.cat([latents, latents]), time)
            output = transformer(inputs, timestep=time.to(device).expand(2), class_labels=labels).sample
            wanted, empty = output[:, :channels].chunk(2)
            noise = empty + guidance * (wanted - empty)
            latents = pipe.scheduler.step(noise, time, latents).prev_sample
        return latents[0]


def class_label(pipe: Any, prompt: str) -> int:
    """The number of a class, given by number, by name, or as the last word of a phrase such as "a seven".

    Raises:
        ValueError: the pipeline has no such class.
    """
    numbers = {str(number): number for number in _classes(pipe)}
    text = prompt.strip()
    number = text.lstrip("0") or text[-1:]
    if number in numbers:
        return numbers[number]
    lower = {name.lower(): label for name, label in pipe.labels.items()}
    for name in (text, *text.split()[-1:]):
        # as it is written first: "Cardigan" is a dog of ImageNet, "cardigan" is not
        label = pipe.labels.get(name, lower.get(name.lower()))
        if label is not None:
            return int(label)
    names = sorted(pipe.labels)
    more = f" and {len(names) - _SHOWN_LABELS} more" if len(names) > _SHOWN_LABELS else ""
    or_name = f", or one of its labels: {', '.join(names[:_SHOWN_LABELS])}{more}" if names else "; it has no labels"
    raise ValueError(
        f"{prompt!r} is no class of this DiT; give a number from {min(numbers.values())} to {max(numbers.values())}"
        f"{or_name}."
    )


def _classes(pipe: Any) -> Collection[int]:
    """Those with names, on which the pipeline was trained; all that the transformer has room for if none has a name."""
    return {int(label) for label in pipe.labels.values()} or range(pipe.transformer.config.num_embeds_ada_norm)
