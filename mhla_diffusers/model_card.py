"""The README that is uploaded with a patch."""

import json
from typing import TYPE_CHECKING, Any

from .describe import describe

if TYPE_CHECKING:
    from .patch_record import PatchRecord

_CARD = """\
# {title}

A patch that gives {base_link} Multi-Head Linear Attention (MHLA),
self-attention of linear cost, through [mhla_diffusers](https://pypi.org/project/mhla-diffusers).

```python
import torch
from diffusers import DiffusionPipeline
from mhla_diffusers import load_mhla

pipe = DiffusionPipeline.from_pretrained("{base_source}", torch_dtype=torch.bfloat16)
load_mhla(pipe, "{repo_id}")
```

`remove_mhla(pipe)` takes it away again.

## What it holds

{holds}

```
{table}
```

## Settings

```json
{settings}
```
"""

_HOLDS = {
    "mhla": "Only the tensors that MHLA adds; the base model's weights are used as they are.",
    "changed": "The tensors that MHLA adds and those of the base model that were adapted to it.",
    "all": "All weights of the transformer.",
}


def model_card(model: Any, repo_id: str, record: "PatchRecord") -> str:
    """Text of the model card.

    Args:
        model: the patched pipeline or transformer.
        repo_id: where it will be uploaded.
        record: what was saved.
    """
    from huggingface_hub import ModelCardData

    base, on_hub = record.base_model, "/" in record.base_model
    data = ModelCardData(
        base_model=base if on_hub else None, library_name="diffusers", tags=["mhla", "linear-attention"]
    )
    settings = {name: part.mhla for name, part in record.transformers.items()}
    body = _CARD.format(
        title=repo_id.split("/")[-1],
        repo_id=repo_id,
        base_link=f"[{base}](https://huggingface.co/{base})"
        if on_hub
        else f"the model {base or 'that it was made for'}",
        base_source=base if on_hub else f"path/to/{base or 'the-model'}",
        holds=_HOLDS[record.weights],
        table=describe(model),
        settings=json.dumps(settings, indent=2),
    )
    return f"---\n{data.to_yaml()}\n---\n\n{body}"
