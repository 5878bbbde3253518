"""Jobs of the running service: the list, one job, its output and files; approve, refuse, cancel, retry."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from starlette.responses import Response

from agent.console import descriptions
from agent.console.context import DECIDERS, KEEPERS, LOOKERS, OPERATOR, READERS, RESEARCHER, SiteConsoleContext
from agent.console.errors import errors_as_pages
from agent.service import job_proposals, jobs, round_parts
from agent.service.job_outputs import read_output, trained_files
from agent.service.job_runner import release_of
from agent.service.jobs import Job, JobStore, standing
from policies.accounting.rdp import epsilon_of
from policies.accounting.rounding import rounded_up
from policies.ledger.state import State
from policies.review.rules import account_name
from policies.statements import claim_from
from protos.common.text import printable
from protos.web.router import PageError, RequestContext, Router

ACTORS: Final = KEEPERS | {RESEARCHER}  # a researcher: on what they have proposed, and never at a price
PROPOSERS: Final = frozenset({RESEARCHER, OPERATOR})  # who wants the data, or runs the machine; neither approves
_SHOWN_BYTES: Final = 32_768  # of the end of what a job printed
_WORD_CHARS: Final = 500  # of the reason of a refusal
_BADGES: Final[Mapping[str, str]] = {
    **dict.fromkeys((jobs.DONE, jobs.RUNNING, jobs.LEAVING), "yes"),
    **dict.fromkeys((jobs.MADE, jobs.PROPOSED, jobs.INTERRUPTED), "warn"),
    **dict.fromkeys((jobs.REFUSED, jobs.FAILED, jobs.CANCELLED), "no"),
}
# A made release is refused under Releases; whoever may refuse a proposal does that, with a reason.
_DECIDED_ELSEWHERE: Final = {False: frozenset({jobs.MADE}), True: frozenset({jobs.MADE, jobs.PROPOSED})}
_EVENTS: Final = {jobs.MADE: "made, waits for the reviewers", jobs.LEAVING: "being sent"}


_RULED: Final = (jobs.PROPOSED, jobs.QUEUED)  # whose reasons are rules, and never counts
_NOT_SHOWN: Final = "why is for those who may see counts"


def add(pages: Router, context: SiteConsoleContext) -> None:
    """The pages of jobs."""
    pages.menu("Jobs", "/jobs", READERS)
    _look(pages, context)
    _decide(pages, context)
    _act(pages, context)


def _without_counts(one: Mapping[str, Any], role: str) -> dict[str, Any]:
    """A job as a role may read it: what a step or a reason says may count patients."""
    if role in LOOKERS or one["command"].startswith("train "):
        return dict(one)
    reason = one["reason"] if _reason_kept(one, one["command"], role) else _NOT_SHOWN
    return {**one, "reason": reason, "progress": {**one["progress"], "detail": ""}}


def _reason_kept(event: Mapping[str, Any], command: str, role: str) -> bool:
    """Whether a role may read why a job changed; what a person wrote is for who proposed."""
    round_of_a_run = command.startswith(f"{jobs.PART} ") and event["state"] != jobs.INTERRUPTED
    free = role in LOOKERS or command.startswith("train ") or round_of_a_run or event["state"] in _RULED
    return free or bool(event["by"]) or not event["reason"]


def _look(pages: Router, context: SiteConsoleContext) -> None:
    @pages.get("/jobs", READERS)
    def listed(asked: RequestContext) -> Response:
        with errors_as_pages():
            told = context.act("jobs/list")
        role = asked.person.role
        return asked.page(
            "jobs.html",
            jobs=[_without_counts(one, role) for one in reversed(told["jobs"])],
            broken=told["broken"],
            standing=standing,
            badges=_BADGES,
            words=_EVENTS,
            proposes=role in PROPOSERS,
        )

    @pages.get("/jobs/{number}", READERS)
    def job(asked: RequestContext, number: int) -> Response:
        with errors_as_pages():
            told = context.act("jobs/show", number=number)
            known, state = JobStore(context.home.root).read(number), context.ledger.read().state
            waits = job_proposals.missing(known, job_proposals.approving(context.acting), state)
        role, own = asked.person.role, known.history[0].by == asked.person.name
        one = _without_counts(told["job"], role)
        kept = [_reason_kept(event, one["command"], role) for event in told["history"]]
        return asked.page(
            "job.html",
            one=one,
            history=[
                {**event, "reason": _NOT_SHOWN} if not keep else event
                for event, keep in zip(told["history"], kept, strict=True)
            ],
            standing=standing(one),
            badge=_BADGES.get(one["state"], ""),
            words=_EVENTS.get(one["state"], one["state"]),
            facts=[
                ("Project", one["project"]),
                ("Proposed by", one["proposed_by"] or "–"),
                *_named("Priority", one["priority"] if one["priority"] != "normal" else ""),
                *_claims(known),
                *_named("Price, as it was then", price_words(state, context.site, known.words, one["price"])),
                *_named("Release", one["release"]),
            ],
            settings=list(settings_of(known)),
            files=frozen_files(context, known),
            command="" if known.lane == jobs.ROUND else " ".join(known.words),
            printed=printed(context, known) if role in LOOKERS or known.lane == jobs.TRAINING else None,
            trained=trained_files(JobStore(context.home.root), known),
            sees=role in DECIDERS and known.lane != jobs.TRAINING,
            looks=role in LOOKERS,
            live=one["state"] not in jobs.ENDED,
            waits=waits,
            may_approve=may_approve(asked, known, waits),
            may_refuse=role in DECIDERS and known.state == jobs.PROPOSED,
            may_cancel=_may_act(role, own) and known.state not in jobs.ENDED | _DECIDED_ELSEWHERE[role in DECIDERS],
            may_retry=_may_act(role, own) and _may_begin_again(known),
        )

    @pages.get("/jobs/{number}/files/{name}", DECIDERS, told=True)
    def file(asked: RequestContext, number: int, name: str) -> Response:
        with errors_as_pages():
            known, found = JobStore(context.home.root).read(number), None
            if known.lane != jobs.TRAINING and name in context.act("jobs/show", number=number)["job"]["outputs"]:
                with context.vault(known.project) as vault:
                    found = read_output(vault, JobStore(context.home.root), known, name)
        if found is None:
            raise PageError(404, "That file is not in the vault: it was not written, or was deleted since.")
        return asked.download(f"job-{number}-{name}", found, "application/octet-stream")


def _decide(pages: Router, context: SiteConsoleContext) -> None:
    @pages.post("/jobs/{number}/approve", DECIDERS)
    def approve(asked: RequestContext, number: int) -> Response:
        _require_certificate(asked)
        with errors_as_pages():
            told = job_proposals.approve(context.acting, number, asked.person.name)
        waits = " and ".join(told["missing"])
        more = f"it waits for {waits}" if waits else "it is queued"
        return asked.go(f"/jobs/{number}", f"Your approval stands in the job's history; {more}.")

    @pages.post("/jobs/{number}/refuse", DECIDERS)
    def refuse(asked: RequestContext, number: int) -> Response:
        _require_certificate(asked)
        why = " ".join(asked.form.get("why", "").split())
        if not why or len(why) > _WORD_CHARS:
            raise PageError(400, f"Say why you refuse it, in at most {_WORD_CHARS} characters. Nothing was done.")
        with errors_as_pages():
            job_proposals.refuse(context.acting, number, asked.person.name, why)
        return asked.go(f"/jobs/{number}", "It is refused, and will not start.")


def _act(pages: Router, context: SiteConsoleContext) -> None:
    @pages.get("/jobs/{number}/cancel", ACTORS)
    def confirm(asked: RequestContext, number: int) -> Response:
        with errors_as_pages():
            known = _own(context, asked, number)
            paid = _paid(context, known)
        if known.state in jobs.ENDED:
            raise PageError(409, f"Job {number} has ended already: {known.state}.")
        return asked.page("job_cancel.html", one=known, paid=paid, may=not paid or asked.person.role in KEEPERS)

    @pages.post("/jobs/{number}/cancel", ACTORS)
    def cancel(asked: RequestContext, number: int) -> Response:
        spend = asked.form.get("spend", "") == "yes"
        with errors_as_pages():
            known = _own(context, asked, number)
            if spend and asked.person.role not in KEEPERS:
                raise PageError(403, "Its price has been paid: who keeps or decides at this site may end it.")
            if not spend and _paid(context, known):
                raise PageError(409, "Its price has been paid and stays spent: confirm that. Nothing was done.")
            told = context.act("jobs/cancel", number=number, by=asked.person.name, spend=spend)
        said = (
            "It is cancelled."
            if told["state"] == jobs.CANCELLED
            else "It is told to end; this page shows when it has."
        )
        return asked.go(f"/jobs/{number}", said)

    @pages.post("/jobs/{number}/retry", ACTORS)
    def retry(asked: RequestContext, number: int) -> Response:
        with errors_as_pages():
            _own(context, asked, number)
            again = context.act("jobs/retry", number=number, by=asked.person.name)["number"]
        said = "It goes on." if again == number else f"It begins anew as job {again}."
        return asked.go(f"/jobs/{again}", said)


def _require_certificate(asked: RequestContext) -> None:
    """A decision about a proposal bears no signature, so the login is the person's own certificate.

    Raises:
        PageError: it is an account of the institution's.
    """
    if not asked.by_certificate:
        raise PageError(
            403,
            "Log in with your own certificate to decide about a proposal: "
            "`lazaret-agent login make NAME --out FOLDER` makes one, and the operator of this "
            "console pins it. Nothing was done.",
        )


def _may_act(role: str, own: bool) -> bool:
    return role in KEEPERS or (role == RESEARCHER and own)


def _own(context: SiteConsoleContext, asked: RequestContext, number: int) -> Job:
    """A job that this person may act on.

    Raises:
        PageError: it is not theirs.
    """
    known = JobStore(context.home.root).read(number)
    if not _may_act(asked.person.role, known.history[0].by == asked.person.name):
        raise PageError(403, f"Job {number} is of {known.history[0].by}: a researcher ends and retries their own.")
    return known


def _may_begin_again(known: Job) -> bool:
    if known.lane == jobs.PREDICTION and known.state in jobs.ENDED:
        return False
    return known.lane != jobs.ROUND and known.state in jobs.ENDED - {jobs.DONE} | {jobs.INTERRUPTED}


def _paid(context: SiteConsoleContext, known: Job) -> bool:
    if known.lane == jobs.ROUND:
        return round_parts.paid(context.home, context.ledger.read().state, known)
    grant = context.ledger.read().state.grants.get(known.grant)
    return grant is not None and grant.state == "held"


def may_approve(asked: RequestContext, known: Job, waits: list[str]) -> bool:
    """Whether the page offers an approval; :func:`agent.service.job_proposals.approve` decides."""
    if known.state != jobs.PROPOSED or asked.person.name in (known.history[0].by, *known.approved.values()):
        return False
    return asked.person.role in (waits or DECIDERS)


def job_of(context: SiteConsoleContext, release: str) -> int | None:
    """The job that made a release; None: it was made by hand, or the job is forgotten."""
    found = (one for one in JobStore(context.home.root).all() if one.grant)
    return next((one.number for one in found if release_of(context.home, one) == release), None)


def price_words(state: State, site: str, words: tuple[str, ...], price: Mapping[str, Any]) -> str:
    """What a release costs and leaves of the budget, as the dry run told it; "" where nothing was told."""
    mechanism = price.get("mechanism", words[1]) if len(words) > 1 else ""
    account = state.accounts.get(account_name(site, mechanism)) if price and mechanism else None
    if account is None:
        return ""
    amount, left = int(price["amount"]), int(price["left"])
    if not account.opened.order:
        after = f"{max(0, left - amount)} of {account.limit} would be left"
        return f"{amount} of the {left} releases without an epsilon that each patient may still be in; {after}"
    delta = account.opened.delta
    loss = descriptions.stated(epsilon_of(amount, float(delta), account.opened.order), delta)
    share = rounded_up(100 * amount / account.limit, 1) if account.limit else 100.0
    rest = max(0.0, 100 * (left - amount) // account.limit) if account.limit else 0.0
    return f"{loss}: {share:g} % of the lifetime budget; {rest:g} % would be left"


def _claims(known: Job) -> Iterator[tuple[str, str]]:
    """Method and promise of a release, as its statement will have them."""
    if known.words[0] not in ("release", jobs.PART) or not known.price:
        return
    method = str(known.price.get("mechanism", known.words[1]))
    yield "Method", descriptions.MECHANISMS.get(method, method)
    yield "Promise", descriptions.promise(claim_from(dict(known.price["claim"])))


def _named(name: str, text: str) -> Iterator[tuple[str, str]]:
    if text:
        yield name, text


def settings_of(known: Job) -> Iterator[tuple[str, str]]:
    """The options of a job's command, by name."""
    words = list(known.words[len(known.kind.split()) :])
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        if name != "--project":  # said among the facts
            yield name.lstrip("-").replace("-", " "), value.removeprefix("in/").removeprefix("out/") or "yes"


def printed(context: SiteConsoleContext, known: Job) -> str:
    """The end of what the job's process has printed."""
    folder = JobStore(context.home.root).folder(known.number)
    lines = [line for name in ("stdout", "stderr") for line in _end_of(folder / name).splitlines()]
    return "\n".join(printable(line) for line in lines)


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _SHOWN_BYTES))
            return stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def frozen_files(context: SiteConsoleContext, known: Job) -> list[tuple[str, str, str]]:
    """What a job reads, as it was proposed: name, SHA-256, and the text of a configuration."""
    folder = JobStore(context.home.root).folder(known.number) / "in"
    return list(_frozen(context, folder)) if folder.is_dir() else []


def _frozen(context: SiteConsoleContext, folder: Path) -> Iterator[tuple[str, str, str]]:
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        about = path.stat()
        seen = (str(path), about.st_size, about.st_mtime_ns)
        digest = context.memory.digests.get(seen)
        if digest is None:
            with path.open("rb") as stream:
                digest = context.memory.digests[seen] = hashlib.file_digest(stream, "sha256").hexdigest()
        yield (
            path.relative_to(folder).as_posix(),
            digest,
            path.read_text(errors="replace") if path.suffix == ".toml" else "",
        )
