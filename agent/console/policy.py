"""The site's own policy: the binding one, a draft with all its problems, and how a draft becomes binding.

What tightens comes into force as one person in office wishes. What loosens anything needs the signature of every
approving role, over the very text: the ledger holds them before the site's key signs the amendment.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from starlette.responses import Response

from agent.console import policy_draft
from agent.console.context import DECIDERS, READERS, SiteConsoleContext
from agent.console.errors import errors_as_pages
from agent.runtime import amend
from policies.governance import amendments, decisions
from policies.ledger.entries import InvalidEntryError
from policies.review.policy import Policy, preset
from policies.statements import Approval
from protos.identity.key_files import replace_private
from protos.web.router import PageError, RequestContext, Router

_MOST: Final = 16_000  # characters: a statement holds no longer text
PRESETS: Final = ("internal", "controlled", "public")
_HELP: Final[dict[str, Any]] = {"presets": PRESETS, "meanings": policy_draft.MEANINGS}


def add(pages: Router, context: SiteConsoleContext) -> None:
    """The pages of the policy."""
    pages.menu("Policy", "/policy", READERS)
    _look(pages, context)
    _decide(pages, context)


def _look(pages: Router, context: SiteConsoleContext) -> None:
    @pages.get("/policy", READERS)
    def policy(asked: RequestContext) -> Response:
        with errors_as_pages():
            signed, federation, own = context.signed_policy(), context.home.federation_policy(), context.home.policy()
        text = drafted(context)
        return asked.page(
            "policy.html",
            rows=policy_draft.compare(signed, own, federation, context.policy()),
            same=own == signed,
            draft=text is not None,
            may=asked.person.role in DECIDERS,
        )

    @pages.get("/policy/edit", DECIDERS)
    def edit(asked: RequestContext, start: str = "") -> Response:
        with errors_as_pages():
            text = preset(start) if start in PRESETS else drafted(context) or context.home.policy_text()
        return asked.page(
            "policy_edit.html", text=text, problems=(), rows=(), presets=PRESETS, meanings=policy_draft.MEANINGS
        )

    @pages.post("/policy/check", DECIDERS)
    def check(asked: RequestContext) -> Response:
        text = asked.form["policy"].strip() + "\n"
        with errors_as_pages():
            made, wrong = judged(context, text)
            signed, federation = context.own_policy(), context.home.federation_policy()
        if made is None:
            return asked.again("policy_edit.html", text=text, problems=wrong, rows=(), **_HELP)
        if asked.form.get("keep", "") != "yes":
            rows = policy_draft.compare(signed, made, federation)
            return asked.page("policy_edit.html", text=text, problems=(), rows=rows, **_HELP)
        replace_private(context.home.root / policy_draft.FILE, text.encode())
        return asked.go("/policy/draft", "The draft is saved. It has no effect until it is put in force.")

    @pages.get("/policy/draft", DECIDERS)
    def draft(asked: RequestContext) -> Response:
        text, made = _draft(context)
        with errors_as_pages():
            store = context.ledger.read()
            signed, federation = context.own_policy(), context.home.federation_policy()
            looser = amendments.loosened_keys(signed, made)
            serial = amendments.amendment_serial(text, store.state.amended.get(context.site, 0))
            digest = amendments.digest(text)
            given = store.state.approvals(serial, amendments.ACTION, context.site, digest)
            missing = sorted(store.state.office() - set(given)) if looser else []
        return asked.page(
            "policy_draft.html",
            text=text,
            digest=digest,
            rows=policy_draft.compare(signed, made, federation),
            looser=looser,
            given=sorted(given),
            missing=missing,
            signing=asked.signing(store.origin, serial, amendments.ACTION, context.site, digest)
            if asked.person.role in missing
            else None,
        )


def _decide(pages: Router, context: SiteConsoleContext) -> None:
    @pages.post("/policy/approve", DECIDERS)
    def approve(asked: RequestContext) -> Response:
        text, _ = _draft(context)
        envelope = asked.envelope()
        with errors_as_pages():
            word = decisions.said_by(envelope)
            serial = amendments.amendment_serial(text, context.ledger.read().state.amended.get(context.site, 0))
            wanted = (serial, amendments.ACTION, context.site, amendments.digest(text))
            if not isinstance(word, Approval) or (word.serial, word.action, word.subject, word.value) != wanted:
                raise InvalidEntryError(
                    "the signature is for another text: the draft was changed meanwhile. Look at it again"
                )
            if word.person != asked.person.name:
                raise InvalidEntryError(f"the signature is of {word.person}, but {asked.person.name} is logged in")
            with context.ledger.write() as store:
                decisions.approve(store, envelope)
        context.log.info("policy_approved", state=asked.person.role)
        return asked.go("/policy/draft", "Your approval is in the ledger.")

    @pages.post("/policy/discard", DECIDERS)
    def discard(asked: RequestContext) -> Response:
        (context.home.root / policy_draft.FILE).unlink(missing_ok=True)
        return asked.go("/policy", "The draft is discarded. Nothing has changed.")

    @pages.post("/policy/force", DECIDERS)
    def force(asked: RequestContext) -> Response:
        text, _ = _draft(context)
        if asked.form.get("digest", "") != amendments.digest(text):
            raise PageError(409, "The draft was changed since you looked at it: look at it again.")
        with errors_as_pages():
            return asked.go("/policy", in_force(context, text))


def drafted(context: SiteConsoleContext) -> str | None:
    """The text of the draft; None without one."""
    with contextlib.suppress(FileNotFoundError):
        return (context.home.root / policy_draft.FILE).read_text()
    return None


def _draft(context: SiteConsoleContext) -> tuple[str, Policy]:
    """The draft, if it is still good.

    Raises:
        PageError: there is none, or it has a problem by now.
    """
    text = drafted(context)
    if text is None:
        raise PageError(404, "There is no draft: edit the policy first.")
    with errors_as_pages():
        made, wrong = judged(context, text)
    if made is None:
        raise PageError(409, f"The draft has problems: {'; '.join(wrong)}.")
    return text, made


def judged(context: SiteConsoleContext, text: str) -> tuple[Policy | None, tuple[str, ...]]:
    """A text as a policy of this site, or everything that is wrong with it."""
    if len(text) > _MOST:
        return None, (f"the text is longer than {_MOST} characters: a statement cannot hold it",)
    patients = 0
    for name in context.projects():
        with context.vault(name) as vault:
            patients = max(patients, vault.patients())
    return policy_draft.problems(text, patients)


def in_force(context: SiteConsoleContext, text: str) -> str:
    """Put a draft in force: at this site, then at the coordinator; what came of it, in a sentence.

    Raises:
        InvalidEntryError: it loosens something, and not everybody in office has approved this very text.
    """
    with context.ledger.work() as opened:
        verdict = amend(opened, text)
        if not verdict.admitted:
            told = "; ".join(f"{f.rule}: {f.detail}" for f in verdict.findings)
            raise InvalidEntryError(f"the coordinator refuses the amendment: {told}")
        replace_private(context.home.root / "policy.toml", text.encode())  # until then the stricter of both binds
    (context.home.root / policy_draft.FILE).unlink(missing_ok=True)
    context.log.info("policy_amended", state=amendments.digest(text)[:16])
    return "The policy is in force: in this site's ledger and at the coordinator. The stricter of both applies."
