"""The review of a release before it leaves: its contents, its nearest real images, approvals and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from starlette.responses import Response

from agent.console import descriptions, image_rendering, review_images
from agent.console.background_task import Progress
from agent.console.context import DECIDERS, KEEPERS, LOOKERS, NoSuchReleaseError, PendingRelease, SiteConsoleContext
from agent.console.errors import errors_as_pages, sentence
from agent.console.jobs import job_of
from agent.console.nearest_image import DISTANCE
from agent.service.commands import read_verdict
from policies.governance import decisions
from policies.ledger.entries import InvalidEntryError, proposal
from policies.ledger.state import State
from policies.review.rules import AccountContext, Finding, account_name, level_of, review
from policies.statements import Approval
from protos.web.router import PageError, RequestContext, Router

REFUSE = "refuse"  # what persons sign: refuse RELEASE "SHA-256 REASON"
DECIDED = 50  # releases that set out, of which the page tells
_SENDING = "sending the release"
_PICTURES = frozenset({"made", "near", "heat"})


@dataclass(frozen=True, slots=True)
class RefusalView:
    """A refusal that somebody signed."""

    person: str
    reason: str  # a key of words.REFUSALS


def add(pages: Router, context: SiteConsoleContext) -> None:
    """The pages of the review."""
    pages.menu("Releases", "/releases", LOOKERS)
    _look(pages, context)
    _pictures(pages, context)
    _decide(pages, context)
    _end(pages, context)


def _look(pages: Router, context: SiteConsoleContext) -> None:
    @pages.get("/releases", LOOKERS)
    def releases(asked: RequestContext) -> Response:
        with errors_as_pages():
            waiting = context.waiting()
            store = context.ledger.read()
            refused = {one.release.release: refusals(context, one) for one in waiting}
            with store.exclusive() as state:  # nothing sets out while these are picked
                decided = tuple(islice(_decided(state), DECIDED))
        return asked.page(
            "releases.html",
            waiting=[(one, refused[one.release.release]) for one in waiting],
            made=descriptions.MECHANISMS,
            errand=context.errand.told(),
            decided=decided,
        )

    @pages.get("/releases/{release}", LOOKERS)
    def release(asked: RequestContext, release: str) -> Response:
        one = found(context, release)
        sees = asked.person.role in DECIDERS
        errand = context.errand.told()  # before its result is looked for: what ends between is shown by the next look
        with errors_as_pages():
            shown = review_images.shown(context, one) if sees else None
            origin, against = context.ledger.read().origin, findings(context, one)
            refused, job = refusals(context, one), job_of(context, release)
        level = level_of(one.release)
        r = one.release
        return asked.page(
            "release.html",
            one=one,
            job=job,
            facts=tuple(descriptions.facts(r)),
            level=level,
            level_words=descriptions.LEVELS.get(level, ("No claim level", "")),
            attacks=descriptions.attacks(r),
            against=against,
            refused=[(x.person, descriptions.REFUSALS.get(x.reason, x.reason)) for x in refused],
            sees=sees,
            shown=shown,
            sheet_size=review_images.SHEET,
            distance=DISTANCE,
            hottest=image_rendering.HOTTEST,
            errand=errand,
            signing=asked.signing(origin, release, "release", release, r.artifact_sha256)
            if sees and _may_approve(asked, one, refused)
            else None,
            reasons=list(descriptions.REFUSALS.items()),
            may_send=asked.person.role in KEEPERS and not one.missing and not one.gone and not refused,
            decides=sees,
        )

    @pages.get("/releases/{release}/refuse", DECIDERS)
    def reason(asked: RequestContext, release: str, why: str = "") -> Response:
        one = found(context, release)
        if why not in descriptions.REFUSALS:
            raise PageError(400, "Choose one of the reasons of the list.")
        with errors_as_pages():
            origin = context.ledger.read().origin
        value = f"{one.release.artifact_sha256} {why}"
        return asked.page(
            "refuse.html",
            one=one,
            why=descriptions.REFUSALS[why],
            signing=asked.signing(origin, refusal_serial(release), REFUSE, release, value),
        )


def _pictures(pages: Router, context: SiteConsoleContext) -> None:
    @pages.post("/releases/{release}/compare", DECIDERS)
    def compare(asked: RequestContext, release: str) -> Response:
        one = found(context, release)
        what = "comparing the release with the images in the vault"
        if not context.errand.begin(
            "releases", what, lambda progress: review_images.compare(context, one, progress), sentence
        ):
            raise PageError(409, "Another task is running: wait until it has ended.")
        context.log.info("release_compared", release=release)
        return asked.go(f"/releases/{release}", "Comparing. This page shows the progress.")

    @pages.get("/releases/{release}/sheet/{number}.png", DECIDERS, told=True)
    def sheet(asked: RequestContext, release: str, number: int) -> Response:
        kept = review_images.recall(context, release)
        if kept is None or not 0 <= number < len(kept.images):
            raise PageError(404, "That image is no longer available: open the release's page again.")
        return asked.png_response(image_rendering.png(kept.images[number]))

    @pages.get("/releases/{release}/beside/{number}/{which}.png", DECIDERS, told=True)
    def beside(asked: RequestContext, release: str, number: int, which: str) -> Response:
        if which not in _PICTURES:
            raise PageError(404, "There is no such image.")
        try:
            kept, one = review_images.still_visible(context, release, number)
        except LookupError:
            raise PageError(404, "That image is no longer available: compare again.") from None
        return asked.png_response(review_images.review_png(kept, one, which))

    @pages.get("/releases/scale/heat.png", DECIDERS)
    def scale(asked: RequestContext) -> Response:
        return asked.png_response(image_rendering.png(image_rendering.scale()))


def _decide(pages: Router, context: SiteConsoleContext) -> None:
    @pages.post("/releases/{release}/approve", DECIDERS)
    def approve(asked: RequestContext, release: str) -> Response:
        one = found(context, release)
        envelope = asked.envelope()
        with errors_as_pages():
            require_own_word(asked, envelope, (release, "release", release, one.release.artifact_sha256))
            if refusals(context, one):
                raise InvalidEntryError("the release was refused already; it can only be withdrawn")
            context.record_approval(envelope)
        context.log.info("release_approved", release=release, state=asked.person.role)
        return asked.go(f"/releases/{release}", "Your approval is in the ledger.")

    @pages.post("/releases/{release}/refuse", DECIDERS)
    def refuse(asked: RequestContext, release: str) -> Response:
        one = found(context, release)
        envelope = asked.envelope()
        with errors_as_pages():
            value = decisions.said_by(envelope).value
            sha, _, why = value.partition(" ")
            if sha != one.release.artifact_sha256 or why not in descriptions.REFUSALS:
                raise InvalidEntryError("the refusal names another artifact or an unknown reason")
            require_own_word(asked, envelope, (refusal_serial(release), REFUSE, release, value))
            context.record_approval(envelope)
        context.log.info("release_refused", release=release, reason=why)
        return _withdrawing(asked, context, release)


def _end(pages: Router, context: SiteConsoleContext) -> None:
    @pages.post("/releases/{release}/withdraw", DECIDERS)
    def withdraw_again(asked: RequestContext, release: str) -> Response:
        one = found(context, release)
        with errors_as_pages():
            if not refusals(context, one):
                raise InvalidEntryError("it is not refused: refuse it first, with a reason and a signature")
        return _withdrawing(asked, context, release)

    @pages.post("/releases/{release}/send", KEEPERS)
    def send(asked: RequestContext, release: str) -> Response:
        one = found(context, release)
        with errors_as_pages():
            if refusals(context, one):
                raise InvalidEntryError("it was refused, so it cannot be sent")
        if one.missing or one.gone:
            raise PageError(409, "It cannot be sent: an approval is missing, or a patient in it has opted out.")
        if not context.errand.begin("releases", _SENDING, lambda p: hand_over(context, release, p), sentence):
            raise PageError(409, "Another task is running: wait until it has ended.")
        return asked.go("/releases", "Sending it. The list below shows the result.")


def _withdrawing(asked: RequestContext, context: SiteConsoleContext, release: str) -> Response:
    """Its own errand: the coordinator may be slow to answer, or away."""
    if not context.errand.begin(
        "releases", "withdrawing the release", lambda _: withdrawn(context, release), sentence
    ):
        return asked.go(f"/releases/{release}", "Refused. Withdraw it when no other task is running.")
    return asked.go("/releases", "Your refusal is in the ledger; the release is being withdrawn.")


def found(context: SiteConsoleContext, release: str) -> PendingRelease:
    """A release that waits.

    Raises:
        PageError: none of that name waits.
    """
    with errors_as_pages():
        for one in context.waiting():
            if one.release.release == release:
                return one
        raise NoSuchReleaseError


def _may_approve(asked: RequestContext, one: PendingRelease, refused: tuple[RefusalView, ...]) -> bool:
    return not (one.gone or refused) and asked.person.role in one.missing


def require_own_word(asked: RequestContext, envelope: bytes, wanted: tuple[str, str, str, str]) -> None:
    """Is it this person's own word on exactly this? The signature itself is the law's to check.

    Under another serial it would be written down, and never counted.

    Raises:
        InvalidEntryError: it is not.
    """
    word = decisions.said_by(envelope)
    if not isinstance(word, Approval) or (word.serial, word.action, word.subject, word.value) != wanted:
        raise InvalidEntryError("the signature is for another text than the one on this page")
    if word.person != asked.person.name:
        raise InvalidEntryError(
            f"the signature is of {word.person}, but {asked.person.name} is logged in: sign with your own key"
        )


def refusal_serial(release: str) -> str:
    """Under which serial a release is refused: never the one under which it is approved."""
    return f"{REFUSE}-{release}"


def refusals(context: SiteConsoleContext, one: PendingRelease) -> tuple[RefusalView, ...]:
    """The refusals of a release, as the ledger counts them: signed anywhere, also by people who have left since."""
    r, serial = one.release, refusal_serial(one.release.release)
    given = context.ledger.read().state.proposals.get(serial)
    reasons = {
        proposal(serial, REFUSE, r.release, f"{r.artifact_sha256} {why}"): why for why in descriptions.REFUSALS
    }
    signed = given.approvals.items() if given is not None else ()
    return tuple(
        RefusalView(person, reasons.get(digest, "a reason of another kind")) for person, (digest, _) in signed
    )


def findings(context: SiteConsoleContext, one: PendingRelease) -> tuple[Finding, ...]:
    """What the site's own review would say now, but for approvals that are still to come."""
    state, r = context.ledger.read().state, one.release
    standing = AccountContext(
        state.accounts.get(account_name(r.site, r.mechanism)), state.grants.get(r.grant), False, False, False
    )
    verdict = review(r, standing, context.policy())
    return tuple(f for f in verdict.findings if f.rule != "approval")


def withdrawn(context: SiteConsoleContext, release: str) -> str:
    """Withdraw a release that was refused; what came of it, in a sentence."""
    review_images.forget(context, release)
    if not context.act("releases/withdraw", release=release, refused=True)["informed"]:
        return "Refused and withdrawn: its grant is spent here. The coordinator could not be informed yet."
    return "Refused and withdrawn. Its grant is spent, since images were read. Its own images are deleted."


def hand_over(context: SiteConsoleContext, release: str, progress: Progress) -> str:
    """Hand an approved release over; the coordinator's verdict, in a sentence."""
    progress(0, 0)
    verdict = read_verdict(context.act("releases/send", release=release)["verdict"])
    review_images.forget(context, release)
    if verdict.admitted:
        return f"Admitted at level {verdict.level}: {release} has left."
    return "Refused: " + "; ".join(f"{f.rule}: {f.detail}" for f in verdict.findings)


@dataclass(frozen=True, slots=True)
class ReleaseOutcome:
    """What became of a release, by the ledger."""

    release: str
    mechanism: str
    outcome: str
    kind: str  # of the badge
    level: str


def _decided(state: State) -> Iterator[ReleaseOutcome]:
    """Releases of one site alone that set out, the newest first."""
    for sent in reversed(state.sent.values()):
        if sent.run:
            continue
        known = state.releases.get(sent.release)
        if known is not None:
            yield ReleaseOutcome(
                sent.release, descriptions.MECHANISMS.get(sent.mechanism, sent.mechanism), "left", "yes", known.level
            )
        else:
            closed = state.grants[sent.grant].state != "held"
            outcome = "refused by the coordinator" if closed else "no verdict yet"
            yield ReleaseOutcome(
                sent.release, descriptions.MECHANISMS.get(sent.mechanism, sent.mechanism), outcome, "warn", ""
            )
