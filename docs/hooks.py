"""Hooks of mkdocs: add the notebook, copy files that pages link to, and strip roles from docstrings."""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()\.\./([^)#\s]+)")
"""Target of a link out of the folder of the pages, seen from a page."""
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):(?=<code>)")
"""What stands before a name in docstrings."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give the site the notebook as a page, and a copy of every file of the repository that a page links to.

    Raises:
        FileNotFoundError: a link to a file that is not there.
    """
    root = Path(config.config_file_path).parent
    linked = {target for page in files.documentation_pages() for target in _LINK.findall(page.content_string)}
    for target in sorted(linked):
        source = root / target
        if not source.is_file():
            raise FileNotFoundError(f"A page links to {target}, which is not a file of the repository.")
        files.append(File.generated(config, f"repository/{target}", abs_src_path=str(source)))
    files.append(File.generated(config, "tour.md", content=_page_of(root / "docs/tour.ipynb")))
    return files


def _page_of(notebook: Path) -> str:
    """Return the text, the code and the outputs of a notebook as Markdown."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for data in (output["data"] for output in cell.get("outputs", ())):
            picture = f'<img alt="What the cell shows" src="data:image/png;base64,{data.get("image/png")}">'
            parts.append(picture if "image/png" in data else f"```text\n{data['text/plain']}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository at those copies."""
    folder = posixpath.dirname(page.file.src_uri)
    return _LINK.sub(lambda match: posixpath.relpath(f"repository/{match[1]}", folder or "."), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave the names of functions and classes in docstrings, and drop the roles before them and the marks of code."""
    return _ROLE.sub("", html).replace("<p>::</p>", "").replace("::</p>", ":</p>")
