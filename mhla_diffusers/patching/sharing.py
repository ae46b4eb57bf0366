"""Share a patch on the Hub: upload, and the model card that goes with it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .describe import describe
from .record import PatchRecord, Weights, read_record
from .saving import save_mhla

_CARD = """\
# {title}

A patch that gives {base_link} Multi-Head Linear Attention (MHLA),
self-attention of linear cost, through [mhla_diffusers](https://pypi.org/project/mhla-diffusers).

```python
import torch
from diffusers import DiffusionPipeline
from mhla_diffusers import load_mhla

pipe = DiffusionPipeline.from_pretrained("{base_source}", dtype=torch.bfloat16)
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


def push_mhla(
    model: Any,
    repo_id: str,
    *,
    weights: Weights = "mhla",
    base: Any = None,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Upload the patch with a model card to the Hub.

    Args:
        model: patched pipeline or transformer.
        repo_id: ``user/name``; is made if it is missing.
        weights: see :func:`save_mhla`.
        base: see :func:`save_mhla`.
        private: for a repository that is made.
        token: for the Hub; None for the one of ``hf auth login``.

    Returns:
        Address of the commit.

    Raises:
        ValueError: what :func:`save_mhla` raises, or a ``repo_id`` that cannot be one.
        OSError: the Hub cannot be reached, or refused.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # of the HTTP library, whose errors of connection are no OSErrors

    with TemporaryDirectory() as folder:
        save_mhla(model, folder, weights=weights, base=base)
        Path(folder, "README.md").write_text(model_card(model, repo_id, read_record(Path(folder))), encoding="utf-8")
        hub = HfApi(token=token)
        try:
            hub.create_repo(repo_id, private=private, exist_ok=True)
            commit = hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload MHLA patch")
        except (HTTPError, OSError) as error:
            raise OSError(
                f"The patch could not be uploaded to the Hub repository {repo_id!r}: {error} Check the connection, "
                "HF_HUB_OFFLINE and the token (hf auth login) and call push_mhla again; until then "
                "save_mhla(model, folder) keeps the patch here."
            ) from error
    return str(commit.commit_url)


def model_card(model: Any, repo_id: str, record: PatchRecord) -> str:
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
