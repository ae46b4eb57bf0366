"""Matplotlib, which draws without a screen and is imported where something is drawn."""

from typing import Any


def require_matplotlib() -> Any:
    """Matplotlib's pyplot.

    Raises:
        ImportError: it is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install mhla_diffusers[demo]") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
