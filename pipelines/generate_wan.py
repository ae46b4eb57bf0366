"""Generate a video with Wan and MHLA. A script to copy and edit; `mhla generate wan` does many prompts and seeds.

python pipelines/generate_wan.py "a cat surfing"                          # sparse attention, without training
python pipelines/generate_wan.py "a cat surfing" --weights my-patch     # an adapted patch: a folder or Hub id
"""

import argparse
from pathlib import Path

import torch
from diffusers import WanPipeline

from mhla_diffusers import apply_mhla, load_mhla
from mhla_diffusers.generation.record import write_video

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="Hub id or folder")
which = parser.add_mutually_exclusive_group()
which.add_argument("--weights", help="what mhla finetune left, or folder or Hub id of a patch")
which.add_argument("--patch", help="preset or YAML file, untrained; default: sparse attention")
parser.add_argument("--output", default="video.mp4")
parser.add_argument("--frames", type=int, default=81)
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--width", type=int, default=832)
parser.add_argument("--steps", type=int, default=50, help="of the sampler")
arguments = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe = WanPipeline.from_pretrained(arguments.model, dtype=dtype).to(device)

if arguments.weights:
    load_mhla(pipe, arguments.weights)
else:
    apply_mhla(pipe, arguments.patch)

video = pipe(
    arguments.prompt,
    num_frames=arguments.frames,
    height=arguments.height,
    width=arguments.width,
    num_inference_steps=arguments.steps,
    generator=torch.Generator().manual_seed(0),
).frames[0]
write_video(video, Path(arguments.output), frames_per_second=16)
