"""A family outside the package, as a user registers one."""

import pytest

from mhla_diffusers import families
from mhla_diffusers.families import register_family

from ..families.cogview3plus import COGVIEW3PLUS


@pytest.fixture
def cogview3plus(monkeypatch):
    """The family, forgotten after the test."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    register_family(COGVIEW3PLUS)
