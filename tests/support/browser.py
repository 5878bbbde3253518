"""A real browser for tests: Debian's Chromium, watched. It reaches this machine and nothing else.

    with chromium() as chrome, chrome.visitor(base, crt, key) as visitor:
        visitor.log_in("/ledger")
        visitor.axe()
        visitor.screenshot("ledger-operator")

When a visitor leaves, the test fails if a page asked for anything beyond this machine, if it tried what the content
security policy forbids, or if a script of it failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped] # it ships no types
from playwright.sync_api import Browser, BrowserContext, Page, Response, sync_playwright

from tests.support.peers import need

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
SCREENS = Path(__file__).resolve().parents[2] / "build" / "screens"
PATIENCE_MS = 120_000  # a page may wait for a process that imports torch, and the machine be busy
_HERE = {"localhost", "127.0.0.1"}
# a page that says no is an answer, and the browser writes a line about it
_AN_ANSWER = re.compile(r"Failed to load resource: the server responded with a status of 4\d\d")
_ARGUMENTS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--no-first-run",
    "--no-pings",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)


@contextmanager
def chromium() -> Iterator[Chrome]:
    """A headless Chromium, until the block ends. One at a time in a process: playwright keeps an event loop."""
    need("chromium")
    arguments = [*_ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, headless=True)
        try:
            yield Chrome(browser)
        finally:
            browser.close()


@dataclass
class Chrome:
    """A browser that is open."""

    browser: Browser

    @contextmanager
    def visitor(
        self,
        base: str,
        certificate: Path | None = None,
        key: Path | None = None,
        *,
        width: int = 1280,
        dark: bool = False,
        script: bool = True,
    ) -> Iterator[Visitor]:
        """Somebody with a profile of their own.

        Args:
            base: the console's address, https://localhost:PORT.
            certificate: of the person, PEM.
            key: its key, PEM.
            width: of the window, in pixels.
            dark: whether the person prefers dark colours.
            script: whether scripts run.
        """
        own: Any = [{"origin": base, "certPath": str(certificate), "keyPath": str(key)}] if certificate else None
        context = self.browser.new_context(
            base_url=base,
            client_certificates=own,
            ignore_https_errors=True,  # the console's own certificate; that it is the right one, tests of TLS ask
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            java_script_enabled=script,
            accept_downloads=True,
            reduced_motion="reduce",
        )
        context.set_default_timeout(PATIENCE_MS)
        visitor = Visitor(base, context, context.new_page())
        visitor.watch()
        try:
            yield visitor
        finally:
            context.close()
        visitor.check()


@dataclass
class Visitor:
    """A person at a browser."""

    base: str
    context: BrowserContext
    page: Page
    asked: list[str] = field(default_factory=list)  # every address that was asked for
    said: list[str] = field(default_factory=list)  # errors of scripts and of the content security policy

    def watch(self) -> None:
        """Remember what the browser does."""
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.context.on("console", self._heard)
        self.context.on("weberror", lambda error: self.said.append(str(error.error)))

    def _heard(self, message: Any) -> None:
        if message.type == "error" and not _AN_ANSWER.match(message.text):
            self.said.append(message.text)

    def check(self) -> None:
        """Fail if anything left this machine, or went wrong in the page."""
        assert not self.foreign(), self.foreign()
        assert not self.said, self.said

    def foreign(self) -> list[str]:
        """What was asked for and is not of this machine."""
        return [
            url
            for url in self.asked
            if urlsplit(url).scheme not in ("data", "blob", "about") and urlsplit(url).hostname not in _HERE
        ]

    def go(self, path: str) -> Response:
        """Open a page."""
        response = self.page.goto(path)
        assert response is not None
        return response

    def log_in(self, to: str = "/") -> None:
        """As a person does it: open the page, be asked, press the button."""
        self.page.goto(to)
        with self.page.expect_navigation():
            self.page.get_by_role("button", name=re.compile("^Log in as ")).click()

    def axe(self) -> None:
        """Fail if axe-core finds a serious or critical violation in the page."""
        axe(self.page)

    def screenshot(self, name: str) -> Path:
        """A picture of the whole page, in build/screens/."""
        return screenshot(self.page, name)

    def pdf(self, name: str) -> Path:
        """The page as it prints, in build/screens/."""
        SCREENS.mkdir(parents=True, exist_ok=True)
        path = SCREENS / f"{name}.pdf"
        self.page.pdf(path=path, format="A4", print_background=False)
        return path


def axe(page: Page) -> None:
    """Fail if axe-core finds a serious or critical violation in the page; each with the elements that it is about."""
    page.wait_for_function("() => document.readyState === 'complete' && document.body !== null")
    found: Any = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    grave = [
        f"{v['id']} ({v['impact']}): {v['help']}: {[node['html'][:160] for node in v['nodes'][:4]]}"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert not grave, "\n".join(grave)


def screenshot(page: Page, name: str) -> Path:
    """A picture of the whole page, in build/screens/."""
    SCREENS.mkdir(parents=True, exist_ok=True)
    path = SCREENS / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path


def rendered(pdf: Path) -> list[Path]:
    """The pages of a PDF as pictures beside it, to be looked at; none where poppler is not installed."""
    if not shutil.which("pdftoppm"):
        return []
    subprocess.run(["pdftoppm", "-r", "80", "-png", str(pdf), str(pdf.with_suffix(""))], check=True)
    return sorted(pdf.parent.glob(f"{pdf.stem}-*.png"))


def sideways(page: Page) -> int:
    """By how many pixels a page is wider than its window; a page that fits has 0."""
    wide: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return max(0, wide)
