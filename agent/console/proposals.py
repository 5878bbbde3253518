"""Proposals of releases and trainings: a form for each mechanism, its price, and the job that it becomes."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from starlette.responses import Response

from agent.console.context import LOOKERS, SiteConsoleContext
from agent.console.errors import errors_as_pages
from agent.console.jobs import PROPOSERS, price_words
from agent.console.proposal_process import check_proposal, read_all_forms
from agent.service import job_proposals
from agent.service.jobs import PRIORITIES, JobStore
from agent.service.proposal_form import (
    NETWORKS,
    FilledForm,
    ProposalForm,
    fill,
    offered_files,
    offered_folders,
    place_problems,
)
from agent.storage.site_directory import MAIN
from protos.web.router import PageError, RequestContext, Router

# fields of the page, and of no configuration
_OWN: Final = frozenset({"csrf", "key", "project", "priority", "propose", "form"})
_WAIT_S: Final = 60.0  # for another proposal that is being checked
_KEY: Final = re.compile(r"(?:[0-9a-f]{16})?")  # of a form: pressed twice, it proposes once
_COUNTED: Final = frozenset({"artifact_size", "disk_full"})
Findings = tuple[tuple[str, str], ...]  # rule and sentence
Typed = Mapping[str, tuple[str, ...]]


def add(pages: Router, context: SiteConsoleContext) -> None:
    """The pages of proposals; the menu's entry is that of the jobs."""

    @pages.get("/jobs/propose", PROPOSERS)
    def choose(asked: RequestContext) -> Response:
        return asked.page("propose.html", forms=_forms(context))

    @pages.get("/jobs/propose/{name}", PROPOSERS)
    def blank(asked: RequestContext, name: str) -> Response:
        form = _form(context, name)
        typed = {one.name: (one.default,) for one in form.fields() if one.default}
        shown = _shown(context, form, typed, (MAIN, "normal"))
        return asked.page("proposal.html", **shown, key=secrets.token_hex(8))

    @pages.post("/jobs/propose/{name}", PROPOSERS)
    def propose(asked: RequestContext, name: str) -> Response:
        form, (project, priority) = _form(context, name), _chosen(context, asked)
        typed = {one: asked.form.all(one) for one in asked.form if one not in _OWN}
        key, for_good = asked.form.get("key", ""), asked.form.get("propose", "") == "yes"
        if not _KEY.fullmatch(key):
            raise PageError(400, "That form is of another version of this console: open it again. Nothing was done.")
        shown = {**_shown(context, form, typed, (project, priority)), "key": key}
        filled = fill(form, typed, context.home.root)
        if filled.problems:
            return asked.again("proposal.html", **{**shown, "wrong": filled.problems})
        with _one_at_a_time(context), errors_as_pages(), _in_folder(context, filled, frozen=for_good) as files:
            words = (*filled.words, *((f"--project={project}",) if form.command[0] == "release" else ()))
            folder = JobStore(context.home.root).root / f"new-{files}"
            checked = check_proposal(context.home.root, folder, words)
            placed, rest = place_problems(form, checked.problem) if checked.problem else ({}, [])
            found = _findings(checked.findings, asked.person.role in LOOKERS)
            shown |= {"wrong": placed, "problems": rest, "findings": found}
            if checked.problem or checked.findings:
                return asked.again("proposal.html", **shown)
            if not for_good:
                price = price_words(context.ledger.read().state, context.site, words, checked.price)
                return asked.page("proposal.html", **{**shown, "checked": True, "price": price})
            told: dict[str, Any] = {"words": words, "project": project, "by": asked.person.name, "key": key}
            told |= {"price": dict(checked.price), "cuda": filled.cuda, "priority": priority}
            number = context.act("jobs/propose", job=told, files=files)["number"]
        return asked.go(f"/jobs/{number}", f"Proposed as job {number}.")


def _chosen(context: SiteConsoleContext, asked: RequestContext) -> tuple[str, str]:
    """Project and priority."""
    project, priority = asked.form.get("project", MAIN), asked.form.get("priority", "normal")
    if project not in context.projects():
        raise PageError(404, "There is no such project.")
    if priority not in PRIORITIES:
        raise PageError(404, f"There is no such priority: it is one of {', '.join(PRIORITIES)}.")
    return project, priority


def _findings(found: Findings, counts: bool) -> Findings:
    """Known reasons for a refusal; figures that follow from the number of patients for those who see counts."""
    hidden = "figures that follow from the number of patients: the operator sees them"
    return tuple((rule, text if counts or rule not in _COUNTED else hidden) for rule, text in found)


def _forms(context: SiteConsoleContext) -> tuple[ProposalForm, ...]:
    if not context.memory.forms:
        with _one_at_a_time(context), errors_as_pages():
            context.memory.forms = context.memory.forms or read_all_forms()
    return context.memory.forms


def _form(context: SiteConsoleContext, name: str) -> ProposalForm:
    for form in _forms(context):
        if form.name == name:
            return form
    raise PageError(404, "Nothing of that name can be proposed: choose from the list.")


def _shown(context: SiteConsoleContext, form: ProposalForm, typed: Typed, chosen: tuple[str, str]) -> dict[str, Any]:
    """What the page of a form shows, with nothing wrong and nothing checked yet; chosen are project and priority."""
    home = context.home.root
    with errors_as_pages():
        approving = sorted(job_proposals.approving(context.acting))
        files, folders = list(offered_files(home)), list(offered_folders(home))
    return {
        "form": form,
        "typed": typed,
        "project": chosen[0],
        "priority": chosen[1],
        "priorities": PRIORITIES,
        "projects": context.projects(),
        "files": files,
        "folders": folders,
        "networks": NETWORKS,
        "pairs": lambda names: [(name, name) for name in names],
        "approving": approving,
        "wrong": {},
        "problems": [],
        "findings": (),
        "checked": False,
        "price": "",
    }


@contextlib.contextmanager
def _one_at_a_time(context: SiteConsoleContext) -> Iterator[None]:
    """A check takes seconds of a processor, and the memory of the networks that it reads.

    Raises:
        PageError: another one takes long.
    """
    if not context.memory.checking.acquire(timeout=_WAIT_S):
        raise PageError(409, "Another proposal is being checked: try again in a minute. Nothing was done.")
    try:
        yield
    finally:
        context.memory.checking.release()


@contextlib.contextmanager
def _in_folder(context: SiteConsoleContext, filled: FilledForm, frozen: bool) -> Iterator[str]:
    """The files of a proposal in a folder of their own; its name.

    ``frozen``: as copies that nobody changes; to look at a price, links will do.
    """
    name = secrets.token_hex(8)
    fresh = JobStore(context.home.root).fresh_folder(name)
    try:
        for file, text in filled.texts.items():
            (fresh / "in" / file).write_text(text)
        for file, source in filled.copies.items():
            _put(source, fresh / "in" / file, frozen)
        yield name
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # where it was proposed, the folder has its number now


def _put(source: Path, place: Path, frozen: bool) -> None:
    if frozen:
        shutil.copyfile(source, place)
    else:
        os.symlink(source.resolve(), place)
