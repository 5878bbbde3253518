"""Reviews become entries: the books of a site and of the coordinator, over one :class:`policies.store.Store`.

A review and the entry that it leads to happen under one lock, so nothing is decided on stale books. An
idempotency key that comes back gets the answer it got before.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from policies import governance
from policies.accounting import confirm, order_for
from policies.claims import Claim
from policies.entries import (
    Admitted,
    Enrolled,
    Entry,
    Expired,
    Freed,
    Opened,
    Refused,
    Reserved,
    RoundClosed,
    Sent,
    Spent,
)
from policies.ledger import Account, KeyReused, State
from policies.policy import Policy
from policies.rdp import allowance
from policies.review import TERMS, Finding, Standing, Verdict, level_of, price, review, review_reservation
from policies.statement import (
    Amendment,
    Enrolment,
    Receipts,
    Release,
    Reservation,
    Settlement,
    canonical,
    claim_json,
)
from policies.store import Draft, Line, Store


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


def account_name(site: str, mechanism: str) -> str:
    """The account that pays for a mechanism; an unknown mechanism has none."""
    terms = TERMS.get(mechanism)
    return f"{site}/{terms.kind}" if terms else ""


def verdict_of(line: Line) -> Verdict:
    """The decision that a line of the ledger records; reasons by their rules alone."""
    entry = line.record.entry
    if isinstance(entry, Refused):
        return Verdict(tuple(Finding(rule, "as recorded in the ledger") for rule in entry.findings))
    if isinstance(entry, Admitted):
        return Verdict((), entry.level, entry.used)
    return Verdict((), amount=entry.amount if isinstance(entry, Reserved) else 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the caller of a review found by itself."""

    wrong: tuple[Finding, ...] = ()  # with the artifact's bytes
    early: tuple[Finding, ...] = ()  # by examining before decoding: then nothing was decoded


@dataclass(frozen=True, slots=True)
class Register:
    """The books: one store, and the policy that holds for each site."""

    store: Store
    policy_of: Callable[[str], Policy]  # the strictest of the site's and the federation's

    def enrol(self, statement: Enrolment, envelope: bytes, policy: Policy) -> None:
        """A site's key and its accounts, in one transaction. ``policy`` sets the limits."""
        key = base64.b64decode(statement.sign_key, validate=True)
        text = hashlib.sha256(statement.policy.encode()).digest()
        entry = Enrolled(statement.site, key, text, digest(envelope))
        accounts = open_accounts(statement.site, policy)
        self.store.append(f"enrol-{statement.site}", Draft((entry, *accounts), (envelope,)))

    def account(self, site: str, claim: Claim) -> Account:
        """The account that pays for a claim of this kind.

        Raises:
            KeyError: the site has none.
        """
        kind = next((t.kind for t in TERMS.values() if t.claim is type(claim)), "")
        return self.store.state.accounts[f"{site}/{kind}"]

    def answered(self, key: str, envelope: bytes) -> Verdict | None:
        """What this key has led to, if it came with this envelope before.

        Raises:
            KeyReused: it came with another one.
        """
        lines = self.store.answer(key)
        if not lines:
            return None
        if getattr(lines[0].record.entry, "envelope", b"") != digest(envelope):
            raise KeyReused("the key was used with another envelope")
        return verdict_of(lines[0])

    def reserve(self, key: str, reservation: Reservation, envelope: bytes) -> Verdict:
        """Hold a claim's price, or append the refusal; durable when this returns."""
        return self.reserve_all(key, [(reservation, envelope)])[0]

    def reserve_all(self, key: str, asked: Sequence[tuple[Reservation, bytes]]) -> list[Verdict]:
        """Hold the prices of several claims, over as many accounts as they touch: all of them or none.

        Returns:
            A verdict for each; when one is refused, all are.
        """
        envelopes = tuple(envelope for _, envelope in asked)
        with self.store.exclusive() as state:
            before = self.store.answer(key)
            if before:
                if [getattr(line.record.entry, "envelope", b"") for line in before] != list(map(digest, envelopes)):
                    raise KeyReused("the key was used with another envelope")
                return [verdict_of(line) for line in before]
            verdicts = [self._priced(state, reservation, envelope) for reservation, envelope in asked]
            together = Counter[str]()
            for (r, _), verdict in zip(asked, verdicts, strict=True):
                together[account_name(r.site, r.mechanism)] += verdict.amount
            for i, (r, _) in enumerate(asked):
                name = account_name(r.site, r.mechanism)
                if not all(v.admitted for v in verdicts) and verdicts[i].admitted:
                    verdicts[i] = Verdict((Finding("together", "another part of the same request was refused"),))
                elif verdicts[i].admitted and not together[name] <= state.accounts[name].left:
                    verdicts[i] = Verdict((Finding("budget", "together they cost more than the account holds"),))
            granted = all(v.admitted for v in verdicts)
            entries: list[Entry] = []
            for (r, envelope), verdict in zip(asked, verdicts, strict=True):
                name, claim = account_name(r.site, r.mechanism), canonical(claim_json(r.claim))
                entries.append(
                    Reserved(r.grant, r.site, r.run, r.mechanism, name, verdict.amount, claim, digest(envelope))
                    if granted
                    else self._refusal(r.grant, r, "reservation", verdict, envelope)
                )
            self.store.append(key, Draft(tuple(entries), envelopes))
        return verdicts

    def _priced(self, state: State, r: Reservation, envelope: bytes) -> Verdict:
        if digest(envelope) in state.refused:  # a no stays one, whatever key it comes under
            return Verdict((Finding("replay", "this very request was refused before; make a new one"),))
        account = state.accounts.get(account_name(r.site, r.mechanism))
        standing = Standing(account, state.grants.get(r.grant), frozen=state.frozen(r.site))
        verdict = review_reservation(r, standing, self.policy_of(r.site))
        if verdict.admitted and account is not None and account.opened.order:
            confirm(r.claim, account.opened.order)
        return verdict

    def admit(self, key: str, release: Release, envelope: bytes, facts: Facts) -> Verdict:
        """Review a release and append the verdict.

        Args:
            key: idempotency key.
            release: the statement inside ``envelope``, whose signature the caller verified.
            envelope: the sealed bytes.
            facts: what the caller found. With something wrong, an earlier yes is no answer: that was to other
                bytes.
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
            if own and not r.run and grant is not None:
                entries.append(Spent(r.grant, grant.reserved.amount, "refused", b""))
            self.store.append(key, Draft(tuple(entries), (envelope,)))
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
        )
        end = () if r.run else (Spent(r.grant, used, "released", b""),)
        self.store.append(key, Draft((entry, *end), (envelope,)))

    def send(self, release: Release, envelope: bytes) -> None:
        """The site's own ledger only: this is about to leave; durable when this returns."""
        r = release
        artifact = bytes.fromhex(r.artifact_sha256)
        used = price(r.claim, self.account(r.site, r.claim))
        entry = Sent(r.release, r.grant, r.site, r.run, r.round, r.mechanism, used, artifact, digest(envelope))
        self.store.append(f"send-{r.release}", Draft((entry,), (envelope,)))

    def unanswered(self) -> list[tuple[Sent, bytes]]:
        """What was sent under a grant that is still held, and has no verdict here; with its envelope."""
        state = self.store.state
        found = [
            s for s in state.sent.values() if s.release not in state.releases and s.envelope not in state.envelopes
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
                self.store.append(key, Draft((wrong,), (envelope,)))
                return Verdict((Finding("grant_of_another", "the grant was given for another site"),))
            entries: list[Entry] = [Refused(s.grant, s.site, s.mechanism, s.outcome, [s.reason], digest(envelope))]
            if grant is not None and grant.state == "held":
                entries.append(Expired(s.grant, s.reason))
            self.store.append(key, Draft(tuple(entries), (envelope,)))
        return Verdict(())

    def finish(self, settlement: Settlement, envelope: bytes) -> None:
        """The site's own ledger only: close a grant at what was made under it; the rest is given back.

        The coordinator spends the whole: it cannot know what was made and has not arrived.

        Raises:
            InvalidEntry: the grant is closed, or more left under it.
        """
        s = settlement
        entry = Spent(s.grant, s.used, "finished", digest(envelope))
        self.store.append(f"close-{s.grant}", Draft((entry,), (envelope,)))

    def amend(self, key: str, statement: Amendment, envelope: bytes) -> Verdict:
        """A site's new policy, from an envelope that the caller opened; it parses, or it is not handed in here."""
        with self.store.exclusive():
            before = self.answered(key, envelope)
            if before is None:
                governance.amend(self.store, key, statement, envelope)
        return before or Verdict(())

    def present(self, key: str, statement: Reservation | Receipts, envelope: bytes) -> Verdict:
        """After a restore: a grant that the backup had lost, or the site's word that these were all.

        Raises:
            InvalidEntry: nothing is awaited from that site.
        """
        with self.store.exclusive():
            before = self.answered(key, envelope)
            if before is None and isinstance(statement, Receipts):
                governance.present(self.store, key, statement, envelope)
            elif before is None and isinstance(statement, Reservation):
                governance.recover_grant(self.store, key, statement, envelope)
        return before or Verdict(())

    def free(self, grant: str, envelope: bytes) -> None:
        """The site's own ledger only: the coordinator refused the price, and nothing was read under the grant."""
        self.store.append(f"close-{grant}", Draft((Freed(grant, "refused", digest(envelope)),), (envelope,)))

    def close(self, grant: str, why: str) -> None:
        """Spend a held grant's whole amount, as expired if nothing left under it; a closed one stays as it is."""
        with self.store.exclusive() as state:
            known = state.grants.get(grant)
            if known is not None and known.state == "held":
                whole = Spent(grant, known.reserved.amount, why, b"")
                end = whole if max(known.used, known.sent) else Expired(grant, why)
                self.store.append(f"close-{grant}", Draft((end,)))

    def close_round(self, run: str, round_index: int, sites: Iterable[str], model: bytes) -> None:
        """A round was aggregated; ``model`` is the SHA-256 of the parameters, durable before this is called."""
        entry = RoundClosed(run, round_index, sorted(sites), model)
        self.store.append(f"round-{run}-{round_index}", Draft((entry,)))

    def examine(self, release: Release, envelope: bytes) -> Verdict:
        """What a review would say now; nothing is written. The site asks this before anything leaves it."""
        with self.store.exclusive() as state:
            return review(release, self._standing(state, release, envelope), self.policy_of(release.site))

    def _standing(self, state: State, release: Release, envelope: bytes) -> Standing:
        seen = release.release in state.releases or digest(envelope) in state.envelopes
        account = state.accounts.get(account_name(release.site, release.mechanism))
        return Standing(account, state.grants.get(release.grant), seen)

    def held(self) -> list[Reserved]:
        """Grants without an end, oldest first."""
        held = [grant.reserved for grant in self.store.state.grants.values() if grant.state == "held"]
        return [reserved for reserved in held if isinstance(reserved, Reserved)]

    def runs(self) -> set[str]:
        """Every federated run that was ever reserved for here."""
        return {grant.reserved.run for grant in self.store.state.grants.values()}
