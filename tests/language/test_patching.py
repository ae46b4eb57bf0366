"""A patched Llama: what it computes, and what the patch leaves behind."""

import copy
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, LlamaModel, TextGenerationPipeline

import mhla_diffusers as mhla
from mhla_diffusers.attention import reference_attention
from mhla_diffusers.families import AttentionInputs
from mhla_diffusers.patching import calibrate_output_norm, layer_sensitivity

from ..forking import CONTEXT
from ..models import assert_changed, relative_change, wan
from ..patching.shared import assert_same_footprint, footprint
from .models import BLOCK_LENGTH, BLOCKS, LONGEST, ROUNDING, llama, logits, patch, patched, text, words


@pytest.mark.parametrize(("implementation", "layers"), [("sdpa", "all"), ("eager", [1])])
def test_a_patch_changes_the_output_and_its_removal_brings_all_back(implementation, layers):
    model = llama(attn_implementation=implementation)
    before, expected = footprint(model), logits(model, text())
    patch(model, layers=layers)
    assert model.config._attn_implementation != implementation
    assert len(mhla.mhla_layers(model)) == (3 if layers == "all" else 1)
    assert_changed(logits(model, text()), expected)
    mhla.remove_mhla(model)
    assert_same_footprint(model, before)
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model, text()), expected)


def test_layers_that_are_not_chosen_run_what_the_model_had():
    """With a patch that changes nothing they are all alone: softmax within one block is softmax attention."""
    model, ids = llama(), text()
    expected = logits(model, ids)
    mhla.apply_mhla(model, blocks=(1,), block_length=LONGEST, layers=[0, 2])
    torch.testing.assert_close(logits(model, ids), expected, **ROUNDING)


@pytest.mark.parametrize("settings", [{"own": "softmax"}, {"own": "linear", "mixing_per_head": True}])
def test_an_attention_is_the_reference_of_queries_and_keys_after_rope(settings):
    """Against float64, keys repeated for the heads that share them."""
    model, ids = patched(**settings), text(length=37)
    attn, seen = model.model.layers[1].self_attn, {}
    attn.o_proj.register_forward_pre_hook(lambda _, args: seen.update(found=args[0]))
    processor = attn.processor

    class Watching(type(processor)):
        def attend(self, attn, query, key, value, hidden_states, cache):
            seen.update(inputs=(query, key, value))
            return super().attend(attn, query, key, value, hidden_states, cache)

    attn.set_processor(Watching(processor.config))
    logits(model, ids, use_cache=False)
    query, key, value = (x.double() for x in seen["inputs"])
    assert key.shape[2] == 2
    key, value = (x.repeat_interleave(2, dim=2) for x in (key, value))
    with torch.no_grad():
        expected = reference_attention(attn.mhla.call(AttentionInputs(query, key, value, query, (37,)))).flatten(2)
    assert relative_change(seen["found"], expected) < 1e-5


@pytest.mark.parametrize("own", ["softmax", "linear"])
def test_no_token_sees_a_later_one(own):
    model, ids = patched(own=own), text()
    other = ids.clone()
    other[:, 21:] = 5
    found, changed = logits(model, ids), logits(model, other)
    assert torch.equal(found[:, :21], changed[:, :21])
    assert_changed(changed[:, 21:], found[:, 21:])


@pytest.mark.parametrize("layers", ["all", [1]])
def test_padding_on_the_right_changes_no_token_before_it(layers):
    """In the forward and in gradients, the pads masked and of any content."""
    model, ids = patched(layers=layers), text(length=29)
    padded = torch.cat([ids, torch.full((2, 11), 7)], dim=1)
    mask = torch.arange(40).expand(2, -1) < 29
    torch.testing.assert_close(logits(model, padded, attention_mask=mask)[:, :29], logits(model, ids), **ROUNDING)
    gradients = []
    for tokens, labels, arguments in ((ids, ids, {}), (padded, padded.where(mask, -100), {"attention_mask": mask})):
        model.zero_grad()
        model(tokens, labels=labels, **arguments).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


USUAL = {"blocks": (6,), "block_length": 8}


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        (None, USUAL | {"causal": None}, "causal=None"),
        (None, USUAL | {"causal": "block"}, "causal='block' .*causal='token'"),
        (None, USUAL | {"rope": "after"}, "rope='after' .*rope='before'"),
        (None, USUAL | {"softmax_steps": 2}, "softmax_steps=2"),
        (None, USUAL | {"blocks": (4, 2)}, r"causal='token' .*blocks=\(4,\)"),
        (None, USUAL | {"own": "pwn"}, r"own='pwn' .*'softmax' or 'linear'\.$"),
        (None, USUAL | {"density": 0.1}, "density .*causal='token' .*blocks"),
        (None, USUAL | {"calibration": lambda: None}, "LlamaForCausalLM is a language model"),
        (mhla.SparseConfig(), {}, "sparse attention .*causal='token'"),
        (mhla.MHLAConfig(blocks=(6,)), {}, "MHLA .*causal='token'"),
        (None, {"density": 0.1}, "(?s)^(?!.*apply_mhla).*density"),  # which would be the very setting that was given
    ],
)
def test_settings_that_a_language_model_has_no_place_for(config, settings, named):
    model = llama()
    before = footprint(model)
    with pytest.raises(ValueError, match=named):
        mhla.apply_mhla(model, config, **settings)
    assert_same_footprint(model, before)


def eager_since(model):
    model.config._attn_implementation = "eager"
    return model


PACKED = torch.cat([torch.arange(25), torch.arange(15)])[None]
FROM_THE_LEFT = torch.arange(40).expand(2, -1) >= torch.tensor([[0], [3]])


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: patched()(text(), attention_mask=FROM_THE_LEFT), "left.*right"),
        (lambda: patched()(text(batch=1), position_ids=PACKED, use_cache=False), "position_ids"),
        (lambda: patched()(text(), attention_mask=torch.zeros(2, 1, 40, 40)), "four axes"),
        (lambda: patched()(text(length=53)), "53 tokens, .* 6 blocks of 8.*beyond='relative'"),
        (lambda: patch(llama(attention_dropout=0.1)).train()(text()), "attention_dropout=0.1"),
        (lambda: logits(eager_since(patched()), text()), "'eager' .*remove_mhla"),
        # of a hybrid too, whose tuple would have fewer entries than the model has layers
        (lambda: patched(layers=[1])(text(), output_attentions=True), "output_attentions=True.*mhla_disabled"),
        (lambda: patch(llama(attn_implementation="eager", output_attentions=True))(text()), "output_attentions=True"),
        *(
            (lambda f=f: f(patched(output_norm=True), lambda: None), rf"{f.__name__}\(\)")
            for f in (layer_sensitivity, calibrate_output_norm, mhla.audit)
        ),
    ],
)
def test_what_is_refused(refused, words):
    with pytest.raises(ValueError, match=words):
        refused()


def test_a_text_longer_than_the_blocks_goes_on_by_the_rule():
    ids = text(length=LONGEST + 5)
    found = logits(patched(beyond="relative"), ids)
    torch.testing.assert_close(found[:, :LONGEST], logits(patched(), ids[:, :LONGEST]), **ROUNDING)


def test_an_implementation_that_is_set_after_the_patch_stays_when_it_goes():
    assert mhla.remove_mhla(eager_since(patched())).config._attn_implementation == "eager"


@pytest.mark.parametrize("cls", [LlamaForCausalLM, LlamaModel])
def test_a_saved_patch_gives_the_same_again(cls, tmp_path):
    settings = {"output_gate": True, "layers": [0, 2]}
    model = patch(llama(cls), **settings)
    with torch.no_grad():
        expected = model(text())[0]
    mhla.save_mhla(model, tmp_path)
    loaded = mhla.load_mhla(llama(cls), tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(text())[0], expected)
    mhla.remove_mhla(loaded)
    assert loaded.config._attn_implementation == "sdpa"


def test_a_whole_model_that_was_trained_is_saved_with_its_patch(tmp_path):
    """Tied embeddings stay tied."""
    model = patch(llama(tie_word_embeddings=True))
    mhla.save_mhla(model, tmp_path, weights="all")
    fresh = llama(tie_word_embeddings=True, initializer_range=0.5)
    assert_changed(logits(fresh, text()), logits(llama(tie_word_embeddings=True), text()))
    assert torch.equal(logits(mhla.load_mhla(fresh, tmp_path), text()), logits(model, text()))
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight


def test_a_model_whose_patch_was_removed_is_saved_as_transformers_does(tmp_path):
    model = mhla.remove_mhla(patched())
    model.save_pretrained(tmp_path)
    assert "mhla" not in (tmp_path / "config.json").read_text()
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path), text()), logits(llama(), text()))


def test_a_patch_is_switched_off_changed_and_described():
    model, expected = patched(layers=[0, 1]), logits(llama(), text())
    with mhla.mhla_disabled(model):
        assert torch.equal(logits(model, text()), expected)
    mhla.change_mhla(model, layers=[1], own="linear")
    assert list(mhla.mhla_layers(model)) == ["model.layers.1.self_attn.mhla"]
    rows = mhla.describe(model, grid=(LONGEST,))
    assert [(row.name, row.replaced) for row in rows] == [
        (f"model.layers.{index}.self_attn", index == 1) for index in range(3)
    ]
    assert rows[1].blocks == BLOCKS and rows[1].tokens_per_block == (BLOCK_LENGTH, BLOCK_LENGTH)
    mhla.remove_mhla(model)
    assert torch.equal(logits(model, text()), expected)
    assert [row.processor for row in mhla.describe(model)] == ["LlamaAttention"] * 3


@pytest.mark.parametrize("length", [3, 20])
def test_a_text_of_any_length_is_described_beside_attention_that_sees_no_later_token(length):
    model, seen = patched(layers=[1]), length * (length + 1) // 2
    own = sum(n * (n + 1) // 2 for n in [BLOCK_LENGTH] * (length // BLOCK_LENGTH) + [length % BLOCK_LENGTH])
    kept, layer, _ = mhla.describe(model, grid=(length,))
    assert (layer.blocks, layer.tokens_per_block) == (BLOCKS, (BLOCK_LENGTH, BLOCK_LENGTH))
    assert layer.density == pytest.approx(own / seen)
    assert (layer.sizes.listed_pairs, layer.sizes.pairs) == (4 * own, 4 * seen)
    assert kept.sizes.softmax_flops == layer.sizes.softmax_flops == kept.sizes.flops == 4 * 8 * 4 * seen
    assert kept.sizes.listed_pairs == kept.sizes.pairs


def test_bfloat16_is_near_float32():
    """As near as rounding of 2^-8 in three layers lets it be."""
    model = patched()
    expected = logits(model, text())
    found = logits(model.to(torch.bfloat16), text())
    assert found.dtype == torch.bfloat16
    assert relative_change(found.float(), expected) < 0.05
    assert all(layer.mixing.dtype == torch.bfloat16 for layer in mhla.mhla_layers(model).values())
    fresh = patch(llama().to(torch.bfloat16))
    assert all(layer.mixing.dtype == torch.float32 for layer in mhla.mhla_layers(fresh).values())


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = patched(layers=[0, 2]).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(text(), labels=text(), use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0]["model.layers.0.self_attn.mhla.mixing"].abs().sum() > 0
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-5, atol=1e-7, msg=name)


def test_a_wrapped_model_is_named_wherever_it_is_given(tmp_path):
    """Also where the question is whether it is patched: what lies inside is."""
    model = patched()
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    calls = (
        mhla.describe,
        mhla.remove_mhla,
        mhla.apply_mhla,
        lambda given: mhla.save_mhla(given, tmp_path / "wrapped"),
    )
    pipe = TextGenerationPipeline(model, tokenizer=words())
    for call in (*calls, lambda given: mhla.mhla_disabled(given).__enter__()):
        for given, named in ((wrapped, r"PeftModel.*get_base_model\(\)"), (pipe, r"TextGenerationPipeline .*\.model")):
            with pytest.raises(ValueError, match=named):
                call(given)
    mhla.save_mhla(wrapped.get_base_model(), tmp_path)
    expected = logits(model, text())
    assert torch.equal(logits(mhla.load_mhla(llama(), tmp_path), text()), expected)
    mhla.remove_mhla(wrapped.get_base_model())
    assert not mhla.is_patched(model)


def test_lora_trains_beside_the_patch():
    """PEFT's wrapper around a patched model: adapters on the projections, and the mixing matrices with them."""
    model = patched()
    wrapped = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["mhla"], init_lora_weights=False)
    )
    assert_changed(logits(wrapped, text()), logits(patched(), text()))
    wrapped(input_ids=text(), labels=text()).loss.backward()
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.grad is not None}
    assert any("lora_A" in name for name in trained) and any("mhla.modules_to_save" in name for name in trained)
    tokens = wrapped.generate(
        input_ids=text(length=9), max_new_tokens=6, do_sample=False, past_key_values=mhla.MHLACache(wrapped)
    )
    assert torch.equal(tokens, wrapped.generate(input_ids=text(length=9), max_new_tokens=6, do_sample=False))


def test_a_copy_has_its_own_patch():
    model = patched()
    twin = copy.deepcopy(model)
    mhla.remove_mhla(twin)
    assert mhla.is_patched(model) and not mhla.is_patched(twin)
    assert torch.equal(logits(twin, text()), logits(llama(), text()))
    assert twin.config._attn_implementation == "sdpa" and model.config._attn_implementation == "mhla+sdpa"


def test_models_that_share_a_configuration_are_patched_apart():
    """And what is set in it meanwhile, as by a change of the vocabulary, stays."""
    model = llama()
    config, twin = model.config, LlamaForCausalLM(model.config).eval()
    expected = logits(twin, text())
    patch(model)
    assert twin.config is config and config._attn_implementation == "sdpa"
    assert torch.equal(logits(twin, text()), expected)
    model.resize_token_embeddings(70)
    mhla.remove_mhla(model)
    assert model.config is config and model.model.layers[0].self_attn.config is config
    assert config.vocab_size == 70


def test_threads_do_not_disturb_each_other():
    model, texts = patched(layers=[0, 2]), [text(length=length, seed=length) for length in (11, 40)]
    expected, found = [logits(model, ids) for ids in texts], {}

    def work(index):
        found[index] = [
            torch.cat([logits(model, part, past_key_values=cache) for part in texts[index].split(3, dim=1)], dim=1)
            for cache in (mhla.MHLACache(model), mhla.MHLACache(model))
        ]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        for one in found[index]:
            torch.testing.assert_close(one, expected[index], **ROUNDING)


@pytest.mark.slow
def test_torch_compile_gives_the_same_in_one_graph():
    model, ids = patch(llama(num_hidden_layers=2), layers=[1]), text()
    expected = logits(model, ids, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), expected, **ROUNDING)


def test_a_language_model_that_encodes_the_prompts_of_a_pipeline_is_left_alone():
    """As HunyuanVideo's text encoder, which is a Llama."""

    class Pipeline:
        components = {"text_encoder": llama(LlamaModel), "transformer": wan()}

    pipe = Pipeline()
    mhla.apply_mhla(pipe, blocks=(2, 2, 3))
    assert not mhla.is_patched(pipe.components["text_encoder"])
    assert {name.split(".")[0] for name in mhla.mhla_layers(pipe)} == {"transformer"}


def test_autocast_runs_with_and_without_a_cache():
    model, ids = patched(), text()
    expected = logits(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = [
            model(ids, use_cache=False).logits,
            model(ids).logits,
            model(ids, past_key_values=mhla.MHLACache(model)).logits,
        ]
    for logits_of_autocast in found:
        assert relative_change(logits_of_autocast.float(), expected) < 0.05  # bfloat16 has 8 bits


def test_a_pickled_model_runs_in_another_process(tmp_path):
    model = patched()
    torch.save(model, tmp_path / "model.pt")
    process = CONTEXT.Process(target=_run_pickled, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(model, text()))


def _run_pickled(folder):
    model = torch.load(folder / "model.pt", weights_only=False)
    torch.save(logits(model, text()), folder / "logits.pt")
