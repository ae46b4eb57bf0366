"""A family outside the package, as a user registers one."""

import pytest

import mhla_diffusers as mhla
from mhla_diffusers import families

from ..families.auraflow import AuraFlowFamily


@pytest.fixture
def auraflow(monkeypatch):
    """The family, forgotten after the test."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    mhla.register_family(AuraFlowFamily())
