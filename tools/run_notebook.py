"""Run the notebook of the pages from top to bottom, and keep what its cells show.

python tools/run_notebook.py docs/tour.ipynb
"""

import ast
import base64
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell, and return what its last line is worth, as a notebook shows it."""
    *lines, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        lines.append(last)
    exec(compile(ast.Module(lines, []), "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if isinstance(last, ast.Expr) else None


def output_of(value: Any) -> dict[str, Any]:
    """Return what a notebook keeps of a value: a picture, or its text."""
    data = {"text/plain": repr(value) if isinstance(value, str) else str(value)}
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.convert("L").save(file, "PNG", optimize=True)  # the digits are grey
        data = {"text/plain": "a picture", "image/png": base64.b64encode(file.getvalue()).decode("ascii")}
    return {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}


def main(file: Path) -> None:
    """Run a notebook in an empty folder, and write it with the outputs."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                value = run("".join(cell["source"]), names)
                cell["outputs"] = [] if value is None else [output_of(value)]
        os.chdir(here)
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
