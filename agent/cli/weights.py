"""``weights convert``: a published ``.pt`` file as a file of public weights that a task can name by its SHA-256."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Final

from agent.cli.output import say
from agent.errors import CommandError
from agent.models.networks import conversion
from agent.models.networks.conversion import Converted, WeightsConversion
from agent.release.maker_process import MakerProcess
from protos.common.durable_files import replace_file

_MOST: Final = 1 << 31  # bytes of a file
_MEMORY: Final = 2 << 30  # of the process that reads it, beside four times the file
_HEADER: Final = 1 << 22
_REFUSED: Final = {
    conversion.CODE: "it asks for code, which is never run: {}. Save its state_dict alone, with its authors' program",
    conversion.DAMAGED: "it is no torch file of tensors and plain values: it is damaged, or TorchScript, or code",
    conversion.INFLATED: "its tensors ask for more memory than the file has bytes",
    conversion.EMPTY: "it holds no float tensor that a network could take: {}. Check --prefix",
    conversion.NOT_FINITE: "{} is not finite",
    conversion.NAMES: "a tensor has a name or a shape that no network has: {}",
}


def run(arguments: argparse.Namespace) -> int:
    """Convert one file."""
    made, digest = convert(arguments.file, arguments.prefix, statistics=arguments.statistics)
    replace_file(arguments.out, made.file)
    if arguments.json:
        told = {"file": arguments.out.name, "sha256": digest, "tensors": made.kept, "left_out": made.left_out}
        sys.stdout.write(json.dumps(told) + "\n")
        return 0
    say(f"{arguments.out}: {made.kept} tensors")
    if made.left_out:
        norms = "which the scales and shifts hold now" if arguments.statistics else "which group norms do not have"
        more = ", ..." if made.left_out > len(made.names) else ""
        names = ", ".join(made.names) + more
        say(f"{made.left_out} left out: statistics of batch norms, {norms}, and what no network here has: {names}")
    say("if no patient of the cohort is in them, vouch for it in site.toml's public_components:")
    say(digest)
    return 0


def convert(source: Path, prefix: str, *, statistics: bool) -> tuple[Converted, str]:
    """A published file as public weights, in a confined process; and the SHA-256 of what it became.

    Raises:
        CommandError: it cannot be read, or holds something else than tensors that a network could take.
    """
    try:
        if source.stat().st_size > _MOST:
            raise CommandError(f"{source.name} is larger than 2 GiB")
        raw = source.read_bytes()
    except OSError as error:
        raise CommandError(f"{source.name}: {error.strerror}") from None
    # numbers of half the width become float32
    order = WeightsConversion(prefix, 2 * len(raw) + _HEADER, statistics)
    made: Converted = MakerProcess(memory=_MEMORY + 4 * len(raw))(order.convert, raw)
    if made.refusal:
        listed = ", ".join(made.names) or "nothing"
        raise CommandError(f"{source.name}: {_REFUSED[made.refusal].format(listed)}")
    return made, hashlib.sha256(made.file).hexdigest()
