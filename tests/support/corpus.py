"""Hostile texts, and pages taken apart as a browser would: what is in them that would run, or lead elsewhere."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import pytest

from protos.web import login_pages
from protos.web import router as pages
from protos.web.forms import read_form
from protos.web.request import Form as Sent
from protos.web.router import Router

MARK: Final = "xq7zz"  # of every text that could be found again
MADE: Final = "99999640000243"  # what a template would make of the corpus
CORPUS: Final = (
    f"{MARK}</textarea></title></option><script>alert('{MARK}')</script>\"'><img src=x onerror={MARK}>",
    f"javascript:alert('{MARK}')//{{{{ 9999991*9999973 }}}}{{% raw %}}",
    "../../../../../../../../etc/passwd",
    f'{MARK}\r\nX-Forged: 1\r\n\r\n{{"event": "forged", "level": "info"}}',
    f"{MARK}\x1b[31m\u202e\x00",
    f"{MARK}' OR 1=1; DROP TABLE words; --..\\..%2f..%2f%0d%0aX-Forged:%201 --out=/tmp/{MARK} $(touch /tmp/{MARK})",
    "+" + "9" * 25,  # a number, and nobody's name
    MARK * 1000,
)
_HEADERS: Final = {
    *(
        "content-type",
        "content-length",
        "content-disposition",
        "content-security-policy",
        "cache-control",
        "location",
    ),
    *("x-content-type-options", "x-frame-options", "referrer-policy", "permissions-policy", "set-cookie"),
    *("cross-origin-opener-policy", "cross-origin-resource-policy", "connection"),
}
_LEAKS: Final = (b"root:x:0", b"PRIVATE KEY-----\n", MADE.encode())
_VOID: Final = {"submit", "button", "reset", "image"}


@dataclass(frozen=True)
class Form:
    """A form of a page."""

    method: str
    path: str  # where it is sent
    fields: Mapping[str, tuple[str, ...]]  # what is sent when nobody touches it; (): known, and not sent
    files: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """Every name of it."""
        return self.files | frozenset(self.fields)


class Page(HTMLParser):
    """A page as a browser takes it apart: its links, its forms, and whatever in it would run."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.forms: list[Form] = []
        self.faults: list[str] = []
        self._path, self._open = path, dict[str, Any]()
        self._select, self._options, self._area = "", list[tuple[str, bool]](), ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self._harm(tag, of)
        if tag in ("a", "img", "link", "script") and (to := of.get("href") or of.get("src")):
            self.links.append(to)
        if tag == "form":
            self._open = {"method": of.get("method", "get").upper(), "action": of.get("action", self._path)}
            self._open |= {"fields": {}, "files": set(), "others": []}
        elif self._open and tag in ("input", "button", "select", "textarea"):
            self._field(tag, of)
        elif tag == "option" and self._select:
            self._options.append((of.get("value", ""), "selected" in of))

    def _field(self, tag: str, of: dict[str, str]) -> None:
        name, kind = of.get("name", ""), of.get("type", "submit" if tag == "button" else "text")
        if "formaction" in of:
            self._open["others"].append((of["formaction"], name, of.get("value", "")))
        if not name:
            return
        if tag == "select":
            self._select, self._options = name, []
        elif tag == "textarea":
            self._area = name
            self._open["fields"][name] = ("",)
        elif kind == "file":
            self._open["files"].add(name)
        elif kind in ("checkbox", "radio"):
            chosen = "checked" in of or "required" in of
            before = self._open["fields"].get(name, ())
            self._open["fields"][name] = (*before, of.get("value", "on")) if chosen else before
        elif kind in _VOID:
            self._open["fields"].setdefault(name, ())
        else:
            self._open["fields"][name] = (of.get("value", ""),)

    def handle_data(self, data: str) -> None:
        if self._area:
            (before,) = self._open["fields"][self._area]
            self._open["fields"][self._area] = (before + data,)
        if self._select and self._options and not self._options[-1][0]:
            self._options[-1] = (data.strip(), self._options[-1][1])

    def handle_endtag(self, tag: str) -> None:
        if tag == "select" and self._select:
            chosen = [value for value, selected in self._options if selected] or [v for v, _ in self._options[:1]]
            self._open["fields"][self._select] = tuple(chosen)
            self._select = ""
        elif tag == "textarea" and self._area:
            (before,) = self._open["fields"][self._area]
            self._open["fields"][self._area], self._area = (before.removeprefix("\n"),), ""
        elif tag == "form" and self._open:
            made = self._open
            actions = [(made["action"], "", ""), *made["others"]]
            for action, name, value in actions:
                path = urlsplit(action).path or self._path
                fields = {**made["fields"], **({name: (value,)} if name else {})}
                self.forms.append(Form(made["method"], path, fields, frozenset(made["files"])))
            self._open = {}

    def handle_comment(self, data: str) -> None:
        if MARK in data:
            self.faults.append("a comment holds what was typed")

    def _harm(self, tag: str, of: Mapping[str, str]) -> None:
        """What runs, or leads elsewhere: a console's own pages have none of it."""
        if MARK in tag or any(MARK in name or name.startswith("on") or name == "style" for name in of):
            self.faults.append(f"<{tag} {' '.join(of)}>")
        if (tag == "script" and not of.get("src", "").startswith("/static/")) or tag in ("base", "iframe", "object"):
            self.faults.append(f"<{tag}>")
        for name in ("href", "src", "action", "formaction", "srcset", "poster", "data", "xlink:href"):
            to = of.get(name, "/").strip()
            if to.startswith(("//", "/\\")) or not to.startswith(("/", "#", "?")):
                self.faults.append(f"{name} of <{tag}> leads elsewhere")


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str:
        """The first of that name; "" without one."""
        return next((value for key, value in self.headers if key == name), "")

    @property
    def text(self) -> str:
        """Of a page; "" of anything else."""
        return self.body.decode() if self.header("content-type").startswith("text/html") else ""


class Heard:
    """Which fields each route asked its forms for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @staticmethod
    def listening(patch: pytest.MonkeyPatch) -> Heard:
        """From now on; the forms are the real ones."""
        heard = Heard()

        class Recorded(Sent):
            def __getitem__(self, name: str) -> str:
                heard.names.add(name)
                return super().__getitem__(name)

            def all(self, name: str) -> tuple[str, ...]:
                heard.names.add(name)
                return super().all(name)

        class Files(dict[str, bytes]):
            def get(self, name: str, default: Any = None) -> Any:
                heard.names.add(name)
                return super().get(name, default)

            def __getitem__(self, name: str) -> bytes:
                heard.names.add(name)
                return super().__getitem__(name)

        async def read(request: Any) -> tuple[Sent, dict[str, bytes]]:
            form, files = await read_form(request)
            pairs = tuple((name, text) for name in form for text in form.all(name))
            return Recorded(pairs), Files(files)

        patch.setattr(pages, "read_form", read)
        patch.setattr(login_pages, "read_form", read)
        return heard


_READERS: Final = {"form", "uploads", "query", "query_params", "values"}


def read_by(folder: Path) -> set[str]:
    """The names that the source of a folder reads from what was sent, as far as they are written down there."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            of: ast.expr | None = None
            name: ast.expr | None = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                of, name = node.value, node.slice
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                of, name = node.func.value, node.args[0]
                if node.func.attr == "envelope":
                    of = ast.Name("form")
                elif node.func.attr not in ("get", "all"):
                    continue
            said = getattr(of, "attr", getattr(of, "id", ""))
            if said in _READERS and isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(name.value)
    return found


@dataclass
class Side:
    """A console that is tried, and what the test knows of it."""

    pages: Router
    folder: Path  # everything of the test
    home: Path  # the console's own, in it
    log: Path
    source: Path  # of its pages
    people: Callable[[], Mapping[str, str]]  # who is in office today: name -> role
    certificate: Callable[[str], bytes]  # of a person, DER
    size: Callable[[], int]  # of the ledger
    fill: Callable[[Form, str], Mapping[str, Any]]  # what a person would type: texts, (texts), or bytes of a file
    settle: Callable[[], None]  # wait until nothing is under way
    late: tuple[str, ...] = ()  # what these do ends what others need: they are carried out at the end
    each: frozenset[str] = frozenset()  # routes whose forms differ by their address


def wrong_with(what: str, reply: Reply) -> list[str]:
    """What an answer should not hold, whatever was sent; ``what`` was asked for."""
    wrong = [] if reply.status < 500 else [f"a {reply.status}"]
    for key, value in reply.headers:
        if key not in _HEADERS or "\r" in value or "\n" in value or (MARK in value and key != "location"):
            wrong.append(f"the header {key}: {value[:60]!r}")
    if not re.fullmatch(r"(/(?![/\\])[!-~]*)?", reply.header("location")):
        wrong.append(f"it leads to {reply.header('location')!r}")
    kind = reply.header("content-type").partition(";")[0]
    kept = reply.header("content-disposition").startswith("attachment;")
    if reply.body and not kept and kind not in ("text/html", "text/plain", "image/png") and "/static/" not in what:
        wrong.append(f"it shows {kind}")
    wrong += [f"it tells {leak!r}" for leak in _LEAKS if leak in reply.body]
    if MARK in reply.text or "javascript:" in reply.text:
        wrong += Page(reply.text, "/").faults
    return wrong


def leaves(body: object, text: str) -> Iterator[bytes]:
    """A JSON file with each of its values, and each name, replaced in turn; nothing for another file."""
    try:
        whole = json.loads(body) if isinstance(body, bytes) else None
    except ValueError:
        return
    if isinstance(whole, dict) and "payload" not in whole:  # what is signed is whole, or nothing
        yield json.dumps({**whole, text: "x"}).encode()
        for name in whole:
            yield json.dumps({**whole, name: text}).encode()


def keys_of(body: object) -> set[str]:
    """The names in a JSON file."""
    try:
        whole = json.loads(body) if isinstance(body, bytes) else None
    except ValueError:
        return set()
    return set(whole) if isinstance(whole, dict) else set()


async def call(app: Any, scope: dict[str, Any], body: bytes) -> Reply:
    """One request of ASGI, and its answer."""
    said: list[dict[str, Any]] = []
    told = False

    async def receive() -> dict[str, Any]:
        nonlocal told
        if told:
            await asyncio.Event().wait()  # the connection stays
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    await app(scope, receive, send)
    pairs = tuple((key.decode("latin-1"), value.decode("latin-1")) for key, value in said[0]["headers"])
    return Reply(said[0]["status"], pairs, b"".join(message.get("body", b"") for message in said[1:]))


def texts(value: object) -> bool:
    """Whether a form's value is texts, and no upload."""
    return isinstance(value, tuple) and all(type(one) is str for one in value)


def put(route: Any, path: str, param: str, text: str) -> str:
    """An address with another value of one of its parameters."""
    found = route.path_regex.match(unquote(path))
    assert found is not None, (route.path, path)
    values = {name: quote(value, safe="") for name, value in found.groupdict().items()} | {
        param: quote(text, safe="")
    }
    return re.sub(r"\{(\w+)[^}]*\}", lambda m: values[m[1]], route.path)
