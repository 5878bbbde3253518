"""A site's part in one round of secure aggregation: five steps, one member, its answers kept and never made again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.domain import LatticePart, Update
from agent.errors import ReviewRejectedError
from agent.federation.participant import Participant
from agent.mechanisms.federated.mechanism import FederatedMasked
from agent.release.pipeline import check_opt_outs
from policies.review.rules import Finding, Verdict
from protos.artifacts.arrays import ArtifactFormatError, unpack_vector
from protos.artifacts.strict_safetensors import pack_ring
from protos.common.dsse import key_id
from protos.secagg import round
from protos.secagg.member import Member
from protos.secagg.messages import SecAggError as NotTogether
from protos.secagg.messages import SumStep
from protos.secagg.ring import Ring
from protos.secagg.session import KnownPartners, Quorum, SumSession
from protos.secagg.shamir import RandomSource

_STEPS: Final = {step.name.lower(): step for step in SumStep}


def _ring_of_look(mechanism: FederatedMasked) -> Ring:
    size, lattice = mechanism.look_ring()
    return Ring(size, round.LOOK_BITS, lattice.bound, lattice.scale)


def _no(detail: str) -> ReviewRejectedError:
    return ReviewRejectedError("site", Verdict((Finding("masked", detail),)))


@dataclass(slots=True)
class SecureAggregationClient:
    """The round that is under way; a new one forgets the old one's secrets."""

    participant: Participant
    sign_key: Ed25519PrivateKey
    known: KnownPartners | None  # None: this site names no partners, and is in no sum
    entropy: RandomSource
    _at: tuple[str, int] = ("", 0)
    _member: Member | None = None
    _session: SumSession | None = None
    _start: Update | None = None
    _looks: bool = False  # the sum is one of a look at the model
    _persons: frozenset[str] = frozenset()  # of whom the masked vector is
    _answers: dict[str, bytes] = field(default_factory=dict)  # by step: a reply that got lost is sent again

    def step(self, run: str, number: int, name: str, payload: bytes, config: bytes) -> bytes:
        """One step of round ``number`` (from 1) of a run.

        Raises:
            ReviewRejectedError: out of order, not granted, a roster without sites that this hospital knows, or a
            protocol that is not followed. The member is forgotten then.
            Exception: whatever goes wrong while this site makes its part; the member is forgotten, too.
        """
        step = _STEPS.get(name)
        if step is None:
            raise _no("unknown step")
        if self._at == (run, number) and name in self._answers:
            return self.again(run, number, name)
        try:
            if step is SumStep.ADVERTISE:
                answer = self._begin(run, number, payload, config)
            else:
                answer = self._go_on(run, number, step, payload)
        except BaseException:  # whatever it was, this round is over here; a step of another round ends none
            if self._at == (run, number):
                self._member, self.participant.round_in_progress = None, False
            raise
        self._answers[name] = answer
        return answer

    @contextmanager
    def _protocol(self) -> Iterator[None]:
        """What fails in here are the messages of others: the sum is over, and its members are told so.

        A fault of this site's own work is none of the protocol's, and has another word, at the site and outside.
        """
        try:
            yield
        except (NotTogether, ArtifactFormatError, ValueError) as fault:
            self._member, self.participant.round_in_progress = None, False
            raise _no(str(fault)) from None

    def again(self, run: str, number: int, name: str) -> bytes:
        """What was said in a step.

        Raises:
            ReviewRejectedError: it is not kept; or the site has left the run, or a patient in the masked vector has
            opted out since. It is deleted, and the round is over here.
        """
        if self._at != (run, number) or name not in self._answers:
            raise _no("this step is out of order")
        try:
            if run != self.participant.run:
                raise _no("the site has left the run meanwhile")
            if _STEPS[name] is SumStep.MASK:
                check_opt_outs(self.participant.site, self._persons)
        except ReviewRejectedError:
            self._member = None
            del self._answers[name]
            raise
        return self._answers[name]

    def _begin(self, run: str, number: int, payload: bytes, config: bytes) -> bytes:
        part = self.participant
        mechanism = part.mechanism
        with self._protocol():
            if not isinstance(mechanism, FederatedMasked) or FederatedMasked.from_json(config.decode()) != mechanism:
                raise _no("the round is not of the run that was priced")
        if self.known is None:
            raise _no(
                "site.toml names no partners: this site takes part in a secure sum only with partners that it knows"
            )
        with self._protocol():
            setup = round.RoundSetup.decode(payload)
            start = unpack_vector(setup.start)
        self._acquainted(setup.roster, mechanism.sites)
        self._looks = setup.strategy == round.LOOK
        if self._looks and mechanism.evaluate is None:
            raise _no("no look was priced")
        ring = _ring_of_look(mechanism) if self._looks else None
        with self._protocol():
            quorum = Quorum.smallest(len(setup.roster), round.CORRUPT, mechanism.honest)
            terms = round.RoundParams(run, number - 1, config, setup.strategy)
            session = round.session(terms, start, setup.roster, quorum, ring)
            member = Member(session, part.site.name, self.sign_key, self.known, self.entropy)
        begin = part.begin_look if self._looks else part.begin_round
        begin(run, number, once=True)  # durable before anything of it is said
        self._at, self._answers = (run, number), {}
        self._member, self._session, self._start = member, session, Update(start)
        with self._protocol():
            return member.answer(SumStep.ADVERTISE, b"")

    def _acquainted(self, roster: Mapping[str, bytes], most: int) -> None:
        """No more sites than were priced, and none beyond the corrupt ones that this hospital does not know itself.

        A coordinator that fills a roster with sites of its own holds the shares of the others' secrets; then no
        threshold helps. Whoever is unknown here counts as corrupt, and the quorum allows for so many.

        Raises:
            ReviewRejectedError: there are more.
        """
        assert self.known is not None
        if not len(roster) <= most:
            raise _no("the roster has more sites than the claim was priced for")
        others = [key for site, key in roster.items() if site != self.participant.site.name]
        strangers = sum(key_id(key) not in self.known.known for key in others)
        if not strangers <= round.CORRUPT:
            raise _no("the roster has more sites that this hospital does not know than may be corrupt")

    def _go_on(self, run: str, number: int, step: SumStep, payload: bytes) -> bytes:
        member = self._member
        if member is None or self._session is None or self._at != (run, number):
            raise _no("this step is out of order")
        if step is not SumStep.MASK:
            with self._protocol():
                return member.answer(step, payload)
        self._member = None  # until its vector is sealed: whatever goes wrong from here on, it takes no further step
        part, start = self.participant, self._start
        assert start is not None
        made, self._persons = part.run_look(start) if self._looks else part.run_round(start)
        assert isinstance(made, LatticePart), "a run of secret sums"
        with self._protocol():
            message = member.answer(step, payload, made.steps)
            masked = pack_ring(round.masked_vector(self._session, message))
        kind = "masked-evaluation" if self._looks else ""
        signed = part.sign(number, masked, kind)
        part.set_out(signed.release, signed.envelope)
        self._member = member
        return round.frame(signed.envelope, message)
