"""A page as a browser takes it in, for tests of what it shows."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Final

VOID: Final = frozenset({"meta", "br", "img", "link", "input", "hr"})


class HtmlPage(HTMLParser):
    """The elements of a page with their attributes, and the text that people read.

    Every element must be closed, in order, and say each attribute once.
    """

    def __init__(self, page: bytes | str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page.decode() if isinstance(page, bytes) else page)
        self.close()
        assert self.open == [], "every element is closed, in order"

    @property
    def text(self) -> str:
        """The text, with one space between words."""
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), "no attribute is said twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not (self.open and self.open[-1] == "style"):
            self.words.append(data)
