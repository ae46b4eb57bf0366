"""Training patched models in a loop of one's own: checkpointing, gradients, batches."""

import pytest
import torch

import mhla_diffusers as mhla

from ..models import (
    FAMILIES,
    inputs,
    output,
    patched,
)
from .shared import EVERYTHING, MODELS, assert_equal_up_to_order


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_gives_the_same_gradients(name):
    """Bit for bit, while every layer runs twice."""
    gradients, runs = [], []
    for checkpointing in (False, True):
        model = patched(name, **EVERYTHING).train()
        counted = []
        for layer in mhla.mhla_layers(model).values():
            layer.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
        if checkpointing:
            model.enable_gradient_checkpointing()
        # DiT drops class labels at random
        torch.manual_seed(0)
        model(**inputs(name)).sample.square().mean().backward()
        gradients.append({path: parameter.grad for path, parameter in model.named_parameters()})
        runs.append(len(counted))
    assert runs == [FAMILIES[name].self_attentions, 2 * FAMILIES[name].self_attentions]
    for path, gradient in gradients[0].items():
        assert (gradient is None) == (gradients[1][path] is None), path
        assert gradient is None or torch.equal(gradient, gradients[1][path]), path


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_reaches_every_weight_of_every_layer(name):
    """And the matrix stays inside (0, 1)."""
    model = patched(name, **EVERYTHING).train()
    before = {
        path: {key: value.clone() for key, value in layer.state_dict().items()}
        for path, layer in mhla.mhla_layers(model).items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mhla.register_mixing_clip(optimizer, model)
    model(**inputs(name)).sample.square().mean().backward()
    optimizer.step()
    for path, layer in mhla.mhla_layers(model).items():
        for key, value in layer.state_dict().items():
            assert value.isfinite().all(), f"{path}.{key}"
            assert not torch.equal(value, before[path][key]), f"{path}.{key}"
        assert layer.mixing.min() > 0
        assert layer.mixing.max() < 1


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_its_samples(name):
    """Classifier-free guidance: a batch of two gives what two batches of one give."""
    model, both = patched(name, **EVERYTHING), inputs(name)
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            layer.gate.weight.add_(0.2)
            layer.convolution.weight.add_(0.2)
    expected = output(model, both)
    for sample in range(2):
        one = {key: value[sample : sample + 1] for key, value in both.items()}
        assert_equal_up_to_order(output(model, one), expected[sample : sample + 1])
