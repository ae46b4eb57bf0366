"""Scripts of ``finetune/`` as modules."""

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "finetune" / "configs"


@cache
def script(name: str) -> ModuleType:
    """The script of a name, run but for its ``main``."""
    sys.path.insert(0, str(ROOT / "finetune"))  # where the scripts find what they share, as when they are run
    spec = spec_from_file_location(f"finetune_{name}", ROOT / "finetune" / f"{name}.py")
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
