"""Generate images with DiT, patched with MHLA or not.

Without a GPU, with the tiny pipeline that ships with the package:

    python pipelines/generate_dit.py "seven"

With the real model:

    python pipelines/generate_dit.py "golden retriever" --model facebook/DiT-XL-2-256 \\
        --patch dit-xl-2-256 --device cuda --dtype bfloat16 --set num_inference_steps=50

--patch applies a patch as it is before training; --weights loads a trained one. Every prompt becomes one PNG file per
seed; files that are there already are kept, so a run that was interrupted goes on where it stopped.
"""

import argparse
from pathlib import Path

from mhla_diffusers.generation import GenerationConfig, generate, parse_settings, read_prompts

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompts", nargs="*")
parser.add_argument("--prompt-file", type=Path, help="one prompt per line")
parser.add_argument("--output", type=Path, default=Path("outputs/dit"))
parser.add_argument("--model", help="Hub id or folder")
parser.add_argument("--patch", help="name or YAML file of a patch")
parser.add_argument("--weights", help="folder or Hub id of a trained patch")
parser.add_argument("--seeds", type=int, nargs="+", default=[0])
parser.add_argument("--device", default="cpu")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="arguments of the pipeline's call")
arguments = parser.parse_args()

config = GenerationConfig(
    family="dit",
    prompts=tuple(arguments.prompts) + (read_prompts(arguments.prompt_file) if arguments.prompt_file else ()),
    output=arguments.output,
    model=arguments.model,
    patch=arguments.patch,
    weights=arguments.weights,
    seeds=tuple(arguments.seeds),
    device=arguments.device,
    dtype=arguments.dtype,
    settings=parse_settings(arguments.set),
)
for task, made in generate(config):
    print(f"{'wrote' if made else 'kept '} {task.file}")
