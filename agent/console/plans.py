"""Plans of federated runs: what a run may do at this site, approvals and refusals."""

from __future__ import annotations

import json

from starlette.responses import Response

from agent.console import descriptions
from agent.console.context import DECIDERS, LOOKERS, SiteConsoleContext
from agent.console.errors import errors_as_pages
from agent.console.releases import REFUSE, require_own_word
from agent.service.run_plans import LOOK, PlanView
from policies.governance import decisions
from policies.ledger.approvals import refusal
from policies.ledger.entries import InvalidEntryError
from protos.web.router import PageError, RequestContext, Router


def add(pages: Router, context: SiteConsoleContext) -> None:
    """The pages of the plans."""
    pages.menu("Runs", "/plans", LOOKERS)
    _look(pages, context)
    _decide(pages, context)


def _look(pages: Router, context: SiteConsoleContext) -> None:
    @pages.get("/plans", LOOKERS)
    def plans(asked: RequestContext) -> Response:
        with errors_as_pages():
            found = context.plans()
        return asked.page("plans.html", plans=found)

    @pages.get("/plans/{run}", LOOKERS)
    def plan(asked: RequestContext, run: str) -> Response:
        with errors_as_pages():
            view = _found(context, run)
            store = context.ledger.read()
        may = asked.person.role in view.missing and view.open
        return asked.page(
            "plan.html",
            view=view,
            look=LOOK,
            facts=view.lines(store.state, context.site),
            config=json.dumps(json.loads(view.plan.config), indent=2),
            signing=asked.signing(store.origin, view.plan.serial, *view.plan.words()) if may else None,
            decides=asked.person.role in DECIDERS and view.standing != "refused",
            reasons=list(descriptions.PLAN_REFUSALS.items()),
        )

    @pages.get("/plans/{run}/refuse", DECIDERS)
    def reason(asked: RequestContext, run: str, why: str = "") -> Response:
        if why not in descriptions.PLAN_REFUSALS:
            raise PageError(400, "Choose one of the reasons of the list.")
        with errors_as_pages():
            view, origin = _found(context, run), context.ledger.read().origin
        value = f"{view.plan.digest} {why}"
        return asked.page(
            "plan_refuse.html",
            view=view,
            why=descriptions.PLAN_REFUSALS[why],
            signing=asked.signing(origin, refusal(view.plan.serial), REFUSE, view.plan.run, value),
        )


def _decide(pages: Router, context: SiteConsoleContext) -> None:
    @pages.post("/plans/{run}/approve", DECIDERS)
    def approve(asked: RequestContext, run: str) -> Response:
        envelope = asked.envelope()
        with errors_as_pages():
            view = _found(context, run)
            require_own_word(asked, envelope, (view.plan.serial, *view.plan.words()))
            if not view.open:
                raise InvalidEntryError("the plan was decided already, or its day is over")
            context.record_approval(envelope)
        context.log.info("plan_approved", run=run, state=asked.person.role)
        return asked.go(f"/plans/{run}", "Your approval is in the ledger.")

    @pages.post("/plans/{run}/refuse", DECIDERS)
    def refuse(asked: RequestContext, run: str) -> Response:
        envelope = asked.envelope()
        with errors_as_pages():
            view = _found(context, run)
            value = decisions.said_by(envelope).value
            sha, _, why = value.partition(" ")
            if sha != view.plan.digest or why not in descriptions.PLAN_REFUSALS:
                raise InvalidEntryError("the refusal names another plan or an unknown reason")
            require_own_word(asked, envelope, (refusal(view.plan.serial), REFUSE, run, value))
            context.record_approval(envelope)
        context.log.info("plan_refused", run=run, reason=why)
        return asked.go(f"/plans/{run}", "Your refusal is in the ledger. This site takes no part in that run.")


def _found(context: SiteConsoleContext, run: str) -> PlanView:
    """The plan of a run.

    Raises:
        PageError: none was asked for.
    """
    for view in context.plans():
        if view.plan.run == run:
            return view
    raise PageError(404, "No plan of that run was asked for here.")
