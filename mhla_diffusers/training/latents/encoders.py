"""What a family's pipeline makes of pixels and prompts: latents and conditioning, as its transformer takes them."""

import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from .data import Sample
from .media import Clip

_NOT_IDENTITY = {"torch_dtype", "dtype", "transformers_version"}
_SHOWN_LABELS = 12
"""How many labels of a DiT an error lists; ImageNet's has a thousand."""


class PipelineEncoder(ABC):
    """Wraps a pipeline.

    Args:
        pipe: with all of its components, on its device.
    """

    default_clip: Clip
    """What is cut out of a file when nothing else is said."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    @abstractmethod
    def latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """Latents of one clip.

        Args:
            pixels: uint8 (3, frames, height, width).

        Returns:
            (C, F, H, W) or (C, H, W), of the scale that the transformer takes.
        """

    @abstractmethod
    def conditioning(self, caption: str) -> Sample:
        """Arguments of the transformer's forward for a caption, or for the empty prompt."""

    @abstractmethod
    def generate(
        self, caption: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """Latents that the pipeline generates, like :meth:`latents`."""

    @staticmethod
    @abstractmethod
    def sample_shapes(transformer: Any, vae: dict[str, Any], clip: Clip) -> Sample:
        """A sample without values, on the meta device.

        Args:
            transformer: configuration of the transformer.
            vae: configuration of the autoencoder.
            clip: frames and size.
        """

    def _pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """From 0..255 to the autoencoder's -1..1, with a batch axis."""
        vae = self.pipe.vae
        return (pixels.to(vae.device).float() / 127.5 - 1).to(vae.dtype)[None]


class WanEncoder(PipelineEncoder):
    """Wan: the mean of the posterior, normalised per channel; UMT5 embeddings padded to 512 tokens."""

    default_clip = Clip(frames=81, fps=16.0, sizes=((480, 832),))

    def latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """(16, F, H, W)."""
        vae = self.pipe.vae
        latents = vae.encode(self._pixels(pixels)).latent_dist.mode()[0].float()
        mean, std = (
            torch.tensor(values, device=latents.device).view(-1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return (latents - mean) / std

    def conditioning(self, caption: str) -> Sample:
        """``encoder_hidden_states`` (512, channels)."""
        embeddings, _ = self.pipe.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=512)
        return {"encoder_hidden_states": embeddings[0]}

    def generate(
        self, caption: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """What the pipeline hands to its autoencoder."""
        height, width = clip.sizes[0]
        output = self.pipe(
            caption,
            height=height,
            width=width,
            num_frames=clip.frames,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generator,
            output_type="latent",
        )
        return output.frames[0]

    @staticmethod
    def sample_shapes(transformer: Any, vae: dict[str, Any], clip: Clip) -> Sample:
        """The first frame becomes a latent frame of its own."""
        stride, (height, width) = vae.get("scale_factor_spatial", 8), clip.sizes[0]
        frames = (clip.frames - 1) // vae.get("scale_factor_temporal", 4) + 1
        return {
            "latents": torch.empty(transformer.in_channels, frames, height // stride, width // stride, device="meta"),
            "encoder_hidden_states": torch.empty(512, transformer.text_dim, device="meta"),
        }


class SanaEncoder(PipelineEncoder):
    """SANA: scaled latents; Gemma embeddings of 300 tokens, with the pipeline's instruction before the caption."""

    default_clip = Clip(frames=1, fps=1.0, sizes=((1024, 1024),))

    def latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """(32, H, W)."""
        vae = self.pipe.vae
        return vae.encode(self._pixels(pixels[:, 0])).latent[0].float() * vae.config.scaling_factor

    def conditioning(self, caption: str) -> Sample:
        """``encoder_hidden_states`` (300, channels) and ``encoder_attention_mask`` (300,)."""
        parameters = inspect.signature(self.pipe.__call__).parameters
        instruction = parameters["complex_human_instruction"].default if caption else None
        embeddings, mask, *_ = self.pipe.encode_prompt(
            caption, do_classifier_free_guidance=False, complex_human_instruction=instruction
        )
        return {"encoder_hidden_states": embeddings[0], "encoder_attention_mask": mask[0]}

    def generate(
        self, caption: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """What the pipeline hands to its autoencoder."""
        height, width = clip.sizes[0]
        output = self.pipe(
            caption,
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generator,
            output_type="latent",
            use_resolution_binning=False,
        )
        return output.images[0]

    @staticmethod
    def sample_shapes(transformer: Any, vae: dict[str, Any], clip: Clip) -> Sample:
        """The autoencoder halves the picture once between two of its stages."""
        stride, (height, width) = 2 ** (len(vae["encoder_block_out_channels"]) - 1), clip.sizes[0]
        return {
            "latents": torch.empty(transformer.in_channels, height // stride, width // stride, device="meta"),
            "encoder_hidden_states": torch.empty(300, transformer.caption_channels, device="meta"),
            "encoder_attention_mask": torch.empty(300, dtype=torch.int64, device="meta"),
        }


class DiTEncoder(PipelineEncoder):
    """DiT: the mean of the posterior, scaled; the caption is the number of a class or one of the pipeline's labels."""

    default_clip = Clip(frames=1, fps=1.0, sizes=((256, 256),))

    def latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """(4, H, W)."""
        vae = self.pipe.vae
        return vae.encode(self._pixels(pixels[:, 0])).latent_dist.mode()[0].float() * vae.config.scaling_factor

    def conditioning(self, caption: str) -> Sample:
        """``class_labels`` ().

        Raises:
            ValueError: if the caption is no class.
        """
        classes = int(self.pipe.transformer.config.num_embeds_ada_norm)
        if not caption:
            return {"class_labels": torch.tensor(classes)}
        if not caption.isdigit():
            if caption not in self.pipe.labels:
                names = sorted(self.pipe.labels)
                more = f" and {len(names) - _SHOWN_LABELS} more" if len(names) > _SHOWN_LABELS else ""
                raise ValueError(
                    f"{caption!r} is no label of this DiT; the caption must be nothing but a class from 0 to "
                    f"{classes - 1} or one of its labels: {', '.join(names[:_SHOWN_LABELS]) or 'it has none'}{more}."
                )
            return {"class_labels": torch.tensor(self.pipe.labels[caption])}
        if int(caption) >= classes:
            raise ValueError(f"Class {caption} is out of range; this DiT knows 0 to {classes - 1}.")
        return {"class_labels": torch.tensor(int(caption))}

    def generate(
        self, caption: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """The pipeline's own sampling up to the autoencoder, which it does not offer to leave out."""
        pipe, transformer, device = self.pipe, self.pipe.transformer, self.pipe.vae.device
        size, channels = transformer.config.sample_size, transformer.config.in_channels
        latents = torch.randn(1, channels, size, size, generator=generator).to(device, transformer.dtype)
        labels = torch.stack([self.conditioning(text)["class_labels"] for text in (caption, "")]).to(device)
        pipe.scheduler.set_timesteps(steps)
        for time in pipe.scheduler.timesteps:
            inputs = pipe.scheduler.scale_model_input(torch.cat([latents, latents]), time)
            output = transformer(inputs, timestep=time.to(device).expand(2), class_labels=labels).sample
            wanted, empty = output[:, :channels].chunk(2)
            noise = empty + guidance * (wanted - empty)
            latents = pipe.scheduler.step(noise, time, latents).prev_sample
        return latents[0]

    @staticmethod
    def sample_shapes(transformer: Any, vae: dict[str, Any], clip: Clip) -> Sample:
        """The autoencoder halves the picture once between two of its stages."""
        stride, (height, width) = 2 ** (len(vae["block_out_channels"]) - 1), clip.sizes[0]
        return {
            "latents": torch.empty(transformer.in_channels, height // stride, width // stride, device="meta"),
            "class_labels": torch.empty((), dtype=torch.int64, device="meta"),
        }


ENCODERS: dict[str, type[PipelineEncoder]] = {"dit": DiTEncoder, "sana": SanaEncoder, "wan": WanEncoder}


def component_identity(model: str, component: str) -> str:
    """Class and configuration of a pipeline's component, read without its weights.

    Args:
        model: Hub id or folder of the pipeline.
        component: for example ``vae``.

    Returns:
        For example ``"AutoencoderKLWan (configuration 3f2a91c07d55)"``, or "none" if there is no such component.

    Raises:
        FileNotFoundError: no such pipeline.
    """
    index = json.loads(pipeline_file(model, "model_index.json").read_text(encoding="utf-8"))
    _, name = index.get(component) or (None, None)
    if name is None:
        return "none"
    config = json.loads(pipeline_file(model, f"{component}/config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if not key.startswith("_") and key not in _NOT_IDENTITY}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    return f"{name} (configuration {digest[:12]})"


def pipeline_file(model: str, name: str) -> Path:
    """A file of a pipeline, here or from the Hub.

    Raises:
        FileNotFoundError: no such pipeline or file.
    """
    if Path(model).is_dir():
        path = Path(model, name)
        if not path.is_file():
            raise FileNotFoundError(f"{model} is no diffusers pipeline: {name} is missing.")
        return path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{model} is neither a folder here nor a pipeline that the Hub gave: {error}"
        ) from error
