"""Generate an image with SANA and MHLA. A script to copy and edit; `mhla generate sana` does many prompts and seeds.

python pipelines/generate_sana.py "a cat surfing" --weights my-patch      # adapted: a folder or Hub id
python pipelines/generate_sana.py "a cat surfing" --patch sana-0.6b       # untrained, to be adapted
"""

import argparse

import torch
from diffusers import SanaPipeline

from mhla_diffusers import apply_mhla, load_mhla

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--model", default="Efficient-Large-Model/Sana_600M_1024px_diffusers", help="Hub id or folder")
which = parser.add_mutually_exclusive_group(required=True)
which.add_argument("--weights", help="what mhla finetune left, or folder or Hub id of a patch")
which.add_argument("--patch", help="preset or YAML file of a patch, untrained: MHLA is to be adapted")
parser.add_argument("--output", default="image.png")
parser.add_argument("--height", type=int, default=1024)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--steps", type=int, default=20, help="of the sampler")
arguments = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe = SanaPipeline.from_pretrained(arguments.model, dtype=dtype).to(device)

if arguments.weights:
    load_mhla(pipe, arguments.weights)
else:
    apply_mhla(pipe, arguments.patch)

image = pipe(
    arguments.prompt,
    height=arguments.height,
    width=arguments.width,
    num_inference_steps=arguments.steps,
    use_resolution_binning=False,  # the size that was asked for, also where SANA was not trained at it
    generator=torch.Generator().manual_seed(0),
).images[0]
image.save(arguments.output)
