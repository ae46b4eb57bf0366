"""What PyTorch asks of an operator, of every operator that calls of the attentions run."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..problems import DEVICE, problem_of

pytestmark = pytest.mark.gpu
KINDS = {
    "MHLA": {},
    "MHLA, not normalised": {},
    "causal by block": {},
    "causal by token, softmax": {},
    "lists": {"heads": 2},
    "by content": {},
    "by content, means": {"batch": 1},
}


class Recorded(TorchDispatchMode):
    """Notes every operator of the package, with the arguments of its last call."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mhla_diffusers":
            self.calls[func] = args
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("kind", "options"), KINDS.items(), ids=KINDS)
def test_opcheck(kind, options):
    """For MHLA also as part of a graph, which would take minutes for sparse attention."""
    problem = problem_of(kind, **options).to(DEVICE)
    leaves = {name: x.requires_grad_() for name, x in problem.tensors.items()}
    with Recorded() as recorded:
        output = problem.attend(**leaves, backend="triton")
        torch.autograd.grad(output, leaves.values(), torch.ones_like(output), allow_unused=True)
    names = {func: func._schema.name.partition("::")[2] for func in recorded.calls}
    assert sum(name.endswith("_backward") for name in names.values()) >= 2
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    for func, arguments in recorded.calls.items():
        has_gradient = not names[func].endswith("_backward") and names[func] != "fit"
        given = tree_map_only(
            torch.Tensor,
            lambda x, wanted=has_gradient: x.detach().clone().requires_grad_(wanted and x.is_floating_point()),
            arguments,
        )
        torch.library.opcheck(
            func, given, test_utils=(*tests, *["test_aot_dispatch_dynamic"] * (kind == "MHLA, not normalised"))
        )
