"""The releases: admitted ones with images and descriptions, and their files for download."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from coordinator.claim_descriptions import release_in
from coordinator.console.context import READERS, CoordinatorConsoleContext
from coordinator.console.policy_comparison import size_of
from coordinator.console.release_facts import ReleaseFacts, RunModel, facts_of, model_of
from coordinator.console.release_files import ArchivedImage, DigestMismatchError, ReleaseFiles, rest_in_chunks
from coordinator.console.release_index import Listed
from coordinator.federation.job import Job
from policies.index.search import EntryQuery
from policies.ledger.entries import Admitted, RoundClosed
from policies.ledger.state import State
from policies.statements import ID
from protos.web.charts import Bar, BarPart, bars
from protos.web.router import PageError, RequestContext, Router

PER_PAGE: Final = 20
PER_SHEET: Final = 60  # images at once
_GONE: Final = "The ledger has admitted no release of that name."


@dataclass(frozen=True, slots=True)
class SheetImages:
    """The images of one page of a contact sheet."""

    first: int
    places: Sequence[ArchivedImage]
    total: int
    page: int
    pages: int
    refused: str  # why there are none, in a sentence


def add(pages: Router, context: CoordinatorConsoleContext) -> None:
    """The pages."""
    files, listed = ReleaseFiles(context.shelf.root), Listed()
    pages.menu("Releases", "/releases", READERS)
    _listed(pages, context, listed)
    _one(pages, context, files, listed)
    _files(pages, context, files, listed)


def _listed(pages: Router, context: CoordinatorConsoleContext, listed: Listed) -> None:
    """All of them, newest first."""

    @pages.get("/releases", READERS)
    def releases(
        asked: RequestContext, site: str = "", level: str = "", mechanism: str = "", text: str = "", page: int = 1
    ) -> Response:
        wanted = {"site": site, "level": level, "mechanism": mechanism, "text": text}
        with context.store.exclusive() as state:
            sheet = listed.sheet(state, wanted, page, PER_PAGE)
            shown = [_facts(context, state, entry) for entry in sheet.entries]
        return asked.page(
            "releases.html",
            releases=shown,
            wanted=wanted,
            choices=sheet.choices,
            total=sheet.total,
            every=sheet.every,
            page=sheet.page,
            last=sheet.last,
            models=_models(context, listed) if sheet.page == 1 and not any(wanted.values()) else [],
        )


def _one(pages: Router, context: CoordinatorConsoleContext, files: ReleaseFiles, listed: Listed) -> None:
    """One release, or a run's model."""

    @pages.get("/releases/{release}", READERS)
    def release(asked: RequestContext, release: str, sheet: int = 1) -> Response:
        found = _find(context, listed, release)
        if isinstance(found, RunModel):
            there = files.there(release, found.facts.file)
            rows = [(part.site, part.rounds, part.level, part.epsilon or "none") for part in found.parts]
            return asked.page("model.html", model=found, facts=found.facts, there=there, rows=rows)
        facts = found
        there = bool(facts.file) and not facts.run and files.there(release, facts.file)
        # of each interval one end: up to where it reaches, or from where on
        ends = [Bar(a.name, (BarPart(a.kind, a.value),), 100.0, f"{a.says}; {a.wanted}") for a in facts.attacks]
        return asked.page(
            "release.html",
            facts=facts,
            there=there,
            sheet=_sheet(files, facts, sheet) if there and facts.pictures else None,
            statement=_statement(context, facts),
            seq=_seq(context, release),
            size=size_of(facts.size) if facts.size is not None else "not stated",
            approvals=[(role, f"{digest[:16]}…") for role, digest in facts.approvals],
            chart=bars(ends, "What the attacks found, of 100 %") if ends else "",
        )

    @pages.get("/releases/{release}/pictures/{index}", READERS)
    def picture(asked: RequestContext, release: str, index: int) -> Response:
        facts = _find(context, listed, release)
        if not isinstance(facts, ReleaseFacts) or not facts.pictures or facts.run:
            raise PageError(404, _GONE)
        try:
            return asked.png_response(files.image(release, facts.file, bytes.fromhex(facts.artifact), index))
        except DigestMismatchError as refusal:
            raise PageError(404, f"{str(refusal).capitalize()}.") from None


def _files(pages: Router, context: CoordinatorConsoleContext, files: ReleaseFiles, listed: Listed) -> None:
    """What can be taken away."""

    @pages.get("/releases/{release}/artifact", READERS)
    def artifact(asked: RequestContext, release: str) -> Response:
        found = _find(context, listed, release)
        facts = found.facts if isinstance(found, RunModel) else found
        if facts.run and not isinstance(found, RunModel):
            raise PageError(404, "A single update of a run is not kept: use the run's model.")
        try:
            stream = files.open(release, facts.file, bytes.fromhex(facts.artifact))
        except DigestMismatchError as refusal:
            context.log.error("release_not_vouched", release=release)
            raise PageError(404, f"{str(refusal).capitalize()}.") from None
        kept = asked.download(f"{release}-{facts.file}", b"", "application/octet-stream").headers
        headers = {"content-disposition": kept["content-disposition"]}
        return StreamingResponse(rest_in_chunks(stream), media_type="application/octet-stream", headers=headers)

    @pages.get("/releases/{release}/statement", READERS)
    def statement(asked: RequestContext, release: str) -> Response:
        facts = _find(context, listed, release)
        body = None if isinstance(facts, RunModel) else context.store.envelope(bytes.fromhex(facts.statement))
        if body is None:
            raise PageError(404, _GONE)
        return asked.download(f"{release}-envelope.json", body, "application/json")


def _find(context: CoordinatorConsoleContext, listed: Listed, name: str) -> ReleaseFacts | RunModel:
    """A release, or a finished run's model, of that name.

    Raises:
        PageError: there is neither.
    """
    with context.store.exclusive() as state:
        entry = state.releases.get(name)
        if entry is not None:
            return _facts(context, state, entry)
    found = _models(context, listed, name) if ID.fullmatch(name) else []
    if not found:
        raise PageError(404, _GONE)
    return found[0]


def _facts(context: CoordinatorConsoleContext, state: State, entry: Admitted) -> ReleaseFacts:
    """A release in words; its statement is the one whose digest is in the entry."""
    opened = state.accounts[state.grants[entry.grant].reserved.account].opened
    try:
        said = release_in(context.store.envelope(entry.envelope) or b"")
    except (ValueError, KeyError):
        said = None
    return facts_of(entry, opened, said)


def _models(context: CoordinatorConsoleContext, listed: Listed, only: str = "") -> list[RunModel]:
    """The models of finished runs, by name; or of the run of that name alone."""
    jobs = [job for job, state in context.runs.known() if state == "finished" and only in ("", job.run)]
    return [model for job in jobs if (model := _model(context, listed, job)) is not None]


def _model(context: CoordinatorConsoleContext, listed: Listed, job: Job) -> RunModel | None:
    """A finished run's model: the one of its last closed round, by the ledger's entry; None if there is none."""
    lines = context.store.answer(f"round-{job.run}-{job.turns}")
    entry = lines[0].record.entry if lines else None
    if not isinstance(entry, RoundClosed):
        return None
    with context.store.exclusive() as ledger:
        return model_of(ledger, listed.of_run(ledger, job.run), entry.model, job.strategy)


def _sheet(files: ReleaseFiles, facts: ReleaseFacts, page: int) -> SheetImages:
    """One page of a set's contact sheet, or why there is none."""
    try:
        sheet = files.sheet(facts.id, facts.file, bytes.fromhex(facts.artifact))
    except DigestMismatchError as refusal:
        return SheetImages(0, (), 0, 1, 1, f"{str(refusal).capitalize()}.")
    pages = max(1, -(-len(sheet.places) // PER_SHEET))
    page = min(max(1, page), pages)
    first = (page - 1) * PER_SHEET
    return SheetImages(first, sheet.places[first : first + PER_SHEET], sheet.total, page, pages, "")


def _seq(context: CoordinatorConsoleContext, release: str) -> int | None:
    """The number of the entry that admitted it; None while the index has not found it."""
    context.index.follow()
    for seq in context.index.find(EntryQuery(kinds=("admitted",), text=release, most=5)).seqs:
        entry = context.store.line(seq).record.entry
        if isinstance(entry, Admitted) and entry.release == release:
            return seq
    return None


def _statement(context: CoordinatorConsoleContext, facts: ReleaseFacts) -> str:
    """The sealed statement's content, indented for reading; "" when it cannot be read."""
    body = context.store.envelope(bytes.fromhex(facts.statement)) or b""
    try:
        payload: Any = json.loads(base64.b64decode(json.loads(body)["payload"]))
    except (ValueError, KeyError, TypeError):
        return ""
    return json.dumps(payload, indent=2, sort_keys=True)
