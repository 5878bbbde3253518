"""A site's part in one federated run: one grant, one update a round, each update made once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from agent.mechanisms.federated import Federated
from agent.nouns import Unreachable, Update
from agent.pipeline import Parcel, Refused, Site, ask, draft_of, finish, parcel, price, set_out
from agent.stages.finetune import Entropy
from policies.claims import Claim
from policies.review import Finding, Verdict
from policies.statement import ID, release_id
from protos.artifact import pack_vector


@dataclass(slots=True)
class Participant:
    """A site's part in one federated run: one grant, one update a round, each update made once."""

    site: Site
    modality: str
    entropy: Entropy
    run: str = ""
    grant: str = ""
    mechanism: Federated | None = None
    rounds_trained: int = 0
    last: tuple[int, Parcel, Update] | None = None  # the newest round's update, sent again if asked again

    def join(self, run: str, mechanism: Federated) -> None:
        """Price the whole run. Asked again for the run it is in, it says yes again and reserves nothing.

        Raises:
            Refused: by either ledger, or because the run was priced before a restart and is spent, has no proper
                name, or is for more patients than delta allows (P1).
        """
        if run == self.run and mechanism == self.mechanism:
            return
        delta = float(self.site.books.account(self.site.name, mechanism.claim()).opened.delta)
        findings = []
        if not ID.fullmatch(run):
            findings.append(Finding("run", "a run's name is a short lower-case identifier"))
        if run in self.site.books.runs():
            findings.append(Finding("run_spent", "this run was priced before; its grant is spent"))
        if not delta * mechanism.public_patients < 1:
            findings.append(Finding("delta", "delta must be below 1 / patients, by the job's public bound"))
        if findings:
            raise Refused("site", Verdict(tuple(findings)))
        self.part()
        self.grant = price(self.site, mechanism, self.modality, run).grant
        self.run, self.mechanism, self.rounds_trained, self.last = run, mechanism, 0, None

    def part(self) -> None:
        """Leave the run this site is in: write down what is known of it, and spend its grant."""
        if self.grant:
            with contextlib.suppress(Unreachable):
                ask(self.site)
            finish(self.site, self.grant, self._made())
        self.run, self.grant, self.mechanism, self.rounds_trained, self.last = "", "", None, 0, None

    def _made(self) -> Claim | None:
        """What was made in this run so far, failed rounds included; None before the first round."""
        if self.mechanism is None or not self.rounds_trained:
            return None
        return replace(self.mechanism.claim(), steps=self.mechanism.steps_per_round * self.rounds_trained)

    def train(self, run: str, round_index: int, start: Update) -> tuple[Parcel, Update]:
        """One round: train on the site's patients from ``start``, and seal the new parameters.

        Raises:
            Refused: not the run that was priced, or a round out of order.
        """
        if self.last is not None and run == self.run and self.last[0] == round_index:
            return self.last[1:]
        mechanism = self.mechanism
        in_order = self.last is None or round_index > self.last[0]
        if mechanism is None or run != self.run or not in_order or not self.rounds_trained < mechanism.rounds:
            raise Refused("site", Verdict((Finding("round", "this round is not covered by a grant"),)))
        self.rounds_trained += 1  # before an image is read: a failure in the middle counts as released
        cohort = self.site.vault.cohort(self.modality, mechanism.shape)
        update = mechanism.run_round(cohort, start, self.entropy)
        claim = replace(mechanism.claim(), steps=mechanism.steps_per_round * self.rounds_trained)
        draft = replace(
            draft_of(self.site, mechanism, self.grant, self.modality, claim),
            release=release_id(self.site.name, self.grant, round_index),
            run=run,
            round=round_index,
        )
        goods = parcel(self.site, draft, pack_vector(update.vector))
        set_out(self.site, goods)
        self.last = (round_index, goods, update)
        self.site.say("round", f"{round_index} of {mechanism.rounds}: update sealed and handed to the link")
        return goods, update

    def follow(self) -> bool:
        """Ask for the verdicts on updates that went out with the link; True when the run's grant is closed.

        Raises:
            Unreachable: not now; ask again later.
        """
        ask(self.site)
        waiting = any(sent.grant == self.grant for sent, _ in self.site.books.unanswered())
        if self.mechanism is None or self.rounds_trained < self.mechanism.rounds or waiting:
            return False
        self.site.books.close(self.grant, "released")
        self.mechanism, self.grant = None, ""
        return True
