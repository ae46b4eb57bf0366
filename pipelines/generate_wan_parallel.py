"""Generate one video with Wan and MHLA on several GPUs, which split its tokens. A script to copy and edit.

torchrun --nproc_per_node 8 pipelines/generate_wan_parallel.py "a cat surfing" --weights my-patch

Every process loads the whole pipeline and draws the same noise; the first one writes the video.
"""

import argparse
import os
from pathlib import Path

import torch
from diffusers import ContextParallelConfig, WanPipeline

from mhla_diffusers import load_mhla
from mhla_diffusers.generation.record import write_video

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="Hub id or folder")
parser.add_argument("--weights", required=True, help="what mhla finetune left, or folder or Hub id of a patch of MHLA")
parser.add_argument("--output", default="video.mp4")
parser.add_argument("--frames", type=int, default=81)
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--width", type=int, default=832)
parser.add_argument("--steps", type=int, default=50, help="of the sampler")
arguments = parser.parse_args()
if not torch.accelerator.device_count():
    parser.error("there is no GPU here, and diffusers' context parallelism needs them")

if not torch.distributed.is_initialized():
    torch.distributed.init_process_group()
device, dtype = torch.device("cpu"), torch.float32  # as tests run it
if torch.cuda.is_available():
    device, dtype = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16
    torch.cuda.set_device(device)
pipe = WanPipeline.from_pretrained(arguments.model, dtype=dtype).to(device)
load_mhla(pipe, arguments.weights)
config = ContextParallelConfig(ulysses_degree=torch.distributed.get_world_size())
pipe.transformer.enable_parallelism(config=config)
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
