"""What a state of causal MHLA keeps, what is done with it, and what it refuses."""

from typing import Any

import pytest
import torch

from mhla_diffusers.attention import MHLAState, extend_mixing, initial_mixing, mhla_attention
from mhla_diffusers.attention.mixing import causal_mixing

MIXING = initial_mixing((4,))
BATCH, HEADS, DIM = 2, 2, 8


def tokens(count: int, batch: int = BATCH, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, count, HEADS, DIM, generator=generator) for _ in range(3))


def new_state(**settings: Any) -> MHLAState:
    return MHLAState(MIXING, (16,), (4,), **({"causal": "token"} | settings))


@pytest.mark.parametrize("linear_branch", [False, True])
def test_what_it_takes_does_not_grow_with_the_sequence(linear_branch: bool) -> None:
    """M summaries of D (D + 1) floats a head at most, beside a cache of keys and values of 2 N D."""
    settings = {"linear_weight": torch.ones(HEADS)} if linear_branch else {}
    state = new_state(beyond="relative", **settings)
    sizes = []
    for step in range(80):
        state.step(*tokens(1, seed=step))
        sizes.append(state.nbytes)
    of_summaries = 4 * BATCH * HEADS * 4 * DIM * (DIM + 1)
    of_open_block = 4 * BATCH * (3 * (2 * HEADS * DIM + 1)) if linear_branch else 0
    # the mixture that the open frame block sees is kept too, in the place of a further summary
    assert max(sizes) <= of_summaries * 5 / 4 + of_open_block
    assert max(sizes[:32]) == max(sizes[32:])
    assert sizes[-1] == 3 * of_summaries // 4
    of_cache = 4 * BATCH * HEADS * 2 * DIM
    assert sizes[-1] < 80 * of_cache


def test_reset_begins_another_sequence() -> None:
    state = new_state()
    first = state.step(*tokens(10))
    state.reset()
    assert state.length == 0 and state.nbytes == 0
    assert torch.equal(state.step(*tokens(10)), first)
    state.reset()
    assert state.step(*tokens(3, batch=5)).shape[0] == 5


@pytest.mark.parametrize("linear_branch", [False, True])
def test_reorder_picks_samples(linear_branch: bool) -> None:
    settings = {"linear_weight": torch.ones(HEADS)} if linear_branch else {}
    state = new_state(**settings)
    begin, rest = tokens(6, batch=3), tokens(3, batch=2, seed=1)
    state.step(*begin)
    order = torch.tensor([2, 0])
    state.reorder(order)
    found = state.step(*rest)
    whole = [torch.cat([a[order], b], dim=1) for a, b in zip(begin, rest, strict=True)]
    expected = mhla_attention(*whole, MIXING, (16,), (4,), causal="token", **settings)
    assert torch.allclose(found, expected[:, 6:], atol=1e-6)


@torch.no_grad()
def test_the_past_is_mixed_once_for_all_denoising_steps() -> None:
    state = new_state(causal="block")
    state.step(*tokens(12))
    state.step(*tokens(4, seed=1), keep=False)
    mixture = state._earlier
    assert mixture is not None
    state.step(*tokens(4, seed=2), keep=False)
    assert state._earlier is mixture
    with torch.enable_grad():  # a mixture without gradients is of no use here
        mixing = MIXING.clone().requires_grad_()
        state.step(*tokens(4, seed=3), mixing=mixing, keep=False).sum().backward()
    assert mixing.grad is not None and (mixing.grad[3, :3] != 0).all()


@pytest.mark.parametrize("linear_branch", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_nothing_behind(linear_branch: bool, error: type[BaseException]) -> None:
    """Though the error comes when the first of three frame blocks is over."""

    class Failing(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += state.length > 5
            if self.calls > 3:
                raise error("out of memory")
            return func(*args, **(kwargs or {}))

    settings: dict[str, Any] = {"linear_weight": torch.ones(HEADS)} if linear_branch else {}
    state, other = new_state(**settings), new_state(**settings)
    for one in (state, other):
        one.step(*tokens(5))
    with pytest.raises(error), Failing():
        state.step(*tokens(9, seed=1))
    assert state.length == 5
    assert torch.equal(state.step(*tokens(9, seed=1)), other.step(*tokens(9, seed=1)))


def test_weights_of_a_step_stand_in_place_of_those_of_the_state() -> None:
    weights: dict[str, Any] = {"mixing": MIXING, "linear_weight": torch.full((HEADS,), 2.0)}
    weights["output_norm"] = torch.rand(DIM)
    state = MHLAState(None, (16,), (4,), causal="token")
    whole = mhla_attention(*tokens(16), grid=(16,), blocks=(4,), causal="token", **weights)
    parts = zip(*(x.split([9, 7], dim=1) for x in tokens(16)), strict=True)
    assert torch.allclose(torch.cat([state.step(*part, **weights) for part in parts], dim=1), whole, atol=1e-6)
    state.reset()
    with pytest.raises(ValueError, match="mixing must be .* got NoneType"):
        state.step(*tokens(1))


@pytest.mark.parametrize("linear_branch", [False, True])
def test_gradients_flow_through_steps(linear_branch: bool) -> None:
    weight = torch.ones(HEADS, dtype=torch.float64, requires_grad=True)
    settings = {"linear_weight": weight} if linear_branch else {}
    mixing = MIXING.double().requires_grad_()
    leaves = [x.double().requires_grad_() for x in tokens(13)]
    differentiated = [*leaves, mixing, *settings.values()]
    expected = mhla_attention(*leaves, mixing, (16,), (4,), causal="token", **settings)
    state = MHLAState(mixing, (16,), (4,), causal="token", **settings)
    parts = zip(*(x.split([5, 1, 7], dim=1) for x in leaves), strict=True)
    found = torch.cat([state.step(*part) for part in parts], dim=1)
    upstream = torch.randn_like(expected)
    of_found = torch.autograd.grad(found, differentiated, upstream)
    for a, b in zip(of_found, torch.autograd.grad(expected, differentiated, upstream), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_inference_first_and_training_after() -> None:
    state = new_state()
    with torch.inference_mode():
        state.step(*tokens(6))
        state.step(*tokens(1, seed=1))
    with torch.no_grad():
        state.step(*tokens(1, seed=2))
    state.reset()
    query, key, value = (x.requires_grad_() for x in tokens(6))
    state.step(query, key, value).sum().backward()
    assert all(x.grad is not None for x in (query, key, value))


@pytest.mark.parametrize("linear_branch", [False, True])
@pytest.mark.parametrize("causal", ["token", "block"])
def test_autocast_changes_nothing(causal: str, linear_branch: bool) -> None:
    settings = {"causal": causal, **({"linear_weight": torch.ones(HEADS)} if linear_branch else {})}
    plain, cast = new_state(**settings), new_state(**settings)
    for seed in range(3):
        given = tokens(4, seed=seed)
        with torch.autocast("cpu", torch.bfloat16):
            found = cast.step(*given)
        assert torch.equal(found, plain.step(*given))


def test_rows_of_an_extended_mixing_matrix() -> None:
    mixing = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    longer = extend_mixing(mixing, (4,), 7)
    assert torch.equal(longer[:4, :4], causal_mixing(mixing, (4,), own=True))
    for row in range(4, 7):
        distance = (row - torch.arange(row + 1)).clamp_max(3)
        shares = torch.where(distance == 3, 1 / (row - 2), 1.0)
        torch.testing.assert_close(longer[row, : row + 1], mixing[3, 3 - distance] * shares)
        torch.testing.assert_close(longer[row].sum(), mixing[3].sum())  # the past weighs as much as in the last row
        assert not longer[row, row + 1 :].any()
    with pytest.raises(ValueError, match="cannot be carried on to 3"):
        extend_mixing(mixing, (4,), 3)
    with pytest.raises(ValueError, match="at least 2 of its own"):
        extend_mixing(torch.ones(1, 1), (1,), 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"causal": "words"}, "'words'"),
        ({"beyond": "further"}, "'further' must be 'error' or 'relative'"),
        ({"backend": "tritn"}, "did you mean 'triton'"),
        ({"feature_map": "rellu"}, "did you mean 'relu'"),
        ({"rope": "never"}, "rope='never'"),
        ({"output_norm": torch.ones(3)}, r"\(8,\), got .*\(3,\)"),
    ],
)
def test_settings_that_do_not_go(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_state(**settings).step(*tokens(1))
    with pytest.raises(TypeError, match="sparse"):
        new_state(sparse=None)


def test_blocks_of_two_lengths_are_not_carried_on() -> None:
    with pytest.raises(ValueError, match="has 15 tokens in 4 blocks"):
        MHLAState(MIXING, (15,), (4,), causal="token", beyond="relative")
    with pytest.raises(ValueError, match="at least two of them"):
        MHLAState(torch.ones(1, 1), (4,), (1,), causal="token", beyond="relative")


def test_tokens_that_do_not_fit() -> None:
    state = new_state()
    state.step(*tokens(10))
    with pytest.raises(ValueError, match=r"of a batch of 2 with 2 heads of 8, but query has 3.*reset\(\)"):
        state.step(*tokens(1, batch=3))
    with pytest.raises(ValueError, match="After 10 tokens 7 more go beyond the 16 tokens.*beyond='relative'"):
        state.step(*tokens(7))
    with pytest.raises(ValueError, match="query must be"):
        state.step(*(x[0] for x in tokens(1)))
    with pytest.raises(ValueError, match="rotary must"):
        state.step(*tokens(1), rotary=(torch.ones(1, 2, 1, 8),) * 2)
    assert state.length == 10
    frames = MHLAState(MIXING, (4, 2, 2), (4, 1, 1), causal="block")
    with pytest.raises(ValueError, match="the next one has 4 tokens, and query has 3"):
        frames.step(*tokens(3))
