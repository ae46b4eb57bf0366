"""Tables of settings in the pages: every field with its default, in the order of the code, and none besides."""

import ast
import re
from dataclasses import MISSING, fields, is_dataclass

import pytest
import yaml

from mhla_diffusers import MHLAConfig
from mhla_diffusers.families import Clip
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig
from mhla_diffusers.training.config import FewStepsConfig

from .snippets import ROOT

TABLES = [
    ("adapt", "## Every setting", TrainingConfig),
    ("adapt", "### A stage", StageConfig),
    ("adapt", "### Objectives", ObjectiveWeights),
    ("few-steps", "### Settings", FewStepsConfig),
    ("adapt", "### Validation", ValidationConfig),
    ("adapt", "### A clip", Clip),
    ("patch", "## Settings", MHLAConfig),
]


def table_under(page, heading):
    """(setting, default, meaning) of every row of the first table under a heading."""
    section = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split(f"\n{heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(("page", "heading", "settings"), TABLES, ids=lambda value: getattr(value, "__name__", value))
def test_table_holds_every_setting_and_its_default(page, heading, settings):
    rows = table_under(page, heading)
    assert [name.strip("`") for name, _, _ in rows] == [item.name for item in fields(settings)]
    for item, (name, cell, meaning) in zip(fields(settings), rows, strict=True):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        assert meaning, name
        if default is MISSING:
            # the blocks of a patch file are needed; in Python the family has some
            assert cell in ("needed", "family's"), name
        elif is_dataclass(default):
            assert cell == "see there", name
        else:
            read = ast.literal_eval if settings is MHLAConfig else yaml.safe_load
            written = read(cell.strip("`"))
            expected = list(default) if isinstance(default, tuple) else default
            assert (written, type(written)) == (expected, type(expected)), name
