"""The tiny models with joint attention are what their cases say of them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from . import cogvideox, flux, hunyuan_video, sd3
from .case import FamilyCase

CASES = {
    "sd3": sd3.CASE,
    "sd3_dual": sd3.DUAL_CASE,
    "flux": flux.CASE,
    "cogvideox": cogvideox.CASE,
    "cogvideox_two_frames": cogvideox.TWO_FRAMES_CASE,
    "hunyuan_video": hunyuan_video.CASE,
}

every_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@torch.no_grad()
def _output(transformer: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    return transformer(**arguments, return_dict=False)[0]


@every_case
@pytest.mark.parametrize("ragged", [False, True])
def test_forward(case: FamilyCase, ragged: bool):
    arguments = case.inputs(ragged=ragged)
    found = _output(case.transformer(), arguments)
    assert found.isfinite().all()
    assert found.shape == arguments["hidden_states"].shape


@every_case
def test_samples_are_their_own(case: FamilyCase):
    """A batch's rows differ, and another second row changes the second row of the output alone."""
    transformer, arguments, others = case.transformer(), case.inputs(), case.inputs(seed=2)
    changed = dict(arguments)
    for name in ("hidden_states", "encoder_hidden_states"):
        assert not arguments[name][0].equal(arguments[name][1])
        changed[name] = torch.stack([arguments[name][0], others[name][1]])
    before, after = _output(transformer, arguments), _output(transformer, changed)
    assert after[0].equal(before[0])  # the same operations on the same numbers
    assert (after[1] - before[1]).abs().max() > 1e-2


@every_case
@pytest.mark.parametrize("ragged", [False, True])
def test_attentions(case: FamilyCase, ragged: bool):
    """They are called once each, in order, with the grid's tokens and those outside it."""
    transformer, calls = case.transformer(), []

    def note(name):
        def hook(_, positional, arguments):
            given = [*positional, *(arguments.get(key) for key in ("hidden_states", "encoder_hidden_states"))]
            calls.append((name, sum(tokens.shape[1] for tokens in given if tokens is not None)))

        return hook

    for name in case.attentions:
        transformer.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True)
    _output(transformer, case.inputs(ragged=ragged))
    grid = torch.Size(case.ragged_grid if ragged else case.grid).numel()
    # the second attention of SD 3.5 is given the image alone
    assert calls == [(name, grid + sum(case.outside) * (not name.endswith("attn2"))) for name in case.attentions]


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
    """Of the first attention's queries, those that other latents change stand where ``outside`` says."""
    transformer, arguments = case.transformer(), case.inputs()
    (before, after), grid = case.outside, torch.Size(case.grid).numel()
    queries = []
    for seed in (1, 2):
        with _Queries(before + grid + after) as noted:
            _output(transformer, arguments | {"hidden_states": case.inputs(seed=seed)["hidden_states"]})
        queries.append(noted.found)
    changed = (queries[0] != queries[1]).any(dim=-1)  # (B, H, N)
    expected = torch.zeros(before + grid + after, dtype=torch.bool)
    expected[before : before + grid] = True
    assert (changed == expected).all()


@every_case
def test_pipeline(case: FamilyCase):
    pipe, results = case.pipeline(), []
    for prompt in (case.call["prompt"], "the blue dog"):
        arguments = {**case.call, "prompt": prompt}
        result = pipe(**arguments, generator=torch.Generator().manual_seed(3))
        results.append(result.frames if hasattr(result, "frames") else result.images)
    assert all(result.isfinite().all() for result in results)
    assert not results[0].equal(results[1])  # the text has its part in it
