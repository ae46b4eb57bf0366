"""What left the package says where it is."""

import pytest
from typer.testing import CliRunner

from mhla_diffusers.cli import app
from mhla_diffusers.config import load_patch
from mhla_diffusers.families import get_family
from mhla_diffusers.moved import MOVED


@pytest.mark.parametrize(
    "ask", [load_patch, get_family, lambda name: CliRunner().invoke(app, name.split(), catch_exceptions=False)]
)
def test_every_way_in_says_where_a_removed_name_went(ask, monkeypatch):
    monkeypatch.setitem(MOVED, "some-thing", "It is in studies/.")
    with pytest.raises(ValueError, match="It is in studies/."):
        ask("some-thing")
