"""Scripts that stand beside the package, as modules."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "finetune" / "configs"


def load_script(place, monkeypatch):
    """Import a script such as studies/quality/quality.py; it is forgotten with what the test has patched."""
    name = Path(place).stem
    spec = spec_from_file_location(name, ROOT / place)
    module = module_from_spec(spec)
    monkeypatch.syspath_prepend(str(ROOT / Path(place).parent))
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look names up
    spec.loader.exec_module(module)
    return module


def run_script(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()
