"""What a user may not do: the error's type, and the values that its message names."""

import re
from collections.abc import Callable

import pytest


def refused(call: Callable[[], object], *named: str, error: type[Exception] = ValueError) -> None:
    """Call what must raise an error whose message holds some texts in this order."""
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, named))):
        call()
