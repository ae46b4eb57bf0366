"""Numbers of the pages: measured ones stand in the shipped tables, counted ones are counted again."""

import ast
import csv
import re

import pytest
from typer.testing import CliRunner

from mhla_diffusers.benchmark.cases import choose_cases
from mhla_diffusers.cli import app
from mhla_diffusers.config import KINDS, PROFILES, load_patch
from mhla_diffusers.families import families
from mhla_diffusers.families.refused import REFUSED
from mhla_diffusers.patching.describe import steps_in_words
from mhla_diffusers.training import TrainingConfig

from .snippets import PAGES, ROOT, snippets

RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
H100 = RESULTS.partition("## On an H100")[2].partition("## The tiny pipelines")[0]


def rows_of(text):
    """The cells of every line of a table, by the first."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines]


def table_under(text, header):
    """Rows of the first table whose header begins so."""
    return rows_of(text[text.index(f"| {header}") :].partition("\n\n")[0])[2:]


def measured(table, *keys):
    """Rows of a table of studies/, by some of their columns."""
    with (ROOT / "studies" / table).open() as file:
        return {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}


def most_of(model):
    """Size → tokens, share of self-attention, and the most that a patch brings, as mhla info counts them."""
    table = CliRunner().invoke(app, ["info", "--model", model]).output.partition("by size\n")[2]
    return {size: cells for size, *cells in map(str.split, table.splitlines()[1:])}


def test_what_a_patch_brings_at_most():
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    rows = rows_of(page.partition("## Where it pays")[2].partition("\n## ")[0])
    (flux,) = [cells for model, *cells in rows if model == "flux-dev"]
    assert flux == [cells[-1] for cells in most_of("flux-dev").values()]
    wan = most_of("wan2.1-1.3b")
    assert [cells for model, *cells in rows if model == "wan2.1-1.3b"] == [[size, *wan[size]] for size in wan]


def test_readme_repeats_what_is_counted_and_measured():
    """Its milliseconds stand in the results."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"Flux speeds up by at most {most_of('flux-dev')['1024x1024'][-1]}x" in readme
    for size, softmax, prototype in re.findall(r"one forward, (\S+) \| H100, \S+ \| ([\d,]+) \| (\d+) \|", readme):
        (row,) = [row for row in rows_of(H100[H100.index("480x800x81") :]) if row[-1] == prototype]
        assert softmax.replace(",", "") in re.search(r"softmax took (\d+) and (\d+) ms", H100).groups(), (size, row)
    (cells,) = re.findall(r"one attention, 30,720 tokens.*?CPU threads \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", readme)
    assert list(cells) == [row[-1] for row in rows_of(RESULTS[RESULTS.index("| tokens N") :].partition("\n\n")[0])[2:]]


def test_readme_says_what_the_profiles_bring_and_which_steps_are_dense():
    rows = {name.strip("`"): cells for name, *cells in table_under((ROOT / "README.md").read_text(), "profile |")}
    assert list(rows) == list(PROFILES)
    for name, (density, dense, counted) in rows.items():
        config = PROFILES[name]
        assert density == f"{100 * config.density:g} %"
        assert dense.partition(", and")[0] == steps_in_words(config.dense_steps(50), 50)[len("steps ") : -len(" of 50")]
        for size, number in zip(("480x832", "720x1280"), re.findall(r"\d\.\d\d", counted), strict=True):
            shown = CliRunner().invoke(app, ["info", "--model", "wan2.1-1.3b", "--size", size, "--patch", name]).output
            assert f"a call is at most {number} times faster" in " ".join(shown.split())


def test_dense_steps_of_the_profiles_are_counted():
    rows = table_under((ROOT / "docs/settings.md").read_text(encoding="utf-8"), "profile | 4 steps")
    for (name, *cells), (profile, config) in zip(rows, PROFILES.items(), strict=True):
        assert name == f"`{profile}`"
        for cell, count in zip(cells, (4, 20, 28, 50), strict=True):
            found = [range(int(part.split("-")[0]) - 1, int(part.split("-")[-1])) for part in cell.split(", ")]
            assert tuple(step for steps in found for step in steps) == config.dense_steps(count)


def test_flops_of_sparse_attention_and_mhla():
    page = (ROOT / "docs/inside.md").read_text(encoding="utf-8")
    rows = [row for row in rows_of(page) if row[0].startswith("Wan2.1-")]
    assert len(rows) == 4
    for name, tokens, *numbers in rows:
        model, size = name.split(",")[0].lower(), name.split()[-1]
        (case,) = choose_cases(model, size)
        mhla, sparse = (
            load_patch(f"wan2.1-t2v-1.3b{ending}").patch.sizes_on(case.grid, case.model.heads, case.model.head_dim)
            for ending in ("", "-sparse")
        )
        expected = [case.shape.tokens, mhla.softmax_flops / 1e9, mhla.flops / 1e9, sparse.flops / 1e9]
        found = [float(cell.replace(" ", "")) for cell in (tokens, *numbers)]
        assert found == [pytest.approx(x, rel=0, abs=0.5 if x >= 100 else 0.005) for x in expected], name


def test_configurations_on_pages_are_accepted(tmp_path):
    texts = [snippet.text for page in PAGES for snippet in snippets(page) if snippet.language == "yaml"]
    assert texts
    for text in texts:
        file = tmp_path / "config.yaml"
        if not re.search("^steps:", text, re.MULTILINE):  # settings alone, of a LoRA
            text += "\noutput: o\nmodel: m\ndata: d\npatch: wan2.1-t2v-1.3b\ntrainable: lora\nlora_rank: 2\n"
            text += "objectives: {diffusion: 1.0}\nsteps: 1\nlearning_rate: 1.0e-4\n"
        file.write_text(text, encoding="utf-8")
        assert TrainingConfig.from_yaml(file).steps


CARRY = "density", "dense steps", "corrected", "cache"
DENSITIES = ("2.5", "5.0", "10.0", "15.0", "25.0")


def untrained(pixels):
    return measured(f"real_weights/untrained-{pixels}.csv", "self-attention")


def test_errors_on_real_weights_are_those_of_the_study():
    found = untrained(1036)
    rows = table_under((ROOT / "README.md").read_text(encoding="utf-8"), "self-attention | keys per query")
    assert len(rows) == 6
    for name, *cells in rows:
        row = found[re.sub(r"^sparse, ([\d.]+) %$", lambda match: f"sparse {float(match[1])}%", name),]
        for cell, column in zip(cells, ("cost", "features", "attention", "mask", "matches"), strict=True):
            part = 0.01 if cell.endswith("%") else 1.0
            number = cell.removesuffix(" %")
            expected = float(row[column]) / part
            decimals = len(number.partition(".")[2])
            assert float(number) == pytest.approx(expected, abs=0.51 * 10**-decimals), (name, column)


def test_errors_by_density_are_those_of_the_study():
    rows = table_under(RESULTS, "tokens (pixels)")
    assert len(rows) == 4
    for label, what, *errors in rows:
        found = untrained(label.partition("(")[2].removesuffix(")").replace(",", ""))
        ending = "" if what == "sparse" else f", {what}"
        expected = [float(found[f"sparse {density}%{ending}",]["features"]) for density in DENSITIES]
        assert [float(x) for x in errors] == pytest.approx(expected, abs=0.00051), (label, what)


@pytest.mark.parametrize(
    ("file", "header"),
    [("carry/wan-50.csv", "density | dense steps |"), ("carry/wan-long-20.csv", "profile or density | dense steps |")],
)
def test_dense_steps_and_caches_are_those_of_the_study(file, header):
    found = measured(file, *CARRY)
    rows = table_under(RESULTS, header)
    assert len(rows) >= 8
    for density, dense, cache, cost, psnr, digits in rows:
        every, _, what = dense.removeprefix("every ").partition("th, ")
        key = "", "", "", cache
        if (name := density.strip("`")) in PROFILES:
            key = f"{PROFILES[name].density:g}", name, "yes", ""
        elif density != "softmax":
            repeated = f"dense_first 1, dense_every {every}" if what else ""
            corrected = {"corrected": "yes", "dropped": "no", "": ""}[what]
            key = f"{float(density.removesuffix(' %')) / 100:g}", repeated, corrected, cache
        assert float(cost) == pytest.approx(float(found[key]["cost"]), abs=0.0051)
        assert float(psnr.partition(" ")[0]) == pytest.approx(float(found[key]["psnr"]), abs=0.051)
        assert float(digits.removesuffix(" %")) == pytest.approx(100 * float(found[key]["digits"]), abs=0.51)


def test_every_transformer_of_diffusers_and_every_reason_of_a_refusal_is_on_the_page():
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    own = [family for family in families() if family.library == "diffusers"]
    assert not [name for family in own for name in family.transformers if f"`{name}`" not in page]
    rows = rows_of(page.partition("## Refused")[2].partition("## Without a family")[0])[2:]
    assert [(name.strip("`"), why) for name, why in rows] == list(REFUSED.items())
    assert not {name for family in own for name in family.transformers} & REFUSED.keys()


def test_settings_hold_every_field_and_its_default():
    """In the order of the code; sparse attention's default where two differ."""
    found = {name: field for kind in reversed(KINDS) for name, field in kind.model_fields.items()}
    names = list(dict.fromkeys(name for kind in KINDS for name in kind.model_fields))
    section = (ROOT / "docs/settings.md").read_text().split("\n## All settings\n")[1].split("\n#")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    rows = [line.strip("|").split("|", 2) for table in tables for line in table.splitlines()[2:]]
    assert [name.strip(" `") for name, _, _ in rows] == names
    for name, (_, cell, meaning) in zip(names, rows, strict=True):
        default, cell = found[name].default, cell.strip()
        assert meaning.strip(), name
        if found[name].is_required():  # a patch file needs blocks, and in Python the family has some
            assert cell == ("family's" if name == "blocks" else "required"), name
        else:
            written = ast.literal_eval(cell.strip("`"))
            assert (written, type(written)) == (default, type(default)), name
