"""Input and output of a page: the logged-in person, the submitted form, and the kinds of responses.

A handler sees an :class:`RequestContext` and nothing else of HTTP.
"""

from __future__ import annotations

import base64
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from protos.common.errors import PeerError

_SAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_TEXT_CHARS: Final = 262_144  # of one field
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"  # of every statement that a person signs


_SENTENCES: Final[Mapping[str, str]] = MappingProxyType(  # what is agreed to when an action is
    {
        "appoint": "{subject} is appointed as {value}",
        "dismiss": "{subject}, {value}, is dismissed",
        "enrol": "the site {subject} takes part, by the request {value}",
        "limit": "the limit of {subject} becomes {value}",
        "release": "the release {subject} leaves, with the artifact {value}",
        "waive": "the federation goes on without {subject}, whose budgets are spent whole, after restore {value}",
    }
)


class PageError(PeerError):
    """The page refuses, with a sentence for the person and an HTTP status."""

    def __init__(self, status: int, sentence: str) -> None:
        """``status``: 400 to 599. ``sentence``: no patient data, no paths; it is shown."""
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class _MissingError(PageError, KeyError):
    """A field that the form must have."""


@dataclass(frozen=True, slots=True)
class LoggedInPerson:
    """The logged-in person and role, by the ledger."""

    name: str
    role: str
    public: bytes = b""  # Ed25519, raw: the key whose signatures count; b"" when the ledger holds none


class Form(Mapping[str, str]):
    """The fields of a form. One that is missing is a refusal with its name."""

    def __init__(self, pairs: tuple[tuple[str, str], ...]) -> None:
        """In the order in which they were sent.

        Raises:
            PageError: a text with control characters, or with marks that turn the direction of writing around.
        """
        self._all: dict[str, list[str]] = {}
        for name, text in pairs:
            plain = text.replace("\r\n", "\n").replace("\r", "\n")
            if len(plain) > _TEXT_CHARS or not is_plain(plain) or not is_plain(name):
                shown = name if name.isprintable() and len(name) <= 40 else "a field"
                raise PageError(400, f"{shown}: holds characters that cannot be shown, or too many of them.")
            self._all.setdefault(name, []).append(plain)

    def __getitem__(self, name: str) -> str:
        """The field's text.

        Raises:
            PageError: it is missing, or given twice.
        """
        texts = self._all.get(name, [])
        if len(texts) != 1:
            raise _MissingError(400, f"The field “{name}” is {'given twice' if texts else 'missing'}.")
        return texts[0]

    def all(self, name: str) -> tuple[str, ...]:
        """Every value of a field that may be chosen several times."""
        return tuple(self._all.get(name, ()))

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._all)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._all)


def is_plain(text: str) -> bool:
    """Whether a text holds no control character but ends of lines and tabs, and nothing that reverses writing."""
    return not any(
        (unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t") or unicodedata.bidirectional(c) in _TURNS
        for c in text
    )


_TURNS: Final = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@dataclass(frozen=True, slots=True, eq=False)
class RequestContext:
    """One request of a person who may make it."""

    who: LoggedInPerson | None  # None on the pages before a login
    path: str
    form: Form
    uploads: Mapping[str, bytes]
    render: Callable[[RequestContext, str, Mapping[str, Any]], str]
    csrf: str = ""
    flash: str = ""
    note: Callable[[str], None] = lambda _words: None  # say this once, on the next page
    encode: Callable[[str, tuple[str, ...]], bytes] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    at: float = 0.0  # when it was asked, in seconds since 1970
    by_certificate: bool = False  # the login is by the person's own pinned certificate, not by OpenID

    @property
    def person(self) -> LoggedInPerson:
        """Who is logged in."""
        if self.who is None:
            raise PageError(401, "Log in first.")
        return self.who

    def page(self, template: str, /, **context: Any) -> Response:
        """A page from a template, with what it shows."""
        return self._html(200, template, context)

    def again(self, template: str, /, **context: Any) -> Response:
        """The same page with what is wrong with the form that was sent."""
        return self._html(422, template, context)

    def _html(self, status: int, template: str, context: Mapping[str, Any]) -> Response:
        return Response(self.render(self, template, context), status, media_type="text/html")

    def go(self, path: str, message: str = "") -> Response:
        """To another page of this console, after something was done; the message is shown there, once."""
        if not is_local(path):
            raise ValueError("a console leads to its own pages only")
        if message:
            self.note(message)
        return RedirectResponse(path, 303)

    def download(self, name: str, body: bytes, media_type: str) -> Response:
        """A file to be kept, never shown in the page's place."""
        safe = _SAFE.sub("_", name).lstrip("._-")[:100] or "download"
        headers = {"content-disposition": f'attachment; filename="{safe}"'}
        return Response(body, media_type=media_type, headers=headers)

    def png_response(self, png: bytes) -> Response:
        """An image in a page.

        Raises:
            ValueError: it is no PNG.
        """
        if not png.startswith(_PNG):
            raise ValueError("an image in a page is a PNG")
        return Response(png, media_type="image/png")

    def envelope(self, field_name: str = "envelope") -> bytes:
        """The signed envelope from a sign panel: made in the browser, or a file of `ledger sign`.

        Raises:
            PageError: neither.
        """
        made = self.form.get(field_name, "").strip().encode() or self.uploads.get(field_name, b"").strip()
        if not made:
            raise PageError(
                400, "Nothing signed came along: choose your key file, or the file that `ledger sign` made."
            )
        return made

    def signing(self, origin: str, serial: str, action: str, subject: str, value: str) -> dict[str, Any]:
        """What the macro ``sign_panel`` needs so that this person approves a proposal.

        Args:
            origin: the ledger's.
            serial: of the proposal.
            action: such as ``limit``.
            subject: whom or what it is about.
            value: what it shall be.
        """
        return self._to_sign("approval/v1", (origin, serial, action, subject, value))

    def requesting(self, origin: str, serial: str, action: str, subject: str, value: str) -> dict[str, Any]:
        """The same for a request: this person asks that others approve it, and may not approve it then."""
        return self._to_sign("request/v1", (origin, serial, action, subject, value))

    def _to_sign(self, kind: str, words: tuple[str, str, str, str, str]) -> dict[str, Any]:
        if self.encode is None:
            raise RuntimeError("give Pages an `encode`, the law's own way to write a statement")
        origin, serial, action, subject, value = words
        raw = self.encode(kind, (self.person.name, *words))
        return {
            "kind": kind.partition("/")[0],
            "person": self.person.name,
            "origin": origin,
            "serial": serial,
            "action": action,
            "subject": subject,
            "value": value,
            "statement": base64.b64encode(raw).decode(),
            "payload_type": PAYLOAD_TYPE,
            "words": Markup(_SENTENCES.get(action, "{action} {subject}: {value}")).format(  # noqa: S704 - our own
                action=action, subject=_said("subject", subject), value=_said("value", value)
            ),
            "command": _command("ask" if kind == "request/v1" else "sign", self.person.name, words),
            "public": base64.b64encode(self.person.public).decode(),
        }


def _command(verb: str, person: str, words: tuple[str, str, str, str, str]) -> str:
    """The command that signs the very same bytes on another machine."""
    origin, serial, action, subject, value = words
    typed = value.split()
    if action == "appoint" and re.fullmatch(r"[0-9a-f]{64}", typed[-1] if typed else ""):
        typed[-1] = base64.b64encode(bytes.fromhex(typed[-1])).decode()  # as `ledger person` printed it
    options = ["--ledger", origin, "--person", person, "--serial", serial, "--key", "YOUR.key"]
    options += ["--out", f"{serial}-{person}.json"]
    said = [action, subject, *typed]
    if any(text.startswith("-") for text in said):  # somebody's words shall not become options
        return shlex.join(["ledger", verb, *options, "--", *said])
    return shlex.join(["ledger", verb, *said, *options])


def _said(name: str, text: str) -> Markup:
    """A word of the statement, marked: `sign.js` compares what is shown with the bytes that it signs."""
    return Markup('<span data-said="{}">{}</span>').format(name, text)


def is_local(path: str) -> bool:
    """Whether a text leads to a page of this very console."""
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() and "\\" not in path
