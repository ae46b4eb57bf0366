"""Make a kernel that Hugging Face's ``kernels`` loads: ``python tools/make_kernel.py FOLDER``.

The folder gets the operators of ``mhla_diffusers/attention`` unchanged, once as sources for ``kernel-builder``
(``torch-ext/mhla``) and once for each backend (``build/torch-cuda``), as ``kernel-builder`` lays them out. Nothing is
uploaded.
"""

import argparse
import hashlib
import shutil
import tomllib
from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory

from mhla_diffusers.files import write_json

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "tools" / "kernel"
"""What a kernel has beside the operators: build file, card and ``__init__``."""


def make_kernel(folder: Path) -> None:
    """Write a kernel into a folder, all of it or nothing.

    The name of a loaded variant, and so the namespace of its operators, holds a hash of the sources: several versions
    of the kernel, and ``mhla_diffusers`` itself, run in one process.

    Raises:
        FileExistsError: the folder is there already.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists. Remove it, or choose another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    general = tomllib.loads((TEMPLATE / "build.toml").read_text(encoding="utf-8"))["general"]
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside:
        kernel = Path(aside, "kernel")
        sources = kernel / "torch-ext" / general["name"]
        shutil.copytree(
            ROOT / "mhla_diffusers" / "attention", sources / "attention", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(ROOT / "mhla_diffusers" / "errors.py", sources)
        shutil.copy(TEMPLATE / "__init__.py", sources)
        for file in (TEMPLATE / "build.toml", TEMPLATE / "README.md", ROOT / "LICENSE"):
            shutil.copy(file, kernel)
        files = sorted(file for file in sources.rglob("*") if file.is_file())
        hashes = {file.relative_to(sources).as_posix(): hashlib.sha256(file.read_bytes()).digest() for file in files}
        version = hashlib.sha256(b"".join(hashes.values())).hexdigest()[:8]
        digest = {name: b64encode(value).decode() for name, value in hashes.items()}
        for backend in general["backends"]:
            variant = shutil.copytree(sources, kernel / "build" / f"torch-{backend}")
            metadata = {"id": f"_{general['name']}_{backend}_{version}"}
            metadata |= {key: general[key] for key in ("name", "version", "license")}
            metadata |= {"python-depends": [], "backend": {"type": backend}}
            write_json({**metadata, "digest": {"algorithm": "sha256", "files": digest}}, variant / "metadata.json")
        kernel.rename(folder)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    make_kernel(parser.parse_args().folder)


if __name__ == "__main__":
    main()
