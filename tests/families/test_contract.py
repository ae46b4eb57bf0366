"""What every family promises, on a tiny model of its real class: the model's own attention runs, its call is answered.

Whatever diffusers does to projections, norms, RoPE and outputs is then right by construction; what is tested is that
every self-attention over the grid is reached, on the right grid, with the right tokens beside it.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mhla_diffusers as mhla

from ..models import assert_changed, attn_processors, output, relative_change
from .cases import (
    ALL_LISTED,
    CASES,
    ROUNDING,
    SPARSE,
    all_listed,
    case_of,
    footprint,
    giving,
    handle,
    plain,
    sample,
    tally,
)

every_case = pytest.mark.parametrize("name", CASES)


def is_sparse(name: str) -> bool:
    """Whether the model's own attention is softmax attention, in whose place there is a sparse one."""
    return bool(case_of(name).of_family.computes == "softmax")


SOFTMAX = tuple(filter(is_sparse, CASES))
MHLA = tuple(name for name in CASES if case_of(name).of_family.mhla is not None)
STAY_DENSE = {
    "lumina2": ("samples of different lengths", 3),  # all but that of the image alone
    "skyreels_v2_forcing": ("a mask between tokens", 3),  # later frames
}
"""Why and how many attentions have no sparse form."""
softmax_cases = pytest.mark.parametrize("name", SOFTMAX)


def both(case: Any) -> list[dict[str, Any]]:
    return [case.inputs(), case.inputs(ragged=True)]


@every_case
def test_a_patch_that_lists_all_pairs_is_the_models_own_attention(name: str) -> None:
    """Sparse attention then calls the same function on the same tensors; MHLA of one block sums in another order."""
    case = case_of(name)
    model, requests = case.transformer(), both(case)
    expected = [output(model, arguments) for arguments in requests]
    mhla.apply_mhla(model, **all_listed(name))
    for arguments, wanted in zip(requests, expected, strict=True):
        assert relative_change(output(model, arguments), wanted) <= (0 if is_sparse(name) else ROUNDING)


@softmax_cases
def test_every_attention_is_sparse_attention_on_what_the_model_gives_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Against float64: float32 sums of up to a thousand terms."""
    case = case_of(name)
    model = mhla.apply_mhla(case.transformer(), **SPARSE)
    reason, count = STAY_DENSE.get(name, ("", 0))
    for arguments, grid in zip(both(case), case.grids, strict=True):
        seen: list[Any] = []
        with handle(model).watched(lambda one, seen=seen: seen.append(one) or one.output):
            output(model, arguments)
        for one in seen:
            assert one.grid == grid and relative_change(one.output, one.reference()) < 2e-6
            assert one.query.shape[1] == math.prod(grid) + sum(one.extra)
        found = {one.layer for one in seen}
        assert found <= set(case.attentions) and len(found) == len(case.attentions) - count
        sparse, dense = tally(model)
        assert sparse == len(seen) and sum(dense.values()) == count
        assert all(words.startswith(reason) and words in caplog.text for words in dense)
    assert {one.levelno for one in caplog.records if "dense attention" in one.message} <= {logging.WARNING}


@softmax_cases
def test_tokens_beside_the_grid_stand_where_the_table_says(name: str) -> None:
    """Other latents change the queries of the grid's tokens, and before the first joint attention no others."""
    case = case_of(name)
    model, seen = mhla.apply_mhla(case.transformer(), **SPARSE), []
    latents, batch = case.of_family.latents_name, 2 if name == "z_image_uneven" else 1
    with handle(model).watched(lambda one: seen.append(one) or one.output):
        for seed in (1, 2):
            output(model, {**case.inputs(batch=batch), latents: case.inputs(batch=batch, seed=seed)[latents]})
    if name == "skyreels_v2_forcing":
        assert not seen
        return
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert case.extra in {one.extra for one in first} <= {case.extra, (0, 0)}
    one, other = next(pair for pair in zip(first, second, strict=True) if pair[0].extra == case.extra)
    changed = (one.query != other.query).any(dim=-1).all(dim=-1)[0]
    before, tokens = case.extra[0], math.prod(case.grid)
    assert changed[before : before + tokens].all() and not changed[:before].any()
    assert not changed[before + tokens :].any()


@pytest.mark.parametrize(
    ("name", "is_mhla"),
    [*((name, False) for name in CASES), *((name, True) for name in MHLA if name != "skyreels_v2_forcing")],
)
def test_apply_changes_and_removal_leaves_no_trace(name: str, is_mhla: bool) -> None:
    """The family's default patch and MHLA, on two grids; twice."""
    case = case_of(name)
    model, requests = case.transformer(), both(case)
    before, attributes, settings = footprint(model), set(dir(model)), plain(name) if is_mhla else {}
    expected = [output(model, arguments) for arguments in requests]
    assert mhla.apply_mhla(model, **settings) is model and mhla.is_patched(model)
    assert is_mhla or handle(model).config == case.of_family.default_config
    assert set(dir(model)) - attributes == {"_mhla"}  # no method comes, such as one that fuses projections
    own = {f"{attention}.processor" for attention in case.attentions}
    kinds = attn_processors(model)
    if is_mhla or not is_sparse(name):
        assert [key.removesuffix(".mhla") for key in mhla.mhla_layers(model)] == list(case.attentions)
    else:
        assert not mhla.mhla_layers(model) and list(model.state_dict()) == [key for key, *_ in before["state"]]
        own = set()
    assert all(kinds[key] is before["processors"][key] for key in before["processors"].keys() - own)
    found = [output(model, arguments) for arguments in requests]
    if name not in STAY_DENSE:
        for one, wanted in zip(found, expected, strict=True):
            assert_changed(one, wanted)
    assert mhla.remove_mhla(model) is model and not mhla.is_patched(model)
    assert torch.equal(output(model, requests[0]), expected[0])
    assert footprint(model) == before
    assert torch.equal(output(mhla.apply_mhla(model, **settings), requests[0]), found[0])


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("skyreels_v2_forcing", "minimax_h3", "framepack")]
)
def test_samples_of_a_batch_do_not_mix(name: str) -> None:
    """As with guidance, whose halves are a batch: each is what it is alone, however long the texts of others are."""
    case = case_of(name)
    arguments = case.inputs(ragged=True)
    model = mhla.apply_mhla(case.transformer(), **(SPARSE if is_sparse(name) else plain(name)))
    batch = output(model, arguments)
    if name == "lumina2":  # its padded batch stays dense
        return
    for place in range(2):
        alone = {key: sample(x, 2, slice(place, place + 1)) for key, x in arguments.items()}
        assert relative_change(batch[place], output(model, alone)[0]) < ROUNDING
    assert_changed(batch[1], batch[0])


TEXTS = (
    ("encoder_hidden_states", "encoder_attention_mask"),
    ("encoder_hidden_states", "encoder_hidden_states_mask"),
    ("encoder_hidden_states", "attention_mask"),
    ("encoder_hidden_states_2", "encoder_attention_mask_2"),
)
"""Texts in the sequence, and the names that their masks have."""


@pytest.mark.parametrize("name", ["chroma", "hunyuan_video", "hunyuan_video15", "mochi", "qwenimage"])
def test_masked_text_takes_no_part(name: str) -> None:
    case = case_of(name)
    model, arguments = mhla.apply_mhla(case.transformer(), **SPARSE), case.inputs()
    expected, other = output(model, arguments), dict(arguments)
    for text, mask in TEXTS:
        if mask in arguments:
            kept = arguments[mask][:, : arguments[text].shape[1], None].bool()
            assert not kept.all()
            other[text] = torch.where(kept, arguments[text], 7.0)
    assert relative_change(output(model, other), expected) < ROUNDING


# What other inputs or settings of a class change


def _mochi_mask(*mask: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return giving(encoder_attention_mask=torch.tensor([mask, [1] * 6]).bool())


def _pictures(key: str, axis: int, channels: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """More channels, or frames, beside those of the latents."""
    return lambda given: {**given, key: torch.cat([given[key]] * 3, axis).narrow(axis, 0, channels)}


def _one_frame(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "hidden_states": given["hidden_states"][:, :, :1]}


_EIGHT = {"attention_head_dim": 8, "num_attention_heads": 3}
_BESIDE = {"in_channels": 9, "image_condition_type": "latent_concat"}
_SKIPPING = {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.tensor([0.0, 1.0])}
_NO_TABLES, _SAME = giving(image_rotary_emb=None), giving()
VARIANTS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "allegro without tables of RoPE": ("allegro", {}, _NO_TABLES),
    "allegro with heads of 8 channels": ("allegro", _EIGHT, _NO_TABLES),
    "cogvideox 2b, without RoPE": ("cogvideox", {"use_rotary_positional_embeddings": False}, _NO_TABLES),
    "cogvideox, picture": ("cogvideox", {"in_channels": 8}, _pictures("hidden_states", 2, 8)),
    "hunyuan-dit without tables": ("hunyuan_dit", {}, _NO_TABLES),
    "hunyuan-dit 1.2": ("hunyuan_dit", {"use_style_cond_and_image_meta_size": False}, _SAME),
    "hunyuan-video, beside": ("hunyuan_video", _BESIDE, _pictures("hidden_states", 1, 9)),
    "hunyuan-video, in place": ("hunyuan_video", {"image_condition_type": "token_replace"}, _SAME),
    "hunyuan-video 1.5, picture": ("hunyuan_video15", {"task_type": "i2v"}, giving(image_embeds=torch.ones(2, 3, 8))),
    "hunyuan-image, refiner": (
        "hunyuan_image",
        {"patch_size": (1, 1, 1), "rope_axes_dim": (4, 4, 4)},
        lambda given: {**given, "hidden_states": given["hidden_states"][:, :, None].repeat(1, 1, 2, 1, 1)},
    ),
    "latte, one frame": ("latte", {}, _one_frame),
    "latte, no temporal": ("latte", {}, giving(enable_temporal_attentions=False)),
    "ltx2, skipping": ("ltx2", {}, giving(**_SKIPPING)),
    "mochi, padded on the left": ("mochi", {}, _mochi_mask(0, 0, 1, 1, 1, 1)),
    "mochi, with gaps": ("mochi", {}, _mochi_mask(1, 0, 0, 1, 0, 1)),
    "mochi, without text": ("mochi", {}, _mochi_mask(0, 0, 0, 0, 0, 0)),
    "sd3, normed": ("sd3", {"qk_norm": "rms_norm"}, _SAME),
}


@pytest.mark.parametrize(("name", "settings", "change"), VARIANTS.values(), ids=VARIANTS)
def test_variants_of_a_family(name: str, settings: dict[str, Any], change: Any) -> None:
    case = case_of(name)
    model, arguments = case.transformer(**settings), change(case.inputs())
    expected = output(model, arguments)
    mhla.apply_mhla(model, **ALL_LISTED)
    assert torch.equal(output(model, arguments), expected)
    mhla.change_mhla(model, **SPARSE)
    assert_changed(output(model, arguments), expected)
    assert tally(model)[0] >= len(case.attentions)


# MHLA, in the families that it is trained for


@pytest.mark.parametrize("name", [name for name in MHLA if name not in ("dit", "skyreels_v2_forcing")])
def test_diffusers_own_form_is_that_of_apply(name: str) -> None:
    """One instance on every attention; other attentions are left alone, and fresh processors are what is removed."""
    case = case_of(name)
    arguments, fresh = case.inputs(), case.transformer()
    expected = output(mhla.apply_mhla(case.transformer(), **plain(name)), arguments)
    model = case.transformer()
    model.set_attn_processor(mhla.MHLAProcessor(**plain(name), grid=case.grid))
    assert mhla.is_patched(model)
    assert relative_change(output(model, arguments), expected) < 1e-6  # tables of RoPE may be read instead
    mhla.remove_mhla(model)
    kinds = [{key: type(one) for key, one in attn_processors(one).items()} for one in (model, fresh)]
    assert kinds[0] == kinds[1] and not mhla.is_patched(model)
    assert torch.equal(output(model, arguments), output(fresh, arguments))


@pytest.mark.parametrize("name", ["chronoedit", "wan"])
def test_diffusers_own_form_reads_the_grid_off_rotary_tables(name: str) -> None:
    case = case_of(name)
    model, other = case.transformer(), mhla.apply_mhla(case.transformer(), **plain(name))
    model.set_attn_processor(mhla.MHLAProcessor(**plain(name)))
    wide = case.inputs()
    tall = {**wide, "hidden_states": wide["hidden_states"].mT}  # of as many tokens
    for arguments in (*both(case), tall, wide):
        assert torch.equal(output(model, arguments), output(other, arguments))
