"""Reviews become entries: the ledger of a site and of the coordinator, over one :class:`policies.ledger.store.Store`.

A review and the entry that it leads to happen under one lock, so nothing is decided on a stale ledger. An
idempotency key that comes back gets the answer it got before.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from policies.accounting.accountant import confirm, order_for
from policies.accounting.claims import Claim
from policies.accounting.rdp import allowance
from policies.governance import decisions
from policies.ledger.entries import (
    Admitted,
    Enrolled,
    Entry,
    Expired,
    Freed,
    Issued,
    Opened,
    Refused,
    Reserved,
    Revoked,
    RoundClosed,
    Sent,
    Spent,
)
from policies.ledger.state import Account, KeyReusedError, State
from policies.ledger.store import AppendRequest, Store, StoredRecord
from policies.review.policy import Policy
from policies.review.rules import (
    TERMS,
    AccountContext,
    Finding,
    Verdict,
    account_name,
    level_of,
    price,
    remaining,
    review,
    review_reservation,
    review_together,
)
from policies.statements import Amendment, Enrolment, Receipts, Release, Reservation, Settlement, claim_json
from protos.common.canonical_json import canonical


def digest(envelope: bytes) -> bytes:
    """How entries refer to an envelope: its SHA-256."""
    return hashlib.sha256(envelope).digest()


def open_accounts(site: str, policy: Policy) -> tuple[Opened, Opened]:
    """One account of each kind under a policy; the Rényi order is fixed here, for ever (P9)."""
    order = order_for(policy.epsilon, policy.delta)
    limit = allowance(policy.epsilon, policy.delta, order)
    return (
        Opened(f"{site}/rdp", limit, order, repr(policy.epsilon), repr(policy.delta)),
        Opened(f"{site}/k", policy.max_releases_per_patient, 0, "", ""),
    )


def _paying(state: State, asked: Sequence[tuple[Reservation, bytes]]) -> Iterator[tuple[str, str, Account]]:
    """The accounts that a request touches: name, site, account."""
    for r, _ in asked:
        name = account_name(r.site, r.mechanism)
        if name in state.accounts:
            yield name, r.site, state.accounts[name]


def verdict_of(line: StoredRecord) -> Verdict:
    """The decision that a line of the ledger records; reasons by their rules alone."""
    entry = line.record.entry
    if isinstance(entry, Refused):
        return Verdict(tuple(Finding(rule, "as recorded in the ledger") for rule in entry.findings))
    if isinstance(entry, Admitted):
        return Verdict((), entry.level, entry.used)
    return Verdict((), amount=entry.amount if isinstance(entry, Reserved) else 0)


@dataclass(frozen=True, slots=True)
class ArtifactFindings:
    """What the caller of a review found by itself."""

    wrong: tuple[Finding, ...] = ()  # with the artifact's bytes
    early: tuple[Finding, ...] = ()  # by examining before decoding: then nothing was decoded


@dataclass(frozen=True, slots=True)
class LedgerService:
    """The ledger: one store, and the policy that holds for each site."""

    store: Store
    policy_of: Callable[[str], Policy]  # the strictest of the site's and the federation's

    def enrol(self, statement: Enrolment, envelope: bytes, policy: Policy, serial: str = "") -> None:
        """A site's key and its accounts, in one transaction; asked again, nothing is written.

        A revoked site is admitted again: its accounts and grants are the ones it had, its certificates stay revoked.

        Args:
            statement: what is inside ``envelope``, whose signature the caller verified.
            envelope: the sealed bytes.
            policy: sets the limits of a new site's accounts.
            serial: of the approved proposal ``enrol``, site, envelope's SHA-256 in hexadecimal; "" where nobody may.
        Raises:
            KeyReusedError: the site is enrolled, and otherwise.
            InvalidEntryError: not enough approvals of exactly this, and by which roles; or the key is another site's.
        """
        site, key = statement.site, base64.b64decode(statement.sign_key, validate=True)
        text = hashlib.sha256(statement.policy.encode()).digest()
        entry = Enrolled(site, key, text, digest(envelope), serial)
        with self.store.exclusive() as state:
            known = state.sites.get(site)
            if known is not None and site not in state.revoked_sites:
                if known != entry:
                    raise KeyReusedError("the site is enrolled already, with another request or approval")
                return
            if state.office() and entry.envelope not in state.requests:  # or the fold says what is needed instead
                decisions.must_agree(state, serial, "enrol", site, entry.envelope.hex())
            if known is None:
                accounts = open_accounts(site, policy)
                self.store.append(f"enrol-{site}", AppendRequest((entry, *accounts), (envelope,)))
            else:
                self.store.append(f"readmit-{site}-{state.size}", AppendRequest((entry,), (envelope,)))

    def issue(self, site: str, number: str, certificate: bytes, not_after: int) -> None:
        """Write down a certificate before the site gets it: see :class:`policies.ledger.entries.Issued`.

        Raises:
            InvalidEntryError: the site is not enrolled or was revoked, or the number was used before.
            KeyReusedError: another certificate of that number was issued.
        """
        self.store.append(f"issue-{number}", AppendRequest((Issued(site, number, certificate, not_after),)))

    def revoke(self, site: str, number: str, why: str) -> None:
        """One certificate counts no longer, or with ``number`` "" all of them and the site; done twice, written once.

        Raises:
            InvalidEntryError: no such site, or no such certificate of it, or ``why`` is not a short word.
        """
        with self.store.exclusive() as state:
            known = state.issued.get(number)
            of_site = known is not None and known.site == site
            done = of_site and number in state.revoked if number else site in state.revoked_sites
            if not done:
                key = f"revoke-{number}-{site}" if number else f"bar-{site}-{state.size}"
                self.store.append(key, AppendRequest((Revoked(site, number, why),)))

    def account(self, site: str, claim: Claim) -> Account:
        """The account that pays for a claim of this kind.

        Raises:
            KeyError: the site has none.
        """
        kind = next((t.kind for t in TERMS.values() if t.admits(claim)), "")
        return self.store.state.accounts[f"{site}/{kind}"]

    def answered(self, key: str, envelope: bytes) -> Verdict | None:
        """What this key has led to, if it came with this envelope before.

        Raises:
            KeyReusedError: it came with another one.
        """
        lines = self.store.answer(key)
        if not lines:
            return None
        if getattr(lines[0].record.entry, "envelope", b"") != digest(envelope):
            raise KeyReusedError("the key was used with another envelope")
        return verdict_of(lines[0])

    def quote(self, reservation: Reservation) -> Verdict:
        """Review this price without writing anything."""
        with self.store.exclusive() as state:
            return self._priced(state, reservation, b"")

    def reserve(self, key: str, reservation: Reservation, envelope: bytes) -> Verdict:
        """Hold a claim's price, or append the refusal; durable when this returns."""
        return self.reserve_all(key, [(reservation, envelope)])[0]

    def reserve_all(
        self,
        key: str,
        asked: Sequence[tuple[Reservation, bytes]],
        least: int | None = None,
        required: Collection[str] = (),
    ) -> list[Verdict]:
        """Hold the prices of several claims, over as many accounts as they touch, in one append.

        Args:
            key: idempotency key; asked again, the answer is the same, whatever ``least`` is then.
            asked: reservations and their sealed bytes, whose signatures the caller verified.
            least: what is refused is left out, and the others are held, in this order, if they are so many; fewer,
                and none is. None: all of them or none.
            required: sites of which each must be granted, or none is.
        Returns:
            A verdict for each.
        Raises:
            KeyReusedError: the key was used with other envelopes.
        """
        envelopes = tuple(envelope for _, envelope in asked)
        with self.store.exclusive() as state:
            before = self.store.answer(key)
            if before:
                if [getattr(line.record.entry, "envelope", b"") for line in before] != list(map(digest, envelopes)):
                    raise KeyReusedError("the key was used with another envelope")
                return [verdict_of(line) for line in before]
            alone = [self._priced(state, reservation, envelope) for reservation, envelope in asked]
            left = {name: remaining(account, self.policy_of(site)) for name, site, account in _paying(state, asked)}
            verdicts = review_together([r for r, _ in asked], alone, left, least, required)
            entries: list[Entry] = []
            for (r, envelope), verdict in zip(asked, verdicts, strict=True):
                name, claim = account_name(r.site, r.mechanism), canonical(claim_json(r.claim))
                entries.append(
                    Reserved(r.grant, r.site, r.run, r.mechanism, name, verdict.amount, claim, digest(envelope))
                    if verdict.admitted
                    else self._refusal(r.grant, r, "reservation", verdict, envelope)
                )
            self.store.append(key, AppendRequest(tuple(entries), envelopes))
        return verdicts

    def _priced(self, state: State, r: Reservation, envelope: bytes) -> Verdict:
        if digest(envelope) in state.refused:  # a no stays one, whatever key it comes under
            return Verdict((Finding("replay", "this very request was refused before; make a new one"),))
        account = state.accounts.get(account_name(r.site, r.mechanism))
        standing = AccountContext(
            account,
            state.grants.get(r.grant),
            frozen=state.frozen(r.site),
            revoked=r.site in state.revoked_sites,
            run_spent=(r.site, r.run) in state.granted,
        )
        verdict = review_reservation(r, standing, self.policy_of(r.site))
        if verdict.admitted and account is not None and account.opened.order:
            confirm(r.claim, account.opened.order)
        return verdict

    def admit(self, key: str, release: Release, envelope: bytes, facts: ArtifactFindings) -> Verdict:
        """Review a release and append the verdict.

        Args:
            key: idempotency key.
            release: the statement inside ``envelope``, whose signature the caller verified.
            envelope: the sealed bytes.
            facts: what the caller found. With something wrong, an earlier yes is no answer: that was to other bytes.
        """
        wrong = facts.wrong
        with self.store.exclusive() as state:
            before = self.answered(key, envelope)
            if before is not None:
                return Verdict(wrong) if before.admitted and wrong else before
            verdict = review(release, self._standing(state, release, envelope), self.policy_of(release.site))
            undecoded = () if verdict.findings else facts.early  # refused a moment ago, so nobody looked inside
            verdict = Verdict((*verdict.findings, *wrong, *undecoded), verdict.level, verdict.amount)
            self.record(key, release, envelope, verdict)
        return verdict

    def record(self, key: str, release: Release, envelope: bytes, verdict: Verdict) -> None:
        """Append a verdict on a release, and spend the grant of a single one; the site does so as it was told.

        A refused release spends its grant too: what was refused was made from patients, and it left the site.
        """
        r = release
        if not verdict.admitted:
            refusal: Entry = self._refusal(r.release, r, "release", verdict, envelope)
            grant = self.store.state.grants.get(r.grant)
            own = grant is not None and grant.state == "held" and grant.reserved.site == r.site
            entries: list[Entry] = [refusal]
            if own and grant is not None and not grant.reserved.run:  # by the grant, whatever the release says
                entries.append(Spent(r.grant, grant.reserved.amount, "refused", b""))
            self.store.append(key, AppendRequest(tuple(entries), (envelope,)))
            return
        used = price(r.claim, self.account(r.site, r.claim))
        artifact, claim = bytes.fromhex(r.artifact_sha256), canonical(claim_json(r.claim))
        entry = Admitted(
            r.release,
            r.grant,
            r.site,
            r.run,
            r.round,
            r.mechanism,
            level_of(r),
            used,
            claim,
            artifact,
            digest(envelope),
            r.reader,
        )
        end = () if r.run else (Spent(r.grant, used, "released", b""),)
        self.store.append(key, AppendRequest((entry, *end), (envelope,)))

    def send(self, release: Release, envelope: bytes) -> None:
        """The site's own ledger only: this is about to leave; durable when this returns."""
        r = release
        artifact = bytes.fromhex(r.artifact_sha256)
        used = price(r.claim, self.account(r.site, r.claim))
        entry = Sent(r.release, r.grant, r.site, r.run, r.round, r.mechanism, used, artifact, digest(envelope))
        self.store.append(f"send-{r.release}", AppendRequest((entry,), (envelope,)))

    def unanswered(self) -> list[tuple[Sent, bytes]]:
        """What was sent under a grant that is still held, and has no verdict here; with its envelope."""
        state = self.store.state
        found = [
            s
            for s in list(state.sent.values())
            if s.release not in state.releases and s.envelope not in state.envelopes
        ]
        return [(s, self.store.envelope(s.envelope) or b"") for s in found if state.grants[s.grant].state == "held"]

    def _refusal(
        self, subject: str, of: Reservation | Release, stage: str, verdict: Verdict, envelope: bytes
    ) -> Refused:
        rules = [f.rule for f in verdict.findings]
        return Refused(subject, of.site, of.mechanism, stage, rules, digest(envelope))

    def settle(self, key: str, settlement: Settlement, envelope: bytes) -> Verdict:
        """A site's word on a grant: declined by its own ledger (recorded), or expired (spent)."""
        s = settlement
        with self.store.exclusive() as state:
            before = self.answered(key, envelope)
            if before is not None:
                rules = {f.rule for f in before.findings}
                return before if "grant_of_another" in rules else Verdict(())
            grant = state.grants.get(s.grant)
            if grant is not None and grant.reserved.site != s.site:
                wrong = Refused(s.grant, s.site, s.mechanism, "call", ["grant_of_another"], digest(envelope))
                self.store.append(key, AppendRequest((wrong,), (envelope,)))
                return Verdict((Finding("grant_of_another", "the grant was given for another site"),))
            entries: list[Entry] = [Refused(s.grant, s.site, s.mechanism, s.outcome, [s.reason], digest(envelope))]
            if grant is not None and grant.state == "held":
                entries.append(Expired(s.grant, s.reason))
            self.store.append(key, AppendRequest(tuple(entries), (envelope,)))
        return Verdict(())

    def finish(self, settlement: Settlement, envelope: bytes) -> None:
        """The site's own ledger only: close a grant at what was made under it; the rest is given back.

        The coordinator spends the entire grant, since artifacts may have been made that have not arrived.

        Raises:
            InvalidEntryError: the grant is closed, or more left under it.
        """
        s = settlement
        entry = Spent(s.grant, s.used, "finished", digest(envelope))
        self.store.append(f"close-{s.grant}", AppendRequest((entry,), (envelope,)))

    def amend(self, key: str, statement: Amendment, envelope: bytes) -> Verdict:
        """A site's new policy, from an envelope that the caller opened; it parses, or it is not handed in here."""
        with self.store.exclusive():
            before = self.answered(key, envelope)
            if before is None:
                decisions.amend(self.store, key, statement, envelope)
        return before or Verdict(())

    def present(self, key: str, statement: Reservation | Receipts, envelope: bytes) -> Verdict:
        """After a restore: a grant that the backup had lost, or the site's word that these were all.

        A grant that the ledger holds was not lost: a no with the rule ``known``.

        Raises:
            InvalidEntryError: nothing is awaited from that site.
        """
        with self.store.exclusive():
            before = self.answered(key, envelope)
            if before is not None:
                return before
            if isinstance(statement, Receipts):
                decisions.present(self.store, key, statement, envelope)
            elif not decisions.recover_grant(self.store, key, statement, envelope):
                return Verdict((Finding("known", "the ledger holds this grant: it was not lost"),))
        return Verdict(())

    def free(self, grant: str, why: str, envelope: bytes) -> None:
        """The site's own ledger only: nothing was read under the grant; why: see
        :class:`policies.ledger.entries.Freed`.
        """
        self.store.append(f"close-{grant}", AppendRequest((Freed(grant, why, digest(envelope)),), (envelope,)))

    def close(self, grant: str, why: str) -> None:
        """Spend a held grant's entire amount; it counts as expired if nothing left under it. A closed grant stays as
        it is.
        """
        with self.store.exclusive() as state:
            known = state.grants.get(grant)
            if known is not None and known.state == "held":
                whole = Spent(grant, known.reserved.amount, why, b"")
                end = whole if max(known.used, known.sent) else Expired(grant, why)
                self.store.append(f"close-{grant}", AppendRequest((end,)))

    def close_round(self, run: str, round_index: int, sites: Iterable[str], model: bytes) -> None:
        """A round was aggregated; ``model`` is the SHA-256 of the parameters, durable before this is called."""
        entry = RoundClosed(run, round_index, sorted(sites), model)
        self.store.append(f"round-{run}-{round_index}", AppendRequest((entry,)))

    def dry_run_review(self, release: Release, envelope: bytes) -> Verdict:
        """Review a release without writing anything. The site calls this before anything leaves it."""
        with self.store.exclusive() as state:
            return review(release, self._standing(state, release, envelope), self.policy_of(release.site))

    def _standing(self, state: State, release: Release, envelope: bytes) -> AccountContext:
        seen = release.release in state.releases or digest(envelope) in state.envelopes
        account = state.accounts.get(account_name(release.site, release.mechanism))
        return AccountContext(
            account, state.grants.get(release.grant), seen, revoked=release.site in state.revoked_sites
        )

    def held(self) -> list[Reserved]:
        """Grants without an end, oldest first."""
        held = [grant.reserved for grant in list(self.store.state.grants.values()) if grant.state == "held"]
        return [reserved for reserved in held if isinstance(reserved, Reserved)]

    def runs(self) -> set[str]:
        """Every federated run that was ever reserved for here."""
        return {grant.reserved.run for grant in list(self.store.state.grants.values())}
