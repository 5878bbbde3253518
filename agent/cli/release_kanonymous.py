"""k-anonymous releases: k-Same, k-SALSA and AnonFACES. Only the learning methods import torch."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from agent.cli import release as commands
from agent.cli.output import print_progress
from agent.errors import CommandError
from agent.mechanisms.common.synthesis import ReleaseConfig
from agent.mechanisms.kanonymous import parts_of
from agent.release.history import known_after_start
from agent.release.pipeline import release_synthetic
from agent.release.preflight import of_clusters
from agent.service.making import begin_making

if TYPE_CHECKING:  # a vetting imports torch
    from agent.release.cluster_vetting import VettingRequest


def run(arguments: argparse.Namespace) -> int:
    """Make and submit a synthetic set; exit 1 when any review refuses it."""
    say = lambda step, detail: print_progress(step, detail, arguments.json)  # noqa: E731 - one line of progress
    commands.refuse_files(arguments)
    _, read_release = parts_of(arguments.mechanism)
    with commands.open_release(arguments, say) as runtime:
        made = read_release(arguments, runtime.settings.public_components)
        mechanism, selection = made.mechanism, made.selection
        looked = _vetted(made, arguments, say)
        arguments.modality = selection.modality
        wrapping = commands.release_format(arguments, runtime.home.root, colour=len(selection.shape) == 3)
        if arguments.dry_run:
            foreseen = of_clusters(
                runtime.site, mechanism, selection, wrapping, known=known_after_start(runtime.site)
            )
            asked = commands.asked_for(mechanism, selection, arguments.anew, looked is not None)
            return commands.dry_run(runtime, foreseen, asked, arguments.json)
        begin_making(runtime, arguments.anew)
        rng = np.random.default_rng(secrets.randbits(256))
        make = lambda: release_synthetic(runtime.site, mechanism, selection, rng, wrapping, looked)  # noqa: E731
        return commands.run_release(runtime, arguments, mechanism.name, make)


def _vetted(
    made: ReleaseConfig, arguments: argparse.Namespace, say: Callable[[str, str], None]
) -> VettingRequest | None:
    """Ask for the vetting that the configuration names, if it names one.

    Raises:
        CommandError: a sheet of its results was asked for, and there are none.
    """
    if made.vetting is None:
        if arguments.sheet is not None:
            raise CommandError("--sheet shows the results of [vetting], which the configuration lacks")
        return None
    from agent.cli.vetting_review import VettingOutput, inspection  # noqa: PLC0415 - torch and matplotlib: few need it

    return inspection(made.vetting, VettingOutput(made.mechanism.name, say, arguments.json, arguments.sheet))
