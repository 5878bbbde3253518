"""A model of the pool at this site: may it be used, and where is it computed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from agent.cli.output import print_progress, print_stderr
from agent.errors import CommandError
from agent.prediction.model_folder import ExportedModel
from agent.prediction.model_use import ModelNotApprovedError, ModelUse, use_of
from agent.runtime import public_file
from agent.service.commands import PROGRAM
from agent.storage.site_directory import SiteDirectory, origin
from agent.storage.site_ledger import site_policy
from policies.governance import cli
from policies.ledger.backends.sqlite import open_read_only
from policies.ledger.read_only import read_store
from protos.operations.confinement import REQUIRED
from protos.operations.questions import confirm

if TYPE_CHECKING:
    from agent.dp.compute_device import SiteCompute
    from agent.models.networks.trainable import TrainableNetwork


def compute_of(home: SiteDirectory, device: str) -> SiteCompute:
    """Where predictions are computed, by the rule of rounds.

    Args:
        home: the site's directory.
        device: as it was typed; "": ``device`` of site.toml.
    Raises:
        SiteConfigError: an accelerator is demanded, and there is none or it may not be used.
    """
    from agent.dp.compute_device import SiteCompute  # noqa: PLC0415 - torch, beside which files are read

    own = home.settings()
    key = "--device" if device else "site.toml: device ="
    return SiteCompute(device or own.device, own.confinement == REQUIRED, of="predictions", key=key)


def network_here(home: SiteDirectory, model: ExportedModel, arguments: argparse.Namespace) -> TrainableNetwork:
    """The model's network where it is computed, which is said.

    Raises:
        AcceleratorLostError: it does not fit there, or the accelerator fails.
    """
    from agent.prediction.predictor import of_accelerator  # noqa: PLC0415 - as above

    compute = compute_of(home, arguments.device)
    print_progress("device", compute.why, arguments.json)
    network = model.network(lambda digest: public_file(home, digest))
    with of_accelerator():
        return network.to(compute.plan.device)


def require_use(home: SiteDirectory, model: ExportedModel, arguments: argparse.Namespace) -> None:
    """The site's policy admits the model, or its officers have approved its use in the site's ledger.

    Raises:
        ModelNotApprovedError: neither; the text says which rule, and what the officer types.
    """
    use, missing = _standing(home, model)
    if not missing:
        return
    for one in use.findings:
        print_stderr(f"{one.rule}: {one.detail}")
    if arguments.person:
        _sign(use, arguments)
        use, missing = _standing(home, model)
    if missing:
        raise ModelNotApprovedError(
            f"this site's policy would not have approved {use.name}: {'; '.join(one.rule for one in use.findings)}. "
            f"Its use has to be approved by {' and '.join(sorted(missing))}: repeat the command with --person NAME "
            f"--key FILE, or `{PROGRAM} ledger sign {' '.join(use.words())} --serial {use.serial}`"
        )


def _standing(home: SiteDirectory, model: ExportedModel) -> tuple[ModelUse, frozenset[str]]:
    disk = open_read_only(home.root / "ledger.db")
    with read_store(disk, origin(home.settings().site), home.sign_key()) as store:
        policy = site_policy(home, store)
        use = use_of(model.name, model.sha256, model.facts, model.statements, home.settings().site, policy)
        return use, use.missing(store.state, policy)


def _sign(use: ModelUse, arguments: argparse.Namespace) -> None:
    """Sign, with the person's own key, that the model may be used in spite of what was shown."""
    if arguments.key is None:
        raise CommandError("--person: give the person's private key, too: --key FILE")
    if not confirm(arguments.yes, f"approve the use of {use.name} here in spite of this?"):
        return
    from agent.cli.ledger import TOOLS  # noqa: PLC0415 - who only predicts needs none of it

    words = {"command": "ledger sign", "words": [*use.words()], "serial": use.serial, "ledger": ""}
    cli.run(argparse.Namespace(**{**vars(arguments), **words, "out": None}), TOOLS)
