"""The review of a release before anything leaves: what it is, what it is like, who approves it, who refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from starlette.responses import Response

from agent.console import exhibits, pictures, words
from agent.console.desk import DECIDERS, KEEPERS, LOOKERS, Desk, NoSuchReleaseError, Waiting
from agent.console.errand import Progress
from agent.console.nearest import DISTANCE
from agent.console.said import said, sentence
from agent.nouns import Unreachable
from policies import governance
from policies.entries import InvalidEntry, proposal
from policies.ledger import State
from policies.review import Finding, Standing, account_name, level_of, review
from policies.statement import Approval
from protos.web.pages import Asked, Pages, Refusal

REFUSE = "refuse"  # what persons sign: refuse RELEASE "SHA-256 REASON"
DECIDED = 50  # releases that set out, of which the page tells
_SENDING = "handing the release over"
_PICTURES = frozenset({"made", "near", "heat"})


@dataclass(frozen=True, slots=True)
class Refusing:
    """A refusal that somebody signed."""

    person: str
    reason: str  # a key of words.REFUSALS


def add(pages: Pages, desk: Desk) -> None:
    """The pages of the review."""
    pages.menu("Releases", "/releases", LOOKERS)
    _look(pages, desk)
    _pictures(pages, desk)
    _decide(pages, desk)
    _end(pages, desk)


def _look(pages: Pages, desk: Desk) -> None:
    @pages.get("/releases", LOOKERS)
    def releases(asked: Asked) -> Response:
        with said():
            waiting = desk.waiting()
            store = desk.books.read()
            refused = {one.release.release: refusals(desk, one) for one in waiting}
            with store.exclusive() as state:  # nothing sets out while these are picked
                decided = tuple(islice(_decided(state), DECIDED))
        return asked.page(
            "releases.html",
            waiting=[(one, refused[one.release.release]) for one in waiting],
            made=words.MECHANISMS,
            errand=desk.errand.told(),
            decided=decided,
        )

    @pages.get("/releases/{release}", LOOKERS)
    def release(asked: Asked, release: str) -> Response:
        one = found(desk, release)
        sees = asked.person.role in DECIDERS
        with said():
            shown = exhibits.shown(desk, one) if sees else None
            origin, against = desk.books.read().origin, findings(desk, one)
            refused = refusals(desk, one)
        level = level_of(one.release)
        r = one.release
        return asked.page(
            "release.html",
            one=one,
            facts=tuple(words.facts(r)),
            level=level,
            level_words=words.LEVELS.get(level, ("No claim level", "")),
            attacks=words.attacks(r),
            against=against,
            refused=[(x.person, words.REFUSALS.get(x.reason, x.reason)) for x in refused],
            sees=sees,
            shown=shown,
            sheet_size=exhibits.SHEET,
            distance=DISTANCE,
            hottest=pictures.HOTTEST,
            errand=desk.errand.told(),
            signing=asked.signing(origin, release, "release", release, r.artifact_sha256)
            if sees and _may_approve(asked, one, refused)
            else None,
            reasons=list(words.REFUSALS.items()),
            may_send=asked.person.role in KEEPERS and not one.missing and not one.gone and not refused,
            decides=sees,
        )

    @pages.get("/releases/{release}/refuse", DECIDERS)
    def reason(asked: Asked, release: str, why: str = "") -> Response:
        one = found(desk, release)
        if why not in words.REFUSALS:
            raise Refusal(400, "Choose one of the reasons of the list.")
        with said():
            origin = desk.books.read().origin
        value = f"{one.release.artifact_sha256} {why}"
        return asked.page(
            "refuse.html",
            one=one,
            why=words.REFUSALS[why],
            signing=asked.signing(origin, refusal_serial(release), REFUSE, release, value),
        )


def _pictures(pages: Pages, desk: Desk) -> None:
    @pages.post("/releases/{release}/compare", DECIDERS)
    def compare(asked: Asked, release: str) -> Response:
        one = found(desk, release)
        what = "comparing the release with the pictures in the vault"
        if not desk.errand.begin("releases", what, lambda progress: exhibits.compare(desk, one, progress), sentence):
            raise Refusal(409, "Something else is under way: wait until it has ended.")
        desk.log.info("release_compared", release=release)
        return asked.go(f"/releases/{release}", "Comparing. This page shows how far it is.")

    @pages.get("/releases/{release}/sheet/{number}.png", DECIDERS, told=True)
    def sheet(asked: Asked, release: str, number: int) -> Response:
        kept = exhibits.recall(desk, release)
        if kept is None or not 0 <= number < len(kept.images):
            raise Refusal(404, "That picture is not at hand any more: open the release's page again.")
        return asked.picture(pictures.png(kept.images[number]))

    @pages.get("/releases/{release}/beside/{number}/{which}.png", DECIDERS, told=True)
    def beside(asked: Asked, release: str, number: int, which: str) -> Response:
        if which not in _PICTURES:
            raise Refusal(404, "There is no such picture.")
        try:
            kept, one = exhibits.still(desk, release, number)
        except LookupError:
            raise Refusal(404, "That picture is not at hand any more: compare again.") from None
        return asked.picture(exhibits.picture(kept, one, which))

    @pages.get("/releases/scale/heat.png", DECIDERS)
    def scale(asked: Asked) -> Response:
        return asked.picture(pictures.png(pictures.scale()))


def _decide(pages: Pages, desk: Desk) -> None:
    @pages.post("/releases/{release}/approve", DECIDERS)
    def approve(asked: Asked, release: str) -> Response:
        one = found(desk, release)
        envelope = asked.envelope()
        with said():
            _signed(asked, envelope, (release, "release", release, one.release.artifact_sha256))
            if refusals(desk, one):
                raise InvalidEntry("the release was refused already; it can only be withdrawn")
            with desk.books.write() as store:
                governance.approve(store, envelope)
        desk.log.info("release_approved", release=release, state=asked.person.role)
        return asked.go(f"/releases/{release}", "Your approval is in the ledger.")

    @pages.post("/releases/{release}/refuse", DECIDERS)
    def refuse(asked: Asked, release: str) -> Response:
        one = found(desk, release)
        envelope = asked.envelope()
        with said():
            value = governance.said_by(envelope).value
            sha, _, why = value.partition(" ")
            if sha != one.release.artifact_sha256 or why not in words.REFUSALS:
                raise InvalidEntry("the refusal is of another artifact, or for no known reason")
            _signed(asked, envelope, (refusal_serial(release), REFUSE, release, value))
            with desk.books.write() as store:
                governance.approve(store, envelope)
        desk.log.info("release_refused", release=release, reason=why)
        return _withdrawing(asked, desk, release)


def _end(pages: Pages, desk: Desk) -> None:
    @pages.post("/releases/{release}/withdraw", DECIDERS)
    def withdraw_again(asked: Asked, release: str) -> Response:
        one = found(desk, release)
        with said():
            if not refusals(desk, one):
                raise InvalidEntry("nobody has refused it: refuse it first, with a reason and a signature")
        return _withdrawing(asked, desk, release)

    @pages.post("/releases/{release}/send", KEEPERS)
    def send(asked: Asked, release: str) -> Response:
        one = found(desk, release)
        with said():
            if refusals(desk, one):
                raise InvalidEntry("somebody has refused it: it does not leave")
        if one.missing or one.gone:
            raise Refusal(409, "It cannot leave: an approval is missing, or a patient in it has opted out.")
        if not desk.errand.begin("releases", _SENDING, lambda p: hand_over(desk, release, p), sentence):
            raise Refusal(409, "Something else is under way: wait until it has ended.")
        return asked.go("/releases", "Handing it over. The list below shows what came of it.")


def _withdrawing(asked: Asked, desk: Desk, release: str) -> Response:
    """Its own errand: the coordinator may be slow to answer, or away."""
    if not desk.errand.begin("releases", "withdrawing the release", lambda _: withdrawn(desk, release), sentence):
        return asked.go(f"/releases/{release}", "Refused. Withdraw it when nothing is under way.")
    return asked.go("/releases", "Your refusal is in the ledger; the release is being withdrawn.")


def found(desk: Desk, release: str) -> Waiting:
    """A release that waits.

    Raises:
        Refusal: none of that name waits.
    """
    with said():
        for one in desk.waiting():
            if one.release.release == release:
                return one
        raise NoSuchReleaseError


def _may_approve(asked: Asked, one: Waiting, refused: tuple[Refusing, ...]) -> bool:
    return not (one.gone or refused) and asked.person.role in one.missing


def _signed(asked: Asked, envelope: bytes, wanted: tuple[str, str, str, str]) -> None:
    """Is it this person's own word on exactly this? The signature itself is the law's to check.

    Under another serial it would be written down, and never counted.

    Raises:
        InvalidEntry: it is not.
    """
    word = governance.said_by(envelope)
    if not isinstance(word, Approval) or (word.serial, word.action, word.subject, word.value) != wanted:
        raise InvalidEntry("what was signed is something else than what this page asks for")
    if word.person != asked.person.name:
        raise InvalidEntry(f"it is signed as {word.person}, and {asked.person.name} is logged in: sign for yourself")


def refusal_serial(release: str) -> str:
    """Under which serial a release is refused: never the one under which it is approved."""
    return f"{REFUSE}-{release}"


def refusals(desk: Desk, one: Waiting) -> tuple[Refusing, ...]:
    """Who has refused it, as the ledger's fold counts them: whatever was signed there, and whoever has left since."""
    r, serial = one.release, refusal_serial(one.release.release)
    given = desk.books.read().state.proposals.get(serial)
    reasons = {proposal(serial, REFUSE, r.release, f"{r.artifact_sha256} {why}"): why for why in words.REFUSALS}
    signed = given.approvals.items() if given is not None else ()
    return tuple(Refusing(person, reasons.get(digest, "a reason of another kind")) for person, (digest, _) in signed)


def findings(desk: Desk, one: Waiting) -> tuple[Finding, ...]:
    """What the site's own review would say now, but for approvals that are still to come."""
    state, r = desk.books.read().state, one.release
    standing = Standing(
        state.accounts.get(account_name(r.site, r.mechanism)), state.grants.get(r.grant), False, False, False
    )
    verdict = review(r, standing, desk.policy())
    return tuple(f for f in verdict.findings if f.rule != "approval")


def withdrawn(desk: Desk, release: str) -> str:
    """Withdraw a release that was refused; what came of it, in a sentence."""
    from agent.approval import withdraw  # noqa: PLC0415 - torch: two seconds that no page needs

    project = desk.project_of(release)
    exhibits.forget(desk, release)
    with desk.books.work(project, greeted=False) as opened:
        try:
            withdraw(opened.site, release)
        except Unreachable:
            desk.log.warning("release_withdrawn", release=release, state="coordinator not told")
            return "Refused and withdrawn: its grant is spent here. The coordinator could not be told yet."
    desk.log.info("release_withdrawn", release=release)
    return "Refused and withdrawn. Its grant is spent, since images were read; the pictures are deleted."


def hand_over(desk: Desk, release: str, progress: Progress) -> str:
    """Hand an approved release over; the coordinator's verdict, in a sentence."""
    from agent.approval import hand_over as leave  # noqa: PLC0415 - torch: two seconds that no page needs
    from agent.site import Refused as Declined  # noqa: PLC0415 - the same

    progress(0, 0)
    with desk.books.work(desk.project_of(release)) as opened:
        try:
            _, verdict = leave(opened.site, release)
        except Declined as refusal:
            verdict = refusal.verdict
    exhibits.forget(desk, release)
    desk.log.info("verdict", release=release, rules=[f.rule for f in verdict.findings])
    if verdict.admitted:
        return f"Admitted at level {verdict.level}: {release} has left."
    return "Refused: " + "; ".join(f"{f.rule}: {f.detail}" for f in verdict.findings)


@dataclass(frozen=True, slots=True)
class Decided:
    """What became of a release, by the ledger."""

    release: str
    mechanism: str
    outcome: str
    kind: str  # of the badge
    level: str


def _decided(state: State) -> Iterator[Decided]:
    """Releases of one site alone that set out, the newest first."""
    for sent in reversed(state.sent.values()):
        if sent.run:
            continue
        known = state.releases.get(sent.release)
        if known is not None:
            yield Decided(
                sent.release, words.MECHANISMS.get(sent.mechanism, sent.mechanism), "left", "yes", known.level
            )
        else:
            closed = state.grants[sent.grant].state != "held"
            outcome = "refused by the coordinator" if closed else "no verdict yet"
            yield Decided(sent.release, words.MECHANISMS.get(sent.mechanism, sent.mechanism), outcome, "warn", "")
