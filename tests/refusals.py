"""What tests say of errors: their type and the values they name, not their prose."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(
    *named: object, error: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect ``error``, whose message holds all that is ``named`` in this order: values, arguments, a remedy's name.

    In a text ``...`` stands for anything, as in doctests.
    """
    parts = "...".join(map(str, named)).split("...")
    assert any(map(str.strip, parts)), "an error without a value says nothing"
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts))) as caught:
        yield caught
