"""The notebook, run from top to bottom as a reader would run it."""

import ast
import json

from .snippets import ROOT

FILE = ROOT / "docs" / "tour.ipynb"
CELLS = json.loads(FILE.read_text(encoding="utf-8"))["cells"]


def run(source, names):
    """Run a cell; what its last line is worth, as a notebook shows it."""
    *lines, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        lines.append(last)
    exec(compile(ast.Module(lines, []), str(FILE), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(FILE), "eval"), names) if isinstance(last, ast.Expr) else None


def test_notebook_tells_what_is_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    shown = {cell["id"]: run("".join(cell["source"]), names) for cell in CELLS if cell["cell_type"] == "code"}
    moved = {name: names["moved"](names[name]) for name in ("softmax", "linear", "sparse")}
    # "fall apart", "the digits are back", and adapting helps
    assert moved["softmax"] == 0 and moved["linear"] > 0.05 > 0.02 > moved["sparse"] > 0
    adapted, adapted_sparse = map(float, shown["adapted"])
    assert moved["linear"] > 1.5 * adapted > 2 * adapted_sparse > 0
    assert "6.2% of the pairs of 32 blocks" in str(shown["sparse-description"])
    assert "4 of 4 self-attentions replaced" in str(shown["patch"])
    assert shown["mixing"].argmax() == 5
    assert shown["save"] is True and shown["remove"] is True
    assert shown["open"].size == (256, 64)


def test_notebook_is_kept_without_outputs():
    for cell in CELLS:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert FILE.stat().st_size < 20_000
