"""Time and memory, measured side by side in one run."""

from .conditions import Conditions
from .results import Row, Run, read_run

__all__ = ["Conditions", "Row", "Run", "read_run"]
