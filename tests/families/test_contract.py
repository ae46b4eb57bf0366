"""What every family promises, on a tiny model of its real class and through its real pipeline."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.attention import rope
from mhla_diffusers.benchmark.cases import choose_cases, models
from mhla_diffusers.benchmark.counts import count_forward
from mhla_diffusers.families import get_family, predict
from mhla_diffusers.families.processes import NoisedBatch
from mhla_diffusers.patching import attn_processors, layer_sensitivity
from mhla_diffusers.training import ObjectiveWeights, StageConfig
from mhla_diffusers.training.objectives import attention_loss, recorded, stage_losses
from mhla_diffusers.training.roles import Roles, Teacher, make_trainable, trainable_names

from ..models import assert_changed, relative_change
from ..patching.shared import EVERYTHING, assert_same_footprint, footprint, with_lora
from ..refusals import refused
from .cases import CASES, NAMES, ROUNDING, all_listed, case_of, output, plain

# the block-causal mask of diffusion forcing is refused: test_skyreels_v2.py
RUNNING = tuple(name for name in CASES if name != "skyreels_v2_forcing")
every_case = pytest.mark.parametrize("name", RUNNING)
FORMS = (
    "flux",  # blocks of two streams, then of one; ids give the grid
    "flux2",  # attention that also runs the feed-forward
    "framepack",  # extra tokens before and after the grid
    "hunyuan_video",  # text after the grid, masked by key
    "ideogram4",  # segments as a mask between tokens, padding that is alike
    "krea2",  # a gate for every channel
    "ltx2",  # RoPE by head from a table, gates, sound beside the video
    "lumina2",  # padding moved to the front, heads that share keys
    "minimax_h3",  # one packed sequence found by indices
    "mochi",  # RoPE by head, masked text cut off
    "skyreels_v2",  # one stream, RoPE table for all heads
    "z_image",  # lists of pictures and texts
)
"""One family of every form of adapter, for what compilation, autograd and LoRA add to a forward; tests/patching looks
at DiT, SANA and Wan."""
forms = pytest.mark.parametrize("name", FORMS)
# of what one family shows of all: RoPE, attention that runs the feed-forward, a batch of frames
FEW = ("flux2", "ltx", "latte")
few_families = pytest.mark.parametrize("name", FEW)
# every process and prediction of their own; tests/training looks at DiT and Wan
TRAINED = ("cogvideox", "flux", "hunyuan_video", "sana_video", "skyreels_v2")
# attentions that tell their family, of classes with set_attn_processor
OWN_FORM = (
    *("chronoedit", "flux", "hunyuan_dit", "ltx", "pixart", "sana", "sana_qk_norm", "sana_video"),
    *("skyreels_v2", "wan", "wan_animate"),
)
SPARSE = {"density": 0.2, "block_size": 4}
# whose own attention is softmax attention
SOFTMAX = tuple(name for name in RUNNING if case_of(name).of_family.computes == "softmax")
# half a minute each, so all but one are left to the long run; tests/benchmark counts DiT, SANA and Wan
slowly = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in NAMES
    if case_of(name).of_family.models and name not in ("dit", "flux", "sana", "wan")
]


@pytest.mark.parametrize("name", RUNNING)
def test_softmax_in_place_of_mhla_is_the_own_attention(name: str) -> None:
    """Projections, norms, RoPE, masks and outputs are read as the model's own processor reads them."""
    case = case_of(name)
    model, both = case.transformer(), [case.inputs(), case.inputs(ragged=True)]
    expected = [output(model, arguments) for arguments in both]
    mhla.apply_mhla(model, **all_listed(name))
    for arguments, wanted in zip(both, expected, strict=True):
        assert relative_change(output(model, arguments), wanted) < ROUNDING


@every_case
def test_apply_changes_and_remove_restores_bit_for_bit(name: str) -> None:
    case = case_of(name)
    model, arguments = case.transformer(), case.inputs()
    before, expected, of_class = footprint(model), output(model, arguments), dict(vars(type(model)))
    own = {f"{attention}.processor" for attention in case.attentions}
    others = {key: one for key, one in attn_processors(model).items() if key not in own}
    if name in NAMES:  # what an attention gets back whose processor nobody has kept
        for attn in case.of_family.self_attentions(model).values():
            assert type(attn.processor) is type(case.of_family.adapter.own_processor(attn))
    assert mhla.apply_mhla(model, **plain(name)) is model and mhla.is_patched(model)
    assert inspect.signature(model.forward) == before["signature"]
    assert [key.removesuffix(".mhla") for key in mhla.mhla_layers(model)] == list(case.attentions)
    assert {key: attn_processors(model)[key] for key in others} == others  # of cross-attention, for one
    found = output(model, arguments)
    assert dict(vars(before["class"])) == of_class
    assert_changed(found, expected)
    assert_changed(output(model, case.inputs(ragged=True)), output(case.transformer(), case.inputs(ragged=True)))
    assert mhla.remove_mhla(model) is model and not mhla.is_patched(model)
    assert torch.equal(output(model, arguments), expected)
    assert_same_footprint(model, before)
    assert torch.equal(output(mhla.apply_mhla(model, **plain(name)), arguments), found)


def halve_projections(model: Any) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(f".{part}." in name for part in ("to_q", "to_k", "to_v")):
                weight.mul_(0.5)


# whose fusing sets processors, which unfusing takes back
@pytest.mark.parametrize("name", ["sd3", "cogvideox", "pixart", "hunyuan_dit", "auraflow"])
@pytest.mark.parametrize("order", ["fused before", "fused while patched"])
def test_unfused_projections_are_those_of_the_model_again(name: str, order: str) -> None:
    """Whatever was fused when: in the end the model is as one that was never patched or fused."""
    case = case_of(name)
    model, reference, arguments = case.transformer(), case.transformer(), case.inputs()
    if order == "fused before":
        model.fuse_qkv_projections()
        mhla.apply_mhla(model, **plain(name))
        model.unfuse_qkv_projections()
        assert_changed(output(model, arguments), output(reference, arguments))  # the patch goes on
        mhla.remove_mhla(model)
    else:
        mhla.apply_mhla(model, **plain(name))
        model.fuse_qkv_projections()
        mhla.remove_mhla(model)
        model.unfuse_qkv_projections()
    for one in (model, reference):
        halve_projections(one)
    assert not mhla.is_patched(model)
    assert torch.equal(output(model, arguments), output(reference, arguments))


@pytest.mark.parametrize("name", ["chronoedit", "flux", "sana", "sd3", "skyreels_v2", "wan", "wan_animate"])
def test_processors_saved_while_patched_run_the_original_attention_after_removal(name: str) -> None:
    """Also patched again with them in place, and the second patch goes without a trace."""
    case = case_of(name)
    model, arguments = case.transformer(), case.inputs()
    before, originals = output(model, arguments), dict(model.attn_processors)
    first = output(mhla.apply_mhla(model, **plain(name)), arguments)
    saved = dict(model.attn_processors)
    mhla.remove_mhla(model)
    model.set_attn_processor(dict(saved))
    with pytest.warns(UserWarning, match="patch was removed"):
        assert torch.equal(output(model, arguments), before)
    assert not mhla.is_patched(model)
    assert torch.equal(output(mhla.apply_mhla(model, **plain(name)), arguments), first)
    mhla.remove_mhla(model)
    assert model.attn_processors == originals


@pytest.mark.parametrize("name", SOFTMAX)
def test_the_default_of_softmax_attention_is_sparse_and_goes_without_a_trace(name: str) -> None:
    case = case_of(name)
    model, requests = case.transformer(), [case.inputs(), case.inputs(ragged=True)]
    before, expected = footprint(model), [output(model, arguments) for arguments in requests]
    mhla.apply_mhla(model)
    assert {layer.config for layer in mhla.mhla_layers(model).values()} == {mhla.SparseConfig()}
    assert list(model.state_dict()) == list(before["state"])
    for arguments, wanted in zip(requests, expected, strict=True):
        assert_changed(output(model, arguments), wanted)
    mhla.remove_mhla(model)
    assert torch.equal(output(model, requests[0]), expected[0])
    assert_same_footprint(model, before)


@pytest.mark.parametrize("name", ["dit", "mochi", "z_image"])
def test_methods_that_a_class_lacks_come_and_go(name: str) -> None:
    """The instance alone has them, also its copies, and the model keeps the name of its class."""
    case = case_of(name)
    model, arguments = case.transformer(), case.inputs()
    cls = type(model)
    mhla.apply_mhla(model, **plain(name, layers=[0, 2]))
    assert isinstance(model, cls) and type(model).__name__ == cls.__name__
    assert not hasattr(cls, "attn_processors") and not hasattr(cls, "set_attn_processor")
    expected, processors = output(model, arguments), model.attn_processors
    assert sum(isinstance(one, mhla.MHLAProcessor) for one in processors.values()) == 2 < len(processors)
    model.set_attn_processor(dict(processors))
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - its own
        assert torch.equal(output(one, arguments), expected)
    mhla.remove_mhla(model)
    assert type(model) is cls


@pytest.mark.parametrize("name", ["dit", "mochi"])
def test_another_pipeline_takes_a_patched_transformer_whose_class_is_switched(name: str) -> None:
    pipe = mhla.apply_mhla(CASES[name].pipeline(), **plain(name))
    other = type(pipe).from_pipe(pipe)
    assert other.transformer is pipe.transformer and mhla.is_patched(other)


@pytest.mark.parametrize("name", [name for name in RUNNING if any(case_of(name).extra)])
def test_extra_tokens_lie_where_the_family_says(name: str) -> None:
    """Other latents change the queries of the grid's tokens alone, before the first attention."""
    case = case_of(name)
    model, queries = mhla.apply_mhla(case.transformer(), **SPARSE), []

    def note(seen: Any) -> torch.Tensor:
        if seen.layer == case.attentions[0]:
            assert seen.extra == case.extra
            queries.append(seen.query)
        return seen.output

    tokens, latents = torch.Size(case.grid).numel(), case.of_family.latents_name
    (patched,) = mhla.patching.find_patched(model).values()
    with patched.watched(note):
        for seed in (1, 2):
            output(model, {**case.inputs(), latents: case.inputs(seed=seed)[latents]})
    changed = (queries[0] != queries[1]).any(dim=-1).all(dim=-1)
    expected = torch.zeros(sum(case.extra) + tokens, dtype=torch.bool)
    expected[case.extra[0] :][:tokens] = True
    assert (changed == expected).all()


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_a_forward_share_the_tables_of_rope(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each kind of attention, as Flux.2 and Lumina 2 have two; the next forward makes its own."""
    case, joined, join = case_of(name), [], rope._joined
    monkeypatch.setattr(rope, "_joined", lambda cos, sin: (joined.append(cos), join(cos, sin))[1])
    model = mhla.apply_mhla(case.transformer(), **plain(name))
    for forward in (1, 2):
        with torch.no_grad():
            output(model, case.inputs())
        assert len(joined) <= 2 * forward < forward * len(mhla.mhla_layers(model))


@pytest.mark.parametrize("name", [*NAMES, "sana_qk_norm", "wan_ti2v", "z_image_uneven"])
def test_samples_of_a_batch_do_not_mix(name: str) -> None:
    """As with guidance, whose halves are a batch: each is what it is alone, however long the texts of others are."""
    case = case_of(name)
    arguments = case.inputs(ragged=True)
    for settings in (plain(name, **EVERYTHING), SPARSE) if name in SOFTMAX else (plain(name, **EVERYTHING),):
        model = _shaken(mhla.apply_mhla(case.transformer(), **settings))
        batch = output(model, arguments)
        for place in range(2):
            # places of frames have no samples
            alone = {
                key: value if key.startswith("indices") else _sample_of(value, place)
                for key, value in arguments.items()
            }
            assert relative_change(batch[place], output(model, alone)[0]) < ROUNDING
        assert_changed(batch[1], batch[0])


TEXTS = (
    ("encoder_hidden_states", "encoder_attention_mask"),
    ("encoder_hidden_states", "encoder_hidden_states_mask"),
    ("encoder_hidden_states", "attention_mask"),
    ("encoder_hidden_states_2", "encoder_attention_mask_2"),
)
"""Texts in the sequence, and the names that their masks have."""


@pytest.mark.parametrize("name", ["chroma", "hunyuan_video", "hunyuan_video15", "lumina2", "mochi", "qwenimage"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["MHLA", "sparse"])
def test_masked_text_takes_no_part(name: str, is_sparse: bool) -> None:
    case = case_of(name)
    model = _shaken(mhla.apply_mhla(case.transformer(), **SPARSE if is_sparse else plain(name)))
    arguments = case.inputs()
    expected, other = output(model, arguments), dict(arguments)
    for text, mask in TEXTS:
        if mask in arguments:
            kept = arguments[mask][:, : arguments[text].shape[1], None].bool()
            assert not kept.all()
            other[text] = torch.where(kept, arguments[text], 7.0)
    assert relative_change(output(model, other), expected) < ROUNDING


def _shaken(model: Any) -> Any:
    """A patched model whose own weights are all random."""
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            for parameter in layer.parameters():
                parameter.uniform_(0.1, 0.9)
    return model


def _sample_of(argument: Any, place: int) -> Any:
    """One sample of an argument, if it has samples."""
    if isinstance(argument, dict):
        return {key: _sample_of(value, place) for key, value in argument.items()}
    is_batch = isinstance(argument, list) or (isinstance(argument, torch.Tensor) and argument.ndim)
    return argument[place : place + 1] if is_batch and len(argument) == 2 else argument


@few_families
def test_a_saved_patch_gives_the_same_output(name: str, tmp_path) -> None:
    case = case_of(name)
    model, arguments = case.transformer(), case.inputs()
    _shaken(mhla.apply_mhla(model, **plain(name, layers="1/2", mixing_per_head=True, **EVERYTHING)))
    expected = output(model, arguments)
    mhla.save_mhla(model, tmp_path)
    assert torch.equal(output(mhla.load_mhla(case.transformer(), tmp_path), arguments), expected)


@few_families
def test_hybrid_and_automatic_layers(name: str) -> None:
    case = case_of(name)
    model, arguments = case.transformer(), case.inputs()
    count = len(case.attentions)
    mhla.apply_mhla(model, **plain(name, layers="2/3"))
    assert 0 < len(mhla.mhla_layers(model)) < count
    mhla.remove_mhla(model)
    mhla.apply_mhla(model, **plain(name, layers="auto:1/2"), calibration=lambda: output(model, arguments))
    assert 0 < len(mhla.mhla_layers(model)) < count
    assert layer_sensitivity(model, lambda: output(model, arguments)).keys() == {
        layer.removesuffix(".mhla") for layer in mhla.mhla_layers(model)
    }


@few_families
def test_audit_and_density(name: str) -> None:
    case = case_of(name)
    model, arguments = case.transformer(), case.inputs()
    expected = output(model, arguments)
    mhla.apply_mhla(model, **SPARSE)
    fresh = relative_change(output(model, arguments), expected)
    found = mhla.audit(model, lambda: output(model, arguments))
    assert [layer.name for layer in found.layers] == list(case.attentions)
    assert 0 < found.moves < 1 and all(0 < layer.density <= layer.mass_kept for layer in found.layers)
    mhla.change_mhla(model, density=0.7)
    nearer = relative_change(output(model, arguments), expected)
    assert ROUNDING < nearer < fresh
    mhla.change_mhla(model, density=1.0)
    assert relative_change(output(model, arguments), expected) < ROUNDING


@few_families
def test_set_attn_processor(name: str) -> None:
    case = case_of(name)
    arguments = case.inputs()
    expected = output(mhla.apply_mhla(case.transformer(), **plain(name)), arguments)
    model = case.transformer()
    mhla.set_attn_processor(model, mhla.MHLAProcessor(case.of_family.complete(plain(name))))
    assert torch.equal(output(model, arguments), expected)


def _kinds(model: Any) -> dict[str, type]:
    return {name: type(one) for name, one in attn_processors(model).items()}


def _in_own_form(name: str) -> Any:
    """A model with one processor on every attention, set by diffusers' own method."""
    model = case_of(name).transformer()
    model.set_attn_processor(mhla.MHLAProcessor(**plain(name), grid=case_of(name).grid))
    return model


@pytest.mark.parametrize("name", OWN_FORM)
def test_diffusers_own_form_is_that_of_apply(name: str) -> None:
    """Every layer has weights of its own, other attentions are left alone, and fresh processors are what is removed."""
    case = case_of(name)
    arguments, fresh = case.inputs(), case.transformer()
    other = mhla.apply_mhla(case.transformer(), **plain(name))
    for has_run in (False, True):
        model = _in_own_form(name)
        assert mhla.is_patched(model)
        if has_run:
            found = output(model, arguments)
            assert torch.equal(found, output(other, arguments))
            layers = mhla.mhla_layers(model)
            assert list(layers) == list(mhla.mhla_layers(other))
            assert len({layer.mixing.data_ptr() for layer in layers.values()}) == len(case.attentions)
            assert_changed(output(_shaken(model), arguments), found)
        mhla.remove_mhla(model)
        assert not mhla.is_patched(model) and _kinds(model) == _kinds(fresh)
        assert list(model.state_dict()) == list(fresh.state_dict())
        assert torch.equal(output(model, arguments), output(fresh, arguments))


@pytest.mark.parametrize("name", ["chronoedit", "wan"])
def test_diffusers_own_form_reads_the_grid_off_rotary_tables(name: str) -> None:
    case = case_of(name)
    model, other = case.transformer(), mhla.apply_mhla(case.transformer(), **plain(name))
    model.set_attn_processor(mhla.MHLAProcessor(**plain(name)))
    for ragged in (False, True, False):
        assert torch.equal(output(model, case.inputs(ragged=ragged)), output(other, case.inputs(ragged=ragged)))


@pytest.mark.parametrize("name", ["cogvideox", "sd3"])
def test_joint_attention_in_diffusers_own_form_says_what_it_lacks(name: str) -> None:
    """Text comes as that of a cross-attention does, and must not be taken for it."""
    model, arguments = _in_own_form(name), case_of(name).inputs()
    with refused("set_attn_processor(transformer"):
        output(model, arguments)
    fresh = case_of(name).transformer()
    assert _kinds(mhla.remove_mhla(model)) == _kinds(fresh)
    assert torch.equal(output(model, arguments), output(fresh, arguments))


@pytest.mark.parametrize("name", [*FORMS, "cogvideox", "sana"])
def test_lora_and_fused_projections_work_under_the_patch(name: str) -> None:
    case = case_of(name)
    arguments = case.inputs()
    lora = with_lora(case.transformer(), "to_q", "to_k", "to_v")
    expected = output(lora, arguments)
    assert_changed(expected, output(case.transformer(), arguments))
    mhla.apply_mhla(lora, **all_listed(name))
    assert relative_change(output(lora, arguments), expected) < ROUNDING
    fused = case.transformer()
    if not hasattr(fused, "fuse_qkv_projections"):
        return
    expected = output(fused, arguments)
    fused.fuse_qkv_projections()
    original = output(fused, arguments)
    mhla.apply_mhla(fused, **all_listed(name))
    assert relative_change(output(fused, arguments), expected) < ROUNDING
    assert torch.equal(output(mhla.remove_mhla(fused), arguments), original)
    model = mhla.apply_mhla(case.transformer(), **plain(name))
    expected = output(model, arguments)
    model.fuse_qkv_projections()
    assert relative_change(output(model, arguments), expected) < ROUNDING


@pytest.mark.parametrize("name", ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in FORMS[1:])])
def test_compiles_to_one_graph(name: str) -> None:
    case = case_of(name)
    model, arguments = mhla.apply_mhla(case.short(), **plain(name)), case.inputs()
    expected = output(model, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=case.compiles_whole, backend="eager")
    assert relative_change(output(compiled, arguments), expected) < ROUNDING


@forms
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    case = case_of(name)
    model = mhla.apply_mhla(case.transformer(), **plain(name)).train()
    arguments = case.inputs(batch=case.checkpointed)
    if case.of_family.trained is not None:
        case.of_family.training.prepare_for_training(model)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        found = model(**arguments, return_dict=False)[0]
        (found if isinstance(found, torch.Tensor) else torch.stack(list(found))).square().mean().backward()
        return [layer.mixing.grad.clone() for layer in mhla.mhla_layers(model).values()]

    expected = gradients()
    assert all(gradient.abs().sum() > 0 for gradient in expected)
    model.enable_gradient_checkpointing()
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


def _batch(name: str, model: Any) -> tuple[NoisedBatch, Any]:
    """Random latents of the usual grid, and conditioning of the shapes that the family tells."""
    case = case_of(name)
    process = case.of_family.training.process(model, 3.0)
    latents, conditioning = case.drawn(case.grid, 2, seed=4)
    return process.make_batch(latents, torch.randn_like(latents), torch.tensor([0.3, 0.7]), conditioning), process


@pytest.mark.parametrize("name", TRAINED)
def test_one_update_of_transfer_and_distillation_brings_the_student_nearer(name: str) -> None:
    case = case_of(name)
    model = mhla.apply_mhla(case.transformer(), **plain(name, mixing_init="identity"))
    batch, process = _batch(name, model)
    trained = make_trainable(model, trainable_names(model, "attention"))
    for weights in (ObjectiveWeights(transfer=1.0), ObjectiveWeights(distillation=1.0)):
        roles, stage = Roles(model, process, Teacher(model, trained)), StageConfig(1, 1e-3, "attention", weights)
        optimizer = torch.optim.SGD(trained.values(), lr=1e-3)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(0.0)
            for loss, _ in stage_losses(roles, stage, model, batch):
                loss.backward()
                losses[-1] += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)
            optimizer.step()
        assert losses[1] < losses[0]
    assert process.loss(predict(model, batch), batch).isfinite().all()


@few_families
def test_transfer_has_nothing_to_do_where_the_student_is_the_teacher(name: str) -> None:
    """Also for masked text, whatever attentions make of what takes no part."""
    case = case_of(name)
    model = mhla.apply_mhla(case.transformer(), **all_listed(name))
    attentions = {name: model.get_submodule(name) for name in case.attentions}
    with recorded(attentions) as calls, Teacher(model, ()).at_work():
        model(**case.inputs(), return_dict=False)
    assert calls.keys() == attentions.keys()
    for name, (args, kwargs, expected) in calls.items():
        with mhla.patching.call_context(grid=case.grid):
            assert attention_loss(attentions[name](*args, **kwargs), expected) < 1e-9


@pytest.mark.parametrize("name", ["flux", *slowly])
def test_real_models_are_counted_without_weights(name: str) -> None:
    """FLOPs of softmax and of MHLA of the first model that ``mhla bench transformer`` knows, on the meta device."""
    family = get_family(case_of(name).transformer())
    assert any(not model.is_tiny for model in family.models) and f"tiny-{family.name}" in models()
    model = family.models[0]
    (case,) = choose_cases([model.name], smallest=True, layers=1)
    config = family.complete({"blocks": model.blocks})
    own, patched = (sum(count_forward(case, one).values()) for one in (None, config))
    assert own > 0 and patched > 0


@pytest.mark.parametrize("name", [*NAMES, "sana_video_image"])
def test_pipeline_changes_rests_and_is_restored(name: str) -> None:
    case = case_of(name)
    pipe = case.pipeline()

    def generate() -> torch.Tensor:
        result = pipe(**case.call, generator=torch.Generator().manual_seed(3))
        found = result.frames if hasattr(result, "frames") else result.images
        return torch.as_tensor(found)

    expected = generate()
    mhla.apply_mhla(pipe, **plain(name))
    patched = generate()
    assert_changed(patched, expected)
    # in the first of two steps the patch rests, which the timestep tells
    mhla.change_mhla(pipe, softmax_steps=1)
    between = generate()
    assert not torch.equal(between, expected)
    assert_changed(between, patched)
    mhla.remove_mhla(pipe)
    assert torch.equal(generate(), expected)
    mhla.describe(pipe)
