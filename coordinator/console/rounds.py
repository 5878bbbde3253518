"""The rounds: forecast for each site, launch, progress, dropouts with reasons, stop and resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.responses import Response

from coordinator.console import job_form
from coordinator.console.context import OPERATOR, READERS, RESEARCHER, CoordinatorConsoleContext
from coordinator.console.job_form import JobFormError
from coordinator.console.run_status import RunEntries, RunFolder, RunStatus, board_of, books_of
from coordinator.federation.aggregation import STRATEGIES
from coordinator.federation.events import RunEvent
from coordinator.federation.job import KEYS, PLAIN, Job, JobError, LaunchDecision, SiteCost, job_from
from coordinator.federation.participation import members
from coordinator.federation.run_journal import JournalError, KeptEvent, LinkCount, answers_of, bytes_of, read_events
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
        entries, seen = _books(context, [job])[run], context.runs.so_far(run)
        journal = _journal(context, run)  # after what this process has seen: each event is kept first
        board = _board(context, job, state, entries, seen, journal or ())
        said = f"{board.closed} of {job.turns} are closed"
        drawn = Bar("Rounds", (BarPart("spent", board.closed),), job.turns, said)
        return asked.page(
            "run.html",
            board=board,
            signs=context.signs() if board.live else {},
            answered=answers_of(journal or ()),
            carried=bytes_of([*(journal or ()), *_carried_since(context, board)]),
            unreadable=journal is None,
            stages=_STAGES,
            chart=bars([drawn], "Progress"),
            config=_indented(job.config),
            strategy=_indented(job.strategy),
            launched=context.runs.launched_by(run),
            drivers=DRIVERS,
            sole=job_form.priced_as(),
        )


def _journal(context: CoordinatorConsoleContext, run: str) -> list[KeptEvent] | None:
    """What happened in a run, also before this process; None: the file is damaged."""
    try:
        return read_events(context.runs.root / run)
    except (JournalError, OSError):
        return None


def _carried_since(context: CoordinatorConsoleContext, board: RunStatus) -> list[KeptEvent]:
    """The counters of the sites' links as they are now, while the run is at work."""
    if board.state not in ("running", "stopping"):
        return []
    links = {s: LinkCount(one.received, one.sent, one.answered) for s, one in context.signs().items()}
    mine = {site: links[site] for site in board.job.sites if site in links}
    return [KeptEvent(context.now().timestamp(), board.closed, "sent", (), "", {}, mine)]


_STAGES: Final = {  # of a site's link, in words
    "idle": "waits to be asked",
    "receiving": "receives the model",
    "working": "works",  # or waits until its answer may leave: the two cannot be told apart here
    "sending": "sends its answer",
    "": "is there",
}


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
            note = {"person": asked.person.name, "role": asked.person.role, "at": int(context.now().timestamp())}
            context.runs.launch(job, note)
        except JobError as fault:
            raise PageError(409, f"It was not launched: {fault}.") from None
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


def _books(context: CoordinatorConsoleContext, jobs: Sequence[Job]) -> dict[str, RunEntries]:
    """What the ledger says of runs."""
    with context.store.exclusive() as ledger:
        return books_of(ledger, jobs)


def _boards(context: CoordinatorConsoleContext, known: Sequence[tuple[Job, str]]) -> list[RunStatus]:
    """Runs as the ledger, and this process, know them."""
    said = _books(context, [job for job, _ in known])
    so_far = context.runs.so_far  # `watch` waits for more, and a page must not
    return [_board(context, job, state, said[job.run], so_far(job.run)) for job, state in known]


def _board(
    context: CoordinatorConsoleContext,
    job: Job,
    state: str,
    entries: RunEntries,
    seen: tuple[Sequence[RunEvent], bool],
    journal: Sequence[KeptEvent] = (),
) -> RunStatus:
    """One of them; with its journal, also what an earlier process knew."""
    events, over = seen
    folder = RunFolder(members(context.runs.root / job.run, entries.closed), journal)
    return board_of(job, state, entries, events, stopping=not over, folder=folder)


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
