"""Scripts beside the package, as modules."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script(place, monkeypatch):
    """Import a script such as finetune/quality.py; it is forgotten with what the test has patched."""
    name = Path(place).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / place)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look names up
    spec.loader.exec_module(module)
    return module


def run_script(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()
