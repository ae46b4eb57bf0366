"""What several tests of patching use: names of models, what a patch could leave behind, weights and adapters."""

import copy
import pickle
import threading

import torch
from diffusers import UNet2DModel
from peft import LoraConfig, inject_adapter_in_model

import mhla_diffusers as mhla
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.patching import find_patched

from ..models import FAMILIES, patched

ONE_PER_CLASS = ["wan", "wan_vace", "sana", "dit"]
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
SPARSE = NOTHING_DENSE | {"density": 0.1, "block_size": 4, "far": "means"}
"""Sparse attention for tiny grids, without dense steps or layers unless a test adds them."""
EVERYTHING = {"output_norm": True, "output_gate": True, "convolution": 3}
"""Settings that give a layer every kind of weight that it can have."""
CAUSAL = {"blocks": (2, 2, 3), "causal": "block", "block_length": 2}
COPIES = [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]  # noqa: S301
"""Ways to copy a module."""


def assert_equal_up_to_order(found, expected):
    """The same operations, perhaps in another order: float32 rounding of outputs of the order of 1."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def shake(*modules, seed=11):
    """Train all parameters a little."""
    generator = torch.Generator().manual_seed(seed)
    for module in modules:
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.rand(parameter.shape, generator=generator))


def trained(name, **settings):
    """A patched model whose layers have learned something, each its own, the same in every process."""
    model = patched(name, **settings)
    shake(*mhla.mhla_layers(model).values())
    return model


def unet():
    """A diffusers model without any attention."""
    return UNet2DModel(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )


def own_form(name, **settings):
    """Model ``name``, patched by diffusers' own ``set_attn_processor``."""
    model = FAMILIES[name].build()
    model.set_attn_processor(mhla.MHLAProcessor(**settings))
    return model


def mixings(model):
    return [layer.mixing for layer in mhla.mhla_layers(model).values()]


def lora(*projections):
    """An adapter that changes the output from the start."""
    torch.manual_seed(2)
    return LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=list(projections))


def with_lora(model, *projections):
    """Diffusers' way where the class has it; DiT has not, so PEFT's own."""
    if hasattr(model, "add_adapter"):
        model.add_adapter(lora(*projections))
        return model
    return inject_adapter_in_model(lora(*projections), model).eval()


def seen_by(model, run):
    """What every patched attention was given and returned, in order."""
    (handle,) = find_patched(model).values()
    seen = []
    with handle.watched(lambda one: seen.append(one) or one.output):
        run()
    return seen


def in_threads(*functions):
    """Run functions, each in a thread of its own, to their ends."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
