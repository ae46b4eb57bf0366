"""What mhla_attention promises whatever the backend, and what it refuses."""

from functools import partial

import numpy as np
import pytest
import torch

from mhla_diffusers.attention import (
    MHLACall,
    MHLAState,
    feature_map_names,
    initial_mixing,
    mhla_attention,
    reference_weights,
    register_feature_map,
    sparse_attention,
)
from mhla_diffusers.attention import feature_maps as feature_maps_module

from ..refusals import refused
from .problems import (
    GRIDS,
    MASKED,
    check_empty_sample,
    errors_against_reference,
    make_problem,
    masked_problem,
    reference,
)


@pytest.mark.parametrize(("grid", "blocks"), GRIDS)
@pytest.mark.parametrize("rope", [None, "before"])
def test_weights_sum_to_one(grid, blocks, rope):
    problem = make_problem(grid, blocks, rotary=rope is not None, **({"rope": rope} if rope else {}))
    problem.tensors["value"] = torch.ones_like(problem.tensors["value"])
    output = problem.run(mhla_attention)["output"]
    torch.testing.assert_close(output, torch.ones_like(output), rtol=0, atol=2e-6)


@pytest.mark.parametrize("init", ["one block", "equal entries"])
def test_plain_linear_attention_is_a_special_case(init):
    grid = (6, 8)
    query, key, value = (make_problem(grid, (1, 1)).tensors[name].double() for name in ("query", "key", "value"))
    phi_q, phi_k = query.relu() + 1e-6, key.relu() + 1e-6
    summary = torch.einsum("bkhd,bkhe->bhde", phi_k, value)
    expected = torch.einsum("bqhd,bhde->bqhe", phi_q, summary)
    expected = expected / torch.einsum("bqhd,bhd->bqh", phi_q, phi_k.sum(dim=1)).unsqueeze(-1)
    blocks = (1, 1) if init == "one block" else (3, 2)
    mixing = initial_mixing(blocks, "uniform").double()
    torch.testing.assert_close(mhla_attention(query, key, value, mixing, grid, blocks), expected)


def test_rank_bound_and_that_mixing_exceeds_the_head_dim():
    problem = make_problem((8, 8), (4, 2), batch=1, heads=1, head_dim=4)
    arguments = {name: problem.tensors[name] for name in ("query", "key", "value")}
    mixed, plain = (
        reference_weights(MHLACall(**arguments, mixing=mixing, grid=(8, 8), blocks=blocks))[0, 0]
        for mixing, blocks in ((torch.rand(8, 8), (4, 2)), (torch.ones(1, 1), (1, 1)))
    )
    assert torch.linalg.matrix_rank(plain, rtol=1e-10) <= 4
    assert 4 < torch.linalg.matrix_rank(mixed, rtol=1e-10) <= 8 * 4


def test_a_key_mask_is_the_same_as_leaving_the_tokens_out():
    problem = make_problem((12,), (3,), batch=1)
    query, key, value, mixing = problem.tensors.values()
    keep = torch.ones(1, 12, dtype=torch.bool)
    keep[:, [3, 7, 11]] = False
    masked = mhla_attention(query, key, value, mixing, (12,), (3,), key_mask=keep)
    left = [x[:, keep[0]] for x in (query, key, value)]
    shorter = mhla_attention(*left, mixing, (9,), (3,))
    torch.testing.assert_close(masked[:, keep[0]], shorter, rtol=1e-5, atol=1e-6)


@pytest.fixture
def own_feature_maps(monkeypatch):
    monkeypatch.setattr(feature_maps_module, "_FEATURE_MAPS", dict(feature_maps_module._FEATURE_MAPS))


def test_a_registered_feature_map_is_used(own_feature_maps):
    register_feature_map("square", lambda x, eps: x.square() + eps)
    assert "square" in feature_map_names()
    query, key, value, mixing = make_problem((12,), (3,)).tensors.values()
    squared = mhla_attention(query, key, value, mixing, (12,), (3,), feature_map="square")
    direct = mhla_attention(query.square(), key.square(), value, mixing, (12,), (3,), feature_map="relu")
    torch.testing.assert_close(squared, direct)


CELL = """
def cube(x, eps):
    return x.abs() ** 3 + eps * {factor}
register_feature_map("cube", cube)
register_feature_map("one", lambda x, eps: x * 0 + 1)
"""


def scaled(factor):
    return lambda x, eps: factor * x.relu() + eps


def test_a_notebook_cell_that_registers_feature_maps_runs_again(own_feature_maps):
    """Another function of the same name is refused, also one that differs in what it encloses alone."""
    names = {"register_feature_map": register_feature_map, "__name__": "__main__"}
    for factor in (1, 1, 2):
        exec(compile(CELL.format(factor=factor), f"cell-{factor}", "exec"), names)
    found = feature_maps_module.get_feature_map("cube")(torch.zeros(1), 0.25)
    assert float(found) == 0.5, "that of the latest run"
    for _ in range(2):
        register_feature_map("sharp", torch.nn.functional.softplus)
    register_feature_map("scaled", scaled(2))
    taken = {"cube": feature_maps_module.elu_plus_one, "relu": feature_maps_module.relu, "scaled": scaled(3)}
    for name, function in taken.items():
        with refused(name):
            register_feature_map(name, function)


def test_blocks_of_any_kind_of_integer():
    query, key, value, mixing = make_problem((12,), (3,)).tensors.values()
    expected = mhla_attention(query, key, value, mixing, (12,), (3,))
    assert torch.equal(mhla_attention(query, key, value, mixing, (12,), (np.int64(3),)), expected)


@pytest.mark.parametrize(
    "grid",
    [
        (np.int64(3), np.int32(4)),
        np.array([3, 4]),
        torch.tensor([3, 4]),
        tuple(torch.tensor([3, 4])),
        torch.Size([3, 4]),
    ],
    ids=["NumPy's", "array", "tensor", "of tensors", "size"],
)
def test_a_grid_of_any_kind_of_integer(grid):
    query, key, value, mixing = make_problem((3, 4), (1, 2)).tensors.values()
    expected = mhla_attention(query, key, value, mixing, (3, 4), (1, 2))
    assert torch.equal(mhla_attention(query, key, value, mixing, grid, (1, 2)), expected)
    expected = sparse_attention(query, key, value, (3, 4))
    assert torch.equal(sparse_attention(query, key, value, grid), expected)


@pytest.mark.parametrize(
    "grid",
    [(3, 0), (3, -4), (3.0, 4), (np.float64(3), 4), (True, 12), ("3", 4), "34", (), (2, 1, 6, 1), None],
    ids=repr,
)
def test_what_is_no_grid_is_named(grid):
    query, key, value, _ = make_problem((3, 4), (1, 2)).tensors.values()
    with refused("grid="):
        sparse_attention(query, key, value, grid)
    with refused("grid="):
        mhla_attention(query, key, value, torch.ones(2, 2), grid, (1, 2))


@pytest.mark.parametrize("shape", [(0, 12, 2, 8), (2, 12, 0, 8), (2, 12, 2, 0)])
def test_empty_tensors_give_empty_tensors_and_gradients(shape):
    x = torch.empty(shape, requires_grad=True)
    learned = [torch.rand(3, 3, requires_grad=True), torch.ones(shape[3], requires_grad=True)]
    output = mhla_attention(x, x, x, learned[0], (12,), (3,), output_norm=learned[1])
    assert output.shape == shape
    output.sum().backward()
    assert x.grad.shape == shape
    assert all(not weight.grad.any() for weight in learned)
    sparse_attention(x, x, x, (12,)).sum().backward()
    state = MHLAState(learned[0], (12,), (3,), causal="token")
    assert state.step(x, x, x).requires_grad


@pytest.mark.parametrize("how", ["in place", ".data", "NumPy"])
def test_rotary_tables_that_were_rewritten_are_read_again(how):
    problem = make_problem((12,), (3,), rotary=True)
    tables = problem.options["rotary"]
    before = problem.attend()
    for table in tables:
        {"in place": table, ".data": table.data, "NumPy": torch.from_numpy(table.numpy())}[how].copy_(table.flip(1))
    expected = problem.attend(rotary=tuple(table.clone() for table in tables))
    assert torch.equal(problem.attend(), expected) and not torch.equal(before, expected)


@pytest.mark.parametrize("causal", [None, "token"])
def test_rotary_tables_of_one_row_are_those_of_all_tokens(causal):
    problem = make_problem((12,), (3,), rotary=True, causal=causal)
    one = tuple(table[:, 5:6] for table in problem.options["rotary"])
    whole = tuple(table.expand(-1, 12, -1, -1).clone() for table in one)
    torch.testing.assert_close(problem.attend(rotary=one), problem.attend(rotary=whole))
    query, key, value, _ = problem.tensors.values()
    sparse = (sparse_attention(query, key, value, (12,), rotary=rotary) for rotary in (one, whole))
    torch.testing.assert_close(*sparse)


def test_views_that_begin_at_odd_places_of_the_memory():
    """PyTorch cannot view them as complex numbers."""
    problem = make_problem((12,), (3,), rotary=True)
    given = {name: problem.tensors[name] for name in ("query", "key", "value")}
    shared, mixing = {"grid": (12,), "rotary": problem.options["rotary"]}, problem.tensors["mixing"]
    attentions = [
        partial(mhla_attention, mixing=mixing, blocks=(3,), rope="after"),
        partial(mhla_attention, mixing=mixing, blocks=(3,), rope="before"),
        partial(mhla_attention, mixing=mixing, blocks=(3,), causal="token"),
        sparse_attention,
    ]
    for attend in attentions:
        expected = attend(**given, **shared)
        for begin, channels in ((1, 10), (0, 9), (1, 9)):
            views = {name: torch.empty(2, 12, 2, channels)[..., begin : begin + 8] for name in given}
            for name, view in views.items():
                view.copy_(given[name])
            torch.testing.assert_close(attend(**views, **shared), expected)


AUTOCAST = {
    "alone": lambda q, k, v: mhla_attention(q, k, v, torch.rand(3, 3), (12,), (3,)),
    "beside text": lambda q, k, v: mhla_attention(q, k, v, torch.rand(3, 3), (9,), (3,), extra=(1, 2)),
    "causal": lambda q, k, v: mhla_attention(
        q, k, v, torch.rand(3, 3), (12,), (3,), causal="token", linear_weight=torch.ones(2)
    ),
    "sparse": lambda q, k, v: sparse_attention(q, k, v, (12,), block_size=2, density=0.3),
    "sparse, text": lambda q, k, v: sparse_attention(q, k, v, (9,), block_size=2, density=0.3, extra=(1, 2)),
    "all listed": lambda q, k, v: sparse_attention(q, k, v, (12,), density=1.0),
    "all listed, text": lambda q, k, v: sparse_attention(q, k, v, (9,), density=1.0, extra=(1, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", AUTOCAST)
def test_autocast_keeps_the_type_of_the_query(kind, dtype):
    tensors = torch.randn(3, 2, 12, 2, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert AUTOCAST[kind](*tensors).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weight", ["identity", "locality"])
def test_a_query_that_gives_weight_to_masked_keys_alone_gets_nothing(weight, dtype):
    """Its row of the mixing matrix has zeros for all other blocks; the other queries do not notice."""
    problem = make_problem((12,), (3,), mask=True, norm=True)
    problem.tensors["mixing"] = initial_mixing((3,), weight)
    seen = 8 if weight == "identity" else 4
    problem.options["key_mask"] = (torch.arange(12) < seen).expand(2, -1)
    empty = slice(seen, 12)
    found = problem.run(mhla_attention, dtype)
    assert all(x.isfinite().all() for x in found.values())
    assert not found["output"][:, empty].any() and found["output"][:, :seen].any(dim=-1).all()
    assert not found["query"][:, empty].any() and not found["mixing"][2].any()
    for name, error in errors_against_reference(problem, dtype, "eager").items():
        assert error <= {torch.float64: 1e-12, torch.float32: 5e-6}[dtype], f"{name}: {error:.2e}"


@pytest.mark.parametrize("apart", [0, 8])
def test_softmax_features_of_large_inputs_are_no_nan(apart):
    """Also where a query and its keys have no channel in common: its features at theirs are 0 in float32."""
    problem = make_problem((12,), (3,), feature_map="softmax")
    for channel, name in enumerate(("query", "key")):
        problem.tensors[name][..., channel] += apart
        problem.tensors[name] *= 50
    found = problem.run(mhla_attention)
    assert all(x.isfinite().all() for x in found.values()) and found["output"].any(dim=-1).all()
    for name, error in errors_against_reference(problem, torch.float32, "eager").items():
        assert error <= 5e-5, f"{name}: {error:.2e}"


@pytest.mark.parametrize("kind", MASKED)
def test_a_sample_without_a_key_gets_nothing(kind):
    """As from PyTorch's attention, forward and backward; the other samples do not notice."""
    problem = masked_problem(kind)
    check_empty_sample(problem, problem.attention)
    if kind != "sparse by content":  # whose lists the reference takes from the call
        check_empty_sample(problem, reference)
        for name, error in errors_against_reference(problem, torch.float64, "eager").items():
            assert error < 1e-12, f"{name}: {error:.2e}"


X, FIVE = torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 5)
TEXT = {"grid": (2, 4), "extra": (0, 4)}
REFUSED = [
    ("(2, 12, 16)", {"query": torch.randn(2, 12, 16)}),
    ("int64", {"query": torch.ones(2, 12, 2, 8, dtype=torch.int64)}),
    ("key...2, 11, 2, 8...query...2, 12, 2, 8", {"key": torch.randn(2, 11, 2, 8)}),
    ("value...torch.float64...torch.float32", {"value": X.double()}),
    ("(3, 5)...15...N=12", {"grid": (3, 5)}),
    ("mixing...(4, 4)...(2, 4, 4)...(3, 3)", {"mixing": torch.rand(3, 3)}),
    ("query...list", {"query": [1.0]}),
    ("mixing...NoneType", {"mixing": None}),
    ("mixing...-0.5", {"mixing": torch.full((4, 4), -0.5), "grid": (2, 4), "extra": (0, 4)}),
    ("mixing...nan", {"mixing": torch.full((4, 4), torch.nan), "grid": (2, 4), "extra": (0, 4)}),
    ("mixing...int64", {"mixing": torch.ones(4, 4, dtype=torch.int64)}),
    ("key_mask...list", {"key_mask": [True] * 12}),
    ("linear_weight...float", {"linear_weight": 1.0}),
    ("grid=12", {"grid": 12}),
    ("grid=(3.0, 4)", {"grid": (3.0, 4)}),
    ("eps=-1.0", {"eps": -1.0}),
    ("eps='1e-6'", {"eps": "1e-6"}),
    ("'rulu'...'relu'", {"feature_map": "rulu"}),
    ("rope='during'...'after'...'before'", {"rope": "during"}),
    ("'eagr'...'eager'", {"backend": "eagr"}),
    ("(1 or 2, 1 or 12, 1, 8)...(12, 8)", {"rotary": (torch.randn(12, 8),) * 2}),
    ("rotary...torch.float32", {"rotary": torch.randn(1, 12, 1, 8)}),
    ("rotary...torch.float32", {"rotary": (torch.randn(1, 12, 1, 8),)}),
    ("rotary...NoneType", {"rotary": (None, None)}),
    ("head dim...5", {"query": FIVE, "key": FIVE, "value": FIVE, "rotary": (torch.randn(1, 12, 1, 5),) * 2}),
    ("key_mask...(2, 12)...(12,)", {"key_mask": torch.ones(12, dtype=torch.bool)}),
    ("key_mask...-10000", {"key_mask": torch.full((2, 12), -1e4)}),
    ("key_mask...1.5", {"key_mask": torch.full((2, 12), 1.5)}),
    ("linear_weight...extra tokens", {"linear_weight": torch.ones(2)}),
    ("linear_weight...0 to 1", {**TEXT, "linear_weight": torch.tensor([1.0, 0.0])}),
    ("linear_weight...-0.5 to 1", {**TEXT, "linear_weight": torch.tensor([1.0, -0.5])}),
    ("linear_weight...nan", {**TEXT, "linear_weight": torch.tensor([1.0, float("nan")])}),
    ("output_norm...(8,)...(16,)", {"output_norm": torch.ones(16)}),
    ("output_gate...(2, 12, 2, 8)...(2, 12, 16)", {"output_gate": torch.ones(2, 12, 16)}),
]


@pytest.mark.parametrize(("words", "changes"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_does_not_fit_is_refused_by_name(words, changes):
    given = {"query": X, "key": X, "value": X, "mixing": torch.rand(4, 4), "grid": (3, 4), "blocks": (2, 2)}
    with refused(words):
        mhla_attention(**given | changes)
