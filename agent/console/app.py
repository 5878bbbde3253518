"""The site console as a whole: its pages; beside `serve`, or alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from agent.console import accounts, archives, optout, policies, queues, releases
from agent.console.books import Books, Held, Lent
from agent.console.desk import Desk
from agent.edges.home import Home
from agent.edges.reception import Reception
from policies import governance
from policies.follower import Follower
from policies.search import Index
from protos.web import settings as console_settings
from protos.web.login_command import FOLDER
from protos.web.logins import Logins
from protos.web.pages import Pages
from protos.web.serving import Serving
from protos.web.settings import BadConsole, ConsoleSettings

INDEX = "search.db"  # of the home: a cache of the ledger, which may be deleted

__all__ = ["INDEX", "BadConsole", "Held", "Lent", "beside", "pages"]


def pages(desk: Desk, settings: ConsoleSettings, logins: Logins) -> Pages:
    """Every page, in the order of the menu."""
    made = Pages(
        title=f"Lazaret, {desk.site}",
        side="site",
        who=desk.person,
        templates=Path(__file__).parent,
        settings=settings,
        log=desk.log,
        logins=logins,
        encode=governance.word,
    )
    for add in (
        accounts.add,
        releases.add,
        queues.add,
        archives.add,
        accounts.add_books,
        policies.add,
        optout.add,
    ):
        add(made, desk)
    return made


@contextmanager
def beside(home: Home, books: Books, log: Any, reception: Reception | None = None) -> Iterator[str]:
    """The console, where ``console.toml`` asks for one, until the context is left.

    Args:
        home: the site's.
        books: its ledger: :class:`Held` where this process holds it, :class:`Lent` elsewhere.
        log: the agent's.
        reception: what receives in this very process, if anything does.
    Yields:
        What to tell the operator; "" without a console.
    Raises:
        BadConsole: it cannot be opened as it is configured.
    """
    settings = console_settings.read(home.root)
    if settings is None:
        yield ""
        return
    with ExitStack() as stack:
        index = stack.enter_context(Index(home.root / INDEX, books.disk))
        stack.enter_context(Follower(index))
        logins = Logins(home.root / FOLDER)
        desk = Desk(home, books, log, lambda: dt.datetime.now(dt.UTC), reception, index=index)
        serving = stack.enter_context(Serving(pages(desk, settings, logins).guarded(), settings, logins, home.root))
        host = settings.listen.rpartition(":")[0]
        yield f"console: https://{host}:{serving.port}, certificate {serving.fingerprint}"
