"""What a pipeline hands to its transformer and to its autoencoder."""

from typing import Any

import torch

from mhla_diffusers.families import get_family
from mhla_diffusers.patching.sensitivity import record_calls


def forwards_of(pipe: Any, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Arguments by name of every forward of the transformer in a call of the pipeline."""
    calls = record_calls({"transformer": pipe.transformer}, lambda: generate(pipe, arguments))["transformer"]
    family = get_family(pipe.transformer)
    return [family.named_arguments(call.args, call.kwargs) for call in calls]


def decoded_by(pipe: Any, arguments: dict[str, Any], monkeypatch: Any) -> torch.Tensor:
    """What the autoencoder decodes in a call of the pipeline."""
    given = []
    decode = pipe.vae.decode
    monkeypatch.setattr(
        pipe.vae, "decode", lambda latents, *args, **kwargs: given.append(latents) or decode(latents, *args, **kwargs)
    )
    generate(pipe, arguments)
    return given[0]


def generate(pipe: Any, arguments: dict[str, Any]) -> Any:
    """A call of the pipeline with a seed."""
    return pipe(**arguments, generator=torch.Generator().manual_seed(3))
