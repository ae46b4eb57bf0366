"""Time a patch beside step caches, quantised weights, LoRA and fewer steps. A script to copy and edit.

python pipelines/measure_together.py "a cat surfing" --patch wan2.1-t2v-1.3b-hybrid --cache firstblock=0.1 --steps 50 8

Everything but the patch is a method of diffusers. Each addition is measured alone, without the patch and with it, all
in turns and from the same noise. Forwards that a cache skips are not counted as computed.
"""

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy
import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig, TaylorSeerCacheConfig
from torch import nn

from mhla_diffusers import apply_mhla, load_mhla
from mhla_diffusers.generation.similarity import psnr, ssim
from mhla_diffusers.reporting import text_table

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="Hub id or folder")
which = parser.add_mutually_exclusive_group(required=True)
which.add_argument("--weights", help="what mhla finetune left, or folder or Hub id of a patch")
which.add_argument("--patch", help="name or YAML file of a patch")
parser.add_argument("--cache", nargs="*", default=[], help="firstblock=0.1 (threshold) or taylorseer=3 (interval)")
parser.add_argument("--quantize", nargs="*", default=[], choices=["int8", "float8"], help="weights, by torchao")
parser.add_argument("--lora", nargs="*", default=[], help="folders or Hub ids")
parser.add_argument("--steps", nargs="+", type=int, default=[50], help="the first is the unpatched pipeline's")
parser.add_argument("--frames", type=int, default=81)
parser.add_argument("--height", type=int, default=480)
parser.add_argument("--width", type=int, default=832)
parser.add_argument("--repetitions", type=int, default=3)
arguments = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe: Any = DiffusionPipeline.from_pretrained(arguments.model, dtype=dtype).to(device)
pipe.set_progress_bar_config(disable=True)
plain = pipe.transformer.to("cpu")


def enable_cache(text: str) -> None:
    """Let the pipeline's transformer skip what it can."""
    name, _, setting = text.partition("=")
    if name == "firstblock":
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=float(setting)))
    elif name == "taylorseer":
        # the lite form extrapolates the output and skips all blocks; the other looks for attentions by names
        lite = TaylorSeerCacheConfig(cache_interval=int(setting), taylor_factors_dtype=dtype, use_lite_mode=True)
        pipe.transformer.enable_cache(lite)
    else:
        raise ValueError(f"cache={text!r} is unknown; allowed: firstblock=0.1, taylorseer=3.")


def quantize(name: str) -> None:
    """Give the linear layers of the pipeline's blocks weights of 8 bits, but for those of the patch and of LoRA."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    def is_meant(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and not {"mhla", "lora_A", "lora_B"} & set(path.split("."))

    config = Int8WeightOnlyConfig() if name == "int8" else Float8WeightOnlyConfig()
    quantize_(pipe.transformer.blocks, config, filter_fn=is_meant)


def put_on_patch() -> None:
    """Patch the pipeline's transformer."""
    if arguments.weights:
        load_mhla(pipe, arguments.weights)
    else:
        apply_mhla(pipe, arguments.patch)


additions: dict[str, Callable[[], None]] = {
    "": lambda: None,
    **{f" + {text}": lambda text=text: enable_cache(text) for text in arguments.cache},
    **{f" + {name}": lambda name=name: quantize(name) for name in arguments.quantize},
    **{f" + {path}": lambda path=path: pipe.load_lora_weights(path) for path in arguments.lora},
    **{f" + {steps} steps": lambda: None for steps in arguments.steps[1:]},
}
# a copy of the transformer for each, which waits on the CPU until its turn
variants: dict[str, tuple[Any, int]] = {}
for patch in ("unpatched", arguments.weights or arguments.patch):
    for name, add in additions.items():
        pipe.transformer = copy.deepcopy(plain).to(device)
        if patch != "unpatched":
            put_on_patch()
        add()
        steps = int(name.split()[1]) if name.endswith(" steps") else arguments.steps[0]
        variants[patch + name] = pipe.transformer.to("cpu"), steps

seconds: dict[str, list[float]] = {name: [] for name in variants}
computed: dict[str, int] = {}
frames: dict[str, torch.Tensor] = {}
for turn in range(1 + arguments.repetitions):  # the first warms up, and counts
    for name, (transformer, steps) in variants.items():
        pipe.transformer = transformer.to(device)
        last = [module for module in transformer.blocks[-1].modules() if isinstance(module, nn.Linear)][-1]

        calls: list[int] = []
        hook = last.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1)) if turn == 0 else None
        begin = time.perf_counter()
        sample = pipe(
            arguments.prompt,
            num_frames=arguments.frames,
            height=arguments.height,
            width=arguments.width,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(0),
        ).frames[0]
        if hook is None:
            seconds[name].append(time.perf_counter() - begin)
        else:
            hook.remove()
            computed[name] = len(calls)
        values = torch.from_numpy(numpy.asarray(sample)).clamp(0, 1)
        frames.setdefault(name, (255 * values).round().to(torch.uint8).movedim(-1, 1))
        transformer.to("cpu")

reference = next(iter(frames.values()))
rows = [
    [
        name,
        f"{median(times):.3g}",
        str(computed[name]),
        f"{psnr(frames[name], reference).mean():.1f}",
        f"{ssim(frames[name], reference).mean():.3f}",
    ]
    for name, times in seconds.items()
]
print(text_table(["variant", "seconds", "forwards computed", "PSNR, dB", "SSIM"], rows, right=True))  # noqa: T201
