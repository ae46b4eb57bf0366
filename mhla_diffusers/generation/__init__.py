"""Which pipeline, called how, into which folder; and names as users write them."""

from .noise import generator_for
from .pipelines import PipelineChoice, component_identity, family_of, load_pipeline, load_result, pipeline_file

__all__ = [
    "PipelineChoice",
    "component_identity",
    "family_of",
    "generator_for",
    "load_pipeline",
    "load_result",
    "pipeline_file",
]
