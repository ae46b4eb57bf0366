"""Generate a video with Wan frame block after frame block, as long as you like. A script to copy and edit.

python pipelines/generate_wan_streaming.py "a cat surfing" --weights my-causal-patch --frame-blocks 30

A frame block starts as noise and is denoised by the pipeline's scheduler. Every self-attention sees the clean frame
blocks before it through an MHLAState, whose size depends on the blocks of the patch and not on the length of the video.
Once denoised, the frame block runs at time 0, which adds it to the states. So it costs one forward more than its steps,
however long the video is. Only the pixels grow with it: the autoencoder decodes all latents in one call.

The patch must be causal and adapted: apply_mhla(pipe, causal="block", block_length=3, beyond="relative"), then
mhla finetune; see docs/adapt.md. Without weights the tiny Wan pipeline and its causal patch show how it works.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline
from diffusers.utils.torch_utils import randn_tensor

from mhla_diffusers import CausalConfig, load_mhla, mhla_disabled
from mhla_diffusers.attention import MHLAState
from mhla_diffusers.generation.record import write_video
from mhla_diffusers.tiny import load_tiny


class StreamedAttention:
    """Wan's self-attention over the next frames, with an MHLAState in place of the frames before.

    Set it as the processor of one attention that a causal patch was applied to, for one video or a batch of them.

    Args:
        attn: the attention.
        frame: tokens of a frame, (height, width).

    Raises:
        ValueError: the attention has no causal patch, or one with dense steps, which leave no state behind.
    """

    def __init__(self, attn: Any, frame: tuple[int, int]) -> None:
        layer = getattr(attn, "mhla", None)
        config = getattr(layer, "config", None)
        if not isinstance(config, CausalConfig) or config.causal != "block" or config.has_dense_steps:
            raise ValueError(
                f"A stream needs causal MHLA in every self-attention and step, and one runs {config or 'softmax'}. "
                "Patch with causal='block', a block_length such as 3, layers='all' and no dense steps."
            )
        weight = layer.linear_log_weight
        self.weights = {
            "mixing": layer.mixing.clamp_min(0) if config.needs_positive_mixing else layer.mixing,
            "output_norm": layer.output_norm,
            "linear_weight": None if weight is None else weight.exp(),
        }
        self.keep = False
        """Whether later frames see those of the next call."""
        self.state = MHLAState(
            (config.blocks[0] * config.block_length, *frame),
            config.blocks,
            causal="block",
            beyond=config.beyond,
            feature_map=config.feature_map,
            rope=config.rope,
            normalize=config.normalize,
            eps=config.eps,
        )

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend: (B, tokens of the next frames, channels), with RoPE of their place in the video."""
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(hidden_states)))
        gate = attn.mhla.gate
        output = self.state.step(
            query,
            key,
            value,
            rotary=rotary_emb,
            output_gate=None if gate is None else gate(hidden_states).unflatten(2, (attn.heads, -1)),
            keep=self.keep,
            **self.weights,
        )
        output = attn.to_out[0](output.flatten(2))
        return attn.to_out[1](output)


@torch.no_grad()
def stream_latents(
    pipe: Any,
    prompts: Sequence[str],
    frame_blocks: int | None,
    *,
    height: int,
    width: int,
    steps: int = 50,
    guidance: float = 5.0,
    negative_prompt: str = "",
    generator: torch.Generator | list[torch.Generator] | None = None,
    max_sequence_length: int = 512,
) -> Iterator[torch.Tensor]:
    """Yield the latents of each frame block as soon as it is done: float32 (B, C, F, H, W), in the model's scale.

    Until the iterator ends or is closed, the pipeline's transformer attends in the stream alone.

    Args:
        pipe: text-to-video pipeline of Wan with one transformer, patched with ``causal="block"`` in all layers.
        prompts: of a batch of videos.
        frame_blocks: number of frame blocks, each of the patch's ``block_length`` latent frames; None for no end, as
            far as the patch's ``beyond="relative"`` and the model's RoPE allow.
        height: in pixels.
        width: in pixels.
        steps: of the scheduler, for every frame block.
        guidance: scale of classifier-free guidance; 1 for none.
        negative_prompt: of the guidance.
        generator: one, or one per prompt; on the CPU for noise that does not depend on the device.
        max_sequence_length: tokens that a text is padded to.

    Raises:
        ValueError: a pipeline of two transformers or of pictures, a size that does not divide into tokens, a patch that
            cannot stream, or frames beyond the patch's blocks or the model's RoPE.
    """
    transformer, rope = pipe.transformer, pipe.transformer.rope
    config, (_, *patch) = transformer.config, transformer.config.patch_size
    channels, stride = config.in_channels, pipe.vae_scale_factor_spatial
    if getattr(pipe, "transformer_2", None) is not None or channels != config.out_channels:
        raise ValueError("Only text-to-video pipelines of one transformer can stream: give Wan 2.1 T2V or 2.2 TI2V.")
    if height % (stride * patch[0]) or width % (stride * patch[1]):
        raise ValueError(f"height={height} and width={width} must be multiples of {stride * patch[0]}.")

    # every self-attention gets a state; guidance doubles the batch, so each state holds both branches
    attentions = [block.attn1 for block in transformer.blocks]
    streamed = [
        StreamedAttention(attn, (height // stride // patch[0], width // stride // patch[1])) for attn in attentions
    ]
    length = attentions[0].mhla.config.block_length
    if frame_blocks is not None and frame_blocks * length > rope.max_seq_len:
        raise ValueError(
            f"frame_blocks={frame_blocks} are {frame_blocks * length} latent frames, and the model has RoPE for "
            f"{rope.max_seq_len}. Load it with a larger rope_max_seq_len=, which adds no weights."
        )
    guides = guidance != 1
    texts = [*prompts, *[negative_prompt] * (len(prompts) * guides)]
    text, _ = pipe.encode_prompt(texts, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length)
    text = text.to(transformer.dtype)
    shape = len(prompts), channels, length * config.patch_size[0], height // stride, width // stride

    def predict(latents: torch.Tensor, time: torch.Tensor, keep: bool) -> torch.Tensor:
        for one in streamed:
            one.keep = keep
        given = torch.cat([latents] * (1 + guides)).to(transformer.dtype)
        with mhla_disabled(transformer):  # the patch's own processors are replaced, which it would warn of
            found = transformer(given, time.expand(len(given)), text, return_dict=False)[0]
        if not guides:
            return found
        conditional, free = found.chunk(2)
        return torch.lerp(free, conditional, guidance)

    processors, tables = [attn.processor for attn in attentions], (rope.freqs_cos, rope.freqs_sin)
    try:
        for attn, processor in zip(attentions, streamed, strict=True):
            attn.processor = processor
        for number in count() if frame_blocks is None else range(frame_blocks):
            if (number + 1) * length > rope.max_seq_len:
                raise ValueError(f"The model has RoPE for {rope.max_seq_len} latent frames; begin another video.")
            # the model makes RoPE from the first rows of its tables, so the frame's channels move up
            rope.freqs_cos, rope.freqs_sin = (
                torch.cat([x[:, : rope.t_dim].roll(-number * length, 0), x[:, rope.t_dim :]], dim=1) for x in tables
            )
            latents = randn_tensor(shape, generator=generator, device=text.device, dtype=torch.float32)
            pipe.scheduler.set_timesteps(steps, device=latents.device)
            for time in pipe.scheduler.timesteps:
                velocity = predict(latents, time, keep=False)
                latents = pipe.scheduler.step(velocity, time, latents, return_dict=False)[0]
            predict(latents, torch.zeros_like(time), keep=True)
            yield latents
    finally:
        rope.freqs_cos, rope.freqs_sin = tables
        for attn, processor in zip(attentions, processors, strict=True):
            attn.processor = processor


@torch.no_grad()
def decode_latents(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Decode latents (B, C, F, H, W), all frame blocks concatenated, to (B, frames, H, W, 3) in [0, 1] on the CPU."""
    vae = pipe.vae
    mean, deviation = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    scaled = latents * deviation.to(latents) + mean.to(latents)
    pixels = vae.decode(scaled.to(vae.device, vae.dtype), return_dict=False)[0]
    return torch.as_tensor(pipe.video_processor.postprocess_video(pixels, output_type="np"))


def main() -> None:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="Hub id or folder")
    parser.add_argument("--weights", help="what mhla finetune left, or folder or Hub id of a causal patch")
    parser.add_argument("--output", type=Path, default=Path("video.mp4"))
    parser.add_argument("--frame-blocks", type=int, default=30, help="of the patch's block_length latent frames")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--steps", type=int, default=50, help="of the sampler, for every frame block")
    parser.add_argument("--guidance", type=float, default=5.0)
    arguments = parser.parse_args()

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    size, text_tokens = (arguments.height, arguments.width), 512
    if arguments.weights:
        pipe = WanPipeline.from_pretrained(arguments.model, dtype=dtype).to(device)
        load_mhla(pipe, arguments.weights)
    else:
        pipe, size, text_tokens = load_tiny("wan", device), (64, 64), 10
        load_mhla(pipe, "tiny-wan-causal")
    latents = stream_latents(
        pipe,
        [arguments.prompt],
        arguments.frame_blocks,
        height=size[0],
        width=size[1],
        steps=arguments.steps,
        guidance=arguments.guidance,
        generator=torch.Generator().manual_seed(0),
        max_sequence_length=text_tokens,
    )
    video = decode_latents(pipe, torch.cat([one.cpu() for one in latents], dim=2).to(device))[0]
    write_video(video, arguments.output, frames_per_second=16)


if __name__ == "__main__":
    main()
