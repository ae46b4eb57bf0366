"""DINOv2 of transformers, with and without registers."""

from .vision import PrefixedAdapter, VisionFamily


class Dinov2Family(VisionFamily):
    """A class token, and in models with registers these after it, before the patches."""

    name = "dinov2"
    transformers = (
        "Dinov2Model",
        "Dinov2ForImageClassification",
        "Dinov2Backbone",
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersBackbone",
    )
    trunk_names = ("dinov2", "dinov2_with_registers")
    layers_path = "encoder.layer"
    attentions = ("attention",)
    adapter = PrefixedAdapter()
    extra_tokens = 5
    """A class token and the four registers of the published models."""
