"""``tune``: try every k of a menu on the cohort, and show the site what each would cost. It imports torch."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from typing import Final

import numpy as np

from agent.cli.output import OUT, print_progress
from agent.errors import CommandError
from agent.evaluation.k_selection import Menu
from agent.mechanisms.kanonymous_config import read_synthesis
from agent.release.k_search import search
from agent.reports.html_page import write
from agent.reports.k_selection import render
from agent.service.making import open_making

UNUSED: Final = "a search does not use [vetting]: its page does not count what the vetting of a release would drop"


def run(arguments: argparse.Namespace) -> int:
    """Try every k of a menu on the cohort, and write a page for this site about what each would cost.

    What is drawn in a search leaves never, and is not vetted: a table ``[vetting]`` is checked, and used by releases.
    """
    if arguments.out.exists() or not arguments.out.parent.is_dir():  # a page is never written over
        raise CommandError(f"{arguments.out.name}: name a new file in an existing folder")
    say = lambda step, detail: print_progress(step, detail, arguments.json)  # noqa: E731 - one line of progress
    with open_making(arguments.home, say, arguments.project) as runtime:
        made = read_synthesis(arguments.config, "", runtime.settings.public_components)
        if made.vetting is not None:
            print_progress("vet", UNUSED, arguments.json)
        mechanism, policy = made.mechanism, runtime.site.ledger.policy_of(runtime.settings.site)
        rng = np.random.default_rng(secrets.randbits(256))
        try:
            menu = Menu(arguments.menu, policy.k_min, mechanism.l_diversity, policy.max_reid_rate)
        except ValueError as error:
            raise CommandError(f"{error}") from None
        curves, shown = search(runtime.site, mechanism, made.selection, menu, rng, next(iter(made.judges), None))
        write(arguments.out, render(curves, shown))
    told = {"page": arguments.out.name, "menu": list(menu.ks), "recommended": curves.recommended, "why": curves.why}
    if arguments.json:
        sys.stdout.write(json.dumps({**told, "vetted": False}) + "\n")
    else:
        OUT.print(f"wrote {arguments.out.name}: it is made from patients, so it stays at this site")
        OUT.print(f"recommended: {curves.recommended or 'none'}; {curves.why}", markup=False)
        OUT.print("every later release of this project and modality says which k were tried")
    return 0
