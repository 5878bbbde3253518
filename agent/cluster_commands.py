"""The commands of releases behind which stand k patients: k-SALSA, AnonFACES, and the search for k."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable
from typing import Final

import numpy as np

from agent import commands
from agent.desk import open_desk
from agent.distill_commands import refuse_sheet
from agent.edges.page import write
from agent.edges.synthesis import read_synthesis
from agent.edges.tuning_page import render
from agent.foreseen import of_clusters
from agent.measures.tuning import Menu
from agent.nouns import NotKept
from agent.pipeline import release_synthetic
from agent.released import known_after_start
from agent.searching import search
from agent.site import Refused, Waiting
from agent.synthesis_commands import OUT, BadOrder, answered
from agent.vetting_words import Telling, inspection

UNUSED: Final = "a search does not use [vetting]: its page says nothing of what a vetting would drop, release does"


def run(name: str, arguments: argparse.Namespace) -> int:
    """Run one command of these; what it expects to go wrong becomes a sentence."""
    return answered(COMMANDS[name], arguments, (NotKept,))


def release(arguments: argparse.Namespace) -> int:
    """Make and submit a synthetic set; exit 1 when any review refuses it."""
    name = arguments.mechanism
    refuse_sheet(arguments.sheet)
    say = lambda step, detail: commands.tell(step, detail, arguments.json)  # noqa: E731 - one line of progress
    with open_desk(arguments.home, say, arguments.project) as desk:
        made = read_synthesis(arguments.config, name, desk.settings.public_components)
        if arguments.sheet is not None and made.vetting is None:
            raise BadOrder("--sheet shows what a vetting found: the configuration has no [vetting]")
        arguments.modality = made.selection.modality
        wrapping = commands.wrapping(arguments, desk.home.root, colour=len(made.selection.shape) == 3)
        if arguments.dry_run:
            known, vetted = known_after_start(desk.site), made.vetting is not None
            foreseen = of_clusters(desk.site, made.mechanism, made.selection, wrapping, known=known)
            asked = commands.asked_for(made.mechanism, made.selection, arguments.anew, vetted)
            return commands.dry_run(desk, foreseen, asked, arguments.json)
        commands.start_making(desk, arguments.anew)
        rng = np.random.default_rng(secrets.randbits(256))
        try:
            looked = inspection(made.vetting, Telling(name, say, arguments.json, arguments.sheet))
            goods, verdict = release_synthetic(desk.site, made.mechanism, made.selection, rng, wrapping, looked)
            release = goods.release.release
        except Refused as refusal:
            release, verdict = "", refusal.verdict
        except Waiting as waiting:
            return commands.print_waiting(desk, waiting, arguments.json)
        desk.log.info("verdict", release=release, rules=[f.rule for f in verdict.findings])
        commands.print_verdict(release, name, verdict, arguments.json)
        return 0 if verdict.admitted else 1


def tune(arguments: argparse.Namespace) -> int:
    """Try every k of a menu on the cohort, and write a page for this site about what each would cost.

    What is drawn in a search leaves never, and is not vetted: a table ``[vetting]`` is checked, and used by releases.
    """
    if arguments.out.exists() or not arguments.out.parent.is_dir():  # a page is never written over
        raise BadOrder(f"{arguments.out.name}: name a new file, in a folder that is there")
    say = lambda step, detail: commands.tell(step, detail, arguments.json)  # noqa: E731 - one line of progress
    with open_desk(arguments.home, say, arguments.project) as desk:
        made = read_synthesis(arguments.config, "", desk.settings.public_components)
        if made.vetting is not None:
            commands.tell("vet", UNUSED, arguments.json)
        mechanism, policy = made.mechanism, desk.site.books.policy_of(desk.settings.site)
        rng = np.random.default_rng(secrets.randbits(256))
        try:
            menu = Menu(arguments.menu, policy.k_min, mechanism.l_diversity, policy.max_reid_rate)
        except ValueError as error:
            raise BadOrder(f"{error}") from None
        curves, shown = search(desk.site, mechanism, made.selection, menu, rng, next(iter(made.judges), None))
        write(arguments.out, render(curves, shown))
    told = {"page": arguments.out.name, "menu": list(menu.ks), "recommended": curves.recommended, "why": curves.why}
    if arguments.json:
        sys.stdout.write(json.dumps({**told, "vetted": False}) + "\n")
    else:
        OUT.print(f"wrote {arguments.out.name}: made from patients, it stays at this site")
        OUT.print(f"recommended: {curves.recommended or 'none'}; {curves.why}", markup=False)
        OUT.print("every later release of this project and modality says which k were tried")
    return 0


COMMANDS: Final[dict[str, Callable[[argparse.Namespace], int]]] = {"release": release, "tune": tune}
