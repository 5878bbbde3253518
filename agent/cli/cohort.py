"""``manifest`` and ``cohort``: what was done to the images of each study, and how many patients there are."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.table import Table

from agent.cli.output import ERR, OUT, answered_ingest, print_stderr
from agent.deidentify.manifest import manifest
from agent.domain import ExampleRule
from agent.errors import SiteConfigError
from agent.event_log import open_log
from agent.ingest.context import IngestContext, open_ingest
from agent.ingest.patient_lists import read_pairs
from agent.storage.equal_patients import EqualPatients
from agent.storage.examples import REASONS, TaskSurvey, rule_for, survey
from agent.storage.label_tables import RARE, read_table
from agent.storage.site_directory import SiteDirectory
from policies.tasks.task import read_task

_SAME: Final = {  # what two patient ids have in common
    "picture": "equal images",
    "study": "one study UID",
    "series": "one series UID",
    "instance": "one instance UID",
}


def show_manifest(arguments: argparse.Namespace) -> int:
    """What was removed, replaced and kept in each study, and why, with digests before and after."""
    with open_ingest(SiteDirectory(arguments.home), arguments.project) as way:
        studies = way.vault.studies()
        if arguments.study and arguments.study not in studies:
            raise SiteConfigError("there is no study of that name: `manifest` without --study lists all")
        chosen = [arguments.study] if arguments.study else studies
        made = {study: manifest(study, way.vault.instances(study), way.ingestion.profile) for study in chosen}
    if arguments.out is not None:
        arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for study, told in made.items():
            (arguments.out / f"{study}.json").write_text(_as_text(told))
        wrote = f"wrote {len(made)} manifests to {arguments.out.name}"
        sys.stdout.write(json.dumps({"manifests": len(made)}) + "\n" if arguments.json else wrote + "\n")
    elif arguments.json and len(made) != 1:
        sys.stdout.write(_as_text(list(made.values())))
    else:
        for told in made.values():
            sys.stdout.write(_as_text(told))
    return 0


def _as_text(told: object) -> str:
    return json.dumps(told, indent=2, sort_keys=True) + "\n"


def cohort(arguments: argparse.Namespace) -> int:
    """How many patients there are to work with, by modality, body part and state: for this console alone."""
    with open_ingest(SiteDirectory(arguments.home), arguments.project) as way:
        _decide(way, arguments)
        if arguments.task or arguments.table or arguments.segment:
            return _print_survey(_survey(way, arguments), as_json=arguments.json)
        if arguments.held:
            held = sorted(way.vault.held() | way.vault.barred())
            sys.stdout.write(json.dumps(held) + "\n" if arguments.json else "".join(f"{one}\n" for one in held))
            return 0
        same = way.vault.alike()
        if arguments.same:
            _print_same(same, as_json=arguments.json)
            return 0
        found = way.vault.counts(way.ingestion.rules.min_instances_per_series)
    if arguments.json:
        sys.stdout.write(json.dumps([{k: getattr(c, k) for k in c.__slots__} for c in found], indent=2) + "\n")
        return 0
    table = Table("modality", "body part", "state", "instances", "patients", title=f"project {arguments.project}")
    for c in found:
        table.add_row(c.modality, c.body_part or "-", c.state, str(c.instances), str(c.patients))
    OUT.print(table)
    if same:
        print_stderr(
            f"{len(same)} groups of patient ids count as one patient each towards k: `cohort --same` shows why"
        )
    return 0


def _survey(way: IngestContext, arguments: argparse.Namespace) -> TaskSurvey:
    """What a task of these columns, or segments, would find. Nothing of it is logged."""
    if arguments.task:
        from agent.mechanisms.federated.task_training import example_rule  # noqa: PLC0415 - torch: two seconds

        return survey(way.vault, way.ingestion.rule_here(example_rule(read_task(arguments.task))))
    rule = ExampleRule(
        "segmentation" if arguments.segment else "classification",
        arguments.modality,
        arguments.size,
        body_part=arguments.body_part,
        classes=tuple(arguments.segment),
        per_study=arguments.per_study,
    )
    images = way.ingestion.rule_here(rule)
    if arguments.segment:
        return survey(way.vault, images)
    table = read_table(way.vault, arguments.table)
    return survey(way.vault, rule_for(table, tuple(arguments.column), images))


def _print_survey(found: TaskSurvey, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
        return 0
    outputs = Table(
        "what is learned", "patients", "", title=f"{found.examples} examples of {found.patients} patients"
    )
    for one in found.outputs:
        outputs.add_row(one.output, str(one.patients), "rare" if one.patients < RARE else "")
    OUT.print(outputs)
    if found.left_out:
        left = Table("left out", "images", "patients", title="what would be left out, and why")
        for what in found.left_out:
            left.add_row(REASONS[what.reason], str(what.images), str(what.patients))
        OUT.print(left)
    OUT.print("This is for your site alone: no count of patients leaves.")
    return 0


def _decide(way: IngestContext, arguments: argparse.Namespace) -> None:
    """What a person has decided: labels, a study or series that was looked at, ids that are as many patients."""
    log = open_log(way.home.root / "agent.log")
    if arguments.labels is not None:
        raw = read_pairs(arguments.labels, ("sop_instance_uid", "label"))
        changed = way.vault.relabel({way.name_of(uid): label for uid, label in raw.items()})
        ERR.print(f"{changed} labels changed")
    if arguments.lift:
        if arguments.lift not in way.vault.held() | way.vault.barred():
            raise SiteConfigError("no study or series with that name is held back: `cohort --held` lists them")
        way.vault.lift(arguments.lift)
        log.info("study_lifted", where=arguments.lift)
    if arguments.apart:
        try:
            count = way.vault.tell_apart(arguments.apart)
        except KeyError:
            raise SiteConfigError("no group of patient ids has that name: `cohort --same` lists the groups") from None
        log.info("ids_told_apart", where=arguments.apart, count=count)


def _print_same(same: Sequence[EqualPatients], *, as_json: bool) -> None:
    """Patient ids that may be one person: how many, why, and the studies that a person looks at."""
    if as_json:
        told = [{"name": o.name, "ids": len(o.persons), "why": list(o.why), "studies": list(o.studies)} for o in same]
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    for one in same:  # no table: it would cut names, which are to be typed again
        why = ", ".join(_SAME[kind] for kind in one.why)
        OUT.print(f"{one.name}  {len(one.persons)} ids  {why}", markup=False, soft_wrap=True)
        for study in one.studies:
            OUT.print(f"    study {study}", markup=False, soft_wrap=True)
    if same:
        OUT.print(
            "Each group counts as one patient towards k. Look in the PACS whether it is one person. If each id is "
            "another person, say `cohort --apart NAME`; if not, leave it so. Level A does not depend on it.",
            soft_wrap=True,
        )


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands; what it expects to go wrong becomes a sentence and exit status 1."""
    return answered_ingest(show_manifest if arguments.command == "manifest" else cohort, arguments)
