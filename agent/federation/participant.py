"""A site's part in one federated run: one grant, one update a round, each update and each look made once.

The site's own ledger reserves the price first. The coordinator then reserves the budgets of all sites at once, and
only grants in its ledger are trained for. The vault records the participant's progress before an image is read, so a
killed agent rejoins the run with the rounds it has begun counted as made. A round that was interrupted goes on from
its sealed steps when it is asked for again, and counts once (:mod:`agent.federation.round_making`). An update is kept
in the vault before it sets out, so that a kill on its way takes no site out of a round: asked again, the site sends
the same bytes. They go when the next round's are sealed, with the run's end, or when the site leaves it.

Where the policies want persons to approve runs, nothing of a run is priced before they have approved its plan
(:mod:`agent.federation.run_plan`), whatever the coordinator asks for.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from agent.domain import Update
from agent.dp.compute_device import SiteCompute
from agent.dp.noise import Entropy
from agent.errors import ReviewRejectedError, SiteStorageError
from agent.federation import own_heads, run_plan
from agent.federation.answer_pace import RunPaces
from agent.federation.part_watch import How, PartEnd, PartWatch
from agent.federation.round_making import UnfinishedRound, digest_of_model, forget_steps, goes_on, make, public_files
from agent.federation.run_findings import findings
from agent.federation.run_mechanism import MECHANISMS, Made, as_sent
from agent.federation.run_plan import RunPlan
from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError, FederatedMasked
from agent.mechanisms.federated.task_training import engine_refusal
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
from agent.release.release_record import remember_members
from agent.release.unsent import PART, SealedUpdate, forget, keep_update, kept_update, updates_of_part
from policies.accounting.claims import Claim, Evaluated, looks_of, training_of
from policies.ledger.entries import Reserved
from policies.review.mechanism_terms import EVALUATIONS
from policies.review.rules import Finding, Verdict
from policies.statements import ID, Release, claim_json, release_id
from policies.tasks.evaluation import HELD_OUT, TRAINED
from protos.artifacts.arrays import pack_update
from protos.common.errors import WorkerError
from protos.federation import round_times
from protos.federation.round_times import RoundTerms

KEPT_S = 30 * 86_400.0  # the last update, once all is made: who was off when the run ended does not hear of its end


def _numbers(made: Made) -> NDArray[Any]:
    return made.vector if isinstance(made, Update) else made.steps


def _no(rule: str, detail: str) -> ReviewRejectedError:
    return ReviewRejectedError("site", Verdict((Finding(rule, detail),)))


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
    looks: int = 0  # at a model, that were begun
    begun: int = 0  # the newest round or look that was begun
    unfinished: UnfinishedRound | None = None  # the same, as long as it may go on at the price that is paid for it
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
    paces: RunPaces = field(default_factory=RunPaces)  # when answers leave
    compute: SiteCompute = field(default_factory=SiteCompute)  # what rounds are computed with

    def resume(self) -> bool:
        """Take up the part that an earlier process had open; False when there is none.

        A round that was begun but not submitted counts as made. The vault may be an older copy with too small a
        count: the number of rounds made is at least the number that the site's ledger holds as sent, and then no part
        of the grant is returned whole.
        """
        note = self.site.vault.note(PART)
        known = self.site.ledger.store.state.grants.get(note["grant"]) if note else None
        held = known is not None and known.state == "held"
        unfinished = UnfinishedRound.of_note(note) if held else None
        if unfinished is None:  # killed between the end of the round and that of its steps
            forget_steps(self.site.vault)
        if not note:
            return False
        if note["grant"] and not held:  # killed between the end of the grant and that of the part
            gone = updates_of_part(self.site.vault, self.site.name)
            self.site.vault.write_note(PART, None)
            for release in gone:
                forget(self.site.vault, release)
            return False
        if (note["modality"], note.get("project", self.project)) != (self.modality, self.project):
            return False
        self.run, self.terms = note["run"], RoundTerms(*note.get("terms", ()))
        self.made_at = note.get("made_at", self.now())
        self._take_up(note.get("sealed", {}))
        if not held:  # all is made, and the run goes on without this site's work
            return False
        self.grant, self.resumed = note["grant"], True
        self.mechanism = MECHANISMS[note["mechanism"]].from_json(note["config"])
        claims = self._claims_sent()
        steps = max((training_of(claim).steps for claim in claims), default=0)  # type: ignore[union-attr]
        self.rounds_trained = max(note["rounds_trained"], steps // self.mechanism.steps_per_round)
        self.looks = max([note.get("looks", 0), *map(looks_of, claims)])
        self.begun = max([note["begun"], *self._sent()])
        self.unfinished = unfinished
        return True

    def _take_up(self, sealed: dict[str, Any]) -> None:
        """The newest update again; without its bytes the round is refused, and never trained again."""
        self.sealed = sealed.get("round", 0)
        if "envelope" in sealed:
            envelope = base64.b64decode(sealed["envelope"])
            release = self.site.read(envelope)
            if kept_update(self.site.vault, release) is not None:
                self.last = SealedUpdate(release, envelope, frozenset(sealed["persons"]), sealed.get("model", ""))

    def _sent(self) -> list[int]:
        """The rounds whose updates have set out under this grant, by the site's ledger."""
        return [s.round for s in self.site.ledger.store.state.sent.values() if s.grant == self.grant]

    def _claims_sent(self) -> list[Claim]:
        """What has set out under this grant, by the site's ledger: each covers all that was made before it."""
        store = self.site.ledger.store
        sent = [s.envelope for s in store.state.sent.values() if s.grant == self.grant]
        return [self.site.read(envelope).claim for digest in sent if (envelope := store.envelope(digest))]

    @property
    def turns_made(self) -> int:
        """Rounds and looks that were begun."""
        return self.rounds_trained + self.looks

    def _note(self) -> None:
        note: dict[str, Any] = {"run": self.run, "grant": self.grant, "modality": self.modality}
        note["project"] = self.project
        note["terms"] = [self.terms.seconds, self.terms.approve_by]
        if self.mechanism is not None:
            note |= {"mechanism": self.mechanism.name, "config": self.mechanism.to_json()}
            note |= {"rounds_trained": self.rounds_trained, "looks": self.looks, "begun": self.begun}
        if self.unfinished is not None:
            note["unfinished"] = asdict(self.unfinished)
        if not self.grant:
            note["made_at"] = self.made_at
        if self.sealed:
            note["sealed"] = {"round": self.sealed}
        if self.last is not None:
            release, persons = self.last.release.release, sorted(self.last.persons)
            note["sealed"] |= {"release": release, "persons": persons, "model": self.last.model}
            note["sealed"]["envelope"] = base64.b64encode(self.last.envelope).decode()
        self.site.vault.write_note(PART, note if self.grant or self.last is not None else None)

    def plan_of(self, run: str, mechanism: Federated | FederatedMasked, terms: RoundTerms) -> RunPlan:
        """What the run would do here, in the form that persons approve."""
        claim, config = mechanism.claim(), mechanism.to_json()
        names = mechanism.name, config, claim_json(claim), mechanism.rounds
        return RunPlan(run, *names, self.modality, self.project, terms)

    def consider(self, run: str, mechanism: Federated | FederatedMasked, terms: RoundTerms) -> None:
        """May this run be priced here, as far as persons are asked? If not yet, they can see it from now on.

        Raises:
            ReviewRejectedError: persons have not approved the plan (``waiting``), have refused it (``plan``), or were
                to decide by a day that is over (``approve_by``); or a round of it would last longer than this site
                allows, or it has no proper name.
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
        standing = run_plan.standing(state, plan, wanted)
        if run_plan.is_over(terms, standing, self.now()):
            raise _no("approve_by", "the day by which persons were to approve the run is over, or it names none")
        self._show(plan)
        match standing:
            case "refused":
                raise _no("plan", "a person at this site has refused the plan of this run")
            case "waiting":
                roles = " and ".join(sorted(run_plan.missing_roles(state, plan, wanted)))
                raise _no("waiting", f"{roles} must approve the plan first: `lazaret-agent run show {run}`")

    def _show(self, plan: RunPlan) -> None:
        if run_plan.keep(self.site.vault, plan):
            self.site.say("plan", f"{plan.run}: see `lazaret-agent run show {plan.run}`")

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
            proper name, is for more patients than delta allows (P1), has larger updates than the policies admit, or
            is of another modality than this site takes part with, or of labels that this site does not declare; or
            as :meth:`consider`.
            FederatedConfigError: the task's network trains another number of parameters than the configuration says,
            or begins at public weights that are not here.
        """
        terms = terms or RoundTerms()
        self.consider(run, mechanism, terms)
        if run == self.run and mechanism == self.mechanism and self.grant and terms == self.terms:
            return self._reservation(self.grant)
        if run == self.run and self.mechanism is None and self.last is not None:  # all is made, and the run goes on
            return self._reservation(self.last.release.grant)
        if found := tuple(findings(self.site, self.modality, run, mechanism)):
            raise ReviewRejectedError("site", Verdict(found))
        if why := engine_refusal(mechanism.task, self.compute.plan.engine):
            raise FederatedConfigError(why)
        # before anything is held: the network can be built, and is so large
        mechanism.network(files=public_files(self.site, mechanism))
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
            self.end = PartEnd(self.grant, how, self.turns_made, self.mechanism.turns)
        self.grant, self.granted, self.mechanism = "", False, None
        self.resumed = False
        self.rounds_trained = self.looks = self.begun = 0
        self.round_in_progress, self.unfinished = False, None
        if how != "made":
            run_plan.forget(self.site.vault, self.run)
            self.run = ""
            self._replace_last(0, None)
        else:
            self.made_at = self.now()
            self._note()
        forget_steps(self.site.vault)

    def _replace_last(self, sealed: int, last: SealedUpdate | None) -> None:
        """Another newest update, or none: it is listed before the bytes of the one before go."""
        before, self.sealed, self.last = self.last, sealed, last
        self._note()
        if before is not None:
            forget(self.site.vault, before.release.release)

    def _made(self) -> Claim | None:
        """What was made in this run so far, failed rounds included; None before the first round."""
        if self.mechanism is None or not self.rounds_trained:
            return None
        whole, steps = self.mechanism.claim(), self.mechanism.steps_per_round * self.rounds_trained
        if not isinstance(whole, Evaluated):
            return replace(whole, steps=steps)
        training = replace(whole.training, steps=steps)
        return replace(whole, training=training, looks=self.looks) if self.looks else training

    def begin_look(self, run: str, round_index: int, once: bool = False) -> Federated | FederatedMasked:
        """The same for a look: there is a model to look at, and no more looks than were priced.

        Raises:
            ReviewRejectedError: see :meth:`begin_round`; or nothing was trained yet, or every look was made.
            CoordinatorUnreachableError: whether it was granted is not known now.
        """
        mechanism = self._in_turn(run, round_index, once)
        plan = mechanism.evaluate
        if plan is None or not self.rounds_trained or not self.looks < plan.looks:
            raise _no("round", "this look is not covered by a grant")
        self._granted_for_certain()
        self.looks += 1
        self._begun(round_index)
        return mechanism

    def begin_round(
        self, run: str, round_index: int, once: bool = False, start: Update | None = None
    ) -> Federated | FederatedMasked:
        """Is this round covered by a grant in both ledgers? Then it is counted, durable before an image is read.

        One that was interrupted is not counted again: nothing of it has left. From another start it is another round.

        Args:
            run: its name.
            round_index: from 1.
            once: also refuse a round that was begun before and led to nothing.
            start: the parameters that it starts from, if it may go on after an interruption.
        Raises:
            ReviewRejectedError: not the run that was priced, a round out of order, or not granted at the coordinator.
            CoordinatorUnreachableError: whether it was granted is not known now.
        """
        mechanism = self._in_turn(run, round_index, once)
        model = None if start is None else own_heads.beside(self.site.vault, run, start)
        asked = None if model is None else UnfinishedRound.of(round_index, model)
        paid = asked is not None and asked == self.unfinished
        if not (paid or self.rounds_trained < mechanism.rounds):
            raise _no("round", "this round is not covered by a grant")
        self._granted_for_certain()
        self.rounds_trained += not paid  # before an image is read: a failure in the middle counts as released
        self._begun(round_index, asked)
        return mechanism

    def _in_turn(self, run: str, round_index: int, once: bool = False) -> Federated | FederatedMasked:
        sent = self.site.ledger.store.state.sent.values()
        if any(one.run == run and one.round > round_index for one in sent):  # the coordinator has them, or had
            raise _no("behind", "a later round of this run has left: the coordinator came back from an older backup")
        in_order = round_index > max([self.begun if once else 0, self.sealed, *self._sent()])
        if self.mechanism is None or run != self.run or not in_order:
            raise _no("round", "this round is not covered by a grant")
        return self.mechanism

    def _granted_for_certain(self) -> None:
        if not self.confirm():
            raise _no("not_granted", "the coordinator's ledger does not show this site's grant")

    def _begun(self, round_index: int, asked: UnfinishedRound | None = None) -> None:
        """Durable before an image is read. Of another round that was interrupted nothing stays."""
        before, self.unfinished = self.unfinished, asked
        self.begun = max(self.begun, round_index)
        self._note()
        if asked != before:
            forget_steps(self.site.vault)
        self.round_in_progress = True

    def train(self, run: str, round_index: int, start: Update) -> SignedRelease:
        """One round: train on the site's patients from ``start``, and seal the new parameters.

        Raises:
            ReviewRejectedError: see :meth:`begin_round`; a run that is aggregated in secret; or a patient opted out.
        """
        if (kept := self.kept(run, round_index, start)) is not None:
            return kept
        if not isinstance(self.mechanism, Federated):
            raise _no("round", "this run sends no unencrypted updates")
        self.begin_round(run, round_index, start=start)
        return self._seal(round_index, start, partial(self.run_round, start))

    def look(self, run: str, round_index: int, model: Update) -> SignedRelease:
        """One look: noisy sums over the held-out patients of how good ``model`` is, sealed like an update.

        Raises:
            ReviewRejectedError: see :meth:`begin_look`; or a patient opted out meanwhile.
        """
        if (kept := self.kept(run, round_index, model)) is not None:
            return kept
        if not isinstance(self.mechanism, Federated):
            raise _no("round", "this run sends no unencrypted sums")
        self.begin_look(run, round_index)
        return self._seal(round_index, model, partial(self.run_look, model), "evaluation")

    def _seal(
        self,
        round_index: int,
        model: Update,
        make: Callable[[], tuple[Made, frozenset[str]]],
        artifact_type: str = "",
    ) -> SignedRelease:
        """What a round or a look that was begun makes: kept before it may leave, so that it is never made again.

        An update is rounded here, once: noise is in it, it alone is looked at, and the rounded bytes are signed.
        """
        try:
            made, persons = make()
            assert isinstance(made, Update), "a run that sends unencrypted updates"
            assert self.mechanism is not None
            numbers = made.vector if artifact_type in EVALUATIONS else as_sent(self.mechanism, made)
            head = made.head
            del made  # of what is rounded, and of what is packed, one copy is enough
            artifact = pack_update(numbers)
            del numbers
            signed = self.sign(round_index, artifact, artifact_type)
            keep_update(self.site.vault, signed.release.release, signed.artifact)
            own_heads.keep(self.site.vault, self.run, head)  # from here on the round starts elsewhere, and is another
            self.unfinished = None
            last = SealedUpdate(signed.release, signed.envelope, persons, digest_of_model(model))
            self._replace_last(round_index, last)
            forget_steps(self.site.vault)
        except Exception as fault:
            if self.unfinished is not None and not goes_on(fault):
                self._give_up()
            raise
        finally:
            self.round_in_progress = False
        self._may_leave()
        return signed

    def _give_up(self) -> None:
        """The round in progress has had its end: asked for again it is another one, and paid.

        The steps go first: where the note cannot be written, a kill lets the round begin anew, and not go on.
        """
        self.unfinished = None
        forget_steps(self.site.vault)
        self._note()

    def kept(self, run: str, round_index: int, model: Update) -> SignedRelease | None:
        """The update of ``model`` that was sealed before, on its way for the first time or again; None: none is.

        Raises:
            ReviewRejectedError: it was made from another model, which a coordinator has lost since (``behind``); a
                patient in it has opted out since, or the site's own review refuses it by now: then it is deleted,
                and its round is refused from here on.
            SiteStorageError: its bytes cannot be read.
        """
        if self.last is None or run != self.run or round_index != self.last.release.round:
            return None
        if digest_of_model(model) != self.last.model:
            raise _no("behind", "this round was made from another model: the coordinator came back from a backup")
        artifact = kept_update(self.site.vault, self.last.release)
        self._may_leave(there=artifact is not None)  # after they were read, which takes a while
        return SignedRelease(self.last.release, self.last.envelope, artifact or b"")

    def _may_leave(self, *, there: bool = True) -> None:
        """The newest update sets out, if it has not; refused, it is deleted. If its bytes are not there, it stays."""
        assert self.last is not None
        try:
            check_opt_outs(self.site, self.last.persons)
            if not there:
                raise SiteStorageError("the vault does not have a round's update as it was made: restore the vault")
            if self.last.release.release not in self.site.ledger.store.state.sent:
                self.set_out(self.last.release, self.last.envelope)
        except ReviewRejectedError:
            self._replace_last(self.sealed, None)
            raise

    def run_round(self, start: Update) -> tuple[Made, frozenset[str]]:
        """What a round makes of patients' images, in a confined process; and of whom it is.

        Raises:
            ReviewRejectedError: a patient in it has opted out meanwhile, or a person here has the site leave the run;
            nothing of it leaves.
            WorkerError: it is of another size than it began with; nothing of it leaves.
        """
        assert self.mechanism is not None
        made, persons = make(self, TRAINED, start)
        remember_members(self.site.vault, self.run, persons)
        if _numbers(made).shape != start.vector.shape:
            raise WorkerError("what trains a round answered with other parameters than it was given: nothing left")
        return made, persons

    def run_look(self, model: Update) -> tuple[Made, frozenset[str]]:
        """The same for a look: the noisy sums over the held-out patients.

        Raises:
            ReviewRejectedError: a patient in them has opted out meanwhile, or a person has the site leave the run.
            WorkerError: they are of another size than was priced; nothing of them leaves.
        """
        assert self.mechanism is not None
        own_heads.keep_for_look(self.site.vault, self.run, self.looks)
        sums, persons = make(self, HELD_OUT, model)
        remember_members(self.site.vault, self.run, persons)
        if _numbers(sums).shape != (self.mechanism.layout().size,):
            raise WorkerError("what looks at a model answered with other sums than were priced: nothing left")
        return sums, persons

    def sign(self, round_index: int, artifact: bytes, artifact_type: str = "") -> SignedRelease:
        """A round's artifact, sealed. Nobody has it yet. Without a type it is the mechanism's usual one."""
        assert self.mechanism is not None
        claim = self._made()
        assert claim is not None, "a round was begun"
        usual = draft_of(self.site, self.mechanism, self.grant, self.modality, claim)
        draft = replace(
            usual,
            artifact_type=artifact_type or usual.artifact_type,
            release=release_id(self.site.name, self.grant, round_index),
            run=self.run,
            round=round_index,
        )
        return sign_release(self.site, draft, artifact)

    def set_out(self, release: Release, envelope: bytes) -> None:
        """A round's sealed artifact is written down as leaving; the link carries it out.

        Raises:
            ReviewRejectedError: by the site's own review; it does not leave.
        """
        assert self.mechanism is not None
        record_submission(self.site, release, envelope)
        self.round_in_progress = False
        looked = release.artifact_type in EVALUATIONS
        made = f"look {self.looks}" if looked else f"update {self.rounds_trained} of {self.mechanism.rounds}"
        self.site.say("round", f"{release.round}: {made} sealed")

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
        if self.mechanism is None or self.turns_made < self.mechanism.turns or waiting or self.round_in_progress:
            return False
        if self.unfinished is not None:
            return False  # interrupted: it is asked for again, or the run ends
        if self.last is not None and self.last.release.release not in self.site.ledger.store.state.sent:
            return False  # killed before it set out: it is asked for again, or the run ends
        self.site.ledger.close(self.grant, "released")
        self._forget("made")
        return True
