"""Tiny pipelines, saved once per session."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mhla_diffusers.training.data.model import DataModel

from .pipelines import dit_pipeline, sana_pipeline, wan_pipeline

Saved = tuple[Any, DataModel]
_MAKE = {"wan": wan_pipeline, "sana": sana_pipeline, "dit": dit_pipeline}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Give a family's pipeline, not to be changed, and what depends on its folder."""
    made: dict[str, Saved] = {}

    def get(family: str) -> Saved:
        if family not in made:
            folder, pipe = tmp_path_factory.mktemp(family), _MAKE[family]()
            pipe.save_pretrained(folder)
            if family == "dit":  # which the pipeline of the Hub has in its index, and diffusers does not save
                index = folder / "model_index.json"
                labels = {"id2label": {"3": "cat, house cat", "5": "dog"}}
                index.write_text(json.dumps({**json.loads(index.read_text()), **labels}))
            made[family] = pipe, DataModel(str(folder))
        return made[family]

    return get


@pytest.fixture(scope="session")
def wan(saved: Callable[[str], Saved]) -> Saved:
    """Wan's."""
    return saved("wan")
