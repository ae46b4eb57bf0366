"""Tables of settings in the pages: every field with its default, in the order of the code, and none besides."""

import ast
import re
from dataclasses import MISSING, fields

import pytest
import yaml

from mhla_diffusers.config import KINDS
from mhla_diffusers.training.config import FewStepsConfig

from .snippets import ROOT

PATCH = {field.name: field for kind in reversed(KINDS) for field in fields(kind)}
PATCH = {name: PATCH[name] for kind in KINDS for name in (field.name for field in fields(kind))}
"""The settings of all attentions, each once, in the order of the code; sparse attention's default where two differ."""
TABLES = [
    ("few-steps", "### Settings", {field.name: field for field in fields(FewStepsConfig)}, yaml.safe_load),
    ("patch", "## Settings", PATCH, ast.literal_eval),
]
NEEDED = {"blocks": "family's", "block_length": "required"}
"""What stands in the place of a default: the blocks of a patch file are needed, and in Python the family has some."""


@pytest.mark.parametrize(("page", "heading", "settings", "read"), TABLES, ids=["few-steps", "patch"])
def test_table_holds_every_setting_and_its_default(page, heading, settings, read):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    section = text.split(f"\n{heading}\n")[1].split("\n#")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()[2:]]
    rows = [[cell.strip() for cell in line.strip("|").split("|", 2)] for line in lines]
    assert [name.strip("`") for name, _, _ in rows] == list(settings)
    for item, (name, cell, meaning) in zip(settings.values(), rows, strict=True):
        assert meaning, name
        if item.default is MISSING:
            assert cell == "needed", name
        elif item.name in NEEDED:
            assert cell == NEEDED[item.name], name
        else:
            written = read(cell.strip("`"))
            assert (written, type(written)) == (item.default, type(item.default)), name
