"""The documentation site: these pages as HTML that opens from a folder, without a network, and can be searched there.

``make docs`` builds it. Every warning is an error: a link, an anchor or a page that is not there stops the build.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

HERE: Final = Path(__file__).parent
_PAGE: Final = re.compile(r"(?:deploy/docs/)?((?:adr/)?[\w-]+)\.md")
_EXAMPLE: Final = re.compile(r"(?:deploy/docs/)?([\w-]+\.example\.toml)")

project = "Lazaret"
author = copyright = "the authors of Lazaret"
version = release = str(tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]["version"])
extensions = ["myst_parser"]
myst_heading_anchors = 3
nitpicky = True
smartquotes = False  # a quotation mark that is copied into a shell stays one
highlight_language = "none"

html_theme = "alabaster"  # of Sphinx itself: no font, style or script from another machine
html_title = "Lazaret"
html_static_path = ["static"]
html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # a page in a folder may not read other pages there; titles and headings are enough
html_sidebars = {"**": ["about.html", "searchbox.html", "navigation.html"]}
html_theme_options = {
    "description": "Privacy gateway for hospitals",
    "font_family": "system-ui, sans-serif",
    "page_width": "1200px",
    "sidebar_width": "260px",
    "sidebar_collapse": True,
    "show_powered_by": False,
}


class NamedPages(SphinxTransform):
    """Make links of the pages and examples that a text names, such as `deploy/docs/pacs.md`."""

    default_priority = 210

    def apply(self, **_: Any) -> None:
        """Put a link around each name; Sphinx reports a page that is not there."""
        for literal in list(self.document.findall(nodes.literal)):
            page, example = _PAGE.fullmatch(literal.astext()), _EXAMPLE.fullmatch(literal.astext())
            link: nodes.Element | None = None
            if isinstance(literal.parent, nodes.reference | addnodes.pending_xref):
                continue
            if page and (page[1] in self.env.found_docs or literal.astext().startswith("deploy/docs/")):
                about = {"refdomain": "std", "reftype": "doc", "reftarget": f"/{page[1]}", "refdoc": self.env.docname}
                link = addnodes.pending_xref("", refexplicit=True, refwarn=True, **about)
            elif example:
                link = addnodes.download_reference("", reftarget=f"/{example[1]}", refdoc=self.env.docname)
            if link is not None:
                literal.replace_self(link)
                link += literal


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the links; pages can be read in parallel."""
    app.add_transform(NamedPages)
    return {"parallel_read_safe": True}
