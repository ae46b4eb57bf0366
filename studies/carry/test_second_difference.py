"""The ways to carry a residual on."""

import second_difference as study
import torch

from mhla_diffusers.patching.residual import Residual


def test_a_residual_that_changes_steadily_is_met_by_its_second_difference():
    first, change = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    old, new = study.Seen(3, first), study.Seen(7, first + 4 * change)
    torch.testing.assert_close(study.second_difference(new, old, 9), first + 6 * change)
    assert study.second_difference(old, None, 5) is first


def test_fading_is_that_of_the_package():
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(2, 8, 4, generator=generator)
    new = torch.stack([0.6 * first[0] + 0.1 * first[1], torch.randn(8, 4, generator=generator)])
    nothing, before = torch.zeros_like(first), None
    for step, residual in ((3, first), (7, new)):
        before = Residual.measured(residual, nothing, step, before)
    seen = study.Seen(3, first), study.Seen(7, new)
    found = study.faded(seen[1], seen[0], 9)
    torch.testing.assert_close(found, before.add_to(nothing, 9), atol=0.02, rtol=0.02)
    assert bool(found[0].any()) and not found[1].any()
