"""The step ``integration``: what surrounds the kernels in use: autocast, torch.compile, CUDA graphs."""

from functools import partial
from typing import Any

import torch

from ...attention import mhla_attention
from ...patching import apply_mhla, mhla_layers
from ..correctness import LARGEST_ERROR, errors_of, relative_error, too_large
from ..models import Size, build_transformer, choose_sizes, make_forward_inputs, models
from ..problems import draw_problem
from .correctness import SMALL
from .findings import Measured, Notebook, NotHereError

_MODELS = ("tiny-wan", "tiny-sana")
_DTYPE = torch.bfloat16
_LAYERS_LIMIT = 5 * LARGEST_ERROR[_DTYPE]
"""Of the output of a whole transformer, whose layers round one after the other."""


def check_integration(notebook: Notebook, device: torch.device) -> None:
    """Tiny configurations of the real transformers, and the attention by itself."""
    for name in _MODELS:
        notebook.attempt(f"autocast training step of {name}", partial(_training_step, name, device))
    for kind in ("plain", "exact tiles", "exact tiles by content", "causal"):
        notebook.attempt(f"torch.compile, fullgraph, {kind}", partial(_compile_attention, kind, device))
        notebook.attempt(f"CUDA graph, {kind}", partial(_replay_graph, kind, device))
    notebook.attempt("compile_repeated_blocks", partial(_compile_blocks, device))


def _patched(name: str, device: torch.device, backend: str) -> tuple[Any, dict[str, Any]]:
    """A seeded transformer in float32, every layer patched, and the arguments of its forward."""
    model = models()[name]
    size: Size = choose_sizes(model, None, None, "cpu")[0]
    transformer = build_transformer(model, size, None, device, torch.float32)
    inputs = make_forward_inputs(model, transformer, size, device, torch.float32)
    return apply_mhla(transformer, blocks=model.blocks, sparse="none", layers="all", backend=backend), inputs


def _training_step(name: str, device: torch.device) -> Measured:
    """Forward under autocast, backward and an update: the loss of the eager backend, and a gradient everywhere."""
    losses, missing, moved = {}, [], 0.0
    for backend in ("eager", "triton"):
        transformer, inputs = _patched(name, device, backend)
        transformer.train()
        optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3)
        with torch.autocast(device.type, _DTYPE):
            output = transformer(**inputs)[0]
        loss = output.float().square().mean()
        loss.backward()
        mixings = {key: layer.mixing for key, layer in mhla_layers(transformer).items()}
        missing = [key for key, x in mixings.items() if x.grad is None or not bool(x.grad.isfinite().all())]
        before = [x.detach().clone() for x in mixings.values()]
        optimizer.step()
        moved = min(relative_error(x, old) for x, old in zip(mixings.values(), before, strict=True))
        losses[backend] = float(loss)
    change = abs(losses["triton"] / losses["eager"] - 1)
    wrong = [f"no finite gradient of the mixing matrix of {', '.join(missing)}"] if missing else []
    wrong += [f"losses {losses}"] if not change <= _LAYERS_LIMIT else []
    wrong += ["a mixing matrix does not move"] if not moved > 0 else []
    return Measured({"losses": losses, "moved": moved}, f"loss {change:.1e} from eager's", "; ".join(wrong))


def _compiler(device: torch.device) -> str:
    """On a CPU inductor would compile C++ for a minute; what is tried there is the capture of forward and backward."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def _compile_attention(kind: str, device: torch.device) -> Measured:
    """One graph without a break, the same output and gradients."""
    problem = draw_problem(SMALL, device, _DTYPE, kind)
    expected = problem.attend("triton")
    compiled: Any = torch.compile(mhla_attention, fullgraph=True, dynamic=False, backend=_compiler(device))
    inputs = {name: x.detach().requires_grad_() for name, x in problem.tensors.items()}
    output = compiled(**inputs, **problem.settings, backend="triton")
    gradients = torch.autograd.grad(output, list(inputs.values()), problem.upstream)
    found = dict(zip(expected, (output, *gradients), strict=True))
    torch.compiler.reset()
    return _agreement(found, expected, {"compiler": _compiler(device)})


def _replay_graph(kind: str, device: torch.device) -> Measured:
    """Captured on one input and replayed on another: what is replayed reads the new one."""
    if device.type != "cuda":
        raise NotHereError("a CPU has no CUDA graphs")
    problem = draw_problem(SMALL, device, _DTYPE, kind)
    attend: Any = torch.no_grad()(partial(mhla_attention, backend="triton", **problem.settings))
    given = {name: x.clone() for name, x in problem.tensors.items()}
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # compiles, which cannot be captured
        attend(**given)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(**given)
    given["query"].copy_(problem.tensors["query"].flip(1))
    graph.replay()
    expected = attend(**given)
    wrong = "" if torch.equal(output, expected) else "the replay gives another output"
    return Measured({"error": relative_error(output, expected)}, "the same bits", wrong)


def _compile_blocks(device: torch.device) -> Measured:
    """Diffusers' own way to compile a transformer, after a patch."""
    transformer, inputs = _patched("tiny-wan", device, "triton")
    with torch.no_grad():
        expected = transformer(**inputs)[0]
        transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=_compiler(device))
        found = transformer(**inputs)[0]
    torch.compiler.reset()
    return _agreement({"output": found}, {"output": expected}, {"compiler": _compiler(device)})


def _agreement(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], numbers: dict[str, Any]) -> Measured:
    errors = errors_of(found, expected)
    telling = f"differs by at most {max(errors.values()):.1e}"
    wrong = too_large(errors, dict.fromkeys(errors, _LAYERS_LIMIT))
    return Measured(numbers | {"errors": errors, "limit": _LAYERS_LIMIT}, telling, wrong)
