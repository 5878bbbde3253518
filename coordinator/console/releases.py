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
from coordinator.console.release_facts import Attack, Facts, Model, facts_of, model_of
from coordinator.console.release_files import ArchivedImage, DigestMismatchError, ReleaseFiles, rest_in_chunks
from coordinator.console.release_index import Listed
from coordinator.federation.job import Job
from policies.index.search import Query
from policies.ledger.entries import Admitted, RoundClosed
from policies.ledger.state import State
from policies.statements import ID
from protos.web.charts import Bar, Part, bars
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


def add(pages: Router, desk: CoordinatorConsoleContext) -> None:
    """The pages."""
    goods, listed = ReleaseFiles(desk.shelf.root), Listed()
    pages.menu("Releases", "/releases", READERS)
    _listed(pages, desk, listed)
    _one(pages, desk, goods, listed)
    _files(pages, desk, goods, listed)


def _listed(pages: Router, desk: CoordinatorConsoleContext, listed: Listed) -> None:
    """All of them, newest first."""

    @pages.get("/releases", READERS)
    def releases(
        asked: RequestContext, site: str = "", level: str = "", mechanism: str = "", text: str = "", page: int = 1
    ) -> Response:
        wanted = {"site": site, "level": level, "mechanism": mechanism, "text": text}
        with desk.store.exclusive() as state:
            sheet = listed.sheet(state, wanted, page, PER_PAGE)
            shown = [_facts(desk, state, entry) for entry in sheet.entries]
        return asked.page(
            "releases.html",
            releases=shown,
            wanted=wanted,
            choices=sheet.choices,
            total=sheet.total,
            every=sheet.every,
            page=sheet.page,
            last=sheet.last,
            models=_models(desk, listed) if sheet.page == 1 and not any(wanted.values()) else [],
        )


def _one(pages: Router, desk: CoordinatorConsoleContext, goods: ReleaseFiles, listed: Listed) -> None:
    """One release, or a run's model."""

    @pages.get("/releases/{release}", READERS)
    def release(asked: RequestContext, release: str, sheet: int = 1) -> Response:
        found = _find(desk, listed, release)
        if isinstance(found, Model):
            there = goods.there(release, found.facts.file)
            rows = [(part.site, part.rounds, part.level, part.epsilon or "none") for part in found.parts]
            return asked.page("model.html", model=found, facts=found.facts, there=there, rows=rows)
        facts = found
        there = bool(facts.file) and not facts.run and goods.there(release, facts.file)
        return asked.page(
            "release.html",
            facts=facts,
            there=there,
            sheet=_sheet(goods, facts, sheet) if there and facts.pictures else None,
            statement=_statement(desk, facts),
            seq=_seq(desk, release),
            size=size_of(facts.size) if facts.size is not None else "not stated",
            approvals=[(role, f"{digest[:16]}…") for role, digest in facts.approvals],
            chart=bars([_bar(test) for test in facts.attacks], "What the attacks found, of 100 %")
            if facts.attacks
            else "",
        )

    @pages.get("/releases/{release}/pictures/{index}", READERS)
    def picture(asked: RequestContext, release: str, index: int) -> Response:
        facts = _find(desk, listed, release)
        if not isinstance(facts, Facts) or not facts.pictures or facts.run:
            raise PageError(404, _GONE)
        try:
            return asked.png_response(goods.image(release, facts.file, bytes.fromhex(facts.artifact), index))
        except DigestMismatchError as refusal:
            raise PageError(404, f"{str(refusal).capitalize()}.") from None


def _files(pages: Router, desk: CoordinatorConsoleContext, goods: ReleaseFiles, listed: Listed) -> None:
    """What can be taken away."""

    @pages.get("/releases/{release}/artifact", READERS)
    def artifact(asked: RequestContext, release: str) -> Response:
        found = _find(desk, listed, release)
        facts = found.facts if isinstance(found, Model) else found
        if facts.run and not isinstance(found, Model):
            raise PageError(404, "A single update of a run is not kept: use the run's model.")
        try:
            stream = goods.open(release, facts.file, bytes.fromhex(facts.artifact))
        except DigestMismatchError as refusal:
            desk.log.error("release_not_vouched", release=release)
            raise PageError(404, f"{str(refusal).capitalize()}.") from None
        kept = asked.download(f"{release}-{facts.file}", b"", "application/octet-stream").headers
        headers = {"content-disposition": kept["content-disposition"]}
        return StreamingResponse(rest_in_chunks(stream), media_type="application/octet-stream", headers=headers)

    @pages.get("/releases/{release}/statement", READERS)
    def statement(asked: RequestContext, release: str) -> Response:
        facts = _find(desk, listed, release)
        body = None if isinstance(facts, Model) else desk.store.envelope(bytes.fromhex(facts.statement))
        if body is None:
            raise PageError(404, _GONE)
        return asked.download(f"{release}-envelope.json", body, "application/json")


def _bar(test: Attack) -> Bar:
    """One end of an interval as a bar: up to where it reaches, or from where on."""
    return Bar(test.name, (Part(test.kind, test.value),), 100.0, f"{test.says}; {test.wanted}")


def _find(desk: CoordinatorConsoleContext, listed: Listed, name: str) -> Facts | Model:
    """A release, or a finished run's model, of that name.

    Raises:
        PageError: there is neither.
    """
    with desk.store.exclusive() as state:
        entry = state.releases.get(name)
        if entry is not None:
            return _facts(desk, state, entry)
    found = _model_of(desk, listed, name) if ID.fullmatch(name) else None
    if found is None:
        raise PageError(404, _GONE)
    return found


def _facts(desk: CoordinatorConsoleContext, state: State, entry: Admitted) -> Facts:
    """A release in words; its statement is the one whose digest is in the entry."""
    opened = state.accounts[state.grants[entry.grant].reserved.account].opened
    try:
        said = release_in(desk.store.envelope(entry.envelope) or b"")
    except (ValueError, KeyError):
        said = None
    return facts_of(entry, opened, said)


def _models(desk: CoordinatorConsoleContext, listed: Listed) -> list[Model]:
    """The models of finished runs, by name."""
    jobs = [job for job, state in desk.runs.known() if state == "finished"]
    return [model for job in jobs if (model := _model(desk, listed, job)) is not None]


def _model_of(desk: CoordinatorConsoleContext, listed: Listed, run: str) -> Model | None:
    """The model of the finished run of that name; None if there is none."""
    jobs = [job for job, state in desk.runs.known() if job.run == run and state == "finished"]
    return _model(desk, listed, jobs[0]) if jobs else None


def _model(desk: CoordinatorConsoleContext, listed: Listed, job: Job) -> Model | None:
    """A finished run's model: the one of its last closed round, by the ledger's entry; None if there is none."""
    lines = desk.store.answer(f"round-{job.run}-{job.rounds}")
    entry = lines[0].record.entry if lines else None
    if not isinstance(entry, RoundClosed):
        return None
    with desk.store.exclusive() as books:
        return model_of(books, listed.of_run(books, job.run), entry.model, job.strategy)


def _sheet(goods: ReleaseFiles, facts: Facts, page: int) -> SheetImages:
    """One page of a set's contact sheet, or why there is none."""
    try:
        sheet = goods.sheet(facts.id, facts.file, bytes.fromhex(facts.artifact))
    except DigestMismatchError as refusal:
        return SheetImages(0, (), 0, 1, 1, f"{str(refusal).capitalize()}.")
    pages = max(1, -(-len(sheet.places) // PER_SHEET))
    page = min(max(1, page), pages)
    first = (page - 1) * PER_SHEET
    return SheetImages(first, sheet.places[first : first + PER_SHEET], sheet.total, page, pages, "")


def _seq(desk: CoordinatorConsoleContext, release: str) -> int | None:
    """The number of the entry that admitted it; None while the index has not found it."""
    desk.index.follow()
    for seq in desk.index.find(Query(kinds=("admitted",), text=release, most=5)).seqs:
        entry = desk.store.line(seq).record.entry
        if isinstance(entry, Admitted) and entry.release == release:
            return seq
    return None


def _statement(desk: CoordinatorConsoleContext, facts: Facts) -> str:
    """The sealed statement's content, indented for reading; "" when it cannot be read."""
    body = desk.store.envelope(bytes.fromhex(facts.statement)) or b""
    try:
        payload: Any = json.loads(base64.b64decode(json.loads(body)["payload"]))
    except (ValueError, KeyError, TypeError):
        return ""
    return json.dumps(payload, indent=2, sort_keys=True)
