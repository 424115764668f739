"""The documentation site, made by Sphinx from the Markdown pages as they stand: `make docs-site` writes it to `site/`.

The source folder is the repository, so that links from `docs/` to the README and to results work on the site as they do
on a code host. `make check` builds the site and fails on every warning: a dead link or heading, a missing picture, a
page that is not in `NAVIGATION`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
NAVIGATION = {
    "README": {
        "Use": [
            "docs/concepts", "docs/redistribute", "docs/compiled-programs", "docs/token-dispatch", "docs/integrations",
            "docs/several-machines", "docs/benchmarking",
        ],
        "Look up": [
            "docs/troubleshooting", "docs/limits", "docs/reliability", "docs/versions", "CHANGELOG",
        ],
        "API": ["docs/api/index"],
        "Contribute": ["CONTRIBUTING", "docs/how-it-works", "docs/architecture", "docs/gpu"],
    },
    "docs/api/index": {
        "API": [
            f"docs/api/{page}"
            for page in ("redistribution", "dtensor", "planner", "token_dispatch", "integrations", "tracing", "errors")
        ]
    },
    "docs/benchmarking": {"Results": ["bench/results/**"]},
}  # fmt: skip
"""Page to the pages below it in the sidebar, by caption, in order."""

project = "shardweave"
version = release = re.search(r'__version__ = "(.*)"', (ROOT / "__init__.py").read_text(encoding="utf-8"))[1]  # type: ignore[index]
author = "the shardweave authors"
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**.md", "bench/results/**.md"]
# Sphinx lists every folder that is not excluded, environments included.
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("docs", "bench")]
extensions = ["myst_parser"]
nitpicky = True
smartquotes = False
myst_heading_anchors = 6
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the page's `NAVIGATION`, so that the files need no directives of Sphinx."""
    for caption, pages in NAVIGATION.get(page, {}).items():
        lines = "\n".join(f"/{below}" for below in pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{lines}\n```\n"


def _write_index(app: Sphinx, error: Exception | None) -> None:
    """The folder itself opens the README."""
    if error is None and app.builder.format == "html":
        page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_navigation)
    app.connect("build-finished", _write_index)
