"""The kernels of the linear branch against its definition, token by token in float64: output and every gradient."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.triton import linear, linear_backward
from mhla_diffusers.attention.triton.launch import EMPTY, PROCESSORS
from mhla_diffusers.attention.triton.linear import Blocks, Branches, Reading, states_launch, states_of
from mhla_diffusers.attention.triton.linear_backward import key_gradient_launch, read_backward
from mhla_diffusers.attention.triton.linear_features import Features
from mhla_diffusers.attention.triton.linear_operators import mixed

from .compiled import SHARED_MEMORY, compile_launch, variant_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT32_TOLERANCE = 1e-5
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Problem:
    tensors: dict
    """All that has a gradient."""
    blocks: Blocks
    up: torch.Tensor
    """Gradient of the output."""
    name: str = "relu"
    eps: float = 1e-3
    angles: torch.Tensor | None = None
    rope_before: bool = False
    key_mask: torch.Tensor | None = None
    normalize: bool = True


def make_problem(
    lengths,
    batch=1,
    heads=2,
    head_dim=16,
    rows=None,
    rotary=False,
    mask=False,
    norm=False,
    gate=False,
    per_head=False,
    branches=(),
    seed=0,
    **options,
):
    """Blocks of these lengths, their tokens anywhere on the raster, or in ``rows`` rows of which some hold none."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    tokens, count = sum(lengths), len(lengths)
    places = torch.randperm(tokens, generator=draw)
    members = places if rows is None else torch.randperm(rows, generator=draw)[:tokens]
    shape = (batch, rows or tokens, heads, head_dim)
    tensors = {name: normal(*shape) for name in ("query", "key", "value")}
    tensors["mixing"] = normal(*([heads] if per_head else []), count, count).abs()
    if branches:
        by_row = (batch * heads, shape[1])
        for branch in branches:
            tensors[branch], tensors[f"{branch}_lse"] = normal(*by_row, head_dim), normal(*by_row) + 3
            tensors[f"{branch}_lse"][:, ::7] = EMPTY
            tensors[branch][:, ::7] = 0
        tensors["linear_weight"] = normal(heads).abs() / tokens
    if norm:
        tensors["output_norm"] = normal(head_dim)
    if gate:
        tensors["gate"] = normal(batch, tokens, heads, head_dim)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tables = (x.to(torch.int32).to(DEVICE) for x in (members, places, starts))
    return Problem(
        {name: x.to(DEVICE) for name, x in tensors.items()},
        Blocks(*tables, max(lengths)),
        normal(batch, tokens, heads, head_dim).to(DEVICE),
        angles=normal(1, tokens, 1, head_dim // 2).repeat_interleave(2, -1).to(DEVICE) if rotary else None,
        key_mask=(torch.rand(batch, tokens, generator=draw) > 0.4).double().to(DEVICE) if mask else None,
        **options,
    )


def apply_map(x, name, eps):
    if name == "relu":
        return x.clamp_min(0) + eps
    if name == "elu+1":
        return torch.nn.functional.elu(x) + 1 + eps
    return x.softmax(-1) if name == "softmax" else x


def rotate(x, angles):
    swapped = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * angles.cos() + swapped * angles.sin()


def features_of(x, problem, places):
    """For numerator and normaliser, of tokens in the order of the members."""
    angles = None if problem.angles is None else problem.angles[:, places].to(x.dtype)
    if angles is not None and problem.rope_before:
        x = rotate(x, angles)
    plain = apply_map(x, problem.name, problem.eps)
    return plain if angles is None or problem.rope_before else rotate(plain, angles), plain


def finish(problem, of, numerator, normaliser, places):
    """Merge, norm, gate and the order of the sequence: numerator (B, H, N, D) and normaliser (B, H, N, 1)."""
    batch, heads, tokens, _ = numerator.shape
    members = problem.blocks.members.long()
    if "listed" in of:

        def by_head(name):
            return of[name].unflatten(0, (batch, heads))[:, :, members]

        weights = of["linear_weight"][:, None, None] * normaliser
        logs = [by_head("listed_lse")[..., None], weights.log()]
        outputs = [by_head("listed"), numerator / normaliser]
        if "pooled" in of:
            logs.append(by_head("pooled_lse")[..., None])
            outputs.append(by_head("pooled"))
        shares = torch.cat(logs, -1).softmax(-1)
        output = sum(shares[..., i, None] * x for i, x in enumerate(outputs))
    else:
        output = numerator / normaliser if problem.normalize else numerator
    output = torch.empty_like(output).index_copy(2, places, output).transpose(1, 2)
    if "output_norm" in of:
        output = output * (output.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * of["output_norm"]
    return output * torch.nn.functional.silu(of["gate"]) if "gate" in of else output


def block_of_member(problem):
    starts = problem.blocks.starts.long()
    return torch.arange(len(starts) - 1, device=DEVICE).repeat_interleave(starts.diff())


def definition(problem, of):
    """From the N x N weights of every query and key."""
    members, places = problem.blocks.members.long(), problem.blocks.places.long()
    block = block_of_member(problem)
    query, plain_query = features_of(of["query"][:, members], problem, places)
    key, plain_key = features_of(of["key"][:, members], problem, places)
    coefficients = of["mixing"][..., block[:, None], block]
    if problem.key_mask is not None:
        coefficients = coefficients * problem.key_mask[:, None, None, places]
    weights = coefficients * torch.einsum("bqhd,bkhd->bhqk", query, key)
    sums = coefficients * torch.einsum("bqhd,bkhd->bhqk", plain_query, plain_key)
    numerator = torch.einsum("bhqk,bkhd->bhqd", weights, of["value"][:, members])
    return finish(problem, of, numerator, sums.sum(-1, keepdim=True), places)


def with_rounded_gradient(x, dtype):
    x.register_hook(lambda gradient: gradient.to(dtype).to(gradient.dtype))
    return x


def in_half_precision(problem, of):
    """The same in float32 with the operands of every product in the type of the inputs, or of their sums."""
    dtype = next(iter(of.values())).dtype
    of_sums = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32

    def rounded(x, to=dtype):
        return x.to(to).float()

    kept = ("query", "key", "value", "listed", "pooled", "gate")
    of = {name: rounded(x) if name in kept else x.float() for name, x in of.items()}
    members, places = problem.blocks.members.long(), problem.blocks.places.long()
    member = torch.nn.functional.one_hot(block_of_member(problem)).float()
    query, plain_query = features_of(of["query"][:, members], problem, places)
    key, plain_key = features_of(of["key"][:, members], problem, places)
    if problem.key_mask is not None:
        mask = problem.key_mask[:, places, None, None].float()
        key, plain_key = key * mask, plain_key * mask
    states = rounded(torch.einsum("bkhd,bkhe,km->bhmde", rounded(key), of["value"][:, members], member), of_sums)
    mixing = of["mixing"].expand(states.shape[1], -1, -1)
    states = rounded(torch.einsum("hij,bhjde->bhide", rounded(mixing, of_sums), states), of_sums)
    sums = torch.einsum("hij,bkhd,kj->bhid", mixing, plain_key, member)
    numerator = torch.einsum("bqhd,bhmde,qm->bhqe", rounded(query), states, member)
    normaliser = torch.einsum("bqhd,bhmd,qm->bhq", plain_query, sums, member)[..., None]
    return rounded(finish(problem, of, with_rounded_gradient(numerator, of_sums), normaliser, places))


def differentiated(attend, problem, of, up):
    of = {name: x.detach().requires_grad_() for name, x in of.items()}
    output = attend(problem, of)
    gradients = torch.autograd.grad(output, list(of.values()), up)
    return {"output": output.detach(), **dict(zip(of, gradients, strict=True))}


def by_kernels(problem, of, up):
    """Output and gradients as the operators give them."""
    angles = problem.angles
    if angles is not None:
        angles = torch.stack([angles.cos()[..., ::2], angles.sin()[..., 1::2]], -1).flatten(-2).float()
    features = Features(problem.name, problem.eps, angles, problem.rope_before)
    mask = None if problem.key_mask is None else problem.key_mask.float()
    keys = of["key"], of["value"], problem.blocks, features, mask
    summed = states_of(states_launch(*keys, problem.normalize))
    leaves = [of["mixing"].clone(), *(x for x in summed if x is not None)]
    for leaf in leaves:
        leaf.requires_grad_()
    mixture = [x for x in mixed(leaves[0], *leaves[1:], *(None,) * (3 - len(leaves))) if x is not None]
    branches = Branches(*map(of.get, Branches._fields))
    states, *sums = (x.detach() for x in mixture)
    reading = Reading(of["query"], states, sums[0] if sums else None, problem.blocks, features, branches)
    reading = replace(reading, output_norm=of.get("output_norm"), norm_eps=NORM_EPS, gate=of.get("gate"))
    launch = linear.read_launch(reading)
    launch.run()
    gradients = read_backward(reading, up)._asdict()
    upstream = [gradients[name] for name in ("states", "sums")[: len(mixture)]]
    gradients["mixing"], *of_states = torch.autograd.grad(mixture, leaves, upstream)
    back = key_gradient_launch(*of_states, *(None,) * (2 - len(of_states)), *keys)
    back.run()
    gradients |= {name: back.arguments[f"{name}_gradient"] for name in ("key", "value")}
    return {"output": launch.arguments["output"], **{name: gradients[name] for name in of}}


FLOAT32 = ("mixing", "listed_lse", "pooled_lse", "linear_weight", "output_norm")
"""What stays in float32 in half precision."""


def check(problem, dtype=torch.float32, attend=by_kernels, least_scale=1e-30):
    """Errors are relative to the largest element; where all should cancel, input times gradient is ``least_scale``."""
    of = {name: x.to(torch.float32 if name in FLOAT32 else dtype) for name, x in problem.tensors.items()}
    up = problem.up.to(dtype)
    truth = differentiated(definition, problem, {name: x.double() for name, x in of.items()}, up.double())
    found = attend(problem, of, up)
    half = None if dtype == torch.float32 else differentiated(in_half_precision, problem, of, up.float())
    for name, true in truth.items():
        assert found[name].dtype == (torch.float32 if name in FLOAT32 else dtype), name
        largest_input = of[name].double().abs().max() if name in of else 1.0
        scale = true.abs().max().clamp_min(least_scale / largest_input)
        error = float((found[name].double() - true).abs().max() / scale)
        allowed = FLOAT32_TOLERANCE
        if half is not None:  # gradients are rounded once, at the end, too
            rounded = half[name].to(found[name].dtype).double()
            allowed = max(2 * float((rounded - true).abs().max() / scale), FLOAT32_TOLERANCE)
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"
    return found


EVERYTHING = {"rotary": True, "mask": True, "norm": True, "gate": True, "per_head": True}
HALF = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.mark.parametrize("name", ["relu", "elu+1", "softmax"])
@pytest.mark.parametrize("rope", [None, "after", "before"])
@pytest.mark.parametrize("normalize", [True, False])
def test_feature_maps_and_rope(name, rope, normalize):
    check(make_problem((13, 20), name=name, rotary=rope is not None, rope_before=rope == "before", normalize=normalize))


def test_identity_needs_no_normaliser():
    check(make_problem((13, 20), name="identity", normalize=False))


@pytest.mark.parametrize("extra", ["mask", "norm", "gate", "per_head"])
def test_extras(extra):
    check(make_problem((5, 18, 17), batch=2, **{extra: True}))


@HALF
@pytest.mark.parametrize("normalize", [True, False])
def test_everything_at_once(dtype, normalize):
    check(make_problem((21, 40, 37), batch=2, head_dim=32, normalize=normalize, **EVERYTHING), dtype)


@HALF
@pytest.mark.parametrize("branches", [("listed",), ("listed", "pooled")], ids="+".join)
def test_beside_sparse_branches(dtype, branches):
    """Rows of which some hold no token, and some attend to nothing in a branch."""
    check(make_problem((21, 40, 37), batch=2, head_dim=32, rows=112, branches=branches, mask=True), dtype)


def test_branches_with_norm_and_gate():
    options = {"norm": True, "gate": True, "rotary": True, "rope_before": True, "seed": 1}
    check(make_problem((21, 40), rows=64, branches=("listed", "pooled"), **options))


def test_the_weight_of_the_linear_branch_has_a_gradient_at_zero():
    problem = make_problem((21, 40), rows=64, branches=("listed", "pooled"))
    near = {name: x.float() for name, x in problem.tensors.items()}
    near["listed_lse"] = near["listed_lse"].clamp_min(0)
    gradients = []
    for weight in (0.0, 1e-9):
        near["linear_weight"] = torch.full_like(near["linear_weight"], weight)
        gradients.append(by_kernels(problem, near, problem.up.float())["linear_weight"])
    assert gradients[0].abs().min() > 0
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=0)


def test_branches_need_the_normaliser():
    problem = make_problem((5,), rows=16, branches=("listed",), normalize=False)
    with pytest.raises(ValueError, match="normaliser"):
        by_kernels(problem, {name: x.float() for name, x in problem.tensors.items()}, problem.up.float())


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_floor_of_relu_counts_above_and_below(eps, dtype):
    """Every other query and key has no positive channel, so that all it says is the floor."""
    problem = make_problem((21, 40), eps=eps)
    for name in ("query", "key"):
        problem.tensors[name][:, ::2] = -problem.tensors[name][:, ::2].abs()
    check(problem, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [5, 72, 88, 256])
def test_head_dims(head_dim, dtype):
    check(make_problem((19, 14), heads=1, head_dim=head_dim, rotary=head_dim % 2 == 0, norm=True), dtype)


@pytest.mark.parametrize("name", ["relu", "softmax"])
def test_states_read_in_parts(name, monkeypatch):
    """As on cards with little shared memory, and for 256 channels."""
    monkeypatch.setitem(linear._TILES, "interpreter", dict.fromkeys(linear._SMALL, linear.Tile(16, 16, 4, 1)))
    check(make_problem((19, 30), heads=1, head_dim=40, name=name, rotary=True))


@HALF
def test_few_long_blocks_are_cut(dtype):
    problem = make_problem((300, 290), heads=1)
    of = {name: problem.tensors[name].to(dtype) for name in ("key", "value")}
    launch = states_launch(of["key"], of["value"], problem.blocks, Features("relu"), None, True)
    assert launch.arguments["parts"] > 1
    check(problem, dtype)


def test_tensors_that_are_views():
    """Query, key and value of one projection, and a broadcast sample of angles."""
    problem = make_problem((13, 20), batch=2, rotary=True)
    names = ("query", "key", "value")
    fused = torch.stack([problem.tensors[name] for name in names], 2).float()

    def attend(problem, of, up):
        return by_kernels(problem, of | dict(zip(names, fused.unbind(2), strict=True)), up)

    check(problem, attend=attend)


def test_head_major_rows_keep_their_order():
    problem = make_problem((13, 20), batch=2, rows=48, branches=("listed",))
    of = {name: x.float() for name, x in problem.tensors.items()}
    for name in ("query", "key", "value"):
        of[name] = of[name].transpose(1, 2).contiguous().transpose(1, 2)
    found = by_kernels(problem, of, problem.up.float())
    for name in ("query", "key", "value"):
        assert found[name].stride() == of[name].stride()


def test_half_precision_states_do_not_overflow():
    problem = make_problem((40, 21))
    problem = replace(problem, tensors=problem.tensors | {"value": problem.tensors["value"] * 3e3 + 3e4})
    check(problem, torch.float16)


def test_the_same_bits_twice():
    problem = make_problem((21, 40, 37), rows=112, branches=("listed", "pooled"), mask=True)
    of = {name: x.float() for name, x in problem.tensors.items()}
    first, second = (by_kernels(problem, of, problem.up.float()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(1, 35), min_size=1, max_size=4),
    head_dim=st.integers(2, 20),
    padding=st.one_of(st.none(), st.integers(0, 9)),
    extras=st.sets(st.sampled_from(["mask", "norm", "gate", "per_head"])),
    sparse=st.booleans(),
)
def test_any_sizes(lengths, head_dim, padding, extras, sparse):
    extras = extras - {"mask"} | ({"mask"} if len(lengths) > 1 and sum(lengths) > 40 else set())
    check(
        make_problem(
            lengths,
            heads=1,
            head_dim=head_dim,
            rows=None if padding is None else sum(lengths) + padding,
            branches=("listed", "pooled") if sparse else (),
            **dict.fromkeys(extras, True),
        ),
        least_scale=0.1,
    )


def launches(architecture, dtype, tokens, heads, head_dim, count, rope, sparse, everything, normaliser=False):
    """All kernels of a problem, over tensors without memory."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    members = empty(tokens, dtype=torch.int32)
    blocks = Blocks(members, members, empty(count + 1, dtype=torch.int32), -(-tokens // count))
    angles = empty(1, tokens, 1, head_dim, dtype=torch.float32) if rope else None
    features = Features("relu", 1e-6, angles, rope == "before")
    rows = -(-tokens // 64) * 64
    tokens_like = empty(1, heads, rows, head_dim).transpose(1, 2) if sparse else empty(1, tokens, heads, head_dim)
    of_states = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    states = empty(1, heads, count, head_dim, head_dim, dtype=of_states)
    sums = empty(1, heads, count, head_dim, dtype=torch.float32)
    mask = empty(1, tokens, dtype=torch.float32) if everything else None
    lse, per_head = empty(heads, rows, dtype=torch.float32), empty(heads, dtype=torch.float32)
    sparse_rows = empty(heads, rows, head_dim)
    branches = Branches(sparse_rows, lse, sparse_rows, lse, per_head) if sparse else Branches()
    norm, gate = (empty(head_dim), empty(1, tokens, heads, head_dim)) if everything else (None, None)
    reading = Reading(tokens_like, states, sums, blocks, features, branches, norm, NORM_EPS, gate)
    of_normaliser = empty(1, tokens, heads, 1, dtype=torch.float32) if normaliser else None
    keys = tokens_like, tokens_like, blocks, features, mask
    yield states_launch(*keys, True, None, architecture)
    yield linear.read_launch(reading, normaliser, architecture)
    up = empty(1, tokens, heads, head_dim)
    query_gradient = linear_backward.query_gradient_launch(reading, up, of_normaliser, architecture)
    yield query_gradient
    of = query_gradient.arguments
    added = of["product_gradient"], blocks, features, None, True, of["product_normaliser_gradient"], architecture
    yield states_launch(tokens_like, *added)
    yield key_gradient_launch(states, sums, *keys, architecture)


WAN = {"dtype": torch.bfloat16, "tokens": 31_500, "heads": 12, "head_dim": 128, "count": 105}
PROBLEMS = {
    "Wan 480p, alone": WAN | {"rope": "after", "sparse": False, "everything": False},
    "Wan 480p, beside": WAN | {"rope": None, "sparse": True, "everything": False},
    "Wan 480p, everything": WAN | {"rope": "after", "sparse": False, "everything": True},
    "Wan 480p, with normaliser": WAN | {"rope": "after", "sparse": False, "everything": False, "normaliser": True},
    "DiT": {"dtype": torch.bfloat16, "tokens": 1024, "heads": 16, "head_dim": 72, "count": 16}
    | {"rope": "before", "sparse": False, "everything": True},
    "float32": {"dtype": torch.float32, "tokens": 1024, "heads": 70, "head_dim": 32, "count": 16}
    | {"rope": "after", "sparse": False, "everything": False},
}


def print_reports(architecture, names=tuple(PROBLEMS)):
    """What the compiler makes of every kernel: one line of JSON each."""
    for name in names:
        for launch in launches(architecture, **PROBLEMS[name]):
            compiled = compile_launch(launch, architecture)
            report = {
                "problem": name,
                "kernel": launch.kernel.__name__,
                "registers": compiled.registers,
                "stack_bytes": compiled.stack_bytes,
                "shared_bytes": compiled.shared_bytes,
                "megabytes": round(launch.moved_bytes / 1e6),
                "programs": math.prod(launch.grid),
                "wgmma": compiled.text.count("wgmma.mma_async"),
                "mma": compiled.text.count("mma.sync"),
                "cp.async": compiled.text.count("cp.async.c"),
                "ld.global": compiled.text.count("ld.global"),
            }
            print(json.dumps(report), flush=True)


OLDEST_TRITON = Path(sys.prefix) / "triton-oldest"
"""The oldest version that is allowed, beside the installed one; the Makefile puts it there."""


def without_interpreter(script, folder, triton=None):
    """What a function of this file prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if triton is not None:
        environment["PYTHONPATH"] = str(triton)
    return subprocess.run(
        [sys.executable, "-c", f"from {__name__} import *; {script}"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        cwd=Path(__file__).parents[3],
    ).stdout


def test_the_table_of_cards_is_whole():
    assert set(SHARED_MEMORY) == set(PROCESSORS)


@pytest.mark.slow
@pytest.mark.parametrize("triton", [None, OLDEST_TRITON], ids=["newest", "oldest"])
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_fit(architecture, triton, tmp_path):
    if triton is not None and (architecture != "sm_90" or not triton.is_dir()):
        pytest.skip("make puts the oldest Triton beside the installed one; one card is enough for it")
    found = without_interpreter(f"print_reports({architecture!r})", tmp_path, triton)
    print(found)
    reports = [json.loads(line) for line in found.splitlines()]
    assert len(reports) == 5 * len(PROBLEMS)
    for report in reports:
        assert report["shared_bytes"] <= SHARED_MEMORY[architecture], report
        assert report["stack_bytes"] == 0, report


def print_variants():
    """How many kernels Triton compiles for three resolutions of each problem."""
    for problem in PROBLEMS.values():
        sizes = [problem | {"tokens": n, "count": m} for n, m in ((31_500, 105), (75_599, 90), (20_001, 98))]
        print(len({variant_of(x, "sm_90").hash() for size in sizes for x in launches("sm_90", **size)}))


def test_another_resolution_compiles_nothing(tmp_path):
    """The states of query and of key are two variants."""
    assert without_interpreter("print_variants()", tmp_path).split() == ["5"] * len(PROBLEMS)
