"""Generate an image with DiT and MHLA. A script to copy and edit; `mhla generate dit` does many classes and seeds.

python pipelines/generate_dit.py "golden retriever"                          # sparse attention, without training
python pipelines/generate_dit.py "golden retriever" --weights my-patch     # an adapted patch: a folder or Hub id
"""

import argparse

import torch
from diffusers import DiTPipeline

from mhla_diffusers import apply_mhla, load_mhla

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("label", help="name of a class, as pipe.labels has it")
parser.add_argument("--model", default="facebook/DiT-XL-2-256", help="Hub id or folder")
which = parser.add_mutually_exclusive_group()
which.add_argument("--weights", help="what mhla finetune left, or folder or Hub id of a patch")
which.add_argument("--patch", help="preset or YAML file, untrained; default: sparse attention")
parser.add_argument("--output", default="image.png")
parser.add_argument("--steps", type=int, default=50, help="of the sampler")
arguments = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe = DiTPipeline.from_pretrained(arguments.model, dtype=dtype).to(device)

if arguments.weights:
    load_mhla(pipe, arguments.weights)
else:
    apply_mhla(pipe, arguments.patch)

image = pipe(
    class_labels=pipe.get_label_ids([arguments.label]),
    num_inference_steps=arguments.steps,
    generator=torch.Generator().manual_seed(0),
).images[0]
image.save(arguments.output)
