"""A site's part in one federated run: one grant, one update a round, each update made once.

The site's own ledger reserves the price first. The coordinator then reserves the budgets of all sites at once, and
only grants in its ledger are trained for. The vault records the participant's progress before an image is read, so a
killed agent rejoins the run with the rounds it has begun counted as made. An update is kept in the vault before it
sets out, so that a kill on its way takes no site out of a round: asked again, the site sends the same bytes. They go
when the next round's are sealed, with the run's end, or when the site leaves it.

Where the policies want persons to approve runs, nothing of a run is priced before they have approved its plan
(:mod:`agent.federation.run_plan`), whatever the coordinator asks for.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from agent.domain import Cohort, Update
from agent.dp.noise import Entropy
from agent.errors import ReviewRejectedError
from agent.federation import run_plan
from agent.federation.answer_pace import AnswerPace, RoundWork
from agent.federation.part_watch import How, PartEnd, PartWatch
from agent.federation.run_plan import RunPlan
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from agent.release.budget import (
    best_effort,
    release_grant,
    reservation_of,
    reserve_locally,
    return_unused_grant,
    settle_grant,
)
from agent.release.packaging import draft_of
from agent.release.pipeline import check_opt_outs, fetch_verdicts, record_submission, sign_release
from agent.release.ports import SignedRelease, SiteContext
from agent.release.unsent import PART, forget, keep_update, kept_update, updates_of_part
from policies.accounting.claims import Claim
from policies.ledger.entries import Reserved
from policies.review.rules import Finding, Verdict
from policies.statements import ID, claim_json, release_id
from protos.artifacts.arrays import pack_vector, unpack_vector
from protos.artifacts.strict_safetensors import vector_bytes
from protos.common.errors import WorkerError
from protos.federation import round_times
from protos.federation.round_times import RoundTerms

KEPT_S = 30 * 86_400.0  # the last update, once all is made: who was off when the run ended does not hear of its end

MECHANISMS: dict[str, type[Federated] | type[FederatedMasked]] = {m.name: m for m in (Federated, FederatedMasked)}


def read_mechanism(config: str) -> Federated | FederatedMasked:
    """The mechanism of a public configuration: only one has these keys.

    Raises:
        FederatedConfigError: it is neither's.
    """
    return (FederatedMasked if '"ring_bits"' in config else Federated).from_json(config)


def update_bytes(mechanism: Federated | FederatedMasked) -> int:
    """The size of every update of a run: a function of its public configuration."""
    if isinstance(mechanism, FederatedMasked):
        return vector_bytes(mechanism.parameters, "ring", f"U{mechanism.ring_bits}")
    return vector_bytes(mechanism.parameters)


def _no(rule: str, detail: str) -> ReviewRejectedError:
    return ReviewRejectedError("site", Verdict((Finding(rule, detail),)))


@dataclass(frozen=True, slots=True)
class SealedUpdate:
    """An update that may leave, or has left, and of whom it is."""

    signed: SignedRelease
    persons: frozenset[str]


@dataclass(slots=True)
class Participant:
    """A site's part in one federated run: one grant, one update a round, each update made once."""

    site: SiteContext
    modality: str
    entropy: Entropy
    run: str = ""
    grant: str = ""
    granted: bool = False  # the coordinator's ledger shows its side of the grant
    resumed: bool = False  # by another process than reserved: that nothing was read is only the vault's word
    mechanism: Federated | FederatedMasked | None = None
    rounds_trained: int = 0
    begun: int = 0  # the newest round that was begun
    # it was begun by this process, and is neither sealed nor given up: the run is not over
    round_in_progress: bool = False
    training: bool = False  # it is computed right now: in a secret sum a round in progress mostly waits for others
    sealed: int = 0  # the newest round whose update was sealed: never trained again
    watch: PartWatch = field(default_factory=PartWatch)
    end: PartEnd | None = None  # of the newest part that has ended in this process
    now: Callable[[], float] = lambda: 0.0  # without a clock nothing grows old
    made_at: float = 0.0  # when all was made, if it is
    last: SealedUpdate | None = None  # that update, sent again if asked again; None: no longer, or not in clear
    project: str = "main"  # whose patients take part
    most_round_seconds: int = round_times.MOST_S  # the longest round in which this site takes part
    terms: RoundTerms = field(default_factory=RoundTerms)  # of the run that was priced
    clock: Callable[[], float] = lambda: 0.0  # seconds, for what a round takes; without one nothing takes any time
    effort: Callable[[], float] = lambda: 0.0  # seconds of work in trainings so far
    pace: AnswerPace = field(default_factory=AnswerPace)
    _nobody: tuple[Federated | FederatedMasked, Cohort, Update] | None = None  # a round of nobody, to be measured

    def resume(self) -> bool:
        """Take up the part that an earlier process had open; False when there is none.

        A round that was begun but not submitted counts as made. The vault may be an older copy with too small a
        count: the number of rounds made is at least the number that the site's ledger holds as sent, and then no part
        of the grant is returned whole.
        """
        note = self.site.vault.note(PART)
        if not note:
            return False
        known = self.site.ledger.store.state.grants.get(note["grant"])
        held = known is not None and known.state == "held"
        if note["grant"] and not held:  # killed between the end of the grant and that of the part
            gone = updates_of_part(self.site.vault, self.site.name)
            self.site.vault.write_note(PART, None)
            for release in gone:
                forget(self.site.vault, release)
            return False
        if note["modality"] != self.modality:
            return False
        self.run, self.terms = note["run"], RoundTerms(*note.get("terms", ()))
        self.made_at = note.get("made_at", self.now())
        self._take_up(note.get("sealed", {}))
        if not held:  # all is made, and the run goes on without this site's work
            return False
        self.grant, self.resumed = note["grant"], True
        sent = self._sent()
        self.rounds_trained = max(note["rounds_trained"], len(sent))
        self.begun = max([note["begun"], *sent])
        self.mechanism = MECHANISMS[note["mechanism"]].from_json(note["config"])
        return True

    def _take_up(self, sealed: dict[str, Any]) -> None:
        """The newest update again; without its bytes the round is refused, and never trained again."""
        self.sealed = sealed.get("round", 0)
        if "envelope" in sealed:
            envelope = base64.b64decode(sealed["envelope"])
            release = self.site.read(envelope)
            artifact = kept_update(self.site.vault, release)
            if artifact is not None:
                signed = SignedRelease(release, envelope, artifact)
                self.last = SealedUpdate(signed, frozenset(sealed["persons"]))

    def _sent(self) -> list[int]:
        """The rounds whose updates have set out under this grant, by the site's ledger."""
        return [s.round for s in self.site.ledger.store.state.sent.values() if s.grant == self.grant]

    def _note(self) -> None:
        note: dict[str, Any] = {"run": self.run, "grant": self.grant, "modality": self.modality}
        note["terms"] = [self.terms.seconds, self.terms.approve_by]
        if self.mechanism is not None:
            note |= {"mechanism": self.mechanism.name, "config": self.mechanism.to_json()}
            note |= {"rounds_trained": self.rounds_trained, "begun": self.begun}
        if not self.grant:
            note["made_at"] = self.made_at
        if self.sealed:
            note["sealed"] = {"round": self.sealed}
        if self.last is not None:
            signed, persons = self.last.signed, sorted(self.last.persons)
            note["sealed"] |= {"release": signed.release.release, "persons": persons}
            note["sealed"]["envelope"] = base64.b64encode(signed.envelope).decode()
        self.site.vault.write_note(PART, note if self.grant or self.last is not None else None)

    def plan_of(self, run: str, mechanism: Federated | FederatedMasked, terms: RoundTerms) -> RunPlan:
        """What the run would do here, in the form that persons approve."""
        claim, config = mechanism.claim(), mechanism.to_json()
        names = mechanism.name, config, claim_json(claim), mechanism.rounds
        return RunPlan(run, *names, self.modality, self.project, terms)

    def consider(self, run: str, mechanism: Federated | FederatedMasked, terms: RoundTerms) -> None:
        """May this run be priced here, as far as persons are asked? If not yet, they can see it from now on.

        Raises:
            ReviewRejectedError: persons have not approved the plan (``waiting``), or have refused it (``plan``); or a
                round of it would last longer than this site allows, or it has no proper name.
        """
        if not ID.fullmatch(run):
            raise _no("run", "a run's name is a short lower-case identifier")
        if not terms.seconds <= self.most_round_seconds:
            told = f"a round would last up to {terms.seconds} seconds, and most_round_seconds in site.toml allows"
            raise _no("round_seconds", f"{told} {self.most_round_seconds}")
        if run == self.run and (mechanism == self.mechanism or self.mechanism is None) and terms == self.terms:
            return  # it was approved before it was priced
        wanted = self.site.ledger.policy_of(self.site.name).run_approvals
        if not wanted:
            return
        plan, state = self.plan_of(run, mechanism, terms), self.site.ledger.store.state
        self._show_plan(plan)
        match run_plan.standing(state, plan, wanted):
            case "refused":
                raise _no("plan", "a person at this site has refused the plan of this run")
            case "waiting":
                roles = " and ".join(sorted(run_plan.missing_roles(state, plan, wanted)))
                raise _no("waiting", f"{roles} must approve the plan first: `lazaret-agent run show {run}`")

    def _show_plan(self, plan: RunPlan) -> None:
        """Keep it where persons find it; the plan of before under that name is another one, and goes."""
        vault = self.site.vault
        if (vault.note(run_plan.NOTE) or {}).get(plan.run) != plan.to_note():
            vault.change_note(run_plan.NOTE, lambda note: run_plan.with_plan(note, plan))
            self.site.say("plan", f"{plan.run}: see `lazaret-agent run show {plan.run}`")

    def forget_plan(self, run: str) -> None:
        """The run is over: nobody has to decide about it any more."""
        if run in (self.site.vault.note(run_plan.NOTE) or {}):
            self.site.vault.change_note(run_plan.NOTE, lambda note: run_plan.without(note, run))

    def same_terms(self, run: str, terms: RoundTerms) -> None:
        """Is a round asked for under the times that were priced, and approved where persons approve runs?

        Raises:
            ReviewRejectedError: it is not.
        """
        if run == self.run and terms != self.terms:
            raise _no("round", "the times of this round are not those of the run that was priced")

    def join(self, run: str, mechanism: Federated | FederatedMasked, terms: RoundTerms | None = None) -> bytes:
        """Price the whole run here. Asked again for the run it is in, it reserves nothing more.

        Returns:
            The site's sealed reservation: the coordinator reserves with it.
        Raises:
            ReviewRejectedError: by the site's ledger, or because the run was priced before and is spent, has no
            proper name, is for more patients than delta allows (P1), or has larger updates than the policies admit;
            or as :meth:`consider`.
        """
        terms = terms or RoundTerms()
        self.consider(run, mechanism, terms)
        if run == self.run and mechanism == self.mechanism and self.grant and terms == self.terms:
            return self._reservation(self.grant)
        if run == self.run and self.mechanism is None and self.last is not None:  # all is made, and the run goes on
            return self._reservation(self.last.signed.release.grant)
        delta = float(self.site.ledger.account(self.site.name, mechanism.claim()).opened.delta)
        findings = []
        if run in self.site.ledger.runs():
            findings.append(Finding("run_spent", "this run was priced before, and its grant is spent"))
        if not delta * mechanism.public_patients < 1:
            findings.append(Finding("delta", "delta must be below 1 / patients, by the job's public bound"))
        size, most = update_bytes(mechanism), self.site.ledger.policy_of(self.site.name).max_artifact_bytes
        if not size <= most:
            told = f"each update takes {size} bytes, and the policies admit {most}"
            findings.append(Finding("artifact_size", told))
        if findings:
            raise ReviewRejectedError("site", Verdict(tuple(findings)))
        self.leave_run("replaced")
        reservation = reservation_of(self.site, mechanism, self.modality, run)
        self.site.say("price", f"{mechanism.name}: reserve in the site's ledger, then at the coordinator")
        envelope = reserve_locally(self.site, reservation)
        self.run, self.grant, self.granted, self.resumed = run, reservation.grant, False, False
        self.mechanism, self.terms = mechanism, terms
        self._note()
        return envelope

    def _reservation(self, grant: str) -> bytes:
        store = self.site.ledger.store
        return store.envelope(store.state.grants[grant].reserved.envelope) or b""

    def confirm(self) -> bool:
        """Does the coordinator's ledger hold this site's price?

        A no frees what is held here, since nothing was read. In a part that was taken up by :meth:`resume`, it is
        spent.

        Raises:
            CoordinatorUnreachableError: not known now.
        """
        if self.granted or not self.grant:
            return self.granted
        digest = hashlib.sha256(self._reservation(self.grant)).digest()
        verdict = self.site.gateway.outcome(f"run-{self.run}", digest)
        if verdict is None:
            return False
        if not verdict.admitted and not self.rounds_trained:
            held = self.site.ledger.store.state.grants[self.grant].reserved
            assert isinstance(held, Reserved)
            if self.resumed:
                settle_grant(self.site, self.grant, None)
            else:
                release_grant(self.site, held)
            self._forget("refused")
            return False
        self.granted = verdict.admitted
        return self.granted

    def leave_run(self, how: How = "over") -> None:
        """Leave the site's run: record its state, and spend what was made under its grant.

        If nothing was made, the process that reserved frees the grant. After a restart only the vault's note says
        that nothing was read, and the vault may be an older copy: then the entire grant is spent.

        Raises:
            LedgerForkError: the coordinator's ledger is another one; the grant stays held, or has its end in the
            ledger here.
        """
        grant = self.site.ledger.store.state.grants.get(self.grant)
        if grant is not None and grant.state == "held":
            with best_effort():
                fetch_verdicts(self.site)
            untouched = not (self.rounds_trained or self.resumed or grant.sent or grant.used)
            if untouched and isinstance(grant.reserved, Reserved):
                return_unused_grant(self.site, grant.reserved)
            else:
                settle_grant(self.site, self.grant, self._made())
        self._forget(how)

    def _forget(self, how: How) -> None:
        """The part is over. If all is ``made`` the run is not, and may ask for the last update again."""
        if self.grant and self.mechanism is not None:
            self.end = PartEnd(self.grant, how, self.rounds_trained, self.mechanism.rounds)
        self.grant, self.granted, self.mechanism = "", False, None
        self.resumed = False
        self.rounds_trained = self.begun = 0
        self.round_in_progress = False
        if how != "made":
            self.forget_plan(self.run)
            self.run = ""
            self._replace_last(0, None)
        else:
            self.made_at = self.now()
            self._note()

    def _replace_last(self, sealed: int, last: SealedUpdate | None) -> None:
        """Another newest update, or none: it is listed before the bytes of the one before go."""
        before, self.sealed, self.last = self.last, sealed, last
        self._note()
        if before is not None:
            forget(self.site.vault, before.signed.release.release)

    def _made(self) -> Claim | None:
        """What was made in this run so far, failed rounds included; None before the first round."""
        if self.mechanism is None or not self.rounds_trained:
            return None
        return replace(self.mechanism.claim(), steps=self.mechanism.steps_per_round * self.rounds_trained)

    def begin_round(self, run: str, round_index: int, once: bool = False) -> Federated | FederatedMasked:
        """Is this round covered by a grant in both ledgers? Then it is counted, durable before an image is read.

        Args:
            run: its name.
            round_index: from 1.
            once: also refuse a round that was begun before and led to nothing.
        Raises:
            ReviewRejectedError: not the run that was priced, a round out of order, or not granted at the coordinator.
            CoordinatorUnreachableError: whether it was granted is not known now.
        """
        mechanism = self.mechanism
        in_order = round_index > max([self.begun if once else 0, self.sealed, *self._sent()])
        if mechanism is None or run != self.run or not in_order or not self.rounds_trained < mechanism.rounds:
            raise _no("round", "this round is not covered by a grant")
        if not self.confirm():
            raise _no("not_granted", "the coordinator's ledger does not show this site's grant")
        self.rounds_trained += 1  # before an image is read: a failure in the middle counts as released
        self.begun = max(self.begun, round_index)
        self._note()
        self.round_in_progress = True
        return mechanism

    def train(self, run: str, round_index: int, start: Update) -> tuple[SignedRelease, Update]:
        """One round: train on the site's patients from ``start``, and seal the new parameters.

        Raises:
            ReviewRejectedError: see :meth:`begin_round`; a run that is aggregated in secret; or a patient opted out
            meanwhile.
        """
        if (kept := self.kept(run, round_index)) is not None:
            return kept, Update(unpack_vector(kept.artifact))
        if not isinstance(self.mechanism, Federated):
            raise _no("round", "this run sends no unencrypted updates")
        self.begin_round(run, round_index)
        try:
            update, persons = self.run_round(start)
            artifact = pack_vector(update.vector)
            del update  # from here on there is one copy of it
            signed = self.sign(round_index, artifact)
            keep_update(self.site.vault, signed.release.release, signed.artifact)
            self._replace_last(round_index, SealedUpdate(signed, persons))
        finally:
            self.round_in_progress = False
        self.kept(run, round_index)
        return signed, Update(unpack_vector(signed.artifact))

    def kept(self, run: str, round_index: int) -> SignedRelease | None:
        """The update of a round that was sealed before, on its way for the first time or again; None: there is none.

        Raises:
            ReviewRejectedError: a patient in it has opted out since, or the site's own review refuses it by now; it
            is deleted, and its round is refused from here on.
        """
        if self.last is None or run != self.run or round_index != self.last.signed.release.round:
            return None
        signed = self.last.signed
        try:
            check_opt_outs(self.site, self.last.persons)
            if signed.release.release not in self.site.ledger.store.state.sent:
                self.set_out(signed)
        except ReviewRejectedError:
            self._replace_last(self.sealed, None)
            raise
        return signed

    def run_round(self, start: Update) -> tuple[Update, frozenset[str]]:
        """What a round makes of patients' images, in a confined process; and of whom it is.

        Raises:
            ReviewRejectedError: a patient in it has opted out meanwhile, or a person here has the site leave the run;
            nothing of it leaves.
            WorkerError: it is of another size than it began with; nothing of it leaves.
        """
        assert self.mechanism is not None
        self.training, began, before = True, self.clock(), self.effort()
        self.watch.changed(self)
        try:
            cohort = self.site.vault.cohort(self.modality, self.mechanism.shape)
            read = self.clock()
            self._check_leaving()
            bench = Workspace(say=self.watch.trains)
            update: Update = self.site.run(self.mechanism.run_round, cohort, start, self.entropy, bench)
            self._check_leaving()
            taken = read - began, self.clock() - read, self.effort() - before
            self.pace.trained(self.run, RoundWork(*taken, len(cohort.patients), self.mechanism.public_patients))
            self._nobody = (self.mechanism, replace(cohort, patients=()), start)
        finally:
            self.training = False
        persons = frozenset(patient.pseudonym for patient in cohort.patients)
        check_opt_outs(self.site, persons)
        if update.vector.shape != start.vector.shape:
            raise WorkerError("what trains a round answered with other parameters than it was given: nothing left")
        return update, persons

    def settle_pace(self) -> None:
        """Choose when the answers of this run leave, if that is open; an update is sealed by now.

        What a round of nobody makes is dropped: it is noise that depends on no patient.
        """
        nobody, self._nobody = self._nobody, None
        if nobody is None or not self.pace.is_open(self.terms.seconds):
            return
        mechanism, cohort, start = nobody
        empty, began, before = 0.0, self.clock(), self.effort()
        try:
            self.site.run(mechanism.run_round, cohort, start, self.entropy, Workspace())
            empty = self.effort() - before
        finally:
            self.pace.choose(empty, self.clock() - began, self.terms.seconds)

    def _check_leaving(self) -> None:
        if self.watch.wants_to_leave(self):
            raise _no("left", "the site leaves this run")

    def sign(self, round_index: int, artifact: bytes) -> SignedRelease:
        """A round's artifact, sealed. Nobody has it yet."""
        assert self.mechanism is not None
        claim = self._made()
        assert claim is not None, "a round was begun"
        draft = replace(
            draft_of(self.site, self.mechanism, self.grant, self.modality, claim),
            release=release_id(self.site.name, self.grant, round_index),
            run=self.run,
            round=round_index,
        )
        return sign_release(self.site, draft, artifact)

    def set_out(self, signed: SignedRelease) -> None:
        """A round's sealed artifact is written down as leaving; the link carries it out.

        Raises:
            ReviewRejectedError: by the site's own review; it does not leave.
        """
        assert self.mechanism is not None
        record_submission(self.site, signed)
        self.round_in_progress = False
        made = f"update {self.rounds_trained} of {self.mechanism.rounds}"
        self.site.say("round", f"{signed.release.round}: {made} sealed")

    def follow(self) -> bool:
        """Ask for the verdicts on updates that went out with the link; True when the run's grant is closed.

        Raises:
            CoordinatorUnreachableError: not now; ask again later.
        """
        if self.last is not None and not self.grant and not self.now() < self.made_at + KEPT_S:
            self._forget("over")
        self.confirm()
        fetch_verdicts(self.site)
        waiting = any(sent.grant == self.grant for sent, _ in self.site.ledger.unanswered())
        if self.mechanism is None or self.rounds_trained < self.mechanism.rounds or waiting or self.round_in_progress:
            return False
        if self.last is not None and self.last.signed.release.release not in self.site.ledger.store.state.sent:
            return False  # killed before it set out: it is asked for again, or the run ends
        self.site.ledger.close(self.grant, "released")
        self._forget("made")
        return True
