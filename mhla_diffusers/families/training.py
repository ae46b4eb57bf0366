"""How a family's models are trained: their process, encoding clips and prompts, and generating latents."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from .calling import label_of
from .inputs import Sample, unpack
from .models import Clip, strides_of
from .processes import KNOWN_FRAMES, DiffusionProcess, FlowMatching, VelocityDDPM


@dataclass(kw_only=True, eq=False)
class Training:
    """How a family's models are trained and encoded for. A subclass overrides the methods that differ."""

    ddpm: Callable[[], DiffusionProcess] | None = None
    """Makes the process of models that were not trained with flow matching."""
    text_settings: Mapping[str, Any] = field(default_factory=dict)
    family: Any = field(init=False)

    @property
    def inputs(self) -> Any:
        """What the forward takes."""
        return self.family.inputs

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Return the process that the model was trained with; channels of a picture are not noised."""
        config = transformer.config
        if self.ddpm is not None:
            return self.ddpm()
        scale = 1e-3 if self.inputs.takes_sigma else 1.0
        process = FlowMatching(flow_shift, scale)
        if self.family.makes_videos and config.in_channels != (config.get("out_channels") or config.in_channels):
            process.channels = int(config.out_channels)
        return process

    def prediction(self, transformer: Any, output: Any, latents: Tensor) -> Tensor:
        """Return the prediction for latents (B, C, ...), of their shape: by default the output, towards the noise."""
        if self.inputs.packs_latents:
            output = unpack(output, self.family.token_grid(transformer, latents), self.family.patch_of(transformer))
        predicted: Tensor = output
        return predicted

    def prepare_for_training(self, transformer: nn.Module) -> None:
        """Disable modules that draw their own random numbers; called once after ``transformer.train()``."""

    # Encoding

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode clips (B, 3, F, H, W) in [-1, 1] to float32 latents (B, C, F, H, W), of images (B, C, H, W).

        A first latent frame that is a picture is encoded by itself.
        """
        latents = self.encoded(pipe, pixels)
        if not self.family.calling.begins_with_picture(pipe, pipe.transformer.config):
            return latents
        return torch.cat([self.encoded(pipe, pixels[:, :, :1]), latents[:, :, 1:]], dim=2)

    def encoded(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Run the autoencoder on clips, and scale their latents as :func:`scaled_latents`."""
        found = pipe.vae.encode(pixels if self.family.makes_videos else pixels[:, :, 0])
        latents = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latent
        return scaled_latents(pipe.vae, latents.float())

    def encode_picture(self, pipe: Any, pixels: Tensor) -> Sample:
        """Return the forward's kwargs that come from a clip (1, 3, F, H, W), by default the number of given frames."""
        return (
            {KNOWN_FRAMES: torch.tensor(1)}
            if self.family.calling.begins_with_picture(pipe, pipe.transformer.config)
            else {}
        )

    def picture_settings(self, pipe: Any, pixels: Tensor) -> Mapping[str, Any]:
        """Return settings of :meth:`encode_prompt` from a clip (1, 3, F, H, W): by default its first frame."""
        is_taken = self.family.makes_videos and "image" in inspect.signature(pipe.encode_prompt).parameters
        return {"image": first_picture(pipe, pixels)} if is_taken else {}

    def beside(self, pipe: Any, latents: Tensor, *pictures: Tensor) -> Tensor:
        """Add channels of pictures, each (B, C, F, H, W) with at most the latents' frames, filled up with zeros."""
        frames, wanted = latents.shape[2], self.inputs.channels(pipe.transformer.config)
        filled = [functional.pad(one, (0, 0, 0, 0, 0, frames - one.shape[2])) for one in pictures]
        found = torch.cat([latents, *filled], dim=1)
        if wanted != found.shape[1]:
            raise ValueError(
                f"{type(pipe.transformer).__name__} takes {wanted} channels, not the {latents.shape[1]} of latents or "
                f"the {found.shape[1]} with a first frame; give the samples as InMemoryData."
            )
        return found

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Return the forward's kwargs for a prompt, by default ``conditions``; settings not taken are ignored."""
        config = pipe.transformer.config
        conditions = self.inputs.conditions_of(config)
        usual = {"max_sequence_length": conditions[0].sizes(config)[0], **self.text_settings}
        tokens = {**usual, **(settings or {})}
        outputs = self.encode_text(pipe, prompt, tokens)
        found = {one.name: (outputs[one.output][0], one.dtype) for one in conditions}
        return {name: x if dtype.is_floating_point else x.to(dtype) for name, (x, dtype) in found.items()}

    def encode_text(self, pipe: Any, prompt: str | list[str], settings: Mapping[str, Any]) -> Any:
        """Run the pipeline's ``encode_prompt`` without guidance; settings that it does not take are ignored."""
        known = inspect.signature(pipe.encode_prompt).parameters
        chosen = {name: value for name, value in settings.items() if name in known}
        if "do_classifier_free_guidance" in known:
            chosen["do_classifier_free_guidance"] = False
        return pipe.encode_prompt(**{**chosen, "prompt": prompt})

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> Tensor:
        """Generate latents in the transformer's scale: (C, ...)."""
        calling = self.family.calling
        settings = {"num_inference_steps": steps, "output_type": "latent", **calling.guidance_arguments(guidance)}
        settings |= calling.clip_arguments(pipe, clip)
        latents: Tensor = calling.call(pipe, [prompt], [generator], **settings)[0]
        if self.inputs.packs_latents and latents.ndim == 2:
            grid = calling.grid(pipe, pipe.transformer, clip)
            latents = unpack(latents[None], grid, self.family.patch_of(pipe.transformer))[0]
        return latents


class SanaTraining(Training):
    """SANA's: a factor on the timesteps, and the pipeline's instruction before the caption."""

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Return flow matching with the factor of SANA-Sprint's timesteps."""
        return FlowMatching(flow_shift, timestep_scale=float(transformer.config.timestep_scale))

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Encode with the pipeline's default instruction before the caption, unless the settings have another."""
        default = inspect.signature(pipe.__call__).parameters["complex_human_instruction"].default
        chosen = {"complex_human_instruction": default, **(settings or {})}
        if not prompt:
            chosen["complex_human_instruction"] = None
        return super().encode_prompt(pipe, prompt, chosen)


class SanaVideoTraining(SanaTraining):
    """SANA-Video's, whose timesteps have no factor."""

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Return flow matching."""
        return FlowMatching(flow_shift)


class DiTTraining(Training):
    """DiT's, conditioned on classes."""

    def prepare_for_training(self, transformer: nn.Module) -> None:
        """Disable label dropout, whose random numbers differ between processes; ``prompt_dropout`` replaces it."""
        for module in transformer.modules():
            if type(module).__name__ == "LabelEmbedding":
                module.eval()

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Return ``class_labels`` (); the empty prompt is the class after the last one."""
        none = int(pipe.transformer.config.num_embeds_ada_norm)
        return {"class_labels": torch.tensor(label_of(pipe, prompt) if prompt else none)}

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


class WanTraining(Training):
    """Wan's: image-to-video adds channels of a mask and of the first frame."""

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode to 16 channels; for image-to-video to 36, with a mask and the latents of the first frame."""
        latents = super().encode_pixels(pipe, pixels)
        if self.inputs.channels(pipe.transformer.config) == latents.shape[1]:
            return latents
        known = torch.ones_like(latents[:, :1, :1]).repeat(1, strides_of(pipe.vae.config, of_videos=True)[0], 1, 1, 1)
        first = torch.cat([pixels[:, :, :1], torch.zeros_like(pixels[:, :, 1:])], dim=2)
        return self.beside(pipe, latents, known, super().encode_pixels(pipe, first))

    def encode_picture(self, pipe: Any, pixels: Tensor) -> Sample:
        """Return ``encoder_hidden_states_image`` (tokens, channels) of the first frame, if the transformer takes it."""
        if pipe.transformer.config.image_dim is None:
            return {}
        return {"encoder_hidden_states_image": pipe.encode_image([first_picture(pipe, pixels)])[0]}


class HunyuanVideoTraining(Training):
    """HunyuanVideo's: image-to-video adds channels of the first frame, and encodes text with the picture."""

    def encode_text(self, pipe: Any, prompt: str | list[str], settings: Mapping[str, Any]) -> Any:
        """Encode with the picture, or without one with a black one, as the pipeline's negative prompt."""
        every = {"latent_concat": 2, "token_replace": 4}.get(pipe.transformer.config.image_condition_type, 1)
        usual = {"image": Image.new("RGB", (336, 336)), "image_embed_interleave": every}
        return super().encode_text(pipe, prompt, {**usual, **settings})

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode to (B, 16, F, H, W); image-to-video adds channels of the first frame and, but for SkyReels, a mask."""
        latents, config = super().encode_pixels(pipe, pixels), pipe.transformer.config
        if config.in_channels == config.out_channels:
            return latents
        first = super().encode_pixels(pipe, pixels[:, :, :1])
        mask = [torch.ones_like(first[:, :1])] if config.image_condition_type == "latent_concat" else []
        return self.beside(pipe, latents, first, *mask)


class QwenImageTraining(Training):
    """Qwen-Image's: an autoencoder of videos, and text that is padded with zeros to one length and masked."""

    def encoded(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode an image as one frame."""
        return scaled_latents(pipe.vae, pipe.vae.encode(pixels).latent_dist.mode().float())[:, :, 0]

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Return the padded text (tokens, channels) and its mask."""
        text, mask = self.inputs.conditions
        length = (settings or {}).get("max_sequence_length", text.shape[0])
        embeddings, masks = self.encode_text(pipe, prompt, {**(settings or {}), "max_sequence_length": length})
        found = embeddings[0] if masks is None else embeddings[0][masks[0].bool()]
        takes_part = torch.arange(length, device=found.device) < len(found)
        padded = functional.pad(found, (0, 0, 0, length - len(found)))
        return {text.name: padded, mask.name: takes_part.to(mask.dtype)}


class CogVideoXTraining(Training):
    """CogVideoX's: frames before channels, whole tokens of two frames."""

    def prediction(self, transformer: Any, output: Any, latents: Tensor) -> Tensor:
        """Put channels before frames."""
        return super().prediction(transformer, output, latents).transpose(1, 2)

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Return diffusion to pure noise with predicted velocity; 2B, without RoPE, has noisier steps."""
        snr_shift = 1.0 if transformer.config.use_rotary_positional_embeddings else 3.0
        return VelocityDDPM(snr_shift, channels=int(transformer.config.out_channels))

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode to (B, 16, F, H, W); the first frame is repeated to fill its token, where the pipeline drops frames.

        Image-to-video adds the first frame's latents, which some checkpoints divide by the autoencoder's factor.
        """
        latents = super().encode_pixels(pipe, pixels)
        missing = self.family.latent_frames(pipe.transformer.config, latents.shape[2], 1) - latents.shape[2]
        latents = torch.cat([latents[:, :, :1].expand(-1, -1, missing, -1, -1), latents], dim=2)
        if self.inputs.channels(pipe.transformer.config) == latents.shape[1]:
            return latents
        first, scale = super().encode_pixels(pipe, pixels[:, :, :1]), pipe.vae.config.scaling_factor
        return self.beside(pipe, latents, first / scale**2 if pipe.vae.config.invert_scale_latents else first)

    def generate_latents(self, *args: Any, **kwargs: Any) -> Tensor:
        """Put channels before frames."""
        return super().generate_latents(*args, **kwargs).transpose(0, 1)


def first_picture(pipe: Any, pixels: Tensor) -> Any:
    """Return the first frame of a clip (1, 3, F, H, W) as a PIL image."""
    return pipe.video_processor.postprocess(pixels[:, :, 0].float(), output_type="pil")[0]


def scaled_latents(vae: Any, latents: Tensor) -> Tensor:
    """Scale an autoencoder's latents (B, C, ...) as transformers take them, by its mean or shift, and its factor."""
    known = {**vae.config, **dict(vae.named_buffers(recurse=False))}
    mean, deviation = (
        None if values is None else torch.as_tensor(values).to(latents).view(-1, *[1] * (latents.ndim - 2))
        for values in (known.get("latents_mean"), known.get("latents_std"))
    )
    shift = mean if mean is not None else known.get("shift_factor") or 0.0
    factor = known.get("scaling_factor") or 1.0
    return (latents - shift) * (factor if deviation is None else factor / deviation)
