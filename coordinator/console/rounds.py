"""The rounds: what a run would cost each site, its launch, its progress, who dropped out and why, stop and resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response

from coordinator.console import jobs
from coordinator.console.board import Board, board_of, books_of
from coordinator.console.desk import OPERATOR, READERS, RESEARCHER, Desk
from coordinator.console.jobs import BadForm
from coordinator.edges.feed import Event
from coordinator.edges.home import write_durably
from coordinator.plan import KEYS, PLAIN, BadJob, Decision, Job, SiteCost, job_from
from coordinator.rounds import STRATEGIES
from policies.statement import ID
from protos.web.charts import Bar, Part, bars
from protos.web.pages import Asked, Pages, Refusal

DRIVERS: Final = frozenset({OPERATOR, RESEARCHER})  # who plans and conducts runs; the sites' budgets decide
PER_PAGE: Final = 50
_LEGEND: Final = (("held", "would be held for the run"), ("left", "would stay"))


def add(pages: Pages, desk: Desk) -> None:
    """The pages."""
    pages.menu("Rounds", "/rounds", READERS)
    _look(pages, desk)
    _conduct(pages, desk)
    _plan(pages, desk)
    _launch(pages, desk)


def _look(pages: Pages, desk: Desk) -> None:
    """All runs, and one of them."""

    @pages.get("/rounds", READERS)
    def rounds(asked: Asked, page: int = 1) -> Response:
        known = sorted(desk.runs.known(), key=lambda one: (one[1] != "open", one[0].run))  # what goes on comes first
        last = max(1, -(-len(known) // PER_PAGE))
        page = min(max(1, page), last)
        boards = _boards(desk, known[(page - 1) * PER_PAGE : page * PER_PAGE])
        return asked.page("rounds.html", boards=boards, page=page, last=last, total=len(known), drivers=DRIVERS)

    @pages.get("/rounds/{run}", READERS)
    def run(asked: Asked, run: str) -> Response:
        job, state = _known(desk, run)
        (board,) = _boards(desk, [(job, state)])
        said = f"{board.closed} of {job.rounds} are closed"
        drawn = Bar("Rounds", (Part("spent", board.closed),), job.rounds, said)
        return asked.page(
            "run.html",
            board=board,
            chart=bars([drawn], "Progress"),
            config=_indented(job.config),
            strategy=_indented(job.strategy),
            launched=_launched(desk, run),
            drivers=DRIVERS,
            sole=jobs.priced_as(),
        )


def _conduct(pages: Pages, desk: Desk) -> None:
    """Stop and resume."""

    @pages.post("/rounds/{run}/stop", DRIVERS)
    def stop(asked: Asked, run: str) -> Response:
        _known(desk, run)
        state = desk.runs.stop(run)
        desk.log.warning("run_stop", run=run, state=state)
        words = "It stops after the round in progress; what is held stays held until it is resumed."
        return asked.go(f"/rounds/{run}", words if state == "stopping" else f"It is over already: {state}.")

    @pages.post("/rounds/{run}/resume", DRIVERS)
    def resume(asked: Asked, run: str) -> Response:
        _job, state = _known(desk, run)
        if state != "stopped":
            raise Refusal(409, f"Only a run that was stopped is resumed; this one is {state}.")
        desk.runs.resume(run)
        desk.log.info("run_resume", run=run)
        return asked.go(f"/rounds/{run}", "It goes on where it was.")


def _plan(pages: Pages, desk: Desk) -> None:
    """What a run would cost."""

    @pages.get("/plan", DRIVERS)
    def plan(asked: Asked, mechanism: str = PLAIN, like: str = "") -> Response:
        if like:
            return _form(asked, desk, jobs.from_job(_known(desk, like)[0]) | {"run": ""})
        if mechanism not in KEYS:
            raise Refusal(404, "There is no such method of federated training.")
        return _form(asked, desk, jobs.blank(mechanism, _sites(desk)))

    @pages.post("/plan/file", DRIVERS)
    def from_file(asked: Asked) -> Response:
        try:
            values = jobs.from_file(asked.uploads.get("job", b""))
        except BadForm as fault:
            return _form(asked, desk, jobs.blank(PLAIN, _sites(desk)), fault.problems)
        return _form(asked, desk, values)

    @pages.post("/plan/change", DRIVERS)
    def change(asked: Asked) -> Response:
        return _form(asked, desk, {name: asked.form[name] for name in asked.form if name != "csrf"})

    @pages.post("/plan", DRIVERS)
    def forecast(asked: Asked) -> Response:
        values = {name: asked.form[name] for name in asked.form if name != "csrf"}
        try:
            job, costs, decision = _priced(desk, values)
        except BadForm as fault:
            return _form(asked, desk, values, fault.problems)
        return _forecast(asked, job, costs, decision)


def _launch(pages: Pages, desk: Desk) -> None:
    """Only what was seen is launched."""

    @pages.post("/plan/launch", DRIVERS)
    def launch(asked: Asked) -> Response:
        try:
            job = job_from(asked.form["job"])
            if any(job.run == other.run for other, _ in desk.runs.known()):
                return asked.go(f"/rounds/{job.run}", "There is a run of that name already; nothing was launched.")
            costs, decision = desk.runs.plan(job)
            if jobs.seen(costs, decision) != asked.form["seen"]:
                return _forecast(asked, job, costs, decision, "The forecast has changed since. Nothing was launched.")
            desk.runs.launch(job)
        except BadJob as fault:
            raise Refusal(409, f"It was not launched: {fault}.") from None
        note = {"person": asked.person.name, "role": asked.person.role, "at": int(desk.now().timestamp())}
        write_durably(desk.runs.root / job.run / "launched.json", json.dumps(note).encode())
        desk.log.info("run_launch", run=job.run, sites=len(decision.sites))
        return asked.go(f"/rounds/{job.run}", "It is launched.")


def _priced(desk: Desk, values: Mapping[str, str]) -> tuple[Job, list[SiteCost], Decision]:
    """The job that a form asks for, and what it would cost.

    Raises:
        BadForm: all that is wrong.
    """
    job = jobs.job_of(values)
    if any(job.run == other.run for other, _ in desk.runs.known()):
        raise BadForm(["run: that name is taken by another run"])
    try:
        return job, *desk.runs.plan(job)
    except BadJob as fault:
        raise BadForm([str(fault)]) from None


def _known(desk: Desk, run: str) -> tuple[Job, str]:
    """A run and its state.

    Raises:
        Refusal: there is none of that name.
    """
    found = next(((job, state) for job, state in desk.runs.known() if job.run == run), None)
    if found is None:
        raise Refusal(404, "There is no run of that name.")
    return found


def _sites(desk: Desk) -> list[str]:
    """The sites that can be asked."""
    with desk.store.exclusive() as state:
        return sorted(site for site in state.sites if site not in state.barred)


def _boards(desk: Desk, known: Sequence[tuple[Job, str]]) -> list[Board]:
    """Runs as the ledger, and this process, know them."""
    with desk.store.exclusive() as books:
        said = books_of(books, [job for job, _ in known])
    out = []
    for job, state in known:
        events, over = _events(desk, job.run)
        out.append(board_of(job, state, said[job.run], events, stopping=not over))
    return out


def _events(desk: Desk, run: str) -> tuple[Sequence[Event], bool]:
    """What this process has seen of a run so far, without waiting; and whether that is all there will be."""
    return desk.runs.so_far(run)  # `watch` waits for more, and a page must not


def _launched(desk: Desk, run: str) -> Mapping[str, Any]:
    """Who launched it from this console, and when; empty for a run from the command line."""
    path = desk.runs.root / run / "launched.json"
    if not ID.fullmatch(run) or not path.exists():
        return {}
    found = json.loads(path.read_bytes())
    return found if isinstance(found, dict) and found.keys() == {"person", "role", "at"} else {}


def _form(asked: Asked, desk: Desk, values: Mapping[str, str], problems: Sequence[str] = ()) -> Response:
    """The form, filled, with what is wrong with it."""
    if values.get("mechanism") not in KEYS:
        raise Refusal(400, "There is no such method of federated training.")
    known = _sites(desk)
    strangers = sorted(k.removeprefix("site.") for k in values if k.startswith("site.") and k[5:] not in known)
    wrong = [*problems, *(f"sites: {site[:64]} is not enrolled" for site in strangers)]
    return (asked.again if wrong else asked.page)(
        "plan.html",
        values={**jobs.blank(values["mechanism"], ()), **values},
        inputs=jobs.inputs(values),
        sites=known,
        methods=jobs.NAMES,
        strategies=", ".join(STRATEGIES),
        problems=wrong,
        some=not wrong and bool(known),
    )


def _forecast(asked: Asked, job: Job, costs: Sequence[SiteCost], decision: Decision, notice: str = "") -> Response:
    """What it would cost each site, with the way to launch it, or back to the form."""
    return (asked.again if notice else asked.page)(
        "forecast.html",
        job=job,
        costs=jobs.costs_of(costs),
        decision=decision,
        seen=jobs.seen(costs, decision),
        sealed=job.to_json(),
        values=jobs.from_job(job),
        notice=notice,
        sole=jobs.priced_as(),
        chart=bars([_bar(cost) for cost in jobs.costs_of(costs)], "Of what is left", _LEGEND),
    )


def _bar(cost: jobs.Cost) -> Bar:
    """What a run takes of what a site has left."""
    if cost.share is None:
        return Bar(cost.site, (), 100.0, "nothing is left, or it cannot be told")
    words = (
        f"{cost.share:.4g} % of what is left" if cost.fits else f"{cost.share:.4g} % of what is left: {cost.reason}"
    )
    return Bar(cost.site, (Part("held" if cost.fits else "no", cost.share),), 100.0, words)


def _indented(text: str) -> str:
    """JSON as people read it; long lists of numbers stay on one line."""
    values = json.loads(text)
    lines = [
        f"{key}: {json.dumps(value) if not _long(value) else _cut(value)}" for key, value in sorted(values.items())
    ]
    return "\n".join(lines)


def _long(value: object) -> bool:
    return isinstance(value, list) and len(value) > 12


def _cut(value: list[Any]) -> str:
    return f"{json.dumps(value[:4])[:-1]}, … ] ({len(value)} numbers)"
