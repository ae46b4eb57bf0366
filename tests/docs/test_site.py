"""Links, and the site that is built of the pages."""

import re

import pytest
from mkdocs.__main__ import cli

import mhla_diffusers
import mhla_diffusers.attention
import mhla_diffusers.training
from mhla_diffusers.evaluation import metrics

from .snippets import PAGES, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages, built as make docs builds them: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        cli.main(["build", "--strict", "--quiet", "--site-dir", str(folder)], standalone_mode=False)
    return folder


def test_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 10_000


def test_nothing_is_fetched_when_a_page_is_opened(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*src="(https?:[^"]+)"', page.read_text())
        fetched += re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="(https?:[^"]+)"', page.read_text())
        assert fetched == [], page.name


def test_api_shows_every_public_name(site):
    shown = set(re.findall(r' id="mhla_diffusers\.([\w.]+)"', (site / "api" / "index.html").read_text()))
    last = {name.rpartition(".")[2] for name in shown}
    assert set(mhla_diffusers.__all__) <= last
    for module in (mhla_diffusers.attention, mhla_diffusers.training):
        assert set(module.__all__) <= last
    public = {name for name, value in vars(metrics).items() if getattr(value, "__module__", "") == metrics.__name__}
    assert {name for name in public if not name.startswith("_")} <= last


def test_api_begins_with_apply_mhla_and_the_notebook_is_a_page(site):
    api = (site / "api" / "index.html").read_text()
    names = re.findall(r' id="mhla_diffusers\.([\w.]+)"', api)
    assert names[0].endswith("apply_mhla") and "::</p>" not in api and ":attr:" not in api
    tour = (site / "tour" / "index.html").read_text()
    assert "Sparse attention" in tour and "apply_mhla" in tour
    assert tour.count("data:image/png;base64,") == 4 and "4 of 4 self-attentions replaced" in tour, "with its outputs"
    assert 'href="tour/"' in (site / "index.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = page if not file else page.parent / file
        assert found.is_file(), f"{page.name} links to {target}"
        # those of the API reference are made when it is built, and checked then
        if anchor and found.name != "api.md":
            assert anchor in anchors(found), f"{page.name} links to {target}"


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
