"""Generate a video frame block by frame block with a causal patch, in constant memory."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from ..config import CausalConfig
from ..families import trained_family
from ..families.training import unscaled_latents
from ..patching import VideoStream, require_layers
from ..settings import check_value

Generators = torch.Generator | Sequence[torch.Generator]


@torch.no_grad()
def stream_latents(
    pipe: Any,
    prompt: str | Sequence[str],
    frame_blocks: int | None,
    *,
    height: int,
    width: int,
    steps: int = 50,
    guidance: float = 5.0,
    negative_prompt: str = "",
    generator: Generators | None = None,
    **settings: Any,
) -> Iterator[torch.Tensor]:
    """Yield the latents of each frame block as soon as it is done.

    A frame block starts as noise and is denoised by the pipeline's scheduler, attending to the clean frame blocks
    before it. One more forward at time 0 then stores its KV states for later frame blocks. So each frame block costs
    one forward more than its steps, and the cost does not grow along the video. The call itself checks all arguments
    and encodes the text.

    Args:
        pipe: text-to-video pipeline of Wan or SkyReels-V2, patched with ``causal="block"``.
        prompt: text, or several, of a batch.
        frame_blocks: number of frame blocks, each of the patch's ``block_length`` latent frames; None for no end, as
            far as the patch's ``beyond="relative"`` and the model's RoPE allow.
        height: in pixels.
        width: in pixels.
        steps: of the scheduler, for every frame block.
        guidance: scale of classifier-free guidance, which runs a second stream; 1 for none.
        negative_prompt: of the second stream.
        generator: one, or one per prompt; on the CPU for noise that does not depend on the device.
        **settings: of the pipeline's ``encode_prompt``, such as max_sequence_length.

    Returns:
        An iterator over float32 (B, C, F, H, W), in the transformer's scale; :func:`decode_latents` decodes them
        together.

    Raises:
        ValueError: a prompt, size or count that is not allowed, a pipeline that takes pictures or has two transformers,
            a patch that cannot stream, or a size that does not divide into tokens.
    """
    from diffusers.utils.torch_utils import randn_tensor

    transformer, family = pipe.transformer, trained_family(pipe.transformer)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    check_value("prompt", prompts, list[str], is_filled=True)
    for name, value in (("height", height), ("width", width), ("steps", steps)):
        check_value(name, value, int, at_least=1)
    check_value("frame_blocks", frame_blocks, int | None, at_least=1)
    if getattr(pipe, "transformer_2", None) is not None:
        raise ValueError(
            f"This {type(pipe).__name__} has a second transformer for the last steps, whose stream would lack the "
            "states that the first one stored; stream with a pipeline of one transformer."
        )
    config, (_, stride) = transformer.config, family.forward.strides(pipe.vae.config)
    if family.forward.channels(config) != config.out_channels:
        raise ValueError(
            f"This {type(pipe).__name__} takes {family.forward.channels(config)} channels and predicts "
            f"{config.out_channels}: the others hold a picture, which frame blocks after the first do not have. Use a "
            "text-to-video pipeline."
        )
    side = stride * family.forward.patch(transformer)[-1]
    if height % side or width % side:
        raise ValueError(f"height={height} and width={width} must be multiples of {side}.")

    texts = [list(prompts), [negative_prompt] * len(prompts)][: 2 if guidance != 1 else 1]
    streams = [VideoStream(transformer) for _ in texts]
    patches = [layer.config for layer in require_layers(transformer).values()]
    causals = [patch for patch in patches if isinstance(patch, CausalConfig)]
    if frame_blocks is not None:
        for causal in causals:
            frames = frame_blocks * causal.block_length
            causal.grid_from((frames,))  # raises if the patch ends earlier
            too_late = family.forward.why_too_late(transformer, 0, frames)
            if too_late is not None:
                raise ValueError(too_late)
    encoded = [family.training.encode_text(pipe, text, settings)[0].to(transformer.dtype) for text in texts]
    frames = causals[0].block_length * int(config.patch_size[0])
    shape = len(prompts), family.forward.channels(config), frames, height // stride, width // stride
    generators = generator if generator is None or isinstance(generator, torch.Generator) else list(generator)
    draw = partial(randn_tensor, shape, generator=generators, device=encoded[0].device, dtype=torch.float32)

    def predict(latents: torch.Tensor, time: torch.Tensor, keep: bool) -> torch.Tensor:
        given, times, found = latents.to(transformer.dtype), time.expand(len(latents)), []
        for stream, text in zip(streams, encoded, strict=True):
            arguments = family.forward.arguments(transformer, given, times, {"encoder_hidden_states": text})
            found.append(stream(**arguments, keep=keep, return_dict=False)[0])
        return found[0] if len(found) == 1 else torch.lerp(found[1], found[0], guidance)

    @torch.no_grad()
    def denoise() -> Iterator[torch.Tensor]:
        for _ in count() if frame_blocks is None else range(frame_blocks):
            latents = draw()
            pipe.scheduler.set_timesteps(steps, device=latents.device)
            for time in pipe.scheduler.timesteps:
                velocity = predict(latents, time, False)
                latents = pipe.scheduler.step(velocity, time, latents, return_dict=False)[0]
            predict(latents, torch.zeros_like(time), True)  # stores its states
            yield latents

    return denoise()


@torch.no_grad()
def decode_latents(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Decode latents (B, C, F, H, W), all frame blocks of a video concatenated, with the pipeline's autoencoder.

    Returns:
        (B, frames, H, W, 3) in [0, 1], float32 on the CPU.
    """
    channels = pipe.transformer.config.out_channels
    if latents.ndim != 5 or latents.shape[1] != channels or not latents.numel() or not latents.is_floating_point():
        raise ValueError(
            f"latents must be floating point of the shape (B, {channels}, F, H, W), as stream_latents gives them side "
            f"by side along dim=2, got {latents.dtype} {tuple(latents.shape)}."
        )
    scaled = unscaled_latents(pipe.vae, latents.float())
    pixels = pipe.vae.decode(scaled.to(pipe.vae.device, pipe.vae.dtype), return_dict=False)[0]
    return torch.as_tensor(pipe.video_processor.postprocess_video(pixels, output_type="np"))
