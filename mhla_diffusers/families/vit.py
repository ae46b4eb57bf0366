"""ViT and DeiT of transformers, and DeiT as the paper trains it, without a class token."""

from .vision import PrefixedForm, VisionFamily, VisionForm


class ViTFamily(VisionFamily):
    """ViT: a class token before the patches."""

    name = "vit"
    transformers = ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling")
    trunk_names = ("vit",)
    attentions = ("attention",)
    form = PrefixedForm()
    outside_tokens = 1


class DeiTFamily(VisionFamily):
    """DeiT: a class token and a distillation token before the patches."""

    name = "deit"
    transformers = (
        "DeiTModel",
        "DeiTForImageClassification",
        "DeiTForImageClassificationWithTeacher",
        "DeiTForMaskedImageModeling",
    )
    trunk_names = ("deit",)
    attentions = ("attention",)
    form = PrefixedForm()
    outside_tokens = 2


class PooledViTFamily(VisionFamily):
    """DeiT whose patches are averaged (paper, Appendix E): :mod:`mhla_diffusers.models.pooled_vit`."""

    name = "pooled-vit"
    library = "mhla_diffusers.models"
    transformers = ("PooledViTForImageClassification",)
    attentions = ("attention",)
    form = VisionForm()
