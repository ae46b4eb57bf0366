"""The notebook, run from top to bottom as a reader would run it."""

import json
import re

from ..scripts import load_script
from .snippets import ROOT

FILE = ROOT / "docs" / "tour.ipynb"
CELLS = json.loads(FILE.read_text(encoding="utf-8"))["cells"]


def test_notebook_tells_what_is_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, names = load_script("tools/run_notebook.py", monkeypatch), {}
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    shown = {cell["id"]: script.run("".join(cell["source"]), names) for cell in code}
    for cell in code:  # numbers differ a little from one machine to another
        (kept,) = cell["outputs"]
        now = script.output_of(shown[cell["id"]])
        texts = [re.sub(r"[\d.,]+", "#", one["data"]["text/plain"]) for one in (kept, now)]
        assert texts[0] == texts[1] and kept["data"].keys() == now["data"].keys(), "run tools/run_notebook.py"
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
