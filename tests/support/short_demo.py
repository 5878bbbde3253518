"""``python short_demo.py WORDS``: ``python -m deploy.demo WORDS`` with the first half of its story, and no PACS."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.demo import __main__ as demo
from deploy.demo.scale import Scale
from deploy.demo.scene import Say, Scene


class ShortScene(Scene):
    """Three hospitals are enrolled and have read their folders; then everybody stops, as after the whole story."""

    __slots__ = ()

    def story(self) -> Iterator[tuple[str, Callable[[Say], str]]]:
        """The steps."""
        yield "folders", self.folders
        yield "keys", self.found
        yield "enrolment", self.enrol
        yield "ingest", self.ingest
        yield "the end", self._end

    def _into_orthanc(self, folder: Path, say: Say) -> int:
        return 0

    def _end(self, say: Say) -> str:
        self.stop()
        return ""


def main() -> int:
    """Run it."""
    demo.Scene = ShortScene  # type: ignore[misc]
    demo.main_job = Scale  # type: ignore[assignment,misc]
    demo._summary = lambda _scene: None
    return demo.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
