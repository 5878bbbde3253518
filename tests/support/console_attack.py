"""What a whole console does with hostile input: every route, parameter, field and upload of it, found and tried.

Nothing is listed by hand. Routes and their parameters are FastAPI's own; fields, uploads and the addresses to try
them at are those of the forms and links that the console serves, as each person, step by step. What a handler reads
beside them is noticed while it runs (:class:`Heard`) and in the source (:func:`read_by`): a field that no form shows,
so that nobody would try it, is a fault.

The console runs in this process behind its own guard; a request is what uvicorn would make of one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode

import httpx

from protos.web.security import RateLimit
from protos.web.sessions import COOKIE
from tests.support.corpus import (
    CORPUS,
    MARK,
    Form,
    Heard,
    Page,
    Reply,
    Side,
    call,
    keys_of,
    leaves,
    put,
    read_by,
    texts,
    wrong_with,
)

_ORIGIN: Final = "https://localhost"
_OWN: Final = {"origin": _ORIGIN, "sec-fetch-site": "same-origin"}
_OUT: Final = {"cookie": "nobody=here"}
_ELSEWHERE: Final[tuple[dict[str, str], ...]] = (
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "https://evil.example"},
    {"sec-fetch-site": "same-site"},
    {},
)
_MOVES: Final = (".log", "-wal", "-shm", "-journal", "search.db")  # what reading changes
_PAGES: Final = 4  # addresses of one route that are looked at in one walk


@dataclass
class Trial:
    """Everything that is tried at one side, and what was wrong."""

    side: Side
    heard: Heard
    corpus: Sequence[str] = CORPUS
    faults: list[str] = field(default_factory=list)
    tried: dict[str, set[str]] = field(default_factory=dict)  # "POST /x/{y}" -> names
    done: dict[str, list[int]] = field(default_factory=dict)  # the same -> answers to a form as it should be
    at: dict[str, tuple[str, str]] = field(default_factory=dict)  # "GET /x/{y}" -> an address, and who saw it
    forms: dict[Any, tuple[Form, str]] = field(default_factory=dict)  # what tells forms apart -> form, who saw it
    sent: int = 0
    shown: int = 0  # pages that showed a text of the corpus, as a text
    taken: set[str] = field(default_factory=set)  # where a text of the corpus was taken

    def __post_init__(self) -> None:
        """Begin; whoever logs in never did so too often: that is another test's."""
        ticks = iter(range(0, 1 << 40, 61))
        self.side.pages.rate = RateLimit(20, 60.0, lambda: float(next(ticks)))
        self.app = self.side.pages.guarded()
        self.runner = asyncio.Runner()
        self.cookies: dict[str, str] = {}
        self.tokens: dict[str, str] = {}
        self.routes: list[Any] = list(self.side.pages.app.router.routes)
        self._attacked: set[Any] = set()
        self._asked: dict[str, set[str]] = {}  # "GET /x" -> names of its query, from its forms
        self._heard: dict[str, set[str]] = {}
        self._before: set[Path] = set()

    # ------------------------------------------------------------------ requests

    def send(
        self, name: str, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Reply:
        """One request of a person; ``path`` with its query, as the bytes of the request line."""
        raw, _, query = path.partition("?")
        given = {"host": "localhost", "content-length": str(len(body)), **(headers or {})}
        if name in self.cookies:
            given.setdefault("cookie", f"{COOKIE}={self.cookies[name]}")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "https",
            "path": unquote(raw),
            "raw_path": raw.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(key.encode(), value.encode("latin-1")) for key, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 443),
            "state": {"peer": self.side.certificate(name) if name else b""},
        }
        self.heard.names.clear()
        reply = self.runner.run(call(self.app, scope, body))
        self.sent += 1
        self._heard.setdefault(f"{method} {self.route(method, path)}", set()).update(self.heard.names)
        return reply

    def enter(self, name: str) -> None:
        """Log somebody in."""
        self.cookies.pop(name, None)
        self.tokens.pop(name, None)
        reply = self.post(name, "/login", {"to": ("/",)})
        found = re.search(rf"{COOKIE}=([^;]+)", reply.header("set-cookie"))
        assert found is not None, reply
        self.cookies[name] = found[1]
        token = re.search(r'name="csrf" value="([^"]+)"', self.send(name, "GET", "/").text)
        assert token is not None
        self.tokens[name] = token[1]

    def post(self, name: str, path: str, fields: Mapping[str, Any], headers: Mapping[str, str] = _OWN) -> Reply:
        """A form with this login's token, unless it has one; bytes, or (file name, bytes), are uploads."""
        headers = {**headers, **(_OUT if path == "/login" else {})}  # else it would end the login that goes on
        data = {key: list(value) for key, value in fields.items() if texts(value)}
        if name in self.tokens:
            data.setdefault("csrf", [self.tokens[name]])
        files = {k: v if isinstance(v, tuple) else (f"{k}.json", v) for k, v in fields.items() if not texts(v)}
        made = httpx.Request("POST", _ORIGIN, data=data, files=files or None)
        kind = made.headers.get("content-type", "application/x-www-form-urlencoded")
        return self.send(name, "POST", path, {**headers, "content-type": kind}, made.read())

    def route(self, method: str, path: str) -> str:
        """Which route answers there; "" for none."""
        plain = unquote(path.partition("?")[0])
        return next((r.path for r in self.routes if method in r.methods and r.path_regex.match(plain)), "")

    def roles(self, key: str) -> frozenset[str]:
        """Who may, by the mark that the kit put on it; empty: before the login."""
        found: frozenset[str] = self._of(key).endpoint.__lazaret_roles__
        return found

    def _may(self, key: str, name: str) -> bool:
        return self.side.people().get(name) in self.roles(key)

    def _of(self, key: str) -> Any:
        return next(r for r in self.routes for m in r.methods if f"{m} {r.path}" == key)

    # ------------------------------------------------------------------ what there is

    def look(self) -> None:
        """Every page that anybody in office is led to; each is judged."""
        for name in self.side.people():
            if name not in self.cookies:
                self.enter(name)
            self._walk(name)
        name = next(iter(self.side.people()))
        self.at.setdefault("GET /login", ("/login", name))
        self.keep(self.judge("a login", self.send(name, "GET", "/login", _OUT)), "/login", name)

    def _walk(self, name: str) -> None:
        ways, seen, count = ["/"], {"/"}, dict[str, int]()
        while ways:
            path = ways.pop(0)
            key = f"GET {self.route('GET', path)}"
            count[key] = count.get(key, 0) + 1
            if count[key] > _PAGES and key[4:] not in self.side.each:
                continue
            reply = self.judge(f"{name} looks at {path}", self.send(name, "GET", path))
            self.shown += MARK in reply.text
            if reply.status == 200:
                self.at.setdefault(key, (path, name))
            for way in self.keep(reply, path, name):
                if way not in seen:
                    seen.add(way)
                    ways.append(way)

    def keep(self, reply: Reply, path: str, name: str) -> list[str]:
        """The forms of a page are remembered; where it leads."""
        here = path.partition("?")[0]
        page = Page(reply.text, here)
        self.faults += [f"{path}: {one}" for one in page.faults]
        for form in page.forms:
            key = f"{form.method} {self.route(form.method, form.path)}"
            if key.endswith(" "):
                self.faults.append(f"{path}: a form is sent to {form.path}, where nobody answers")
            elif form.method == "GET":
                self._asked.setdefault(key, set()).update(form.names)
                given = {name: value[0] for name, value in form.fields.items() if value}
                page.links.append(f"{form.path}?{urlencode(given)}")
            else:
                apart = form.path if key.partition(" ")[2] in self.side.each else ""
                known = key, form.names, form.files, apart
                if known not in self.forms or (self._may(key, name) and not self._may(key, self.forms[known][1])):
                    self.forms[known] = (form, name)
        plain = [way.partition("#")[0] for way in (*page.links, reply.header("location"))]
        for way in plain:
            if key := self.route("GET", way):
                self.at.setdefault(f"GET {key}", (way, name))
        return [here + way if way.startswith("?") else way for way in plain if way]

    # ------------------------------------------------------------------ what is tried

    def attack(self) -> None:
        """Everything that was found since: each text of the corpus at each place, then the form as it should be."""
        self._before = self._before or self._outside()
        for key, (path, name) in list(self.at.items()):
            if key not in self._attacked:
                self._attacked.add(key)
                self._read(key, path, name)
        while fresh := [key for key in self.forms if key not in self._attacked]:
            for key in fresh:
                self._attacked.add(key)
                form, name = self.forms[key]
                if self.roles(key[0]) and not self._may(key[0], name):  # it was shown to somebody who may not
                    name = next(n for n in self.side.people() if self._may(key[0], n))
                    self.forms[key] = (form, name)
                self._write(key[0], form, name)

    def _read(self, key: str, path: str, name: str) -> None:
        """A page: each parameter of its path and of its query."""
        route = self._of(key)
        asked = {p.alias for p in route.dependant.query_params} | self._asked.get(key, set())
        asked |= {"to"} if route.path == "/login" else set()  # which it reads by itself
        tried = self.tried.setdefault(key, set())
        plain, _, query = path.partition("?")
        for param, text in self._every(route.param_convertors):
            tried.add(param)
            self._hostile(f"{key} {param}={text[:30]!r}", name, "GET", put(route, plain, param, text))
        for param, text in self._every(asked):
            tried.add(param)
            said = urlencode({**dict(parse_qsl(query)), param: text})
            self._hostile(f"{key} ?{param}={text[:30]!r}", name, "GET", f"{plain}?{said}")
            if route.path == "/login":
                self.judge(f"{key} ?{param}={text[:30]!r}", self.send(name, "GET", f"{plain}?{said}", _OUT))

    def _write(self, key: str, form: Form, name: str) -> None:
        """A form: each parameter of its path, each field, each upload and its name, and a field's name itself."""
        what, tried = self.filled(form, name), self.tried.setdefault(key, set())
        for param, text in self._every(self._of(key).param_convertors):
            tried.add(param)
            self._hostile(
                f"{key} {param}={text[:30]!r}", name, "POST", put(self._of(key), form.path, param, text), what
            )
        for one, text in self._every(form.fields):
            tried.add(one)
            self._hostile(f"{key} {one}={text[:30]!r}", name, "POST", form.path, {**what, one: (text,)})
        for one, text in self._every(form.files):
            tried |= {one, *keys_of(what.get(one))}
            for body in (text.encode(), *leaves(what.get(one), text)):
                self._hostile(f"{key} file {one}={text[:30]!r}", name, "POST", form.path, {**what, one: body})
            named = {**what, one: (text, b"{}")}
            self._hostile(f"{key} file's name {one}={text[:30]!r}", name, "POST", form.path, named)
        if key not in self.side.late:
            self.carry_out(key, form, name)
            for text in self.corpus:
                self._hostile(f"{key} the name {text[:30]!r}", name, "POST", form.path, {**what, text: ("x",)})

    def carry_out(self, key: str, form: Form, name: str) -> None:
        """The form as it should be: what was refused before was refused for the text of the corpus alone."""
        reply = self.judge(f"{key} as it should be", self.post(name, form.path, self.filled(form, name)))
        self.done.setdefault(key, []).append(reply.status)
        self.keep(reply, form.path, name)
        self.side.settle()

    def finish(self) -> None:
        """Carry out what was left for the end, and look at everything again."""
        for late in self.side.late:
            for key in [key for key in self.forms if key[0] == late][:1]:
                self.carry_out(late, *self.forms[key])
        self.attack()
        for name in self.side.people():
            self.enter(name)
        self.look()
        self._judge_what_stays()

    def _every(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        return ((one, text) for one in sorted(names) for text in self.corpus)

    def filled(self, form: Form, name: str) -> dict[str, Any]:
        """A form as somebody would send it."""
        plain = {key: value for key, value in form.fields.items() if value and key != "csrf"}
        return {**plain, **self.side.fill(form, name)}

    def _hostile(self, what: str, name: str, method: str, path: str, fields: Mapping[str, Any] | None = None) -> None:
        size = self.side.size()
        reply = self.send(name, method, path) if fields is None else self.post(name, path, fields)
        self.judge(what, reply)
        if reply.status == 401:
            self.faults.append(f"{what}: nobody was logged in, and so nothing was tried")
        if reply.status == 303 and method == "POST":
            self.taken.add(what)
            self.side.settle()
        elif self.side.size() != size:
            self.faults.append(f"{what}: the ledger has grown at a {reply.status}")
        self.shown += MARK in reply.text

    # ------------------------------------------------------------------ what is judged

    def judge(self, what: str, reply: Reply) -> Reply:
        """An answer that is none of the corpus's making."""
        wrong = wrong_with(what, reply)
        self.faults += [f"{what}: {one}" for one in wrong]
        return reply

    def _judge_what_stays(self) -> None:
        for line in self.side.log.read_text().split("\n")[:-1]:
            try:
                said = json.loads(line)
            except ValueError:
                said = {"event": "forged"}
            if not isinstance(said, dict) or said.get("event") in (None, "forged") or MARK in json.dumps(said):
                self.faults.append(f"the log says {line[:200]!r}")
        here = [*self.side.folder.rglob("*"), *Path("/tmp").glob(f"*{MARK[:5]}*"), *Path.cwd().glob(f"*{MARK}*")]
        self.faults += [f"{path} was written" for path in here if MARK in path.name]
        self.faults += [f"{path} was written outside" for path in self._outside() - self._before]

    def _outside(self) -> set[Path]:
        return {p for p in self.side.folder.rglob("*") if self.side.home not in (p, *p.parents)}

    def untried(self) -> list[str]:
        """What a request can hold and nobody tried: empty, or the trial says nothing."""
        out, by = [], {f"{m} {r.path}": r for r in self.routes for m in r.methods}
        for key, route in by.items():
            known = self.tried.get(key)
            if known is None:
                out.append(f"{key}: no page leads there")
                continue
            names = set(route.param_convertors) | {p.alias for p in route.dependant.query_params}
            names |= {name for name in self._heard.get(key, ()) if MARK not in name and name not in self.corpus}
            out += [f"{key}: {name} was not tried" for name in sorted(names - known)]
            if key.startswith("POST") and key not in self.done:
                out.append(f"{key}: was never carried out")
        every = set().union(*self.tried.values())
        out += [
            f"{name}: is read in the source, and no form has it" for name in sorted(read_by(self.side.source) - every)
        ]
        return out

    # ------------------------------------------------------------------ who may not

    def refuse_all(self) -> int:
        """Each page and each form: by nobody, by each role that may not, without its token, from elsewhere."""
        count = self.sent
        for key, (path, _) in self.at.items():
            if roles := self.roles(key):
                self._refused(f"{key} by nobody", 303, lambda p=path: self.send("", "GET", p))  # type: ignore[misc]
                for name, role in self.side.people().items():
                    if role not in roles:
                        self._refused(f"{key} by {role}", 403, lambda p=path, n=name: self.send(n, "GET", p))  # type: ignore[misc]
        for (key, *_), (form, name) in self.forms.items():
            self._refuse(key, form, name)
        return self.sent - count

    def _refuse(self, key: str, form: Form, name: str) -> None:
        what, path, roles = self.filled(form, name), form.path, self.roles(key)
        before, people = self._files(), self.side.people()

        def said(who: str, headers: Mapping[str, str] = _OWN, **more: Any) -> Callable[[], Reply]:
            return lambda: self.post(who, path, {**what, **more}, headers)

        for headers in _ELSEWHERE:
            self._refused(f"{key} from elsewhere {headers}", 403, said(name, headers))
        if roles:
            self._refused(f"{key} by nobody", 401, said(""))
        for person, role in people.items():
            if roles and role not in roles:
                self._refused(f"{key} by {role}", 403, said(person))
        if key != "POST /login":
            other = next(self.tokens[n] for n in people if n != name)
            for token in ((), ("",), ("x",), (other,), (self.tokens[name],) * 2):
                self._refused(f"{key} with the tokens {len(token)}", {403, 400}, said(name, csrf=token))
        if self._files() != before:
            self.faults.append(f"{key}: something was written, though it was refused")

    def _refused(self, what: str, status: int | set[int], act: Callable[[], Reply]) -> None:
        size = self.side.size()
        reply = self.judge(what, act())
        if reply.status not in (status if isinstance(status, set) else {status}):
            self.faults.append(f"{what}: answered with {reply.status}")
        if self.side.size() != size:
            self.faults.append(f"{what}: the ledger has grown")

    def _files(self) -> dict[Path, tuple[int, int]]:
        found = [p for p in self.side.folder.rglob("*") if p.is_file() and not any(m in p.name for m in _MOVES)]
        return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in found}
