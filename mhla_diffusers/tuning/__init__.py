"""Find the settings that suit a model, on the user's machine with the user's prompts."""

from typing import TYPE_CHECKING

from .. import lazy_names

__all__ = ["Target", "Tuned", "tune"]

if TYPE_CHECKING:
    from .candidates import Target, Tuned
    from .run import tune
else:
    # mhla tune lies in this folder as well
    __getattr__, __dir__ = lazy_names(__name__, __all__, (".candidates", ".run"))
