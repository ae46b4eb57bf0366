"""SigLIP's vision tower of transformers, alone, under a classifier, or beside the text tower, which is left alone."""

from .vision import VisionAdapter, VisionFamily


class SiglipFamily(VisionFamily):
    """Patches alone: what pools them is no self-attention."""

    name = "siglip"
    transformers = ("SiglipVisionModel", "SiglipForImageClassification", "SiglipModel")
    trunk_names = ("vision_model",)
    layers_path = "encoder.layers"
    attentions = ("self_attn",)
    adapter = VisionAdapter()
