"""Scripts that stand beside the package, as modules."""

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "finetune" / "configs"


@cache
def script(name: str) -> ModuleType:
    """The script of ``finetune/`` with a name, run but for its ``main``."""
    sys.path.insert(0, str(ROOT / "finetune"))  # where the scripts find what they share, as when they are run
    spec = spec_from_file_location(f"finetune_{name}", ROOT / "finetune" / f"{name}.py")
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


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
