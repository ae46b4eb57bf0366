"""The tiny models with joint attention are what their cases say of them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from . import cogvideox, flux, hunyuan_video, hunyuan_video15, qwenimage, sd3, z_image
from .case import FamilyCase

CASES = {
    "sd3": sd3.CASE,
    "sd3_dual": sd3.DUAL_CASE,
    "flux": flux.CASE,
    "cogvideox": cogvideox.CASE,
    "cogvideox_two_frames": cogvideox.TWO_FRAMES_CASE,
    "hunyuan_video": hunyuan_video.CASE,
    "qwenimage": qwenimage.CASE,
    "z_image": z_image.CASE,
    "z_image_uneven": z_image.UNEVEN_CASE,
    "hunyuan_video15": hunyuan_video15.CASE,
}

every_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
either_grid = pytest.mark.parametrize("ragged", [pytest.param(False, id="even"), pytest.param(True, id="ragged")])


@torch.no_grad()
def _output(transformer: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    found = transformer(**arguments, return_dict=False)[0]
    return torch.stack(found) if isinstance(found, list) else found


def _latents(arguments: dict[str, Any]) -> str:
    """Name of the argument that the latents are."""
    return "x" if "x" in arguments else "hidden_states"


def _with_second_of(arguments: dict[str, Any], others: dict[str, Any], name: str) -> Any:
    """An argument with the second sample of other arguments; all Z-Image's are lists of tensors."""
    mixed = [arguments[name][0], others[name][1]]
    return mixed if isinstance(arguments[name], list) else torch.stack(mixed)


@every_case
@either_grid
def test_forward(case: FamilyCase, ragged: bool):
    arguments = case.inputs(ragged=ragged)
    expected = [2, *arguments[_latents(arguments)][0].shape]
    if case is hunyuan_video15.CASE:
        expected[1] = 4  # besides the latents its input has those of an image and a mask
    found = _output(case.transformer(), arguments)
    assert found.isfinite().all()
    assert list(found.shape) == expected


@every_case
def test_samples_are_their_own(case: FamilyCase):
    """A batch's rows differ, and another second row changes the second row of the output alone."""
    transformer, arguments, others = case.transformer(), case.inputs(), case.inputs(seed=2)
    before = _output(transformer, arguments)
    latents, text = _latents(arguments), "cap_feats" if "x" in arguments else "encoder_hidden_states"
    assert not arguments[latents][0].equal(arguments[latents][1])
    for name in (latents, text):
        after = _output(transformer, arguments | {name: _with_second_of(arguments, others, name)})
        assert after[0].equal(before[0])  # the same operations on the same numbers
        assert (after[1] - before[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[name], id=name) for name in ("hunyuan_video", "qwenimage", "hunyuan_video15")]
)
def test_masked_text_has_no_part(case: FamilyCase):
    transformer, arguments = case.transformer(), case.inputs()
    before, text = _output(transformer, arguments), arguments["encoder_hidden_states"]
    for token, masked in ((-1, True), (0, False)):
        changed = text.clone()
        changed[1, token] += 5
        after = _output(transformer, arguments | {"encoder_hidden_states": changed})
        assert after.equal(before) is masked


def _given_grid_alone(name: str) -> bool:
    """The second attention of a layer of SD 3.5."""
    return name.endswith("attn2")


@every_case
def test_attentions(case: FamilyCase):
    """They are called once each, in order, with the grid's tokens and those outside it."""
    transformer, calls = case.transformer(), []

    def note(name):
        def hook(_, positional, arguments):
            given = [*positional, *(arguments.get(key) for key in ("hidden_states", "encoder_hidden_states"))]
            calls.append((name, sum(tokens.shape[1] for tokens in given if tokens is not None)))

        return hook

    for name in case.attentions:
        transformer.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True)
    _output(transformer, case.inputs())
    grid, extra = torch.Size(case.grid).numel(), sum(case.extra)
    assert calls == [(name, grid if _given_grid_alone(name) else grid + extra) for name in case.attentions]


class _Queries(TorchFunctionMode):
    """Keeps the queries of the first softmax attention over a number of tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.found: torch.Tensor | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            if self.found is None and query.shape[-2] == self.tokens:
                self.found = query
        return function(*args, **(kwargs or {}))


@every_case
def test_where_the_grid_lies(case: FamilyCase):
    """Of the first joint attention's queries, those that other latents change stand where ``extra`` says."""
    transformer, arguments, others = case.transformer(), case.inputs(), case.inputs(seed=2)
    (before, after), grid = case.extra, torch.Size(case.grid).numel()
    queries = []
    for latents in (arguments[_latents(arguments)], others[_latents(others)]):
        with _Queries(before + grid + after) as noted:
            _output(transformer, arguments | {_latents(arguments): latents})
        queries.append(noted.found)
    changed = (queries[0] != queries[1]).any(dim=-1)  # (B, H, N)
    expected = torch.zeros(before + grid + after, dtype=torch.bool)
    expected[before : before + grid] = True
    assert (changed == expected).all()


@every_case
def test_ragged_grids_are_not_divided(case: FamilyCase):
    assert all(size % count == 0 for size, count in zip(case.grid, case.blocks, strict=True))
    assert any(size % count for size, count in zip(case.ragged_grid, case.blocks, strict=True))


@every_case
def test_pipeline(case: FamilyCase):
    pipe, results = case.pipeline(), []
    for prompt in (case.call["prompt"], "the blue dog"):
        arguments = {**case.call, "prompt": prompt}
        result = pipe(**arguments, generator=torch.Generator().manual_seed(3))
        results.append(result.frames if hasattr(result, "frames") else result.images)
    assert all(result.isfinite().all() for result in results)
    assert not results[0].equal(results[1])  # the text has its part in it
