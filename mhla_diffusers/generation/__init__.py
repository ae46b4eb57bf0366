"""Which pipeline, called how, into which folder; and names as users write them."""

from typing import TYPE_CHECKING

from .. import lazy_names

__all__ = [
    "PipelineChoice",
    "component_identity",
    "family_of",
    "generator_for",
    "load_pipeline",
    "load_result",
    "pipeline_file",
]

if TYPE_CHECKING:
    from .noise import generator_for
    from .pipelines import PipelineChoice, component_identity, family_of, load_pipeline, load_result, pipeline_file
else:
    # options of commands are in this folder too
    __getattr__, __dir__ = lazy_names(__name__, __all__, (".noise", ".pipelines"))
