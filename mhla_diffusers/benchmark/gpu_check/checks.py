"""The steps: versions and rates, correctness, limits, the tests of a checkout, integration, and times of kernels."""

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ...attention import mhla_attention
from ...attention.triton.launch import Launch, architecture_of
from ...devices import FLOAT_TYPES
from ...patching import apply_mhla, mhla_layers
from ..conditions import Rates, gather_conditions, measure_rates
from ..correctness import LARGEST_ERROR, errors_of, limits_of, too_large
from ..lists import draw_lists
from ..models import build_transformer, choose_sizes, make_forward_inputs, models
from ..problems import CUT_HEADS, branch_weights, cut, differentiate, draw_problem
from ..shapes import Shape, shapes
from ..timing import Clock, free_bytes, summarise
from .findings import Measured, Notebook, NotHereError

SHAPES = ("wan2.1-1.3b-480p", "wan2.1-1.3b-720p", "dit-xl-2-1024px", "sana-1.6b-2048px")
"""Head dims 128, 72 and 32."""
SMALL = Shape("small", (2, 4, 8), (1, 2, 2), 1, 16, block_size=16, density=0.25, rotary_axes=(8, 4, 4))
"""What the interpreter is through with in seconds."""
KINDS = ("plain", "everything", "sparse and everything", "causal", "causal softmax")
_MOST_TOKENS = 4096
_REFERENCE_MATRICES = 24
"""N x N matrices of float64 per head that the reference and its backward pass hold, and some more."""
_TO_EAGER = 1.5
"""Where terms cancel, the eager backend has a large error too: so many times its error is allowed."""
_MOST_ERROR = 0.2
"""However large the eager backend's."""
_OF_HEADS = {"linear_weight": 10, "pooled_bias": 10}
"""Single numbers per head, each a sum over all tokens in which most cancels, from weights that kernels round."""
_DTYPE = torch.bfloat16
_LAYERS_LIMIT = 5 * LARGEST_ERROR[_DTYPE]
"""Of the output of a whole transformer, whose layers round one after the other."""
_ROOT = Path(__file__).parents[3]
TESTS = Path("tests/attention/triton")
_REPETITIONS = 20


def describe_device(notebook: Notebook, device: torch.device) -> None:
    """Everything that is to be known before a number of the other steps is read."""

    def rates(dtype: torch.dtype) -> Measured:
        found = measure_rates(device, dtype)
        return Measured(f"{found.matmul / 1e12:.3g} TFLOP/s, {found.copy / 1e9:.4g} GB/s copied", asdict(found))

    def versions() -> Measured:
        numbers = asdict(gather_conditions(device)) | {"architecture": architecture_of(device)}
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            names = ("multi_processor_count", "total_memory", "shared_memory_per_block_optin", "L2_cache_size")
            numbers |= {name: getattr(properties, name, None) for name in names}  # not all are in every version
        named = ", ".join(f"{name} {numbers['versions'].get(name)}" for name in ("torch", "triton", "diffusers"))
        return Measured(f"{numbers['architecture']}, Python {numbers['python']}, {named}", numbers)

    for name in FLOAT_TYPES if device.type == "cuda" else ("float32",):
        notebook.attempt(f"rates in {name}", partial(rates, FLOAT_TYPES[name]))
    notebook.attempt("versions", versions)


def check_correctness(notebook: Notebook, device: torch.device) -> None:
    """Output and every gradient of the kernels, for each shape, type and kind of call, against the reference."""
    small = [SMALL]
    if device.type != "cpu":
        # as many tokens as have room for their N x N weights
        tokens = math.isqrt(int(free_bytes(device) / 2 / (_REFERENCE_MATRICES * CUT_HEADS * 8)))
        known = (replace(shapes()[name], block_size=64) for name in SHAPES)
        small = [cut(shape, min(tokens, _MOST_TOKENS)) for shape in known]
    for kind in KINDS:
        for shape in small:
            for name, dtype in FLOAT_TYPES.items():
                notebook.attempt(f"{shape.name} {name} {kind}", partial(_compare, shape, device, dtype, kind))


def _compare(shape: Shape, device: torch.device, dtype: torch.dtype, kind: str) -> Measured:
    """Errors of the kernels, those of the eager backend beside them, and what is allowed."""
    problem = draw_problem(shape, device, dtype, kind)
    expected, found, eager = problem.reference(), problem.attend("triton"), problem.attend("eager")
    errors, of_eager = errors_of(found, expected), errors_of(eager, expected)
    limits = {
        name: max(limit, min(_MOST_ERROR, _OF_HEADS.get(name, _TO_EAGER) * of_eager[name]))
        for name, limit in limits_of(errors, dtype).items()
    }
    wrong = too_large(errors, limits)
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    numbers = {"grid": shape.grid, "errors": errors, "limits": limits, "errors of eager": of_eager}
    text = f"worst is {worst}, {errors[worst]:.1e} of {limits[worst]:.0e}"
    return Measured(text, numbers, f"relative error too large: {wrong}" if wrong else "")


@dataclass(frozen=True)
class Large:
    """A query too large for offsets of 32 bits, in slices that do not see each other."""

    batch: int
    slices: int
    """Along the tokens: blocks of an identity mixing matrix."""
    slice_tokens: int
    heads: int
    head_dim: int
    block_size: int | None = None
    """Of the sparse branch, which a batch row has for itself."""

    @property
    def size(self) -> tuple[int, int, int, int]:
        """(B, N, H, D)."""
        return self.batch, self.slices * self.slice_tokens, self.heads, self.head_dim

    @property
    def bytes(self) -> int:
        """Of one forward and backward pass: 16 tensors of the size of the query, some of them float32, and a margin."""
        return 18 * math.prod(self.size) * _DTYPE.itemsize

    def attend(self, query: torch.Tensor) -> dict[str, torch.Tensor]:
        """Output, and gradients of query, key and value, which are one tensor to save memory."""
        grid = (self.size[1],)
        settings: dict[str, Any] = {"grid": grid, "blocks": (self.slices,), "mixing": torch.eye(self.slices)}
        settings["mixing"] = settings["mixing"].to(query.device)
        if self.block_size is not None:
            shape = Shape("", grid, (self.slices,), self.heads, self.head_dim, self.block_size)
            settings |= {"sparse": draw_lists(shape, query.device), **branch_weights(self.heads, query.device)}
        tensors = dict.fromkeys(("query", "key", "value"), query)
        return differentiate(partial(mhla_attention, backend="triton", **settings), tensors, query)


_ON_GPU = {
    "2^31 elements along the batch": Large(65, 1, 16384, 16, 128),
    "2^31 elements along the tokens": Large(1, 65, 16384, 16, 128),
    "2^31 elements, sparse": Large(65, 1, 16384, 16, 128, block_size=64),
}
_ON_CPU = {
    "few elements along the batch": Large(3, 1, 32, 1, 16),
    "few elements along the tokens": Large(1, 3, 32, 1, 16),
    "few elements, sparse": Large(3, 1, 32, 1, 16, block_size=16),
}


def check_limits(notebook: Notebook, device: torch.device) -> None:
    """What a small call on one device does not show: offsets beyond 2^31, the same bits twice, another device."""
    for name, large in (_ON_CPU if device.type == "cpu" else _ON_GPU).items():
        notebook.attempt(name, partial(_check_last_slice, large, device))
    notebook.attempt("the same bits twice", partial(_same_bits_twice, device))
    notebook.attempt("a second device", partial(_second_device, device))
    notebook.attempt("compute-sanitizer", partial(_run_sanitizer, device))


def _check_last_slice(large: Large, device: torch.device) -> Measured:
    """The last batch row, or the last block of tokens, of a huge call against the same one alone."""
    if large.bytes > (free := free_bytes(device)):
        raise NotHereError(f"it needs {large.bytes / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free")
    torch.manual_seed(0)
    query = torch.randn(large.size, device=device, dtype=_DTYPE)
    rows, tokens = slice(large.batch - 1, None), slice(-large.slice_tokens, None)
    last = {name: x[rows, tokens].clone() for name, x in large.attend(query).items()}
    errors = errors_of(last, replace(large, batch=1, slices=1).attend(query[rows, tokens].clone()))
    wrong = too_large(errors, limits_of(errors, _DTYPE))
    text = f"{query.numel()} elements, error at most {max(errors.values()):.1e}"
    return Measured(text, {"errors": errors}, f"the last slice differs: {wrong}" if wrong else "")


def _same_bits_twice(device: torch.device) -> Measured:
    shape = SMALL if device.type == "cpu" else shapes()[SHAPES[0]]
    problem = draw_problem(shape, device, _DTYPE, "sparse and everything")
    first, second = problem.attend("triton"), problem.attend("triton")
    differ = [name for name in first if not torch.equal(first[name], second[name])]
    return Measured("all equal", wrong=f"differ: {', '.join(differ)}" if differ else "")


def _second_device(device: torch.device) -> Measured:
    """The same call on a device that is not the current one."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        raise NotHereError("there is no second GPU")
    other = torch.device("cuda", 1 if (device.index or 0) == 0 else 0)
    problem = draw_problem(SMALL, device, _DTYPE, "plain")
    moved = {name: x.to(other) for name, x in problem.tensors.items()}
    found = replace(problem, tensors=moved, upstream=problem.upstream.to(other)).attend("triton")
    errors = errors_of({key: x.to(device) for key, x in found.items()}, problem.attend("triton"))
    return Measured(torch.cuda.get_device_name(other), wrong=too_large(errors, limits_of(errors, _DTYPE)))


def _run_sanitizer(device: torch.device) -> Measured:
    """One tiny call in a process of its own, its memory allocated by CUDA, so that every tensor has its own bounds."""
    if device.type != "cuda" or shutil.which("compute-sanitizer") is None:
        raise NotHereError("there is no NVIDIA GPU with compute-sanitizer installed")
    program = (
        f"import torch; from {__name__} import SMALL, draw_problem; device = torch.device({str(device)!r}); "
        "draw_problem(SMALL, device, torch.bfloat16, 'sparse and everything').attend('triton'); "
        "torch.cuda.synchronize()"
    )
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-P", "-c", program]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("=========")]
    wrong = f"code {ended.returncode}: {' '.join(lines[:6])}" if ended.returncode else ""
    return Measured(lines[-1] if lines else "", wrong=wrong)


def run_tests(notebook: Notebook, device: torch.device) -> None:
    """The tests that carry the marker ``gpu``, on the card, where there is a checkout that has them."""
    notebook.attempt(f"pytest -m gpu {TESTS}", partial(_run_pytest, device))


def _run_pytest(device: torch.device) -> Measured:
    if device.type == "cpu":
        raise NotHereError("on a CPU, make test runs them through the interpreter")
    if not (_ROOT / TESTS).is_dir():
        raise NotHereError(f"there is no {TESTS}: the package does not run from a checkout")
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        raise NotHereError(f"{', '.join(missing)} is not installed")
    # the options that pyproject.toml adds need a plugin that may not be there
    options = ["-m", "gpu", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short"]
    if find_spec("xdist") is not None:
        options += ["-n", str(min(8, os.cpu_count() or 1))]
    command = [sys.executable, "-m", "pytest", str(TESTS), *options]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    sys.stdout.write(ended.stdout + ended.stderr)
    last = (ended.stdout.strip().splitlines() or ["nothing printed"])[-1].strip("= ")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last)}
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    wrong = "" if ended.returncode == 0 else f"{last}; {'; '.join(failed[:3])}"
    return Measured(last, {**counts, "failures": failed}, wrong)


def check_integration(notebook: Notebook, device: torch.device) -> None:
    """What surrounds the kernels in use: autocast, torch.compile, CUDA graphs."""
    for name in ("tiny-wan", "tiny-sana"):
        notebook.attempt(f"autocast training step of {name}", partial(_training_step, name, device))
    for kind in ("plain", "sparse", "sparse by content", "causal"):
        notebook.attempt(f"torch.compile, fullgraph, {kind}", partial(_compile_attention, kind, device))
        notebook.attempt(f"CUDA graph, {kind}", partial(_replay_graph, kind, device))
    notebook.attempt("compile_repeated_blocks", partial(_compile_blocks, device))


def _patched(name: str, device: torch.device, backend: str) -> tuple[Any, dict[str, Any]]:
    """A seeded transformer in float32, every layer patched, and the arguments of its forward."""
    model = models()[name]
    size = choose_sizes(model, None, None, "cpu")[0]
    transformer = build_transformer(model, size, None, device, torch.float32)
    inputs = make_forward_inputs(model, transformer, size, device, torch.float32)
    return apply_mhla(transformer, blocks=model.blocks, sparse="none", layers="all", backend=backend), inputs


def _training_step(name: str, device: torch.device) -> Measured:
    """Forward under autocast, backward and an update: the loss of the eager backend, and a gradient everywhere."""
    losses, wrong = {}, []
    for backend in ("eager", "triton"):
        transformer, inputs = _patched(name, device, backend)
        optimizer = torch.optim.AdamW(transformer.train().parameters(), lr=1e-3)
        with torch.autocast(device.type, _DTYPE):
            output = transformer(**inputs)[0]
        loss = output.float().square().mean()
        loss.backward()
        mixings = {key: layer.mixing for key, layer in mhla_layers(transformer).items()}
        before = {key: x.detach().clone() for key, x in mixings.items()}
        optimizer.step()
        missing = [key for key, x in mixings.items() if x.grad is None or not bool(x.grad.isfinite().all())]
        still = [key for key, x in mixings.items() if torch.equal(x, before[key])]
        wrong += [f"no finite gradient of the mixing matrix of {key}" for key in missing]
        wrong += [f"the mixing matrix of {key} does not move" for key in still]
        losses[backend] = float(loss)
    change = abs(losses["triton"] / losses["eager"] - 1)
    wrong += [f"losses {losses}"] if not change <= _LAYERS_LIMIT else []
    return Measured(f"loss {change:.1e} from eager's", {"losses": losses}, "; ".join(wrong))


def _compiler(device: torch.device) -> str:
    """On a CPU inductor would compile C++ for a minute; what is tried there is the capture of forward and backward."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def _compile_attention(kind: str, device: torch.device) -> Measured:
    """One graph without a break, the same output and gradients."""
    problem = draw_problem(SMALL, device, _DTYPE, kind)
    compiled: Any = torch.compile(mhla_attention, fullgraph=True, dynamic=False, backend=_compiler(device))
    attend = partial(compiled, backend="triton", **problem.settings)
    found = differentiate(attend, problem.tensors, problem.upstream)
    torch.compiler.reset()
    return _agreement(found, problem.attend("triton"))


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
    same = torch.equal(output, attend(**given))
    return Measured("the same bits", wrong="" if same else "the replay gives another output")


def _compile_blocks(device: torch.device) -> Measured:
    """Diffusers' own way to compile a transformer, after a patch."""
    transformer, inputs = _patched("tiny-wan", device, "triton")
    with torch.no_grad():
        expected = transformer(**inputs)[0]
        transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=_compiler(device))
        found = transformer(**inputs)[0]
    torch.compiler.reset()
    return _agreement({"output": found}, {"output": expected})


def _agreement(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Measured:
    errors = errors_of(found, expected)
    wrong = too_large(errors, dict.fromkeys(errors, _LAYERS_LIMIT))
    return Measured(f"differs by at most {max(errors.values()):.1e}", {"errors": errors}, wrong)


def measure_kernels(notebook: Notebook, device: torch.device) -> None:
    """The time of each kernel of Wan's attention beside the bytes that it moves."""
    shape = SMALL if device.type == "cpu" else shapes()[SHAPES[0]]
    rates, clock = measure_rates(device, _DTYPE) if device.type == "cuda" else None, Clock(device)
    known: set[str] = set()
    for kind in ("plain", "sparse by content", "causal"):
        problem = draw_problem(shape, device, _DTYPE, kind)
        with recorded_launches() as launches:
            problem.attend("triton")
        for name in launches.keys() - known:
            known.add(name)
            notebook.attempt(f"{name}, {kind}", partial(_time, launches[name], rates, clock))


@contextmanager
def recorded_launches() -> Iterator[dict[str, Launch]]:
    """Within the context every launch of this process is kept by its kernel's name; the last one of each.

    A launch keeps its tensors, so it can be run again and again.
    """
    found: dict[str, Launch] = {}
    run = Launch.run

    def keep(launch: Launch) -> None:
        found[launch.kernel.__name__] = launch
        run(launch)

    with mock.patch.object(Launch, "run", keep):
        yield found


def _time(launch: Launch, rates: Rates | None, clock: Clock) -> Measured:
    """Median of replays of a CUDA graph that holds the launch alone; on a CPU bytes alone, as nothing has a speed."""
    moved = launch.moved_bytes
    if rates is None:
        return Measured(f"{moved} bytes, not timed on a CPU", {"bytes": moved})
    launch.run()
    torch.cuda.synchronize(clock.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(clock.device), torch.cuda.graph(graph):
        launch.run()
    seconds = summarise([clock.seconds(graph.replay) for _ in range(_REPETITIONS)]).median
    share = moved / seconds / rates.copy
    numbers = {"bytes": moved, "seconds": seconds, "copy_fraction": share}
    return Measured(f"{1e6 * seconds:.0f} µs, {moved / 1e6:.0f} MB, {share:.0%} of the copy rate", numbers)


FUNCTIONS: dict[str, Callable[[Notebook, torch.device], None]] = {
    "device": describe_device,
    "correctness": check_correctness,
    "limits": check_limits,
    "tests": run_tests,
    "integration": check_integration,
    "kernels": measure_kernels,
}
"""Name of a step → what it does."""
