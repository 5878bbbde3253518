"""P9, P10: fifty kills while images arrive, releases are made, a run goes on and a person signs.

``pytest -m slow -s tests/journeys/test_fifty_kills.py`` prints where each kill came, and the seed that chose them:
``LAZARET_TEST_SEED`` gives it. Processes are no clockwork, so a seed repeats the choices, and not each moment.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.service import jobs
from agent.service.jobs import Job
from protos.artifacts.arrays import unpack_images
from tests.support.killed_world import (
    APPROVER,
    OPEN,
    PRIVATE,
    REVIEWED,
    RUN,
    STEADY,
    KilledSite,
    KilledWorld,
    launched,
)
from tests.support.process_world import ledger, site_ledger, spent
from tests.support.tcp_proxy import wait_until

STATES = ("queued", "running", "made", "leaving", "signing")
IMAGES = 100  # to each of two sites
ROUNDS = 30
PERSONS = 5  # whom the site's approver appoints
PATIENCE_S = 600.0
RUN_S = 1500.0  # for the rest of the run: a round whose question a kill lost is asked again when its time is over


class Journey:
    """Kills in one state after another."""

    def __init__(self, world: KilledWorld, dice: random.Random, each: int) -> None:
        self.world, self.dice, self.each = world, dice, each
        self.a, self.b = world.sites[PRIVATE], world.sites[REVIEWED]

    def counted(self, state: str) -> int:
        return sum(kill.state == state for kill in self.world.kills)

    def pause(self, most: float) -> None:
        time.sleep(self.dice.uniform(0.0, most))

    def hit(self, state: str, site: KilledSite, *targets: str, more: str = "") -> None:
        """Kill one of these, or the service where that one does not run."""
        self.world.kill(state, site, self.dice.choice(targets), more) or self.world.kill(state, site, "service", more)

    def queued(self) -> None:
        """Both releases are queued, and their hours have not come."""
        self.world.queue(self.b, "ksalsa", self.world.ksalsa())
        self.world.queue(self.a, "privimage", self.world.privimage())
        while self.counted("queued") < self.each:
            site = self.dice.choice((self.a, self.b))
            if self.dice.random() < 0.7:  # else it is killed again while it starts
                site.service.wait()
            self.pause(1.0)
            assert state_of(site) == jobs.QUEUED
            self.hit("queued", site, "service", "service", "console")

    def opens(self, site: KilledSite) -> None:
        """Its hours have come; a service reads them when it starts."""
        self.world.hours(site.name, OPEN)
        self.world.kill("queued", site, "service")

    def running(self, site: KilledSite, count: int, beside: Callable[[], None] = lambda: None) -> None:
        """Kills while the release is made, half of them once patients were read."""
        until = self.counted("running") + count
        while self.counted("running") < until:
            target, point = (
                self.dice.choice(("job", "service", "supervisor")),
                self.dice.choice(("", "start", "make")),
            )
            job = reached(site, lambda job, point=point: job.state == jobs.RUNNING and works(site, point))  # type: ignore[misc]
            if job.state != jobs.RUNNING:
                assert job.state in (jobs.MADE, jobs.LEAVING, jobs.DONE), job
                return
            self.pause(0.8)
            if state_of(site) == jobs.RUNNING:
                self.world.kill("running", site, target)
                beside()

    def made(self) -> None:
        """The k release waits for a person."""
        self.pause(1.0)
        if self.counted("made") >= self.each or state_of(self.b) != jobs.MADE:
            return
        if not self.world.kill("made", self.b, "supervisor"):  # a service that ran no job has none
            self.hit("made", self.b, "console", "service")

    def leaving(self) -> None:
        """What is made leaves, and the line to the coordinator stands still, until the last of these kills."""
        line = self.world.proxy
        line.delay_s = 0.4
        while self.counted("leaving") < self.each:
            job = reached(self.a, lambda job: leaves(self.a, job))
            if job.state in jobs.ENDED:
                break
            last = self.counted("leaving") == self.each - 1
            if not last:
                line.half_open()
            for target in self.dice.choice((["service"], ["job", "service"], ["supervisor", "service"])):
                self.pause(4.0 if last else 1.0)
                self.world.kill("leaving", self.a, target)
            line.forward()
            self.made()
        line.delay_s = 0.0

    def signing(self) -> None:
        """A person appoints others, approves the k release and sends it; each word is said again until it holds."""
        job = self.b.job()
        assert job is not None
        release = release_name(self.world, REVIEWED)
        state = lambda: self.b.ledger().state  # noqa: E731 - as the file has it now
        key = ["--person", APPROVER, "--key", str(self.world.key(APPROVER))]
        for number in range(PERSONS):
            name, public = f"auditor-{number}", self.world.public_key(f"auditor-{number}")
            words = ["appoint", name, "auditor", public]
            serial = f"appoint-{number}"
            self.said(lambda s=serial: given(state(), s), "ledger", "sign", *words, "--serial", serial, *key)  # type: ignore[misc]
            self.said(lambda n=name: n in state().persons, "ledger", *words, "--serial", serial)  # type: ignore[misc]
        draft = release_digest(self.world, self.b, release)
        words = ["ledger", "sign", "release", release, draft, "--serial", release, *key]
        self.said(lambda: given(state(), release), *words)
        assert state_of(self.b) == jobs.MADE
        self.said(lambda: release in state().releases, "release", "send", release)
        reached(self.b, lambda job: job.state == jobs.DONE)

    def said(self, holds: Callable[[], bool], *words: str) -> None:
        """A command until it holds, with a kill each time while there are kills left."""
        until = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until, self.world.said()
            self.b.service.wait()
            typed = self.world.typed(self.b, *words)
            if self.counted("signing") < self.each:
                self.pause(0.4)
                told = f", typed: {' '.join(words[:3])}"
                self.hit("signing", self.b, "service", "service", "service", "console", "supervisor", more=told)
            typed.wait()


def state_of(site: KilledSite) -> str:
    job = site.job()
    assert job is not None
    return job.state


def reached(site: KilledSite, seen: Callable[[Job], bool]) -> Job:
    """The site's job when something came true of it, or when it is past that."""
    found: list[Job] = []

    def look() -> bool:
        job = site.job()
        assert job is not None
        found[:] = [job]
        return seen(job) or job.state in jobs.ENDED | {jobs.MADE}

    assert wait_until(look, PATIENCE_S), (found, site.service.out.read_text())
    return found[0]


def progress(site: KilledSite) -> str:
    job = site.job()
    return jobs.progress_of(site.store.folder(job.number)).step if job is not None else ""


def works(site: KilledSite, point: str) -> bool:
    """Whether the job's process is there, and makes the set; "": its service may just start again."""
    return not point or (bool(site.pid("job")) and (point == "start" or progress(site) == "make"))


def leaves(site: KilledSite, job: Job) -> bool:
    there = job.state == jobs.LEAVING or (job.state == jobs.RUNNING and progress(site) == "leave")
    return there and bool(site.pid("job"))


def given(state: object, serial: str) -> bool:
    known = state.proposals.get(serial)  # type: ignore[attr-defined]
    return known is not None and bool(known.approvals)


def release_name(world: KilledWorld, name: str) -> str:
    job = world.sites[name].job()
    assert job is not None
    told = json.loads(world.run(world.agent(name, "jobs", "show", str(job.number), "--json")))
    return str(told["job"]["release"])


def release_digest(world: KilledWorld, site: KilledSite, release: str) -> str:
    """As whoever looks at it is told."""
    said = world.run(world.agent(site.name, "release", "inspect", release, "--out", str(world.work / "inspected")))
    return said.partition(f"ledger sign release {release} ")[2].split()[0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_after_fifty_kills_nothing_is_lost_or_doubled_and_budgets_are_exact(tmp_path: Path) -> None:
    seed = int(os.environ.get("LAZARET_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    print(f"\nseed {seed}", flush=True)
    with KilledWorld.enrolled(tmp_path / "world", ROUNDS) as world:
        before = {name: world.images_of(name) for name in (PRIVATE, REVIEWED)}
        with world.running(IMAGES):
            run = launched(world)
            journey = Journey(world, random.Random(seed), each=10)
            journey.queued()
            journey.opens(journey.b)
            journey.running(journey.b, 5)
            reached(journey.b, lambda job: job.state == jobs.MADE)
            journey.opens(journey.a)
            journey.running(journey.a, 6, journey.made)
            journey.leaving()
            while journey.counted("made") < journey.each:
                journey.b.service.wait()
                journey.made()
            journey.signing()
            reached(journey.a, lambda job: job.state == jobs.DONE)
            assert run.wait(RUN_S) == 0, (world.work / "run.out").read_text()[-2000:]
            for site in world.sites.values():
                everything_arrived(world, site)
                site.service.wait()
                assert wait_until(lambda site=site: world.spooled(site) == 0, 120)  # type: ignore[misc]
        counts = Counter(kill.state for kill in world.kills)
        print(f"{len(world.kills)} kills: {dict(counts)}; {dict(Counter(kill.target for kill in world.kills))}")
        print(f"said again by a person: {dict(world.retries)}")
        for name, earlier in before.items():
            nothing_is_lost_or_doubled(world, name, earlier)
        budgets_are_exact(world)
        an_auditor_accepts_the_ledgers(world)
        assert len(world.kills) >= 50
        assert min(counts[state] for state in STATES) >= 8
        assert {kill.target for kill in world.kills} == {"service", "supervisor", "job", "console"}


def everything_arrived(world: KilledWorld, site: KilledSite) -> None:
    """The PACS has had an answer for every image."""
    assert wait_until(lambda: len(world.notes(site).read_text().split()) == IMAGES, PATIENCE_S)


def nothing_is_lost_or_doubled(world: KilledWorld, name: str, earlier: Counter[str]) -> None:
    """Each image that was answered with success is one new patient's one image."""
    now = world.images_of(name)
    assert now - earlier == Counter(dict.fromkeys(now.keys() - earlier.keys(), 1))
    assert (earlier - now, len(now) - len(earlier)) == (Counter(), IMAGES)
    assert [job.state for job in world.sites[name].store.all()] == [jobs.DONE] * (1 + (name == PRIVATE))


def budgets_are_exact(world: KilledWorld) -> None:
    """One release of each site, each paid once, here and there; and the run's part."""
    hub = ledger(world)
    for name, account in ((REVIEWED, "k"), (PRIVATE, "rdp"), (STEADY, "rdp")):
        own = site_ledger(world, name)
        here, there = (grants(shown, name) for shown in (own, hub))
        assert sorted(here) == sorted(there) == ["", RUN][name == STEADY : 1 + (name != REVIEWED)], "each priced once"
        for shown, known in ((own, here), (hub, there)):
            assert spent(shown, f"{name}/{account}") == (0, sum(grant["paid"] for grant in known.values()))
            releases = [e["release"] for e in shown["entries"] if e["type"] == "admitted" and e["site"] == name]
            alone = [e for e in shown["entries"] if e["type"] == "admitted" and e["site"] == name and not e["run"]]
            assert (len(releases), len(alone)) == (len(set(releases)), name != STEADY), "nothing is admitted twice"
        if "" in here:
            assert here[""]["paid"] == here[""]["amount"] == there[""]["paid"]
        if RUN in here:  # a round that a kill ended counts as made; the coordinator spends the whole of a part
            made = [e["used"] for e in own["entries"] if e["type"] == "sent" and e["run"]]
            assert len(made) == ROUNDS, "it was in every round"
            assert max(made) <= here[RUN]["paid"] <= here[RUN]["amount"] == there[RUN]["paid"]
    assert spent(hub, f"{REVIEWED}/k") == (0, 1), "its one k release is not burnt"
    for name in (PRIVATE, REVIEWED):
        release = release_name(world, name)
        images, _ = unpack_images((world.work / "coordinator" / "releases" / release / "images.tar").read_bytes())
        assert len(images) > 0
    rounds = [e["round"] for e in hub["entries"] if e["type"] == "round-closed" and e["run"] == RUN]
    assert rounds == list(range(1, ROUNDS + 1)), "every round once"
    both = [e["sites"] for e in hub["entries"] if e["type"] == "round-closed" and e["run"] == RUN]
    assert both == [[PRIVATE, STEADY]] * ROUNDS, "and no kill took a site out of one"
    persons = [e["person"] for e in site_ledger(world, REVIEWED)["entries"] if e["type"] == "appointed"]
    assert sorted(persons) == sorted([APPROVER, *(f"auditor-{number}" for number in range(PERSONS))])


def grants(shown: dict[str, Any], name: str) -> dict[str, Any]:
    """A site's grants in a ledger that was shown, and what was paid, by their run; "": of a release of its own."""
    paid = {e["grant"]: e["used"] for e in shown["entries"] if e["type"] == "spent"}
    mine = [{**grant, "paid": paid[grant["grant"]]} for grant in shown["grants"] if grant["site"] == name]
    found = {grant["run"]: grant for grant in mine}
    assert len(found) == len(mine), mine
    return found


def an_auditor_accepts_the_ledgers(world: KilledWorld) -> None:
    """``lazaret-verify``, with the key that the other side knows."""
    exports = {"coordinator": world.coordinator("ledger", "export", str(world.out / "coordinator"))}
    exports |= {n: world.agent(n, "ledger", "export", str(world.out / n)) for n in (PRIVATE, REVIEWED, STEADY)}
    keys = {"coordinator": world.agent(PRIVATE, "ledger", "fingerprint", "--coordinator")}
    keys |= {n: world.coordinator("ledger", "fingerprint", "--site", n) for n in (PRIVATE, REVIEWED, STEADY)}
    for name, words in exports.items():
        world.run(words)
        key = world.run(keys[name]).strip()
        world.run([sys.executable, "-m", "policies.audit.verify", str(world.out / name), "--key", key])
