"""One page and one JSON at a run's end, for people of the consortium who did not watch it. Pure.

It has the codes of why a site was out, as the run's own page has. They are not exported with a model, so both say
that they are not to be handed on with it: the model's card and certificate are made for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.claim_descriptions import describe_claim
from coordinator.explanations import MECHANISMS, count, epsilon_text, format_rounded_up, utc
from coordinator.federation.participation import sentence
from coordinator.reports.certificates import promise
from coordinator.reports.document import Block, Document, FactList, ReportTable, Section, Text
from coordinator.reports.model_cards import leaving
from coordinator.reports.model_facts import ModelFacts
from coordinator.reports.report_inputs import UNIT_OF, Item, ReportInputs, per
from coordinator.reports.run_facts import RoundFacts, RunFacts, SiteCharge, Wait
from coordinator.reports.run_plots import (
    duration,
    mib,
    plot_budgets,
    plot_durations,
    plot_looks,
    plot_members,
    plot_traffic,
)
from coordinator.round_codes import explain_code
from policies.accounting.rdp import epsilon_of
from policies.audit.display import percent_up
from policies.statements import claim_json

HANDLING: Final = (
    "For the consortium's own people. It says why hospitals were out of rounds: do not hand it on with the model. "
    "The model's card and its certificate are made for that."
)
_OLDER: Final = "The run was begun by a version that kept no times: when its rounds were sent is not known."
_SUM: Final = (
    "Within a masked round nothing is known of a single hospital's time: the round is five exchanges with all of "
    "them, and each answer leaves at one of few fixed times."
)
_PLAIN: Final = (
    "A hospital's time is from when the round was last sent to its whole answer, by the coordinator's clock. It "
    "holds the transfers and the pause until one of the few times at which an answer may leave: it tells little of "
    "how many patients there are."
)
_CHARGED: Final = (
    "Charged is what the ledger holds or has spent for this run. A share is of what the Rényi filter lets through, "
    "which adds up; epsilon itself does not. All that is charged is rounded up. The promise to rely on, whatever "
    "comes next, is the whole budget."
)
_CARRIED: Final = (
    "Bytes of the training links, from the price to the run's last event, as the coordinator counted them. Its "
    "counters begin anew when it is started again; what went on just then may be missing. Nothing was counted "
    "while the run was stopped or waited."
)
_UNKNOWN: Final = "why was not kept"


@dataclass(frozen=True, slots=True)
class ReleasedModel:
    """The model of a finished run, as the ledger admitted it."""

    item: Item
    facts: ModelFacts


def run_report(inputs: ReportInputs, facts: RunFacts, model: ReleasedModel | None) -> Document:
    """The report of a run, whether it finished, failed, was stopped or goes on.

    Args:
        inputs: the ledger.
        facts: of the run.
        model: of a finished run.
    """
    job, state = facts.job, _ending(facts, inputs.source.made)
    promised = (Section("What is promised to patients", promise(model.item)),) if model is not None else ()
    sections = (
        Section("How it ended", _end(facts, state)),
        *promised,
        Section("May it leave, and under which controls", _leaving(inputs, facts, model)),
        Section("Is it any good?", _figures(facts)),
        Section("What each hospital was charged", _charges(facts)),
        Section("Who took part", _members(facts)),
        Section("How long it took, and what was waited for", _times(facts)),
        Section("What went over the lines", _traffic(facts)),
        Section("The job", (_job(facts),)),
    )
    data = _data(inputs, facts, model, state)
    title = f"Report of the run {job.run}"
    return Document(
        "run-report",
        title,
        f"{job.mechanism}, {count(len(job.sites), 'hospital')}. {HANDLING}",
        sections,
        inputs.source,
        data,
    )


def _ending(facts: RunFacts, made: str) -> str:
    """The state in a few words."""
    done = f"{facts.closed} of {facts.job.turns} rounds are closed"
    if facts.state == "finished":
        return f"Finished: all {facts.job.turns} rounds are closed"
    if facts.state == "failed":
        return f"Failed: {done}"
    if facts.state == "stopped":
        return f"Stopped, and not ended: {done}" if facts.ended_at else f"Asked to stop, and not ended: {done}"
    return f"Not ended: {done} at {made} UTC"


def _why(facts: RunFacts) -> str:
    """The reason and what to do, in words."""
    if facts.state == "finished":
        return f"Who took part: {facts.reason}."
    if facts.state == "open":
        return "The run goes on, or waits. What follows is how it stands, and may change."
    why, todo = explain_code(facts.reason)
    if not why:
        why = "Why was not kept." if facts.state == "failed" else "It stops after the round in progress, or has."
    where = f" In round {facts.end_round}." if facts.end_round else " Before the first round."
    place = where if facts.state == "failed" and facts.reason != "internal" else ""
    return f"{why}{place} {todo}".strip() if facts.state == "failed" else why


def _end(facts: RunFacts, state: str) -> tuple[Block, ...]:
    rows: list[tuple[str, str]] = []
    if facts.launched:
        by = f"{facts.launched['person']}, {facts.launched['role']}, {utc(facts.launched['at'])} UTC"
        rows.append(("Launched by", by))
    else:
        rows.append(("Launched by", "the command line"))
    if facts.events:
        rows.append(("First event", f"{utc(facts.events[0].at)} UTC"))
    if facts.ended_at:
        took = f", {duration(facts.ended_at - facts.events[0].at)} after the first event"
        rows.append(("Ended" if facts.state != "stopped" else "Stopped", f"{utc(facts.ended_at)} UTC{took}"))
    elif facts.state != "open":
        rows.append(("Ended", "when was not kept"))
    if facts.state == "stopped":
        rows.append(("To go on", f"lazaret-coordinator round resume {facts.job.run}"))
    if facts.state == "finished":
        rows += [(name.capitalize(), words) for name, words in _ways(facts).items()]
    tone = {"finished": "claim"}.get(facts.state, "warn")
    return (Text(f"{state}. {_why(facts)}", tone), FactList(tuple(rows)))


def _ways(facts: RunFacts) -> dict[str, str]:
    """Where the certificate and the card are."""
    run = facts.job.run
    return {
        "certificate": f"lazaret-coordinator report certificate certificate-{run}.pdf --release {run}",
        "model card": f"lazaret-coordinator report card card-{run}.html --release {run}",
        "model": f"releases/{run}/ of the coordinator's directory; at the console /releases/{run}",
    }


# --- may it leave


def _leaving(inputs: ReportInputs, facts: RunFacts, model: ReleasedModel | None) -> tuple[Block, ...]:
    said = leaving(model.item, model.facts) if model is not None else (Text(_stays(facts)),)
    rows = tuple(_controls(inputs, facts).items())
    applied = ReportTable(
        "How each control was applied in this run (SATRE 2.0, 3.3.07)",
        ("Control", "What was done"),
        rows,
        widths=(20, 80),
    )
    return (*said, applied)


def _stays(facts: RunFacts) -> str:
    """Of a run without a model on the shelf."""
    kept = f"Its {count(facts.closed, 'closed round')} stay with the coordinator" if facts.closed else "It made none"
    ended = "has not ended" if facts.state in ("open", "stopped") else "has failed"
    return f"No model may leave: the run {ended}, and only a finished run's model is released. {kept}."


def _controls(inputs: ReportInputs, facts: RunFacts) -> dict[str, str]:
    """What was done in this very run, by the ledger and the run's folder."""
    job, task = facts.job, facts.job.task()
    held = [site for site, one in facts.sites.items() if one.grant]
    without = [f"{site} ({_words(facts.declined.get(site, ''))})" for site in job.sites if site not in held]
    budget = f"held before the first round at {', '.join(held) or 'no hospital'}"
    budget += f"; not held at {', '.join(without)}" if without else ""
    asked = {
        site: ", ".join(inputs.policies[site].run_approvals)
        for site in job.sites
        if site in inputs.policies and inputs.policies[site].run_approvals
    }
    people = "; ".join(f"{site}: {roles}" for site, roles in asked.items())
    persons = (
        f"wanted by the policies of today of {people}. A hospital's agent holds no price before; who approved is "
        "written in its own ledger, which the coordinator does not see"
        if asked
        else "no policy of today wants persons to approve a run"
    )
    rounds = [set(one.sites) for one in facts.rounds if one.closed]
    seen = "the coordinator saw sums alone" if job.secure else "added at each hospital before anything left it"
    noise = (
        f"no patient moves a step by more than {task.training.clip:g} (L2); {describe_claim(claim_json(job.claim()))}"
    )
    counted = sum(map(len, rounds))
    return {
        "Budget": budget,
        "Clipping and noise": f"{noise}; {seen}",
        "Review": f"{count(facts.admitted, 'answer')} admitted by the ledger, of which closed rounds count {counted}",
        "Persons": persons,
        "Who must be in a round": (
            f"at least {count(job.min_sites, 'hospital')}; by name: {', '.join(job.required_sites) or 'none'}"
        ),
        "Looks": (
            f"{len(facts.looks)} of {len(job.looks)} made, in sums with noise, within the same price"
            if job.looks
            else "none was priced, and none was made"
        ),
    }


# --- figures


def _figures(facts: RunFacts) -> tuple[Block, ...]:
    if not facts.job.looks:
        return (Text("Nobody looked: the job priced no look, so nothing is known of how good the model is."),)
    if not facts.looks:
        return (Text("No look was made: the run did not come to one."),)
    rows = tuple(
        (
            f"round {look.after_round}",
            name,
            "nothing is known" if one["value"] is None else f"{one['value']:.3f}",
            f"{one['low']:.3f} to {one['high']:.3f}",
        )
        for look in facts.looks
        for name, one in look.figures.items()
    )
    best = f"The model is the one of round {facts.chosen}, which looked best. " if facts.chosen else ""
    first = [next(iter(look.figures.values()))["value"] for look in facts.looks]
    if facts.chosen and all(value is None for value in first):
        best = f"No look says which model is better, so it is the one of the last look, of round {facts.chosen}. "
    told = (
        "The figures are of held-out patients, from sums with noise; every interval covers the noise and the choice "
        "of those patients."
    )
    head = ("After", "Figure", "Value", "95 % interval")
    return (
        Text(f"{best}{told}"),
        plot_looks(facts.looks, facts.job.rounds, facts.chosen),
        ReportTable("Every figure of every look", head, rows, frozenset({2}), (16, 40, 20, 24)),
    )


# --- what it cost


def _charges(facts: RunFacts) -> tuple[Block, ...]:
    rows = tuple(
        (
            site,
            {"held": "held", "spent": "spent", "freed": "given back", "": "nothing held"}[one.grant],
            _epsilon(one, one.charged),
            _share(one.charged, one.limit),
            f"epsilon {epsilon_text(one.budget)}" if one.budget else "no account",
            _share(one.others, one.limit),
        )
        for site, one in facts.sites.items()
    )
    head = ("Hospital", "Price", "Charged", "Of its budget", "Budget", "All other uses")
    caption = f"What was charged, {per(UNIT_OF)}"
    return (
        Text(_CHARGED, "note"),
        plot_budgets(facts.sites),
        ReportTable(caption, head, rows, frozenset({3, 5}), (16, 13, 27, 13, 18, 13)),
    )


def _epsilon(one: SiteCharge, amount: int) -> str:
    if not amount or not one.order:
        return "nothing"
    lost = epsilon_of(amount, float(one.delta), one.order)
    return f"epsilon {epsilon_text(lost)} at delta {format_rounded_up(one.delta)}"


def _share(part: int, whole: int) -> str:
    """In percent, rounded up: a little is never nothing."""
    return f"{percent_up(part, whole):g} %" if whole else ""


# --- who was there


def _words(code: str) -> str:
    """A code in words, without the stop."""
    return explain_code(code)[0].removesuffix(".") or _UNKNOWN


def _members(facts: RunFacts) -> tuple[Block, ...]:
    closed = [set(one.sites) for one in facts.rounds if one.closed]
    told = f"{sentence(facts.job.sites, closed)}" if closed else "no round is closed"
    blocks: list[Block] = [Text(f"Of the closed rounds: {told}."), plot_members(facts.job.sites, facts.rounds)]
    out = [("price", facts.declined), *((str(one.number), one.out) for one in facts.rounds)]
    rows = [
        (number, site, _words(code), explain_code(code)[1]) for number, codes in out for site, code in codes.items()
    ]
    blocks.append(
        ReportTable(
            "Who was out, and why (not to be handed on with the model)",
            ("Hospital", "Round", "Why it is not in it", "What to do"),
            _merged(rows, facts.job.sites),
            widths=(18, 12, 38, 32),
            empty="nobody was out of a round that was reached",
        )
    )
    return tuple(blocks)


def _merged(rows: Sequence[tuple[str, ...]], sites: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """By hospital; rounds in a row of which the same is said become one line."""
    found: list[tuple[str, ...]] = []
    first = last = 0
    for number, *said in sorted(rows, key=lambda row: sites.index(row[1])):
        here = int(number) if number != "price" else 0
        if found and here == last + 1 and last and (found[-1][0], *found[-1][2:]) == tuple(said):
            found[-1] = (said[0], f"{first} to {here}", *said[1:])
        else:
            found.append((said[0], number, *said[1:]))
            first = here
        last = here
    return tuple(found)


# --- time


def _times(facts: RunFacts) -> tuple[Block, ...]:
    if not facts.events:
        return (Text(_OLDER, "warn"),)
    blocks: list[Block] = []
    timed = [one for one in facts.rounds if one.seconds]
    if timed:
        blocks += [Text(_SUM if facts.job.secure else _PLAIN, "note"), plot_durations(facts.job.sites, facts.rounds)]
        head = ("Round", "Sent (UTC)", "Closed (UTC)", "Took", "Each hospital's time")
        rows = tuple(_timed(one, facts.job.secure) for one in timed)
        blocks.append(ReportTable("The rounds", head, rows, frozenset({3}), (12, 20, 20, 10, 38)))
    else:
        blocks.append(Text("No round was both sent and closed."))
    blocks.append(_waited(facts.waits))
    return tuple(blocks)


def _timed(one: RoundFacts, secure: bool) -> tuple[str, ...]:
    each = ", ".join(f"{site} {duration(seconds)}" for site, seconds in one.site_seconds.items())
    unknown = [site for site in one.sites if site not in one.site_seconds]
    each = "; ".join(filter(None, (each, f"not known: {', '.join(unknown)}" if unknown and not secure else "")))
    times = utc(one.sent_at), utc(one.closed_at)
    return (
        f"{one.number}{', look' if one.look else ''}",
        *times,
        duration(one.seconds),
        "not known of one" if secure else each,
    )


def _waited(waits: Sequence[Wait]) -> ReportTable:
    head = ("From (UTC)", "For", "Round", "Why", "Hospitals")
    return ReportTable(
        "What was waited for, and where it stood still",
        head,
        tuple(_wait(one) for one in waits),
        frozenset({1}),
        (19, 12, 9, 38, 22),
        "the run waited for nobody between its rounds",
    )


def _wait(one: Wait) -> tuple[str, ...]:
    lasted = duration(one.end - one.begin) if one.end else "to the end"
    stood = "stopped: " if one.state == "stopped" else ""
    return (utc(one.begin), lasted, str(one.round or "price"), f"{stood}{_words(one.reason)}", ", ".join(one.sites))


# --- lines


def _traffic(facts: RunFacts) -> tuple[Block, ...]:
    known = {site: facts.traffic[site] for site in facts.job.sites if site in facts.traffic}
    silent = [site for site in facts.job.sites if site not in known]
    if not known:
        return (Text("Not known: the coordinator kept no counts of this run's links.", "note"),)
    rows = tuple((site, mib(up), mib(down)) for site, (up, down) in known.items())
    head = ("Hospital", "MiB from it", "MiB to it")
    blocks: tuple[Block, ...] = (Text(_CARRIED, "note"), plot_traffic(known))
    blocks += (ReportTable("Bytes each way", head, rows, frozenset({1, 2})),)
    return (*blocks, Text(f"Not known of {', '.join(silent)}.")) if silent else blocks


def _job(facts: RunFacts) -> FactList:
    job = facts.job
    task = job.task()
    return FactList(
        (
            ("Method", MECHANISMS.get(job.mechanism, job.mechanism)),
            ("Hospitals asked", ", ".join(job.sites)),
            ("Rounds", f"{job.rounds} of training, {count(len(job.looks), 'look')}"),
            ("Parameters", f"{job.parameters:,}".replace(",", " ")),
            ("Strategy", job.aggregator().name),
            ("Seconds of a round", f"{job.round_seconds:,} at most".replace(",", " ")),
            ("Task", f"{task.name}, {task.kind}, sha256 {task.digest}"),
        )
    )


# --- for machines


def _data(inputs: ReportInputs, facts: RunFacts, model: ReleasedModel | None, state: str) -> dict[str, Any]:
    job = facts.job
    why, todo = ("", "") if facts.state == "finished" else explain_code(facts.reason)
    said = leaving(model.item, model.facts) if model is not None else (Text(_stays(facts)),)
    return {
        "handling": HANDLING,
        "run": job.run,
        "state": facts.state,
        "told": state,
        "ended": facts.state in ("finished", "failed"),
        "ended_at": facts.ended_at or None,
        "end": {"round": facts.end_round, "reason": facts.reason, "why": why, "todo": todo},
        "launched": dict(facts.launched) or None,
        "mechanism": job.mechanism,
        "task": {"name": job.task().name, "sha256": job.task().digest},
        "required_sites": list(job.required_sites),
        "min_sites": job.min_sites,
        "closed": facts.closed,
        "rounds": [_round_data(job.sites, one) for one in facts.rounds],
        "looks": [{"after_round": look.after_round, "figures": dict(look.figures)} for look in facts.looks],
        "chosen_round": facts.chosen or None,
        "sites": [_site_data(facts, site) for site in job.sites],
        "waited": [_wait_data(one) for one in facts.waits],
        "satre_3_3_07": {
            "may_leave": model is not None,
            "said": next(block.text for block in said if isinstance(block, Text)),
            "controls": {name: text for block in said if isinstance(block, FactList) for name, text in block.rows},
            "applied": _controls(inputs, facts),
        },
        "certificate": _ways(facts) if model is not None else None,
    }


def _round_data(sites: tuple[str, ...], one: RoundFacts) -> dict[str, Any]:
    return {
        "round": one.number,
        "kind": "look" if one.look else "training",
        "closed": one.closed,
        "states": {site: one.state(site) for site in sites},
        "out": {site: {"code": code, "why": _words(code)} for site, code in one.out.items()},
        "sent_at": one.sent_at or None,
        "closed_at": one.closed_at or None,
        "seconds": round(one.seconds, 2) if one.seconds else None,
        "site_seconds": {site: round(seconds) for site, seconds in one.site_seconds.items()},
    }


def _site_data(facts: RunFacts, site: str) -> dict[str, Any]:
    one, code = facts.sites[site], facts.declined.get(site)
    up, down = facts.traffic.get(site, (None, None))
    priced: Mapping[str, Any] | None = None
    if one.limit:
        priced = {
            **UNIT_OF,
            "charged": epsilon_text(epsilon_of(one.charged, float(one.delta), one.order)) if one.order else None,
            "budget": epsilon_text(one.budget) if one.budget else None,
            "delta": format_rounded_up(one.delta) if one.delta else None,
            "order": one.order,
            "charged_percent": percent_up(one.charged, one.limit),
            "others_percent": percent_up(one.others, one.limit),
        }
    return {
        "site": site,
        "price": one.grant or None,
        "declined": None if code is None else {"code": code, "why": _words(code)},
        "rounds": sum(site in r.sites for r in facts.rounds),
        "epsilon": priced,
        "bytes_from": up,
        "bytes_to": down,
    }


def _wait_data(one: Wait) -> dict[str, Any]:
    end = one.end or None
    return {"from": one.begin, "until": end, "round": one.round, "state": one.state, "code": one.reason,
            "why": _words(one.reason), "sites": list(one.sites)}  # fmt: skip
