"""Tables of settings in the pages: every field with its default, in the order of the code, and none besides."""

import ast
import re
from dataclasses import MISSING, fields

import pytest
import yaml

from mhla_diffusers import MHLAConfig
from mhla_diffusers.training.config import FewStepsConfig

from .snippets import ROOT

TABLES = [("few-steps", "### Settings", FewStepsConfig), ("patch", "## Settings", MHLAConfig)]


@pytest.mark.parametrize(("page", "heading", "settings"), TABLES, ids=["few-steps", "patch"])
def test_table_holds_every_setting_and_its_default(page, heading, settings):
    section = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split(f"\n{heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|", 2)] for line in lines]
    assert [name.strip("`") for name, _, _ in rows] == [item.name for item in fields(settings)]
    for item, (name, cell, meaning) in zip(fields(settings), rows, strict=True):
        assert meaning, name
        if item.default is MISSING:
            # the blocks of a patch file are needed; in Python the family has some
            assert cell in ("needed", "family's"), name
        else:
            read = ast.literal_eval if settings is MHLAConfig else yaml.safe_load
            written = read(cell.strip("`"))
            assert (written, type(written)) == (item.default, type(item.default)), name
