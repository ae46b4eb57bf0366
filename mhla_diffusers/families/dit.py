"""DiT: ``DiTTransformer2DModel``.

Softmax self-attention over the image alone; positions are added to the tokens once, and there is no RoPE. It is
conditioned on a class, by number or by a name of the pipeline's labels. At 256 px there are 256 tokens, too few uniform
blocks of 64 to choose among, so they have 16 by default.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import Clip, Model, squares, tiny_image
from .processes import LearnedVarianceDDPM

_CLASS = "DiTTransformer2DModel"
_SHOWN_LABELS = 12  # in an error; ImageNet has a thousand


def _model(name: str, heads: int, head_dim: int, layers: int, **different: Any) -> Model:
    sizes = squares(256, 512, 1024, 2048, 4096)
    return Model(name, _CLASS, heads, head_dim, layers, (4, 4), sizes, {"out_channels": 8}, **different, has_rope=False)


class _Training(Training):
    def prepare_for_training(self, transformer: nn.Module) -> None:
        """Disable label dropout, whose random numbers differ between processes; ``prompt_dropout`` replaces it."""
        for module in transformer.modules():
            if type(module).__name__ == "LabelEmbedding":
                module.eval()

    def parts_to_gather(self, transformer: nn.Module) -> list[nn.Module]:
        """Return the embeddings of the first block, which the last layer uses too."""
        from diffusers.models.embeddings import CombinedTimestepLabelEmbeddings

        return [module for module in transformer.modules() if isinstance(module, CombinedTimestepLabelEmbeddings)]

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Return ``class_labels`` (); the empty prompt is the class after the last one."""
        none = int(pipe.transformer.config.num_embeds_ada_norm)
        return {"class_labels": torch.tensor(_label_of(pipe, prompt) if prompt else none)}

    def class_count(self, index: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """Return the labelled classes; all classes of the transformer if there are no labels."""
        return len(index.get("id2label") or {}) or int(config["num_embeds_ada_norm"])

    def check_class(self, index: Mapping[str, Any], config: Mapping[str, Any], prompt: str) -> None:
        """Raise ValueError unless the pipeline has the class, one of the names that DiTPipeline reads."""
        named = index.get("id2label") or {}
        labels = {name.strip(): int(label) for label, names in named.items() for name in names.split(",")}
        if labels or "num_embeds_ada_norm" in config:  # else it is not a DiT, which loading says
            class_label(prompt, labels, config.get("num_embeds_ada_norm", 0))

    def check_prompt(self, pipe: Any, prompt: str) -> None:
        """Raise ValueError unless the pipeline has the class."""
        _label_of(pipe, prompt)

    def prompt_arguments(self, pipe: Any, prompts: Sequence[str]) -> Kwargs:
        """Give the classes as ``class_labels``."""
        return {"class_labels": [_label_of(pipe, prompt) for prompt in prompts]}

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> Tensor:
        """Sample as the pipeline does up to the autoencoder, which it cannot skip."""
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


DIT = Family(
    name="dit",
    transformers=(_CLASS,),
    attention=Attention(),
    forward=Forward(conditions=(Condition("class_labels", (), dtype=torch.int64),)),
    trained=_Training(ddpm=LearnedVarianceDDPM, prompts_are_classes=True),
    squares_only=True,
    default_clip=Clip(frames=1, fps=1.0, sizes=((256, 256),)),
    models=(
        _model("dit-s-2", 6, 64, 12),
        _model("dit-xl-2", 16, 72, 28, source="facebook/DiT-XL-2-256"),
        tiny_image("dit", _CLASS, {"out_channels": 8}, has_rope=False),
    ),
)


def _label_of(pipe: Any, prompt: str) -> int:
    return class_label(prompt, pipe.labels, pipe.transformer.config.num_embeds_ada_norm)


def class_label(prompt: str, labels: Mapping[str, int], count: int) -> int:
    """Return the number of a class, from its number, its name, or a phrase that ends in its name, such as "a seven".

    Args:
        prompt: the class.
        labels: name → number of the classes that a pipeline was trained on.
        count: classes of its transformer, all of which are meant if there are no labels.

    Raises:
        ValueError: there is no such class.
    """
    numbers = {int(label) for label in labels.values()} or range(count)
    text = prompt.strip()
    number = text.lstrip("0") or text[-1:]
    if number in map(str, numbers):
        return int(number)
    lower = {name.lower(): label for name, label in labels.items()}
    for name in (text, *text.split()[-1:]):
        # case-sensitive first: "Cardigan" is a dog of ImageNet, "cardigan" is not
        label = labels.get(name, lower.get(name.lower()))
        if label is not None:
            return int(label)
    names = sorted(labels)
    more = f" and {len(names) - _SHOWN_LABELS} more" if len(names) > _SHOWN_LABELS else ""
    or_name = f", or one of its labels: {', '.join(names[:_SHOWN_LABELS])}{more}" if names else "; it has no labels"
    raise ValueError(
        f"{prompt!r} is not a class of this DiT; give a number from {min(numbers)} to {max(numbers)}{or_name}."
    )
