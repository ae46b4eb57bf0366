"""``mhla bench gpu-check``: the first check of a new GPU.

Every step runs in its own process, ``python -m mhla_diffusers.benchmark.gpu_check STEP DEVICE FILE``, and writes
what it finds after every attempt, so that a crash loses one attempt and a hang one step.
"""

import gc
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ..attention import mhla_attention
from ..attention.triton.tiles import architecture_of
from ..devices import FLOAT_TYPES, choose_device
from ..files import check_writable, read_json, write_json, write_text
from ..patching import apply_mhla, mhla_layers
from .correctness import (
    CUT_HEADS,
    LARGEST_ERROR,
    branch_weights,
    cut,
    differentiate,
    draw_problem,
    errors_of,
    limits_of,
    too_large,
)
from .models import build_transformer, choose_sizes, make_forward_inputs, models
from .results import console, gather_conditions, measure_rates
from .shapes import Shape, draw_lists, shapes
from .timing import free_bytes

SHAPES = ("wan2.1-1.3b-480p", "wan2.1-1.3b-720p", "dit-xl-2-1024px", "sana-1.6b-2048px")
"""Head dims 128, 72 and 32."""
SMALL = Shape("small", (2, 4, 8), (1, 2, 2), 1, 16, block_size=16, density=0.25, rope=True)
"""Small enough for Triton's interpreter to finish in seconds."""
_DTYPE = torch.bfloat16
_LAYERS_LIMIT = 5 * LARGEST_ERROR[_DTYPE]
"""Of the output of a whole transformer, whose layers round one after the other."""

Status = Literal["ok", "failed", "skipped"]


# ---- what is found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What became of one attempt."""

    name: str
    status: Status
    text: str = ""
    """Why it failed or was skipped, or the most telling number."""
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured."""


def found(text: str, wrong: str = "", **numbers: Any) -> Finding:
    """What an attempt gives back: the most telling number, or what is wrong; it is named by who attempts it."""
    return Finding("", "failed" if wrong else "ok", wrong or text, numbers=numbers)


class NotHereError(Exception):
    """What an attempt needs is not on this machine; its text says what."""


class Notebook:
    """The file of a step's findings, and the attempts that fill it.

    A restarted process skips the attempts that are in the file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._found = {finding.name: finding for finding in read_findings(file)}

    def attempt(self, name: str, measure: Callable[..., Finding], *args: Any) -> None:
        """Run an attempt and record the outcome; an exception is a finding too.

        Raises:
            SystemExit: the CUDA context is lost, in which every further call would fail.
        """
        if name in self._found:
            return
        # remains if the process ends during the attempt; replaced otherwise
        self._write(Finding(name, "failed", "the process ended, or was killed, during the attempt"))
        start, lost = time.perf_counter(), False
        try:
            finding = measure(*args)
        except NotHereError as error:
            finding = Finding(name, "skipped", str(error))
        except Exception as error:  # noqa: BLE001 - recorded with its reason; the other attempts continue
            traceback.print_exc()
            finding = Finding(name, "failed", f"{type(error).__name__}: {error}"[:500])
            lost = any(words in str(error) for words in ("CUDA error", "Triton Error [CUDA]"))
        self._write(replace(finding, name=name, seconds=time.perf_counter() - start))
        if lost:
            raise SystemExit(1)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _write(self, finding: Finding) -> None:
        self._found[finding.name] = finding
        write_json([asdict(one) for one in self._found.values()], self.file)


def read_findings(file: Path) -> list[Finding]:
    """The findings of a process; none where it has written nothing yet."""
    return [Finding(**one) for one in read_json(file)] if file.is_file() else []


# ---- device ---------------------------------------------------------------------------------------------------------


def describe_device(notebook: Notebook, device: torch.device) -> None:
    """Device and versions, which the numbers of the other steps depend on."""

    def rates(dtype: torch.dtype) -> Finding:
        one = measure_rates(device, dtype)
        return found(f"{one.matmul / 1e12:.3g} TFLOP/s, {one.copy / 1e9:.4g} GB/s copied", **asdict(one))

    def versions() -> Finding:
        numbers = asdict(gather_conditions(device)) | {"architecture": architecture_of(device)}
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            names = ("multi_processor_count", "total_memory", "shared_memory_per_block_optin", "L2_cache_size")
            numbers |= {name: getattr(properties, name, None) for name in names}  # not all are in every version
        named = ", ".join(f"{name} {numbers['versions'].get(name)}" for name in ("torch", "triton", "diffusers"))
        return found(f"{numbers['architecture']}, Python {numbers['python']}, {named}", **numbers)

    for name in FLOAT_TYPES if device.type == "cuda" else ("float32",):
        notebook.attempt(f"rates in {name}", rates, FLOAT_TYPES[name])
    notebook.attempt("versions", versions)


# ---- correctness ----------------------------------------------------------------------------------------------------


def check_correctness(notebook: Notebook, device: torch.device) -> None:
    """Output and every gradient of the kernels, for each shape, type and kind of call, against the reference."""
    small = [SMALL]
    if device.type != "cpu":
        # as many tokens as have room for their N x N weights, of which the reference holds some 24 in float64 per head
        tokens = min(4096, math.isqrt(int(free_bytes(device) / 2 / (24 * CUT_HEADS * 8))))
        small = [cut(replace(shapes()[name], block_size=64), tokens) for name in SHAPES]
    for kind in ("plain", "everything", "sparse and everything", "causal", "causal softmax"):
        for shape in small:
            for name, dtype in FLOAT_TYPES.items():
                notebook.attempt(f"{shape.name} {name} {kind}", _compare, shape, device, dtype, kind)


def _compare(shape: Shape, device: torch.device, dtype: torch.dtype, kind: str) -> Finding:
    """Errors of the kernels, those of the eager backend beside them, and what is allowed.

    Where terms cancel, the eager backend has a large error too: 1.5 times its error is allowed, up to 0.2, and 10 times
    that of single numbers per head, each a sum over all tokens from weights that kernels round.
    """
    problem = draw_problem(shape, device, dtype, kind)
    expected = problem.reference()
    errors, of_eager = (errors_of(problem.attend(backend), expected) for backend in ("triton", "eager"))
    factors = {"linear_weight": 10, "pooled_bias": 10}
    limits = {
        name: max(limit, min(0.2, factors.get(name, 1.5) * of_eager[name]))
        for name, limit in limits_of(errors, dtype).items()
    }
    wrong = too_large(errors, limits)
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    text = f"worst is {worst}, {errors[worst]:.1e} of {limits[worst]:.0e}"
    numbers = {"grid": shape.grid, "errors": errors, "limits": limits, "errors of eager": of_eager}
    return found(text, f"relative error too large: {wrong}" if wrong else "", **numbers)


# ---- limits ---------------------------------------------------------------------------------------------------------


def check_limits(notebook: Notebook, device: torch.device) -> None:
    """What a small call on one device does not show: offsets beyond 2^31, the same bits twice, another device."""
    cpu = device.type == "cpu"
    tokens, heads, head_dim, block = (32, 1, 16, 16) if cpu else (16384, 16, 128, 64)
    many, words = (3, "few elements") if cpu else (65, "2^31 elements")
    one, long = (Shape("", (count * tokens,), (count,), heads, head_dim) for count in (1, many))
    notebook.attempt(f"{words} along the batch", _check_last_slice, one, many, device)
    notebook.attempt(f"{words} along the tokens", _check_last_slice, long, 1, device)
    notebook.attempt(f"{words}, sparse", _check_last_slice, replace(one, block_size=block), many, device)
    notebook.attempt("the same bits twice", _same_bits_twice, device)
    notebook.attempt("a second device", _second_device, device)
    notebook.attempt("compute-sanitizer", _run_sanitizer, device)


def _check_last_slice(shape: Shape, batch: int, device: torch.device) -> Finding:
    """The last batch row and block of tokens of a call too large for offsets of 32 bits, against the same one alone.

    Blocks do not see each other: they are mixed by an identity matrix.
    """
    size = (batch, shape.tokens, shape.heads, shape.head_dim)
    # of a forward and backward pass: 16 tensors of the size of the query, some of them float32, and a margin
    needed, free = 18 * math.prod(size) * _DTYPE.itemsize, free_bytes(device)
    if needed > free:
        raise NotHereError(f"it needs {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free")

    def attend(query: torch.Tensor, blocks: int) -> dict[str, torch.Tensor]:
        """Output, and gradients of query, key and value, which are one tensor to save memory."""
        grid, mixing = (query.shape[1],), torch.eye(blocks, device=device)
        settings: dict[str, Any] = {"grid": grid, "blocks": (blocks,), "mixing": mixing}
        if shape.block_size is not None:
            settings |= {"sparse": draw_lists(shape, device), **branch_weights(shape.heads, device)}
        tensors = dict.fromkeys(("query", "key", "value"), query)
        return differentiate(partial(mhla_attention, backend="triton", **settings), tensors, query)

    torch.manual_seed(0)
    query, (blocks,) = torch.randn(size, device=device, dtype=_DTYPE), shape.blocks
    rows, tokens = slice(batch - 1, None), slice(-(shape.tokens // blocks), None)
    last = {name: x[rows, tokens].clone() for name, x in attend(query, blocks).items()}
    errors = errors_of(last, attend(query[rows, tokens].clone(), 1))
    wrong = too_large(errors, limits_of(errors, _DTYPE))
    text = f"{query.numel()} elements, error at most {max(errors.values()):.1e}"
    return found(text, f"the last slice differs: {wrong}" if wrong else "", errors=errors)


def _same_bits_twice(device: torch.device) -> Finding:
    shape = SMALL if device.type == "cpu" else shapes()[SHAPES[0]]
    problem = draw_problem(shape, device, _DTYPE, "sparse and everything")
    first, second = problem.attend("triton"), problem.attend("triton")
    differ = [name for name in first if not torch.equal(first[name], second[name])]
    return found("all equal", f"differ: {', '.join(differ)}" if differ else "")


def _second_device(device: torch.device) -> Finding:
    """The same call on a device that is not the current one."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        raise NotHereError("there is no second GPU")
    other = torch.device("cuda", 1 if (device.index or 0) == 0 else 0)
    problem = draw_problem(SMALL, device, _DTYPE, "plain")
    moved = {name: x.to(other) for name, x in problem.tensors.items()}
    there = replace(problem, tensors=moved, upstream=problem.upstream.to(other)).attend("triton")
    errors = errors_of({key: x.to(device) for key, x in there.items()}, problem.attend("triton"))
    return found(torch.cuda.get_device_name(other), too_large(errors, limits_of(errors, _DTYPE)))


def _run_sanitizer(device: torch.device) -> Finding:
    """One tiny call in a process of its own, its memory allocated by CUDA, so that every tensor has its own bounds."""
    if device.type != "cuda" or shutil.which("compute-sanitizer") is None:
        raise NotHereError("there is no NVIDIA GPU with compute-sanitizer installed")
    program = (
        "import torch; from mhla_diffusers.benchmark.gpu_check import SMALL, draw_problem; "
        f"draw_problem(SMALL, torch.device({str(device)!r}), torch.bfloat16, 'sparse and everything').attend('triton');"
        " torch.cuda.synchronize()"
    )
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-P", "-c", program]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("=========")]
    wrong = f"code {ended.returncode}: {' '.join(lines[:6])}" if ended.returncode else ""
    return found(lines[-1] if lines else "", wrong)


# ---- integration ----------------------------------------------------------------------------------------------------


def check_integration(notebook: Notebook, device: torch.device) -> None:
    """Integration of the kernels: autocast, torch.compile, CUDA graphs."""
    for name in ("tiny-wan", "tiny-sana"):
        notebook.attempt(f"autocast training step of {name}", _training_step, name, device)
    for kind in ("plain", "sparse", "sparse by content", "causal"):
        notebook.attempt(f"torch.compile, fullgraph, {kind}", _compile_attention, kind, device)
        notebook.attempt(f"CUDA graph, {kind}", _replay_graph, kind, device)
    notebook.attempt("compile_repeated_blocks", _compile_blocks, device)


def _patched(name: str, device: torch.device, backend: str) -> tuple[Any, dict[str, Any]]:
    """A seeded transformer in float32, every layer patched, and the arguments of its forward."""
    model = models()[name]
    size = choose_sizes(model, None, None, "cpu")[0]
    transformer = build_transformer(model, size, None, device, torch.float32)
    inputs = make_forward_inputs(model, transformer, size, device, torch.float32)
    return apply_mhla(transformer, blocks=model.blocks, sparse="none", layers="all", backend=backend), inputs


def _training_step(name: str, device: torch.device) -> Finding:
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
        missing = [key for key, x in mixings.items() if x.grad is None or not bool(x.grad.isfinite().all())]
        optimizer.step()
        still = [key for key, x in mixings.items() if torch.equal(x, before[key])]
        wrong += [f"no finite gradient of the mixing matrix of {key}" for key in missing]
        wrong += [f"the mixing matrix of {key} does not move" for key in still]
        losses[backend] = float(loss)
    change = abs(losses["triton"] / losses["eager"] - 1)
    wrong += [f"losses {losses}"] if not change <= _LAYERS_LIMIT else []
    return found(f"loss {change:.1e} from eager's", "; ".join(wrong), losses=losses)


def _compiler(device: torch.device) -> str:
    """On a CPU inductor would compile C++ for a minute; what is tried there is the capture of forward and backward."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def _compile_attention(kind: str, device: torch.device) -> Finding:
    """One graph without a break, the same output and gradients."""
    problem = draw_problem(SMALL, device, _DTYPE, kind)
    compiled: Any = torch.compile(mhla_attention, fullgraph=True, dynamic=False, backend=_compiler(device))
    attend = partial(compiled, backend="triton", **problem.settings)
    compiled_output = differentiate(attend, problem.tensors, problem.upstream)
    torch.compiler.reset()
    return _agreement(compiled_output, problem.attend("triton"))


def _replay_graph(kind: str, device: torch.device) -> Finding:
    """Captured on one input and replayed on another: the replay must read the new one."""
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
    return found("the same bits", "" if same else "the replay gives another output")


def _compile_blocks(device: torch.device) -> Finding:
    """Diffusers' own way to compile a transformer, after a patch."""
    transformer, inputs = _patched("tiny-wan", device, "triton")
    with torch.no_grad():
        expected = transformer(**inputs)[0]
        transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=_compiler(device))
        compiled = transformer(**inputs)[0]
    torch.compiler.reset()
    return _agreement({"output": compiled}, {"output": expected})


def _agreement(one: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Finding:
    errors = errors_of(one, expected)
    wrong = too_large(errors, dict.fromkeys(errors, _LAYERS_LIMIT))
    return found(f"differs by at most {max(errors.values()):.1e}", wrong, errors=errors)


# ---- the run: a process per step ------------------------------------------------------------------------------------

STEPS: dict[str, tuple[Callable[[Notebook, torch.device], None], float]] = {
    "device": (describe_device, 60),
    "correctness": (check_correctness, 600),
    "limits": (check_limits, 180),
    "integration": (check_integration, 300),
}
"""Name → what it does, and the seconds after which its process is ended, in the order of a run."""


@dataclass(frozen=True)
class Report:
    """The result of one step."""

    step: str
    device: str
    """Name of the card or processor."""
    status: Status
    reason: str
    """Why the step as a whole failed; empty where its findings say so."""
    seconds: float
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        """How many findings there are of each kind, and the first words of those that failed, else of the others."""
        counts = {status: sum(one.status == status for one in self.findings) for status in ("ok", "failed", "skipped")}
        words = [self.reason, ", ".join(f"{number} {status}" for status, number in counts.items() if number)]
        first = sorted(self.findings, key=lambda one: one.status != "failed")
        words += [f"{one.name}: {one.text}" for one in first if one.text][:3]
        return _in_one_line("; ".join(word for word in words if word))


def choose_steps(names: Sequence[str] | None) -> list[str]:
    """Steps by name, in the order of ``STEPS``; all for None. A name may be several with commas between them.

    Raises:
        ValueError: an unknown name.
    """
    wanted = [name.strip() for text in names or () for name in text.split(",")]
    for name in wanted:
        if name not in STEPS:
            raise ValueError(f"Unknown step {name!r}; allowed: {', '.join(STEPS)}. Leave --steps out to run all.")
    return [step for step in STEPS if step in wanted or not wanted]


def check_gpu(steps: Sequence[str], device: torch.device, output: Path) -> bool:
    """Run steps one after the other; a step whose result is there and ok is kept.

    Args:
        steps: which.
        device: where; on a CPU sizes are small, and the kernels run through Triton's interpreter.
        output: gets ``{step}.json`` and ``{step}.log`` per step, and ``summary.md``.

    Returns:
        Whether none of them failed.

    Raises:
        OSError: the folder cannot be written, or holds results of another device.
        ValueError: a file in it is no result.
    """
    check_writable(output)
    name = gather_conditions(device).device
    reports = {step: one for step in STEPS if (one := _read_report(output / f"{step}.json", name)) is not None}
    # so that a scheduler's signal ends the process of the step too
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for step in steps:
            kept = step in reports and reports[step].status == "ok"
            if not kept:
                reports[step] = run_step(step, device, name, output, STEPS[step][1])
                write_json(asdict(reports[step]), output / f"{step}.json")
            write_text(_summary([reports[one] for one in STEPS if one in reports], name), output / "summary.md")
            status = f"{reports[step].status}, " + ("kept" if kept else f"{reports[step].seconds:.0f} s")
            console().print(f"{step}: {status}; {reports[step]}", highlight=False, markup=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    return all(reports[step].status != "failed" for step in steps)


def run_step(step: str, device: torch.device, name: str, output: Path, seconds: float) -> Report:
    """Run one step; after a crash its process is started anew, as long as each start finds something more.

    An illegal memory access leaves a process in which every further call fails: a new one makes the attempts that are
    left.
    """
    findings, start = output / f".{step}.json", time.monotonic()
    findings.unlink(missing_ok=True)
    # -P: use this process's package, ignoring the current folder
    command = [sys.executable, "-P", "-m", "mhla_diffusers.benchmark.gpu_check", step, str(device), str(findings)]
    # kernels are made for the interpreter on a CPU, and for the card elsewhere
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONUNBUFFERED": "1"} | ({"TRITON_INTERPRET": "1"} if device.type == "cpu" else {})
    reason, known = "", -1
    with (output / f"{step}.log").open("wb") as log:
        while len(read_findings(findings)) > known:
            known = len(read_findings(findings))
            left = start + seconds - time.monotonic()
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code = process.wait(timeout=max(0.0, left))
                reason = f"its process ended with code {code}" if code else ""
            except subprocess.TimeoutExpired:
                code, reason = None, f"ended after {seconds:.0f} s, its limit"
            finally:
                with suppress(ProcessLookupError):  # and what it started
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code in (0, None):
                break
    all_found = tuple(read_findings(findings))
    findings.unlink(missing_ok=True)
    statuses = {one.status for one in all_found}
    status: Status = "failed" if reason or "failed" in statuses else "skipped" if statuses == {"skipped"} else "ok"
    return Report(step, name, status, reason, time.monotonic() - start, all_found)


def _read_report(file: Path, device: str) -> Report | None:
    if not file.is_file():
        return None
    try:
        saved = read_json(file)
        report = Report(**saved | {"findings": tuple(Finding(**one) for one in saved["findings"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{file} is no result of mhla bench gpu-check; choose another --output.") from error
    if report.device != device:
        raise OSError(f"{file} is of {report.device!r}; this is {device!r}. Choose another --output.")
    return report


def _summary(reports: Sequence[Report], device: str) -> str:
    """Markdown: a line per step, then a line per finding."""
    lines = [f"# {device}", "", "| step | status | seconds | most telling |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.step} | {one.status} | {one.seconds:.0f} | {one} |" for one in reports]
    for report in reports:
        lines += ["", f"## {report.step}", "", *([report.reason, ""] if report.reason else [])]
        findings = report.findings
        lines += [_in_one_line(f"- {one.name}: {one.status}, {one.seconds:.1f} s; {one.text}") for one in findings]
    return "\n".join(lines) + "\n"


def _in_one_line(text: str) -> str:
    """For a cell of a table."""
    return " ".join(text.split()).replace("|", "/")


if __name__ == "__main__":
    if sys.argv[1:]:
        step_name, device_name, file_name = sys.argv[1:]
        STEPS[step_name][0](Notebook(Path(file_name)), torch.device(device_name))
    else:
        sys.exit(not check_gpu(list(STEPS), choose_device("auto"), Path("outputs/gpu-check")))
