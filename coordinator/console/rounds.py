"""The rounds: forecast for each site, launch, progress, dropouts with reasons, stop and resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response

from coordinator.console import job_form
from coordinator.console.context import OPERATOR, READERS, RESEARCHER, CoordinatorConsoleContext
from coordinator.console.job_form import JobFormError
from coordinator.console.run_status import RunStatus, board_of, books_of
from coordinator.federation.aggregation import STRATEGIES
from coordinator.federation.job import KEYS, PLAIN, Job, JobError, LaunchDecision, SiteCost, job_from
from policies.statements import ID
from protos.common.durable_files import replace_file
from protos.web.charts import Bar, BarPart, bars
from protos.web.router import PageError, RequestContext, Router

DRIVERS: Final = frozenset({OPERATOR, RESEARCHER})  # who plans and conducts runs; the sites' budgets decide
PER_PAGE: Final = 50
_LEGEND: Final = (("held", "would be held for the run"), ("left", "would stay"))


def add(pages: Router, context: CoordinatorConsoleContext) -> None:
    """The pages."""
    pages.menu("Rounds", "/rounds", READERS)
    _look(pages, context)
    _conduct(pages, context)
    _plan(pages, context)
    _launch(pages, context)


def _look(pages: Router, context: CoordinatorConsoleContext) -> None:
    """All runs, and one of them."""

    @pages.get("/rounds", READERS)
    def rounds(asked: RequestContext, page: int = 1) -> Response:
        # what goes on comes first
        known = sorted(context.runs.known(), key=lambda one: (one[1] != "open", one[0].run))
        last = max(1, -(-len(known) // PER_PAGE))
        page = min(max(1, page), last)
        boards = _boards(context, known[(page - 1) * PER_PAGE : page * PER_PAGE])
        return asked.page("rounds.html", boards=boards, page=page, last=last, total=len(known), drivers=DRIVERS)

    @pages.get("/rounds/{run}", READERS)
    def run(asked: RequestContext, run: str) -> Response:
        job, state = _known(context, run)
        (board,) = _boards(context, [(job, state)])
        said = f"{board.closed} of {job.turns} are closed"
        drawn = Bar("Rounds", (BarPart("spent", board.closed),), job.turns, said)
        return asked.page(
            "run.html",
            board=board,
            chart=bars([drawn], "Progress"),
            config=_indented(job.config),
            strategy=_indented(job.strategy),
            launched=_launched(context, run),
            drivers=DRIVERS,
            sole=job_form.priced_as(),
        )


def _conduct(pages: Router, context: CoordinatorConsoleContext) -> None:
    """Stop and resume."""

    @pages.post("/rounds/{run}/stop", DRIVERS)
    def stop(asked: RequestContext, run: str) -> Response:
        _known(context, run)
        state = context.runs.stop(run)
        context.log.warning("run_stop", run=run, state=state)
        words = "It stops after the round in progress. Held budget stays held until it is resumed."
        return asked.go(f"/rounds/{run}", words if state == "stopping" else f"It is over already: {state}.")

    @pages.post("/rounds/{run}/resume", DRIVERS)
    def resume(asked: RequestContext, run: str) -> Response:
        _job, state = _known(context, run)
        if state != "stopped":
            raise PageError(409, f"Only a run that was stopped is resumed; this one is {state}.")
        context.runs.resume(run)
        context.log.info("run_resume", run=run)
        return asked.go(f"/rounds/{run}", "It continues where it stopped.")


def _plan(pages: Router, context: CoordinatorConsoleContext) -> None:
    """What a run would cost."""

    @pages.get("/plan", DRIVERS)
    def plan(asked: RequestContext, mechanism: str = PLAIN, like: str = "") -> Response:
        if like:
            return _form(asked, context, job_form.from_job(_known(context, like)[0]) | {"run": ""})
        if mechanism not in KEYS:
            raise PageError(404, "There is no such method of federated training.")
        return _form(asked, context, job_form.blank(mechanism, _sites(context)))

    @pages.post("/plan/file", DRIVERS)
    def from_file(asked: RequestContext) -> Response:
        try:
            values = job_form.from_file(asked.uploads.get("job", b""))
        except JobFormError as fault:
            return _form(asked, context, job_form.blank(PLAIN, _sites(context)), fault.problems)
        return _form(asked, context, values)

    @pages.post("/plan/change", DRIVERS)
    def change(asked: RequestContext) -> Response:
        return _form(asked, context, {name: asked.form[name] for name in asked.form if name != "csrf"})

    @pages.post("/plan", DRIVERS)
    def forecast(asked: RequestContext) -> Response:
        values = {name: asked.form[name] for name in asked.form if name != "csrf"}
        try:
            job, costs, decision = _priced(context, values)
        except JobFormError as fault:
            return _form(asked, context, values, fault.problems)
        return _forecast(asked, job, costs, decision)


def _launch(pages: Router, context: CoordinatorConsoleContext) -> None:
    """Only what was seen is launched."""

    @pages.post("/plan/launch", DRIVERS)
    def launch(asked: RequestContext) -> Response:
        try:
            job = job_from(asked.form["job"])
            if any(job.run == other.run for other, _ in context.runs.known()):
                return asked.go(f"/rounds/{job.run}", "There is a run of that name already; nothing was launched.")
            costs, decision = context.runs.plan(job)
            if job_form.forecast_digest(costs, decision) != asked.form["seen"]:
                return _forecast(asked, job, costs, decision, "The forecast has changed since. Nothing was launched.")
            context.runs.launch(job)
        except JobError as fault:
            raise PageError(409, f"It was not launched: {fault}.") from None
        note = {"person": asked.person.name, "role": asked.person.role, "at": int(context.now().timestamp())}
        replace_file(context.runs.root / job.run / "launched.json", json.dumps(note).encode())
        context.log.info("run_launch", run=job.run, sites=len(decision.sites))
        return asked.go(f"/rounds/{job.run}", "The run is launched.")


def _priced(
    context: CoordinatorConsoleContext, values: Mapping[str, str]
) -> tuple[Job, list[SiteCost], LaunchDecision]:
    """The job that a form asks for, and what it would cost.

    Raises:
        JobFormError: all that is wrong.
    """
    job = job_form.job_of(values)
    if any(job.run == other.run for other, _ in context.runs.known()):
        raise JobFormError(["run: that name is taken by another run"])
    try:
        job = context.runs.with_noise(job)
        return job, *context.runs.plan(job)
    except JobError as fault:
        raise JobFormError([str(fault)]) from None


def _known(context: CoordinatorConsoleContext, run: str) -> tuple[Job, str]:
    """A run and its state.

    Raises:
        PageError: there is none of that name.
    """
    found = next(((job, state) for job, state in context.runs.known() if job.run == run), None)
    if found is None:
        raise PageError(404, "There is no run of that name.")
    return found


def _sites(context: CoordinatorConsoleContext) -> list[str]:
    """The sites that can be asked."""
    with context.store.exclusive() as state:
        return sorted(site for site in state.sites if site not in state.revoked_sites)


def _boards(context: CoordinatorConsoleContext, known: Sequence[tuple[Job, str]]) -> list[RunStatus]:
    """Runs as the ledger, and this process, know them."""
    with context.store.exclusive() as ledger:
        said = books_of(ledger, [job for job, _ in known])
    out = []
    for job, state in known:
        events, over = context.runs.so_far(job.run)  # `watch` waits for more, and a page must not
        out.append(board_of(job, state, said[job.run], events, stopping=not over))
    return out


def _launched(context: CoordinatorConsoleContext, run: str) -> Mapping[str, Any]:
    """Who launched it from this console, and when; empty for a run from the command line."""
    path = context.runs.root / run / "launched.json"
    if not ID.fullmatch(run) or not path.exists():
        return {}
    found = json.loads(path.read_bytes())
    return found if isinstance(found, dict) and found.keys() == {"person", "role", "at"} else {}


def _form(
    asked: RequestContext, context: CoordinatorConsoleContext, values: Mapping[str, str], problems: Sequence[str] = ()
) -> Response:
    """The form, filled, with what is wrong with it."""
    if values.get("mechanism") not in KEYS:
        raise PageError(400, "There is no such method of federated training.")
    known = _sites(context)
    strangers = sorted(k.removeprefix("site.") for k in values if k.startswith("site.") and k[5:] not in known)
    wrong = [*problems, *(f"sites: {site[:64]} is not enrolled" for site in strangers)]
    return (asked.again if wrong else asked.page)(
        "plan.html",
        values={**job_form.blank(values["mechanism"], ()), **values},
        inputs=job_form.inputs(values),
        sites=known,
        methods=job_form.NAMES,
        strategies=", ".join(STRATEGIES),
        problems=wrong,
        some=not wrong and bool(known),
    )


def _forecast(
    asked: RequestContext, job: Job, costs: Sequence[SiteCost], decision: LaunchDecision, notice: str = ""
) -> Response:
    """What it would cost each site, with the way to launch it, or back to the form."""
    return (asked.again if notice else asked.page)(
        "forecast.html",
        job=job,
        costs=job_form.costs_of(costs),
        decision=decision,
        seen=job_form.forecast_digest(costs, decision),
        sealed=job.to_json(),
        values=job_form.from_job(job),
        notice=notice,
        sole=job_form.priced_as(),
        chart=bars([_bar(cost) for cost in job_form.costs_of(costs)], "Of what is left", _LEGEND),
    )


def _bar(cost: job_form.SiteForecast) -> Bar:
    """What a run takes of what a site has left."""
    if cost.share is None:
        return Bar(cost.site, (), 100.0, "no budget left, or unknown")
    words = f"{cost.share:.4g} % of what is left{'' if cost.fits else f': {cost.reason}'}"
    return Bar(cost.site, (BarPart("held" if cost.fits else "no", cost.share),), 100.0, words)


def _indented(text: str) -> str:
    """JSON as people read it; long lists of numbers stay on one line."""
    values = json.loads(text)
    return "\n".join(f"{key}: {_cut(value)}" for key, value in sorted(values.items()))


def _cut(value: object) -> str:
    if isinstance(value, list) and len(value) > 12:
        return f"{json.dumps(value[:4])[:-1]}, … ] ({len(value)} numbers)"
    return json.dumps(value)
