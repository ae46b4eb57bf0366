"""DeiT without a class token, of transformers' own layers."""

import pytest
import torch
from transformers import DeiTConfig, DeiTForImageClassification, ViTConfig, ViTForImageClassification, ViTModel
from transformers.models.vit.modeling_vit import ViTAttention

from mhla_diffusers import apply_mhla
from mhla_diffusers.models import PooledViTConfig, PooledViTForImageClassification

from ..models import seeded
from .shared import pictures

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIZE |= {"image_size": 32, "patch_size": 8, "num_labels": 5}


def pooled(**settings):
    return seeded(PooledViTForImageClassification, config=PooledViTConfig(**(SIZE | settings)))


@torch.no_grad()
def logits(model, images, **settings):
    return model(images, **settings).logits


@pytest.mark.parametrize(
    ("config", "cls", "others"),
    [(ViTConfig, ViTForImageClassification, 1), (DeiTConfig, DeiTForImageClassification, 2)],
)
def test_from_vit_has_all_weights_but_those_of_other_tokens(config, cls, others):
    model = seeded(cls, config=config(**SIZE))
    taken = PooledViTForImageClassification.from_vit(model)
    images = pictures(32, 32)
    tokens = model.base_model.embeddings(images)[:, others:]
    for layer in model.base_model.layers:
        tokens = layer(tokens)
    expected = model.classifier(model.base_model.layernorm(tokens).mean(dim=1))
    torch.testing.assert_close(logits(taken, images), expected, rtol=1e-5, atol=1e-6)
    assert not taken.training and taken.config.id2label == model.config.id2label
    ours = {one.data_ptr() for one in taken.parameters()}
    assert ours.isdisjoint(one.data_ptr() for one in model.parameters()), "copies"


FROM_VIT = PooledViTForImageClassification.from_vit


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda: FROM_VIT(ViTModel(ViTConfig(**SIZE))), "ViTModel .*DeiTForImageClassification"),
        (lambda: FROM_VIT(apply_mhla(ViTForImageClassification(ViTConfig(**SIZE)), blocks=(2, 2))), "remove_mhla"),
        (lambda: pooled()(pictures(32, 64)), "32 x 64 .* 32 x 32.*interpolate_pos_encoding"),
    ],
)
def test_what_is_refused(use, named):
    with pytest.raises(ValueError, match=named):
        use()


def test_it_is_saved_trained_and_looked_at_like_transformers_models(tmp_path):
    model = pooled()
    images, labels = pictures(32, 32), torch.tensor([1, 4])
    model.save_pretrained(tmp_path)
    opened = PooledViTForImageClassification.from_pretrained(tmp_path, attn_implementation="eager")
    output = opened(images, labels=labels, output_attentions=True, output_hidden_states=True)
    # eager attention against sdpa
    torch.testing.assert_close(output.logits, logits(model, images), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))
    assert [tuple(one.shape) for one in output.attentions] == [(2, 2, 16, 16)] * 2
    assert [tuple(one.shape) for one in output.hidden_states] == [(2, 16, 16)] * 3
    model.train().gradient_checkpointing_enable()
    model(images, labels=labels).loss.backward()
    assert all(one.grad is not None for one in model.parameters())
    assert all(isinstance(model.get_submodule(f"layers.{i}.attention"), ViTAttention) for i in range(2))


def test_positions_are_interpolated_to_sides_that_differ():
    model = pooled()
    wide = pictures(32, 64)
    assert torch.equal(logits(model, pictures(32, 32), interpolate_pos_encoding=True), logits(model, pictures(32, 32)))
    turned = logits(model, wide.mT, interpolate_pos_encoding=True)
    assert not torch.allclose(turned, logits(model, wide, interpolate_pos_encoding=True))
    # positions that differ from row to row alone stay so when the width grows
    with torch.no_grad():
        rows = torch.randn(4, 1, 16).expand(4, 4, 16)
        model.position_embeddings.copy_(rows.reshape(1, 16, 16))
        found = model._positions((32, 64), True).view(4, 8, 16)
    torch.testing.assert_close(found, rows[:, :1].expand(4, 8, 16), rtol=1e-5, atol=1e-5)


def test_tokens_that_are_masked_are_neither_seen_nor_counted():
    model = pooled()
    images = pictures(32, 32)
    mask = torch.ones(2, 16, dtype=torch.int64)
    assert torch.equal(logits(model, images, attention_mask=mask), logits(model, images))
    mask[:, 12:] = 0  # the last row of patches
    changed = images.clone()
    changed[:, :, 24:] += 1
    first, second = (logits(model, one, attention_mask=mask) for one in (images, changed))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(model, images), logits(model, changed))
