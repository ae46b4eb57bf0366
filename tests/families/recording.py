"""What a pipeline hands to its transformer: what a family's own inputs are compared with."""

from typing import Any

from mhla_diffusers.families import get_family


def forwards(pipe: Any, **call: Any) -> list[dict[str, Any]]:
    """Arguments of every forward of a call of the pipeline, by name; its tensors are no longer changed."""
    found: list[dict[str, Any]] = []
    family = get_family(pipe.transformer)
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: found.append(family.named_arguments(pipe.transformer, args, kwargs)),
        with_kwargs=True,
    )
    pipe(**call)
    hook.remove()
    return found
