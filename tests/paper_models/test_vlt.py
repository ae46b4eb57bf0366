"""VLT with MHLA built in, as transformers' models are used."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import mhla_diffusers as mhla
from mhla_diffusers.models import VLTForImageClassification
from mhla_diffusers.models.vlt import DropPath, rotary_of_grid
from mhla_diffusers.patching import MHLALayer, register_mixing_clip
from mhla_diffusers.patching.layer import SparseLayer

from .shared import MHLA, pictures, tiny_config, tiny_vlt

SPARSE = [{"density": 0.3}, {"density": 0.2, "block_size": 4, "far": "means"}, None, None]
BOTH = [SPARSE[0], *MHLA[1:]]
LABELS = torch.tensor([1, 4])


@torch.no_grad()
def logits(model, images=None):
    return model(pictures() if images is None else images).logits


@pytest.mark.parametrize("settings", [MHLA, SPARSE, BOTH, [None] * 4], ids=["mhla", "sparse", "both", "softmax"])
def test_what_is_saved_opens_bit_for_bit_and_every_weight_is_trained(settings, tmp_path):
    model = tiny_vlt(mhla=settings)
    model.save_pretrained(tmp_path)
    opened = VLTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(opened), logits(model))
    assert opened.config.mhla == settings
    output = model.train()(pictures(), labels=LABELS)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, LABELS))
    output.loss.backward()
    assert not [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()]


def test_weights_that_a_folder_lacks_are_fresh_ones(tmp_path):
    model = tiny_vlt(mhla=BOTH, output_gate=False)
    model.save_pretrained(tmp_path)
    opened = VLTForImageClassification.from_pretrained(tmp_path, output_gate=True)
    for name in ("vlt.stages.0.layers.0.attn", "vlt.stages.1.layers.0.attn.mhla"):
        gate, fresh = (one.get_submodule(name).gate for one in (opened, VLTForImageClassification(opened.config)))
        assert torch.equal(gate.weight, fresh.weight) and torch.equal(gate.bias, fresh.bias)
    # gates that are 1 change nothing; SiLU of the bias is 1 to the last bits of float32
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-5, atol=1e-6)


def test_sparse_attention_with_all_pairs_is_softmax_attention():
    model, sparse = tiny_vlt(mhla=[None] * 4), tiny_vlt(mhla=[{"density": 1.0}] * 2 + [None] * 2)
    sparse.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(sparse), logits(model), rtol=1e-5, atol=1e-6)
    assert all(isinstance(layer, SparseLayer) for layer in mhla.mhla_layers(sparse).values())


def test_a_fresh_model_has_the_paper_s_mixing():
    torch.manual_seed(0)
    layers = mhla.mhla_layers(VLTForImageClassification(tiny_config()))
    assert list(layers) == [f"vlt.stages.{stage}.layers.0.attn.mhla" for stage in (0, 1)]
    assert [tuple(layer.mixing.shape) for layer in layers.values()] == [(9, 9), (4, 4)]
    assert all(torch.allclose(layer.mixing.sum(dim=1), torch.tensor(1.0)) for layer in layers.values())
    assert all(layer.mixing.diagonal().min() > layer.mixing.min() for layer in layers.values())


def test_feature_maps_of_any_size_are_told():
    output = tiny_vlt()(pictures(72, 41), output_hidden_states=True)
    sizes = [tuple(one.shape) for one in output.hidden_states]
    assert sizes == [(2, 3, 72, 41), (2, 8, 18, 11), (2, 16, 9, 6), (2, 16, 5, 3), (2, 24, 3, 2)]
    assert logits(tiny_vlt(), pictures(9, 8)).isfinite().all(), "fewer tokens than blocks"


def test_one_block_is_blocks_that_weigh_alike_and_both_are_plain_linear_attention():
    uniform = {"mixing_init": "uniform", "mixing_learnable": False}
    one = tiny_vlt(mhla=[{"blocks": [1, 1]}, None, None, None], rope_theta=None)
    many = tiny_vlt(mhla=[{"blocks": [3, 3]} | uniform, None, None, None], rope_theta=None)
    many.load_state_dict(
        {name: value for name, value in one.state_dict().items() if "mixing" not in name}, strict=False
    )
    many.vlt.stages[0].layers[0].attn.mhla.mixing.data.fill_(1 / 9)
    # float32 sums in another order
    torch.testing.assert_close(logits(many), logits(one), rtol=1e-4, atol=1e-5)
    layer = one.vlt.stages[0].layers[0].attn
    hidden, grid = torch.randn(2, 20, 8), (4, 5)
    query, key = (projection(hidden).relu() + 1e-6 for projection in (layer.q_proj, layer.k_proj))
    weights = query @ key.mT
    value = layer.v_proj(hidden)
    expected = weights @ value / weights.sum(dim=-1, keepdim=True)
    expected = expected * torch.nn.functional.silu(layer.mhla.gate(hidden)) + layer.mhla.convolution(value, grid)
    torch.testing.assert_close(layer(hidden, grid, None), layer.o_proj(expected), rtol=1e-4, atol=1e-5)


def test_mixing_tells_blocks_apart():
    """Blocks that change places change what MHLA sees, and not what plain linear attention sees."""
    hidden = torch.randn(1, 6, 6, 8, generator=torch.Generator().manual_seed(0))
    moved = torch.cat([hidden[:, :, :2], hidden[:, :, 4:], hidden[:, :, 2:4]], dim=2)
    settings = {"blocks": [3, 3], "convolution": None}
    for mixing, same in (("uniform", True), ("locality", False)):
        model = tiny_vlt(mhla=[settings | {"mixing_init": mixing}, None, None, None])
        attn = model.vlt.stages[0].layers[0].attn
        attn.mhla.mixing.data = MHLALayer(attn.mhla.config, 1, 8, 8).mixing.data
        first, second = (attn(one.flatten(1, 2), (6, 6), None).view(1, 6, 6, 8)[:, :, :2] for one in (hidden, moved))
        assert torch.allclose(first, second, rtol=1e-4, atol=1e-5) is same, "of tokens that stay where they were"


def test_checkpointing_gives_the_same_gradients():
    model = tiny_vlt(mhla=BOTH, drop_path_rate=0.5).train()
    gradients = []
    for wanted in (False, True):
        model.zero_grad()
        if wanted:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        model(pictures(), labels=LABELS).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert model.vlt.stages[0].layers[0].gradient_checkpointing
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.slow
def test_compiled_without_breaks_at_several_sizes():
    size = {"hidden_sizes": (8, 16), "depths": (1, 1), "num_attention_heads": (1, 2)}
    model = tiny_vlt(mhla=[{"blocks": [3, 3]}, None], **size)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")  # what breaks a graph breaks it while it is traced
    for images in (pictures(), pictures(48, 80)):
        torch.testing.assert_close(logits(compiled, images), logits(model, images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_mixing_in_float32(dtype, tmp_path):
    model = tiny_vlt()
    model.save_pretrained(tmp_path)
    half = VLTForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    assert half.classifier.weight.dtype == dtype
    assert all(layer.mixing.dtype == torch.float32 for layer in mhla.mhla_layers(half).values())
    exact = logits(model)
    error = (logits(half).float() - exact).norm() / exact.norm()
    # roundings of 2⁻⁹ and 2⁻¹² in some 40 operations one after another
    assert 0 < error < (0.05 if dtype == torch.bfloat16 else 0.005)


def test_lora_and_the_clip_of_mixing_go_together():
    model = get_peft_model(tiny_vlt(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["mhla"]))
    layers = mhla.mhla_layers(model)
    assert len(layers) == 2
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e4)
    register_mixing_clip(optimizer, model)
    before = [layer.mixing.clone() for layer in layers.values()]
    model(pictures(), labels=LABELS).loss.backward()
    optimizer.step()
    for layer, mixing in zip(layers.values(), before, strict=True):
        assert not torch.equal(layer.mixing, mixing)
        assert layer.mixing.min() > 0 and layer.mixing.max() < 1


def test_transformers_trainer_takes_it(tmp_path):
    data = [{"pixel_values": image, "labels": int(label)} for image, label in zip(pictures(), LABELS, strict=True)]
    model = tiny_vlt()
    before = model.classifier.weight.clone()
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert not torch.equal(model.classifier.weight, before)
    assert trainer.evaluate()["eval_loss"] > 0


def test_rope_turns_by_the_angles_of_row_and_column():
    cos, sin = rotary_of_grid((3, 4), 16, 10000.0, torch.device("cpu"))
    row, column = 2, 3
    frequencies = [10000 ** -(i / 3) for i in range(4)]
    angles = [place * frequency for place in (row, column) for frequency in frequencies for _ in "ab"]
    assert cos.shape == sin.shape == (1, 12, 1, 16)
    torch.testing.assert_close(cos[0, row * 4 + column, 0], torch.tensor(angles).cos())
    torch.testing.assert_close(sin[0, row * 4 + column, 0], torch.tensor(angles).sin())


def test_drop_path_keeps_the_mean_and_drops_whole_samples():
    torch.manual_seed(0)
    dropped = DropPath(0.25).train()(torch.ones(4000, 2, 3))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))
    # of 4,000 draws; six standard deviations of their mean
    assert dropped.mean() == pytest.approx(1, abs=6 * (1 / 3 / 4000) ** 0.5)
    assert torch.equal(DropPath(0.25).eval()(torch.ones(3, 2)), torch.ones(3, 2))


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: tiny_config(mhla=MHLA[:3]), " 3 .*depths=.* 4"),
        (lambda: tiny_config(num_attention_heads=(1, 3, 2, 3)), "hidden_sizes=16 .*num_attention_heads=3"),
        (lambda: first_stage(density=0.1), "blocks .*density"),
        (lambda: first_stage(block_length=3), r"mhla\[0\] is causal"),
        (lambda: first_stage(layers="1/2"), "layers='1/2'"),
        (lambda: first_stage(softmax_steps=1), "softmax_steps=1"),
        (lambda: first_stage(blocks=[9]), r"blocks=\(9,\).*two counts"),
        (lambda: first_stage(block=[3, 3]), "'block'"),
        (lambda: tiny_config(hidden_act="gelo"), "'gelo'; .*'gelu'"),
        (lambda: tiny_vlt()(pictures(), output_attentions=True), "output_attentions=True"),
        (lambda: tiny_vlt()(pictures(), atention_mask=None), "'atention_mask'"),
        # MHLA is built in
        (lambda: mhla.apply_mhla(tiny_vlt()), "VLTForImageClassification .*2 layers.*VLTConfig"),
        (lambda: mhla.save_mhla(tiny_vlt(), "unused"), "VLTForImageClassification .*2 layers.*VLTConfig"),
    ],
)
def test_what_is_refused(refused, words):
    with pytest.raises(ValueError, match=words):
        refused()


def first_stage(**settings):
    return tiny_config(mhla=[{"blocks": [3, 3]} | settings, None, None, None])


def test_softmax_in_every_stage_leaves_no_layer():
    assert mhla.mhla_layers(tiny_vlt(mhla=[None] * 4)) == {}
