"""Generate one video with Wan and MHLA on several GPUs, between which its tokens are split. A script to copy and edit.

torchrun --nproc_per_node 8 pipelines/generate_wan_parallel.py "a cat surfing" --weights my-patch --ring 8
torchrun --nproc_per_node 8 pipelines/generate_wan_parallel.py "a cat surfing" --weights my-patch --ring 4 --ulysses 2

Every process loads the whole pipeline and makes the same noise; the first one writes the video.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
from diffusers import ContextParallelConfig, WanPipeline

from mhla_diffusers import apply_mhla, load_mhla
from mhla_diffusers.generation.record import write_video

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="Hub id or folder")
which = parser.add_mutually_exclusive_group(required=True)
which.add_argument("--weights", help="what mhla finetune left, or folder or Hub id of a patch")
which.add_argument("--patch", help="name or YAML file of a patch")
parser.add_argument("--ring", type=int, default=1, help="processes that exchange KV states")
parser.add_argument("--ulysses", type=int, default=1, help="processes that exchange tokens for heads")
parser.add_argument("--output", default="video.mp4")
parser.add_argument("--frames", type=int, default=81)
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--width", type=int, default=832)
parser.add_argument("--steps", type=int, default=50, help="of the sampler")
arguments = parser.parse_args()
if not torch.accelerator.device_count():
    parser.error("there is no GPU here, and diffusers' context parallelism needs them")

if not torch.distributed.is_initialized():
    # whoever waits longer than this for another process ends, with an error that says so
    torch.distributed.init_process_group(timeout=timedelta(minutes=5))
device, dtype = torch.device("cpu"), torch.float32  # as tests run it
if torch.cuda.is_available():
    device, dtype = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16
    torch.cuda.set_device(device)
pipe = WanPipeline.from_pretrained(arguments.model, dtype=dtype).to(device)

if arguments.weights:
    load_mhla(pipe, arguments.weights)
else:
    apply_mhla(pipe, arguments.patch)

# ring_anything=True, with --ring alone, for numbers of tokens that the processes do not divide
pipe.transformer.enable_parallelism(
    config=ContextParallelConfig(ring_degree=arguments.ring, ulysses_degree=arguments.ulysses)
)
video = pipe(
    arguments.prompt,
    num_frames=arguments.frames,
    height=arguments.height,
    width=arguments.width,
    num_inference_steps=arguments.steps,
    generator=torch.Generator().manual_seed(0),
).frames[0]
if torch.distributed.get_rank() == 0:
    write_video(video, Path(arguments.output), frames_per_second=16)
torch.distributed.destroy_process_group()
