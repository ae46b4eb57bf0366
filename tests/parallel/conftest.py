"""Processes for all tests of context parallelism."""

from collections.abc import Iterator

import pytest

from .processes import Processes


@pytest.fixture(scope="session")
def two() -> Iterator[Processes]:
    """Two processes."""
    processes = Processes(2)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Processes]:
    """Four processes."""
    processes = Processes(4)
    yield processes
    processes.close()
