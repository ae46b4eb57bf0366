"""The demo: what plain linear attention loses and MHLA keeps, measured on a tiny pipeline within minutes."""

from .run import DemoConfig, run_demo

__all__ = ["DemoConfig", "run_demo"]
