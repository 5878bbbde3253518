"""The pages before a login, the logout, and the files that every page asks for.

A browser certificate alone does not log in: the person presses a button. So a login has a beginning, an end and a
session, and another site's page cannot use the certificate without the person's knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from protos.web.client_certificates import PinnedCertificates
from protos.web.forms import read_form
from protos.web.oidc import LoginError, Provider
from protos.web.request import Form, LoggedInPerson, PageError, RequestContext, is_local
from protos.web.security import RateLimit
from protos.web.sessions import COOKIE, LoginSession, LoginSessions
from protos.web.settings import ConsoleSettings
from protos.web.templates import Templates

_BINDING: Final = "__Host-lazaret-oidc"
_YEAR: Final = "public, max-age=31536000, immutable"  # the name holds the digest of what is in it


class LoginHost(Protocol):
    """What the pages of a login need of the console that they belong to (:class:`protos.web.router.Router`)."""

    settings: ConsoleSettings
    log: Any
    logins: PinnedCertificates
    sessions: LoginSessions
    rate: RateLimit
    kit: Templates

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds that never go back."""

    @property
    def now(self) -> Callable[[], float]:
        """Seconds since 1970."""

    @property
    def who(self) -> Callable[[str], LoggedInPerson | None]:
        """The ledger's person of this name; None if there is none, or no longer one with a role."""

    def public(self, method: str, path: str, endpoint: Callable[..., Any]) -> None:
        """Add a page before the login."""

    def logged_in(self, request: Request, *, touch: bool = False) -> tuple[LoginSession, LoggedInPerson] | None:
        """The session and the person of a request; None when there is none."""

    def asked(
        self,
        request: Request,
        session: LoginSession | None,
        person: LoggedInPerson | None,
        form: Form,
        uploads: Mapping[str, bytes],
    ) -> RequestContext:
        """What a page is given."""


def peer(request: Request) -> bytes:
    """The client certificate that the connection showed, DER; b"" for none. TLS proved its key."""
    shown = request.scope.get("state", {}).get("peer", b"")
    return shown if type(shown) is bytes else b""


def address(request: Request) -> str:
    """Where the connection comes from."""
    return request.client.host if request.client else ""


def safe_target(text: str) -> str:
    """Where to go after a login: a page of this console, or the first one."""
    return text if is_local(text) and not text.startswith(("/login", "/logout", "/oidc")) else "/"


def set_cookie(
    response: Response, name: str, value: str, *, samesite: Any = "strict", seconds: int | None = None
) -> None:
    """A cookie that only TLS carries, no script reads, and that is of this very host."""
    response.set_cookie(name, value, max_age=seconds, path="/", secure=True, httponly=True, samesite=samesite)


def start_session(pages: LoginHost, request: Request, name: str, certificate: bytes, response: Response) -> Response:
    """Log a person in: the session before ends, a new one begins under a new id."""
    pages.sessions.end(request.cookies.get(COOKIE, ""))
    set_cookie(response, COOKIE, pages.sessions.begin(name, certificate))
    pages.log.info("console_login", rule="certificate" if certificate else "oidc", person=name)
    return response


def may_try(pages: LoginHost, request: Request, what: str = "login") -> None:
    """Count a login, or a logout, from that address: before anything that was sent is looked at.

    Raises:
        PageError: there were too many.
    """
    if not pages.rate.allows(f"{what} {address(request)}"):
        pages.log.warning("console_refused", rule="rate", state=what)
        raise PageError(429, f"Too many {what}s from your address: wait a minute.")


def _page(pages: LoginHost, request: Request, template: str, context: Mapping[str, Any]) -> Response:
    asked = pages.asked(request, None, None, Form(()), {})
    return Response(pages.kit.render(asked, template, context), media_type="text/html")


def add(pages: LoginHost) -> None:
    """The login, the logout and the files."""
    has_oidc = pages.settings.oidc is not None

    def login(request: Request) -> Response:
        to = safe_target(request.query_params.get("to", "/"))
        if pages.logged_in(request) is not None:
            return RedirectResponse(to, 303)
        return _page(pages, request, "login.html", {**_shown(pages, request), "to": to, "oidc": has_oidc})

    async def enter(request: Request) -> Response:
        may_try(pages, request)
        form, _files = await read_form(request)
        return await run_in_threadpool(_enter, pages, request, safe_target(form.get("to", "/")))

    async def leave(request: Request) -> Response:
        may_try(pages, request, "logout")
        form, _files = await read_form(request)
        return await run_in_threadpool(_leave, pages, request, form.get("csrf", ""))

    def left(request: Request) -> Response:
        return _page(pages, request, "left.html", {"oidc": has_oidc})

    def static(name: str) -> Response:
        if name not in pages.kit.assets:
            raise PageError(404, "There is no such file.")
        kind, body = pages.kit.assets[name]
        return Response(body, media_type=kind, headers={"cache-control": _YEAR})

    pages.public("GET", "/login", login)
    pages.public("POST", "/login", enter)
    pages.public("POST", "/logout", leave)
    pages.public("GET", "/logout", left)
    pages.public("GET", "/static/{name}", static)
    if pages.settings.oidc is not None:
        _add_oidc(pages, Provider(pages.settings.oidc, pages.clock, pages.now))


def _add_oidc(pages: LoginHost, provider: Provider) -> None:
    """The way to the institution's own login, and back."""

    def way_back(request: Request) -> str:
        return f"https://{request.headers['host']}/oidc/back"  # the guard answers to names that are configured

    def refused(problem: LoginError) -> PageError:
        pages.log.warning("console_refused", rule=f"oidc_{problem.rule}", state="login")
        return PageError(403, problem.sentence)

    def start(request: Request) -> Response:
        may_try(pages, request)
        try:
            begun = provider.start(way_back(request), safe_target(request.query_params.get("to", "/")))
        except LoginError as problem:
            raise refused(problem) from None
        response = RedirectResponse(begun.url, 303)
        set_cookie(response, _BINDING, begun.binding, samesite="lax", seconds=600)  # it comes back from elsewhere
        return response

    def back(request: Request) -> Response:
        may_try(pages, request)
        try:
            name, to = provider.finish(request.query_params, request.cookies.get(_BINDING, ""), way_back(request))
        except LoginError as problem:
            raise refused(problem) from None
        if pages.who(name) is None:
            raise refused(LoginError("nobody", f"{name} is not in the ledger, or was dismissed: ask the operator."))
        # a page, and no redirect: a browser on its way from elsewhere would not send the strict cookie along
        response = _page(pages, request, "oidc.html", {"name": name, "to": to})
        set_cookie(response, _BINDING, "", samesite="lax", seconds=0)
        return start_session(pages, request, name, b"", response)

    pages.public("GET", "/oidc/start", start)
    pages.public("GET", "/oidc/back", back)


def _shown(pages: LoginHost, request: Request) -> dict[str, str]:
    """What the connection's certificate says: whose it is, and as what that person would be logged in."""
    certificate = peer(request)
    name = pages.logins.name_of(certificate) if certificate else None
    who = pages.who(name) if name else None
    state = "none" if not certificate else "forgotten" if not name else "nobody" if who is None else "known"
    return {"state": state, "name": name or "", "role": who.role if who else ""}


def _enter(pages: LoginHost, request: Request, to: str) -> Response:
    shown = _shown(pages, request)
    if shown["state"] != "known":
        pages.log.warning("console_refused", rule="login", state=shown["state"], person=shown["name"])
        raise PageError(403, "Your browser shows no certificate of a person who may log in here.")
    return start_session(pages, request, shown["name"], peer(request), RedirectResponse(to, 303))


def _leave(pages: LoginHost, request: Request, csrf: str) -> Response:
    found = pages.logged_in(request)
    if found is not None and csrf != found[0].csrf:
        raise PageError(403, "That form belongs to another login: open the page again.")
    if found is not None:
        pages.log.info("console_logout", person=found[1].name)
    pages.sessions.end(request.cookies.get(COOKIE, ""))
    response = RedirectResponse("/logout", 303)
    set_cookie(response, COOKIE, "", seconds=0)
    return response
