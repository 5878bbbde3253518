"""How a page is written: a function with a path and the roles that may ask for it, and nothing beside that.

    def add(pages: Pages, context: Context) -> None:
        pages.menu("Ledger", "/ledger", READERS)

        @pages.get("/ledger/{seq}", READERS)
        def entry(asked: Asked, seq: int) -> Response:
            return asked.page("entry.html", entry=context.entry(seq))

FastAPI runs underneath. The person, their role, the form's token and its size are checked before the function runs. A
route that was not registered here keeps the entire console from starting.
"""

from __future__ import annotations

import inspect
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_type_hints
from urllib.parse import quote

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from protos.common.errors import InvariantError, Signal
from protos.web import login_pages
from protos.web.client_certificates import PinnedCertificates
from protos.web.forms import read_form
from protos.web.login_pages import peer
from protos.web.request import Form, LoggedInPerson, PageError, RequestContext, is_local
from protos.web.security import ConsoleGuard, RateLimit, Scope
from protos.web.sessions import COOKIE, LoginSession, LoginSessions
from protos.web.settings import ConsoleSettings
from protos.web.templates import Templates

__all__ = ["Form", "LoggedInPerson", "PageError", "RequestContext", "Router", "UnprotectedRouteError"]

LIVE: Final = "x-lazaret-live"  # a page that looks again by itself says so, and keeps nobody logged in
_MARK: Final = "__lazaret_roles__"
_OPEN: Final = 20  # requests of one person at a time; a browser sends six
_Handler = TypeVar("_Handler", bound=Callable[..., Response])


class UnprotectedRouteError(InvariantError, RuntimeError):
    """A route would be answered without a check of who asks."""


class _Answered(Signal):
    """A check has an answer of its own: a way to the login."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


@dataclass(eq=False)
class Router:
    """All pages of one console."""

    title: str  # of the console, such as "Lazaret, site alpha"
    side: str  # "coordinator" or "site"
    who: Callable[[str], LoggedInPerson | None]  # by the ledger; None: nobody, or nobody any more
    templates: Path  # a folder; those of the kit are found beside it
    settings: ConsoleSettings
    log: Any
    logins: PinnedCertificates
    # a person's statement: kind, and its fields in order
    encode: Callable[[str, tuple[str, ...]], bytes] | None = None
    clock: Callable[[], float] = time.monotonic  # seconds that never go back
    now: Callable[[], float] = time.time  # seconds since 1970, shown on the pages
    _menu: list[tuple[str, str, frozenset[str]]] = field(default_factory=list, init=False)
    _open: Counter[str] = field(default_factory=Counter, init=False)  # person -> requests; the loop's alone

    def __post_init__(self) -> None:
        """An application without a page but those of the login."""
        self.app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        self.sessions = LoginSessions(self.settings.idle_minutes * 60.0, self.settings.hours * 3600.0, self.clock)
        self.rate = RateLimit(20, 60.0, self.clock)  # of everything that logs in
        self.kit = Templates(self.templates, self.title, self.side, self._menu)
        for kind, handler in (
            (PageError, self._refused),
            (_Answered, self._answered),
            (RequestValidationError, self._invalid),
            (HTTPException, self._no_page),
            (Exception, self._fault),
        ):
            self.app.add_exception_handler(kind, handler)
        login_pages.add(self)

    # ------------------------------------------------------------------ for those who write pages

    def menu(self, label: str, path: str, roles: Collection[str]) -> None:
        """An entry of the menu, shown to those roles only."""
        self._menu.append((label, path, frozenset(roles)))

    def get(self, path: str, roles: Collection[str], *, told: bool = False) -> Callable[[_Handler], _Handler]:
        """A page that changes nothing, for those roles.

        Args:
            path: with its parameters in braces.
            roles: that may see it.
            told: whether the log is told who looks, as of patients' images.
        """
        return self._route("GET", path, frozenset(roles), told)

    def post(self, path: str, roles: Collection[str]) -> Callable[[_Handler], _Handler]:
        """What a form of this console does, for those roles; its token is checked before, and the log is told."""
        return self._route("POST", path, frozenset(roles), told=True)

    def build(self) -> FastAPI:
        """The application, every route of it checked.

        Raises:
            UnprotectedRouteError: somebody added a route of another kind.
        """
        refuse_unchecked(self.app)
        return self.app

    def guarded(self) -> ConsoleGuard:
        """The application behind its guard, as it is served."""
        return ConsoleGuard(self.build(), self.settings.names, self.log, self._known)

    def _known(self, scope: Scope) -> bool:
        """Whether somebody is logged in who may send a large form here; the person and the role are checked later."""
        request = Request(scope)
        if request.url.path in ("/login", "/logout"):
            return False
        return self.sessions.find(request.cookies.get(COOKIE, ""), peer(request), touch=False) is not None

    # ------------------------------------------------------------------ the checks

    def _route(self, method: str, path: str, roles: frozenset[str], told: bool) -> Callable[[_Handler], _Handler]:
        if not roles:
            raise UnprotectedRouteError(f"{method} {path}: name the roles that may")

        async def gate(request: Request) -> AsyncIterator[RequestContext]:
            session, person = await self._let_in(request, roles)
            if self._open[person.name] >= _OPEN:
                self.log.warning("console_refused", rule="open", state=person.role, person=person.name)
                raise PageError(429, f"You have {_OPEN} requests open: wait until they are answered.")
            self._open[person.name] += 1
            try:
                yield await self._checked(request, session, person)
            finally:  # the answer is sent, to its last byte
                self._open[person.name] -= 1

        return self._add(method, path, gate, roles, told)

    def public(self, method: str, path: str, endpoint: Callable[..., Any]) -> None:
        """A page before the login: for :mod:`protos.web.login_pages` and :mod:`protos.web.oidc` alone."""
        setattr(endpoint, _MARK, frozenset())
        self.app.add_api_route(path, endpoint, methods=[method], response_model=None, name=f"{method} {path}")

    def _add(
        self, method: str, path: str, gate: Callable[..., Any], roles: frozenset[str], told: bool
    ) -> Callable[[_Handler], _Handler]:
        def made(handler: _Handler) -> _Handler:
            hints = get_type_hints(handler, include_extras=True)
            first, *others = inspect.signature(handler).parameters.values()

            def endpoint(**given: Any) -> Response:
                if told:  # who, and what was done: never to whom or to what
                    who: LoggedInPerson = given[first.name].person
                    self.log.info("console_act", person=who.name, role=who.role, page=path)
                return self._run(f"{method} {path}", handler, given)

            only = inspect.Parameter.KEYWORD_ONLY
            kinds = [first.replace(annotation=Annotated[RequestContext, Depends(gate)], kind=only)]
            kinds += [p.replace(annotation=hints[p.name], kind=only) for p in others]
            endpoint.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined] # what FastAPI reads
            setattr(endpoint, _MARK, roles)
            self.app.add_api_route(path, endpoint, methods=[method], response_model=None, name=f"{method} {path}")
            return handler

        return made

    def _run(self, what: str, handler: Callable[..., Response], given: dict[str, Any]) -> Response:
        try:
            return handler(**given)
        except (PageError, _Answered):
            raise
        except Exception as fault:  # noqa: BLE001 - nothing of its text leaves
            incident = secrets.token_hex(4)
            self.log.error("console_incident", rule=incident, state=f"{type(fault).__name__} {what}")
            raise PageError(500, f"Internal fault, incident {incident}: the log has it under this number.") from None

    async def _let_in(self, request: Request, roles: frozenset[str]) -> tuple[LoginSession, LoggedInPerson]:
        """Who asks, and whether that person may."""
        live = LIVE in request.headers
        found = await run_in_threadpool(self.logged_in, request, touch=not live)
        if found is None:
            path = quote(request.url.path, safe="/")
            if request.url.query:
                path += quote(f"?{request.url.query}", safe="")
            if request.method == "POST" or live:
                raise PageError(401, "You are not logged in any more. Nothing was done: log in and try again.")
            raise _Answered(RedirectResponse(f"/login?to={path}" if path != "/" else "/login", 303))
        session, person = found
        if person.role not in roles:
            self.log.warning("console_refused", rule="role", state=person.role, person=person.name)
            allowed = " or ".join(sorted(roles))
            raise PageError(403, f"This is for {allowed}; you are logged in as {person.name}, {person.role}.")
        return session, person

    async def _checked(self, request: Request, session: LoginSession, person: LoggedInPerson) -> RequestContext:
        """What was sent, with the token of this very login."""
        form, uploads = await read_form(request) if request.method == "POST" else (Form(()), {})
        if request.method == "POST" and not secrets.compare_digest(
            form.get("csrf", "").encode(), session.csrf.encode()
        ):
            self.log.warning("console_refused", rule="csrf", state=person.role, person=person.name)
            raise PageError(403, "That form is not of your own login. Nothing was done: open the page again.")
        return self.asked(request, session, person, form, uploads)

    def logged_in(self, request: Request, *, touch: bool = False) -> tuple[LoginSession, LoggedInPerson] | None:
        """The session and the person of a request; None if no person with a role is logged in."""
        shown = peer(request)
        session = self.sessions.find(request.cookies.get(COOKIE, ""), shown, touch=touch)
        if session is None:
            return None
        if session.certificate and self.logins.name_of(shown) != session.person:
            return None  # forgotten since
        person = self.who(session.person)
        return (session, person) if person is not None else None

    def asked(
        self,
        request: Request,
        session: LoginSession | None,
        person: LoggedInPerson | None,
        form: Form,
        uploads: Mapping[str, bytes],
    ) -> RequestContext:
        """What a handler is given."""

        def note(words: str) -> None:
            if session is not None:
                session.flash = words

        live = LIVE in request.headers
        return RequestContext(
            who=person,
            path=request.url.path,
            form=form,
            uploads=uploads,
            render=self.kit.render,
            csrf=session.csrf if session else "",
            flash=self.sessions.said(session) if session and request.method == "GET" and not live else "",
            note=note,
            encode=self.encode,
            query=dict(request.query_params),
            at=self.now(),
            by_certificate=session is not None and session.certificate != b"",
        )

    # ------------------------------------------------------------------ answers to what cannot be answered

    async def _answered(self, _request: Request, answered: Any) -> Response:
        response: Response = answered.response
        return response

    async def _refused(self, request: Request, refusal: Any) -> Response:
        return await run_in_threadpool(self._error, request, refusal.status, refusal.sentence)

    async def _invalid(self, request: Request, fault: Any) -> Response:
        where = sorted({str(error["loc"][-1]) for error in fault.errors()})
        if any(error["loc"][0] == "path" for error in fault.errors()):
            return await run_in_threadpool(self._error, request, 404, "There is no such page.")
        sentence = f"The page cannot be asked for in that way; look at {', '.join(where)}."
        return await run_in_threadpool(self._error, request, 400, sentence)

    async def _no_page(self, request: Request, fault: Any) -> Response:
        sentences = {404: "There is no such page.", 405: "That page cannot be used in that way."}
        sentence = sentences.get(fault.status_code, "The request cannot be answered.")
        return await run_in_threadpool(self._error, request, fault.status_code, sentence)

    async def _fault(self, _request: Request, fault: Exception) -> Response:
        incident = secrets.token_hex(4)
        self.log.error("console_incident", rule=incident, state=type(fault).__name__)
        sentence = f"Internal fault, incident {incident}: the log has it under this number.\n"
        return Response(sentence, 500, media_type="text/plain")

    def _error(self, request: Request, status: int, sentence: str) -> Response:
        session, person = self.logged_in(request) or (None, None)
        asked = self.asked(request, session, person, Form(()), {})
        back = request.url.path.rpartition("/")[0] or "/"
        back = back if is_local(back) else "/"  # of //elsewhere/x it is another host's
        words = self.kit.render(asked, "error.html", {"status": status, "sentence": sentence, "back": back})
        return Response(words, status, media_type="text/html")


def refuse_unchecked(app: FastAPI) -> None:
    """Refuse an application with a route that :class:`Router` did not make.

    Raises:
        UnprotectedRouteError: with its path.
    """
    for route in app.router.routes:
        if not hasattr(getattr(route, "endpoint", None), _MARK):
            raise UnprotectedRouteError(
                f"{getattr(route, 'path', 'a route')} would be answered without a check of who asks"
            )
