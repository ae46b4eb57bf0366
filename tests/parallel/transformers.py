"""Real transformers on several processes against the same on one."""

import copy
from typing import Any
from unittest.mock import patch

import torch
from diffusers import ContextParallelConfig
from torch import nn

import mhla_diffusers as mhla

from ..families.tiny import case_of
from ..models import FAMILIES, inputs
from .softmax_on_cpu import softmax_on_cpu

NAMES = ("wan", "chronoedit", "flux", "ltx", "qwenimage")
"""Families of which diffusers tells how their tokens are split."""


def case(name: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny transformer and its inputs, the same in every process."""
    if name == "wan":
        return FAMILIES["wan"].build(), inputs("wan", **options)
    found = case_of(name)
    arguments = found.inputs(**options)
    # diffusers splits LTX's mask of the text but not what it makes of it
    return found.transformer(), arguments | ({"encoder_attention_mask": None} if name == "ltx" else {})


def run(model: nn.Module, arguments: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output, and gradients of the parameters and the latents."""
    latents = arguments["hidden_states"].clone().requires_grad_()
    output = model(**{**arguments, "hidden_states": latents}, return_dict=False)[0]
    goal = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    (output * goal).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients | {"hidden_states": latents.grad}


def spread(model: Any, ring: int, ulysses: int, **options: Any) -> None:
    """diffusers' context parallelism on a CPU, of which it counts no devices and then divides by their number."""
    with patch.object(torch.accelerator, "device_count", lambda: 1):
        config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **options)
        model.enable_parallelism(config=config)


def errors(
    name: str, degrees: tuple[int, int], settings: dict[str, Any], options: dict[str, Any] | None = None
) -> dict[str, float]:
    """Relative errors of the output and the worst of the gradients."""
    model, arguments = case(name, **options or {})
    blocks = (2, 2, 2) if name == "wan" else case_of(name).blocks
    mhla.apply_mhla(model, **{"blocks": blocks, **settings})
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter).abs())
    expected, expected_gradients = run(copy.deepcopy(model), arguments)
    spread(model, *degrees)
    with softmax_on_cpu():
        output, gradients = run(model, arguments)
    assert set(gradients) == set(expected_gradients), set(gradients) ^ set(expected_gradients)
    scale = max(x.norm() for x in expected_gradients.values())
    worst = {}
    for key, gradient in sorted(gradients.items()):
        torch.distributed.all_reduce(gradient)
        difference = (gradient - expected_gradients[key]).norm()
        worst[key] = float(difference / expected_gradients[key].norm().clamp_min(1e-3 * scale))
    worst_name = max(worst, key=worst.__getitem__)
    return {"output": float((output - expected).norm() / expected.norm()), worst_name: worst[worst_name]}
