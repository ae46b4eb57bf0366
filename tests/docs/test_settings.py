"""The tables of settings in docs/settings.md: every field with its default, in the order of the code."""

import ast
import re
from dataclasses import MISSING, fields

from mhla_diffusers.config import KINDS

from .snippets import ROOT

PATCH = {field.name: field for kind in reversed(KINDS) for field in fields(kind)}
PATCH = {name: PATCH[name] for kind in KINDS for name in (field.name for field in fields(kind))}
"""The settings of all attentions, each once, in the order of the code; sparse attention's default where two differ."""


def test_table_holds_every_setting_and_its_default():
    text = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    section = text.split("\n## All settings\n")[1].split("\n#")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()[2:]]
    rows = [[cell.strip() for cell in line.strip("|").split("|", 2)] for line in lines]
    assert [name.strip("`") for name, _, _ in rows] == list(PATCH)
    for item, (name, cell, meaning) in zip(PATCH.values(), rows, strict=True):
        assert meaning, name
        if item.default is MISSING:
            assert cell == "required", name
        elif item.name == "blocks":  # a patch file needs them, and in Python the family has some
            assert cell == "family's", name
        else:
            written = ast.literal_eval(cell.strip("`"))
            assert (written, type(written)) == (item.default, type(item.default)), name
