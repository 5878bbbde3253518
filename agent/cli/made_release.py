"""The commands about releases that are made already, ``release send|inspect|withdraw``; and ``ledger amend``."""

from __future__ import annotations

import argparse
from contextlib import closing
from functools import partial

from agent.cli.output import OUT, print_progress, print_verdict
from agent.service.commands import read_verdict, site_acts
from protos.operations.questions import confirm


def inspect(arguments: argparse.Namespace) -> int:
    """Show approvers what they are asked to approve: files to look at, and the statement to sign."""
    from agent.release import approval  # noqa: PLC0415 - who only asks the service waits for none of this
    from agent.reports.approval import show  # noqa: PLC0415 - as above
    from agent.service import pending  # noqa: PLC0415 - as above
    from agent.service.ledger_access import BorrowedLedger  # noqa: PLC0415 - as above
    from agent.storage import projects  # noqa: PLC0415 - as above
    from agent.storage.site_directory import SiteDirectory  # noqa: PLC0415 - as above
    from agent.storage.site_ledger import site_policy  # noqa: PLC0415 - as above

    home, name = SiteDirectory(arguments.home), _named(arguments)
    store = BorrowedLedger(home).read()
    with closing(projects.open_vault(home)) as vault:
        draft, artifact = approval.waiting(vault, name)
    files = show(draft, artifact, arguments.out)
    given = store.state.approvals(draft.release, "release", draft.release, draft.artifact_sha256)
    missing = sorted(site_policy(home, store).approvals - set(given))
    OUT.print(f"wrote {arguments.out.name}: {', '.join(files)}; not released yet: keep it at this site")
    OUT.print(f"{draft.mechanism}, {draft.modality}, {draft.artifact_type} of {draft.artifact_bytes} bytes")
    if draft.menu:
        OUT.print(f"k was chosen from {draft.menu.replace(',', ', ')}, which were all tried on the patients")
    if draft.reid_rate is not None:
        OUT.print(f"at most {draft.reid_rate} of it were re-identified as a patient by an independent verifier")
    if draft.vetting_power is not None:
        OUT.print(f"of planted copies, the vetting found {draft.vetting_power} or more")
    OUT.print(f"approved by: {', '.join(sorted(given)) or 'nobody yet'}; missing: {', '.join(missing) or 'nobody'}")
    line = f"ledger sign release {draft.release} {draft.artifact_sha256} --serial {draft.release}"
    OUT.print(f"to approve: ledger sign {pending.number_of(pending.waiting(home), name)} --person NAME --key FILE")
    OUT.print(
        f"or on another machine: {line} --person NAME --key FILE --ledger {store.origin} --out FILE", soft_wrap=True
    )
    return 0


def _named(arguments: argparse.Namespace) -> str:
    """The release that was meant, by its name or by its short number."""
    word: str = arguments.release
    if not (word.isascii() and word.isdigit()):
        return word
    from agent.service.pending import release_named  # noqa: PLC0415 - as in :func:`inspect`
    from agent.storage.site_directory import SiteDirectory  # noqa: PLC0415 - as above

    return release_named(SiteDirectory(arguments.home), word)


def send(arguments: argparse.Namespace) -> int:
    """Hand over a release that persons have approved; exit 1 when an approval is missing or a review refuses."""
    name = _named(arguments)
    with site_acts(arguments.home, partial(print_progress, silent=arguments.json)) as do:
        told = do("releases/send", release=name)
    verdict = read_verdict(told["verdict"])
    print_verdict(name, told["mechanism"], verdict, arguments.json)
    return 0 if verdict.admitted else 1


def withdraw_release(arguments: argparse.Namespace) -> int:
    """Give up a release that persons did not approve; its grant is spent."""
    name = _named(arguments)
    if name != arguments.release and not confirm(arguments.yes, f"withdraw {name}? Its grant is spent"):
        OUT.print("nothing was withdrawn")
        return 1
    with site_acts(arguments.home, partial(print_progress, silent=False)) as do:
        do("releases/withdraw", release=name)
    OUT.print(f"{name} is withdrawn, and its grant is spent")
    return 0


def amend(arguments: argparse.Namespace) -> int:
    """Sign the site's policy of today: in its own ledger, and then at the coordinator."""
    with site_acts(arguments.home, partial(print_progress, silent=False)) as do:
        verdict = read_verdict(do("ledger/amend")["verdict"])
    print_verdict("", "amendment", verdict, False)
    return 0 if verdict.admitted else 1


def run(arguments: argparse.Namespace) -> int:
    """Carry out a command about a release that is made already, or ``ledger amend``."""
    match arguments.command:
        case "release send":
            return send(arguments)
        case "release inspect":
            return inspect(arguments)
        case "release withdraw":
            return withdraw_release(arguments)
    return amend(arguments)
