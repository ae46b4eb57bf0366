"""The operators as a kernel of Hugging Face's ``kernels``: made in a folder, loaded from there, the package's own."""

import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch

from mhla_diffusers import attention

from ..attention.triton.interpreter import make_interpreter_fast
from ..scripts import load_script, run_script

make_interpreter_fast()
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU's machine no interpreter runs kernels")
GRID, BLOCKS = (4, 4, 4), (1, 2, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "mhla"
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_script(load_script("tools/make_kernel.py", monkeypatch), monkeypatch, folder)
    return folder


@pytest.fixture(scope="module", params=["kernels", "by its path"])
def kernel(request, folder):
    if request.param == "kernels":
        kernels = pytest.importorskip("kernels", reason="kernels is missing; .ci/run installs it")
        return kernels.get_local_kernel(folder, backend="cpu")
    variant = folder / "build" / "torch-cpu"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs(functions, name, backend):
    """The output of an operator, and the gradients of query, key and value."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 64, 1, 16, requires_grad=True) for _ in range(3)]
    if name == "mhla":
        mixing = functions.initial_mixing(BLOCKS, "locality")
        output = functions.mhla_attention(*inputs, mixing, GRID, BLOCKS, backend=backend)
    else:
        output = functions.sparse_attention(*inputs, GRID, density=0.2, block_size=16, backend=backend)
    return output, *torch.autograd.grad(output.square().sum(), inputs)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=INTERPRETED)])
@pytest.mark.parametrize("name", ["mhla", "sparse"])
def test_its_functions_are_those_of_the_package(kernel, name, backend):
    for found, expected in zip(outputs(kernel, name, backend), outputs(attention, name, backend), strict=True):
        assert torch.equal(found, expected)


def test_it_offers_what_the_package_offers_by_operators_of_its_own(kernel):
    """So the package and several versions of the kernel run in one process."""
    assert kernel.__all__ == attention.__all__
    assert kernel.__name__ != "mhla_diffusers"
    own, package = (getattr(torch.ops, name).to_blocks.default for name in (kernel.__name__, "mhla_diffusers"))
    assert own is not package


def test_it_needs_torch_and_triton_alone(folder):
    for variant in ("cpu", "cuda", "rocm"):
        root = folder / "build" / f"torch-{variant}"
        for file in root.rglob("*.py"):
            imported = re.findall(r"^(?:import|from) (\w+)", file.read_text(), re.MULTILINE)
            assert set(imported) <= {"torch", "triton", *sys.stdlib_module_names}, file
            for dots, module in re.findall(r"^\s*from (\.+)([\w.]*) import", file.read_text(), re.MULTILINE):
                found = file.parents[len(dots) - 1].joinpath(*module.split("."))
                assert found.is_relative_to(root) and (found.is_dir() or found.with_suffix(".py").is_file()), file


def test_kernels_accepts_its_files(folder):
    rust = pytest.importorskip("kernels._rust", reason="kernels is missing; .ci/run installs it")
    assert len(rust.Build.open(folder).general.backends) == 3
    for variant in (folder / "build").iterdir():
        digest = rust.Metadata.read_from_file(variant / "metadata.json").digest
        digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))
