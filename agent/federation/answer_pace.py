"""When a site's answers of one run leave: by public numbers and by the speed of this machine, not by its patients.

An answer leaves at one of a few times (:mod:`protos.federation.round_times`). The next of them after a training would
still tell twice as many patients from half of them, and, round after round, on which side of such a time the draws of
patients fall. So the time is chosen once in a run, in its first round: that by which a site with as many patients as
the job's public bound would be ready, on this machine. A look reads other patients than a round: of both, the part of
the bound that the job names counts, and each has a time of its own. What a round takes without a patient is measured
by one more round of nobody, of which nothing is kept: in seconds of work, which other programs on the machine hardly
change. Pure: all seconds come from outside.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protos.federation.round_times import HEADROOM, answer_time

MOST_SHARE: Final = 8.0  # by which the seconds that grow with patients are multiplied at most


def children_seconds() -> float:
    """Seconds of work of this process's children that have ended: trainings are some of them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class RoundWork:
    """What one round has taken here. It never leaves."""

    reading: float  # seconds, for this site's patients
    training: float  # seconds, from them, without those of ``fixed``
    effort: float  # seconds of work in it
    patients: int  # that the round could draw from
    bound: int  # of them, by the job's public bound of a site's patients
    fixed: float = 0.0  # seconds between reading and training, and of it those in which steps are kept: of no patient

    def expected(self, empty: float) -> float:
        """The seconds that a site of ``bound`` patients would take; ``empty``: the effort of a round of nobody.

        What grows with the patients grows to the bound. So this is the same for every number of patients from one
        ``MOST_SHARE``-th of the bound to the bound; one with fewer is taken for one with so many of them as that
        makes, since little is measured of few patients but the machine's own moods.
        """
        theirs = self.training * max(self.effort - empty, 0.0) / self.effort if self.effort else 0.0
        share = min(max(1.0, self.bound / max(self.patients, 1)), MOST_SHARE)
        return self.fixed + self.training - theirs + (self.reading + theirs) * share


@dataclass(slots=True)
class AnswerPace:
    """The time at which this site's answers of a run leave, once it is chosen."""

    run: str = ""
    chosen: float = 0.0  # seconds after the question; 0: not chosen yet
    work: RoundWork | None = None  # of a round by which it is still to be chosen
    first: float = 0.0  # the same of the very answer before which a round of nobody was measured, too

    def trained(self, run: str, work: RoundWork) -> None:
        """A round was trained: the first of a run is the one by which its time is chosen."""
        if run != self.run:
            self.run, self.chosen, self.work, self.first = run, 0.0, None, 0.0
        if not self.chosen:
            self.work = work

    def is_open(self, round_seconds: int) -> bool:
        """Whether the time depends on what a round of nobody takes, so that one is to be measured.

        That lies between nothing and the whole round. Where both lead to one time, none is measured.
        """
        if self.work is None:
            return False
        times = {answer_time(HEADROOM * self.work.expected(e), round_seconds) for e in (0.0, self.work.effort)}
        if len(times) == 1:
            self.choose(0.0, 0.0, round_seconds)
            self.first = 0.0
            return False
        return True

    def settle(
        self,
        of_nobody: Callable[[], object],
        clock: Callable[[], float],
        effort: Callable[[], float],
        round_seconds: int,
    ) -> None:
        """Choose the run's time if it is open, by what ``of_nobody``, a round of no patient, takes here."""
        if not self.is_open(round_seconds):
            return
        empty, began, before = 0.0, clock(), effort()
        try:
            of_nobody()
            empty = effort() - before
        finally:
            self.choose(empty, clock() - began, round_seconds)

    def choose(self, empty: float, seconds: float, round_seconds: int) -> None:
        """Choose the run's time.

        Args:
            empty: effort of a round of nobody; 0 where that could not be measured.
            seconds: that measuring it took, on top of the first answer's own.
            round_seconds: of the job. What would be ready too late by the bound is tried for the round's end.
        """
        assert self.work is not None
        expected = HEADROOM * self.work.expected(empty)
        self.chosen = min(answer_time(expected, round_seconds), float(round_seconds))
        self.first = min(answer_time(expected + seconds, round_seconds), float(round_seconds))
        self.work = None

    def leaves(self, run: str, elapsed: float, round_seconds: int) -> float:
        """How many seconds after its question an answer of ``run`` leaves that is there after ``elapsed``."""
        time = answer_time(elapsed, round_seconds)
        if run != self.run or not self.chosen:
            return time
        if self.first:
            first, self.first = self.first, 0.0
            return max(first, time)
        self.chosen = max(self.chosen, time)  # once it was missed, it is not missed again and again
        return self.chosen


@dataclass(slots=True)
class RunPaces:
    """When the answers of rounds and of looks leave: what was made last says by which time its answer does.

    A masked round and a masked look are asked for in the same words, so the question does not say which it is.
    """

    rounds: AnswerPace = field(default_factory=AnswerPace)
    looks: AnswerPace = field(default_factory=AnswerPace)
    last: AnswerPace | None = None  # of what was begun last
    # from the next round on this machine is another one: times are chosen by the bound again, else they would follow
    # what this site's own patients take there
    choose_anew: bool = False
    _nobody: Callable[[], object] | None = None  # a round or look of nobody, to be measured

    def begun(self, *, look: bool) -> None:
        """A round or a look is begun: from here on its answer, or its refusal, leaves by its own time."""
        if self.choose_anew:
            self.rounds, self.looks, self.choose_anew = AnswerPace(), AnswerPace(), False
        self.last, self._nobody = self.looks if look else self.rounds, None

    def made(self, run: str, work: RoundWork, of_nobody: Callable[[], object]) -> None:
        """It was made; ``of_nobody`` is the same of no patient."""
        assert self.last is not None, "it was begun"
        self.last.trained(run, work)
        self._nobody = of_nobody

    def settle(self, clock: Callable[[], float], effort: Callable[[], float], round_seconds: int) -> None:
        """Choose the time of what was made last, if it is open. What a round of nobody makes is dropped."""
        nobody, self._nobody = self._nobody, None
        if nobody is not None and self.last is not None:
            self.last.settle(nobody, clock, effort, round_seconds)

    def leaves(self, run: str, elapsed: float, round_seconds: int) -> float:
        """See :meth:`AnswerPace.leaves`, of what was begun last."""
        return (self.last or self.rounds).leaves(run, elapsed, round_seconds)
