"""Generate a video with Wan frame block after frame block, as long as you like. A script to copy and edit.

python pipelines/generate_wan_streaming.py "a cat surfing" --weights my-causal-patch --frame-blocks 30

The patch must be causal and adapted: apply_mhla(pipe, causal="block", block_length=3, beyond="relative"), then
mhla finetune; see docs/stream.md. Without weights the tiny Wan pipeline and its causal patch show how it works.
"""

import argparse
from pathlib import Path

import torch
from diffusers import WanPipeline

from mhla_diffusers import load_mhla
from mhla_diffusers.generation.record import write_video
from mhla_diffusers.generation.streaming import decode_latents, stream_latents
from mhla_diffusers.tiny import load_tiny

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="Hub id or folder")
parser.add_argument("--weights", help="what mhla finetune left, or folder or Hub id of a causal patch")
parser.add_argument("--output", default="video.mp4")
parser.add_argument("--frame-blocks", type=int, default=30, help="of as many latent frames as the patch's block_length")
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--width", type=int, default=832)
parser.add_argument("--steps", type=int, default=50, help="of the sampler, for every frame block")
parser.add_argument("--guidance", type=float, default=5.0)
arguments = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
size, settings = (arguments.height, arguments.width), {}
if arguments.weights:
    pipe = WanPipeline.from_pretrained(arguments.model, dtype=dtype).to(device)
    load_mhla(pipe, arguments.weights)
else:
    pipe, size, settings = load_tiny("wan", device), (64, 64), {"max_sequence_length": 10}
    load_mhla(pipe, "tiny-wan-causal")

done = []
for latents in stream_latents(
    pipe,
    arguments.prompt,
    arguments.frame_blocks,
    height=size[0],
    width=size[1],
    steps=arguments.steps,
    guidance=arguments.guidance,
    generator=torch.Generator().manual_seed(0),
    **settings,
):
    done.append(latents.cpu())

# the autoencoder sees all latents at once; cut them into several calls where its memory does not do
video = decode_latents(pipe, torch.cat(done, dim=2).to(device))[0]
write_video(video, Path(arguments.output), frames_per_second=16)
