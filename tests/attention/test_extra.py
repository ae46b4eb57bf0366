"""Extra tokens, as of text, beyond what test_eager.py compares with the reference."""

import torch

from mhla_diffusers.attention import mhla_attention, reference_attention, reference_weights

from .problems import call_of, errors_against_reference, make_problem, make_sparse_problem


def make(extra, **options):
    return make_problem((5, 6), (2, 2), extra=extra, **options)


def make_both(extra, **options):
    """A problem of MHLA, and one of sparse attention."""
    return make(extra, **options), make_sparse_problem((5, 6), 6, key_size=2, extra=extra, **options)


def test_mhla_alone_remains_where_all_extra_tokens_are_masked():
    problem = make((2, 4), linear_branch=True)
    keep = torch.ones(2, 36, dtype=torch.bool)
    keep[0, [0, 1, *range(32, 36)]] = False
    problem.options["key_mask"] = keep
    for name, error in errors_against_reference(problem, torch.float32, "eager").items():
        assert error <= 5e-6, f"{name}: relative error {error:.2e}"
    query, key, value, mixing, _ = problem.tensors.values()
    on_grid = (x[:1, 2:32] for x in (query, key, value))
    alone = mhla_attention(*on_grid, mixing, (5, 6), problem.blocks)
    torch.testing.assert_close(problem.attend()[:1, 2:32], alone, rtol=1e-5, atol=1e-6)


def test_reference_weights_are_of_the_sequence():
    for problem in make_both((3, 4), mask=True):
        call = call_of(**problem.tensors, **problem.settings)
        weights, value = reference_weights(call), problem.tensors["value"].double()
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 37, dtype=torch.float64))
        torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights, value), reference_attention(call))
        masked = ~problem.options["key_mask"][:, None, :].expand(-1, 37, -1)
        assert not weights.transpose(0, 1)[:, masked].abs().gt(1e-9).any()
