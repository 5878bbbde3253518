"""The site's own policy: the binding one, a draft with all its problems, and how a draft becomes binding.

What tightens comes into force as one person in office wishes. What loosens anything needs the signature of every
approving role, over the very text: the ledger holds them before the site's key signs the amendment.

A policy as it is edited: every problem at once, what changes, and which way. Pure but for the file it waits in.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from typing import Any, Final

from starlette.responses import Response

from agent.console.context import DECIDERS, READERS, SiteConsoleContext
from agent.console.errors import errors_as_pages
from agent.service.commands import read_verdict
from policies.governance import amendments, decisions
from policies.ledger.entries import InvalidEntryError
from policies.review.policy import Policy, PolicyError, parse, preset, strictest
from policies.statements import Approval
from protos.identity.key_files import replace_private
from protos.web.router import PageError, RequestContext, Router

FILE: Final = "policy.proposed.toml"  # of the home: what is proposed, until it is in force or taken back
MEANINGS: Final = {
    "name": "the policy's name, printed on certificates",
    "epsilon": "lifetime budget of each patient for all releases with noise",
    "delta": "must stay below 1 / patients",
    "k_min": "minimum of distinct patients behind a released image",
    "l_diversity": "minimum of distinct labels behind a released image",
    "max_releases_per_patient": "releases without an epsilon that a patient may be in, ever",
    "max_artifact_bytes": "largest file that may leave",
    "max_reid_rate": "largest share that an attack may re-identify (upper bound)",
    "mechanisms": "methods that may be used",
    "modalities": "modalities that may be released",
    "artifact_types": "kinds of files that may leave",
    "components": "where networks and data that make a release may come from",
    "levels": "claim levels that may leave",
    "approvals": "roles that must approve each release before it leaves",
    "run_approvals": "roles that must approve the plan of a federated run before this site takes part in it",
    "readers": "recipients' keys to which a release may be encrypted, so that the coordinator cannot read it",
}


@dataclass(frozen=True, slots=True)
class PolicyKeyDiff:
    """One key of a policy, beside itself."""

    key: str
    meaning: str
    signed: str  # what the site signed last
    proposed: str
    federation: str
    strictest: str  # what would bind
    change: str  # "" | "tighter" | "looser" | "other": proposed against signed


def problems(text: str, patients: int) -> tuple[Policy | None, tuple[str, ...]]:
    """The policy of a text, or everything that is wrong with it, one sentence each.

    Args:
        text: TOML.
        patients: of this site (P1: delta below one in so many).
    """
    try:
        policy = parse(text, "policy.toml")
    except PolicyError as error:
        said = str(error).removeprefix("policy.toml: ")
        return None, tuple(said.split("; "))
    if not patients * policy.delta < 1:
        return None, ("delta: must be below 1 / the number of this site's patients",)
    return policy, ()


def compare(
    signed: Policy, proposed: Policy, federation: Policy, binding: Policy | None = None
) -> tuple[PolicyKeyDiff, ...]:
    """Every key: the site's binding value, the proposed one, and the result with the federation's policy.

    ``binding``: what binds, where that is known to be something else.
    """
    binding = binding or strictest(proposed, federation)
    rows = []
    for f in fields(Policy):
        a, b, c, d = (shown(getattr(policy, f.name)) for policy in (signed, proposed, federation, binding))
        rows.append(PolicyKeyDiff(f.name, MEANINGS[f.name], a, b, c, d, _change(f.name, signed, proposed)))
    return tuple(rows)


def shown(value: object) -> str:
    """A value as people write it."""
    if isinstance(value, frozenset):
        return ", ".join(sorted(v if len(v) < 64 else v[:12] + "…" for v in value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _change(key: str, signed: Policy, proposed: Policy) -> str:
    before, after = getattr(signed, key), getattr(proposed, key)
    if before == after:
        return ""
    if key == "name":
        return "other"
    both = getattr(strictest(signed, proposed), key)
    return "tighter" if both == after else "looser"


_MOST: Final = 16_000  # characters: a statement holds no longer text
PRESETS: Final = ("internal", "controlled", "public")
_HELP: Final[dict[str, Any]] = {"presets": PRESETS, "meanings": MEANINGS}


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
            rows=compare(signed, own, federation, context.policy()),
            same=own == signed,
            draft=text is not None,
            may=asked.person.role in DECIDERS,
        )

    @pages.get("/policy/edit", DECIDERS)
    def edit(asked: RequestContext, start: str = "") -> Response:
        with errors_as_pages():
            text = preset(start) if start in PRESETS else drafted(context) or context.home.policy_text()
        return asked.page("policy_edit.html", text=text, problems=(), rows=(), presets=PRESETS, meanings=MEANINGS)

    @pages.post("/policy/check", DECIDERS)
    def check(asked: RequestContext) -> Response:
        text = asked.form["policy"].strip() + "\n"
        with errors_as_pages():
            made, wrong = judged(context, text)
            signed, federation = context.own_policy(), context.home.federation_policy()
        if made is None:
            return asked.again("policy_edit.html", text=text, problems=wrong, rows=(), **_HELP)
        if asked.form.get("keep", "") != "yes":
            rows = compare(signed, made, federation)
            return asked.page("policy_edit.html", text=text, problems=(), rows=rows, **_HELP)
        replace_private(context.home.root / FILE, text.encode())
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
            rows=compare(signed, made, federation),
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
            context.record_approval(envelope)
        context.log.info("policy_approved", state=asked.person.role)
        return asked.go("/policy/draft", "Your approval is in the ledger.")

    @pages.post("/policy/discard", DECIDERS)
    def discard(asked: RequestContext) -> Response:
        (context.home.root / FILE).unlink(missing_ok=True)
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
        return (context.home.root / FILE).read_text()
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
    return problems(text, patients)


def in_force(context: SiteConsoleContext, text: str) -> str:
    """Put a draft in force: at this site, then at the coordinator; what came of it, in a sentence.

    Raises:
        InvalidEntryError, ServiceRefusedError: it loosens something, and not everybody in office has approved this
            very text; or the coordinator refuses.
    """
    verdict = read_verdict(context.act("ledger/amend", policy=text)["verdict"])
    if not verdict.admitted:
        told = "; ".join(f"{f.rule}: {f.detail}" for f in verdict.findings)
        raise InvalidEntryError(f"the coordinator refuses the amendment: {told}")
    (context.home.root / FILE).unlink(missing_ok=True)
    context.log.info("policy_amended", state=amendments.digest(text)[:16])
    return "The policy is in force: in this site's ledger and at the coordinator. The stricter of both applies."
