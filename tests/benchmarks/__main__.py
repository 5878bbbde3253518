"""``python -m tests.benchmarks NAME [--json]``; some take ``--entries N``: how large; federated takes ``--full``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Final

from tests.benchmarks import (
    attacks,
    brain_mask,
    clustering,
    console,
    distill,
    dp_audit,
    dp_engine,
    dp_networks,
    faces,
    federated,
    hospital_runs,
    hull,
    ingest,
    ksalsa,
    ledger,
    predict_inference,
    privimage,
    round_size,
    rounds,
    service,
    start,
    style_alignment,
    transport,
    verifier,
    vetting,
    volume_gan,
)
from tests.benchmarks.report import Report, as_json, as_table

BENCHMARKS: Final[dict[str, Callable[[], Report]]] = {
    "attacks": attacks.main,
    "brain_mask": brain_mask.main,
    "clustering": clustering.main,
    "console": console.main,
    "distill": distill.main,
    "dp_audit": dp_audit.main,
    "dp_engine": dp_engine.main,
    "dp_networks": dp_networks.main,
    "faces": faces.main,
    "federated": federated.main,
    "hospital_runs": hospital_runs.main,
    "hull": hull.main,
    "ingest": ingest.main,
    "ksalsa": ksalsa.main,
    "ledger": ledger.main,
    "predict_inference": predict_inference.main,
    "privimage": privimage.main,
    "round_size": round_size.main,
    "rounds": rounds.main,
    "service": service.main,
    "start": start.main,
    "style_alignment": style_alignment.main,
    "transport": transport.main,
    "verifier": verifier.main,
    "vetting": vetting.main,
    "volume_gan": volume_gan.main,
}
SIZED: Final[dict[str, Callable[[int], Report]]] = {
    "console": console.main,
    "ledger": ledger.large,
    "round_size": round_size.main,
}
FULL: Final[dict[str, Callable[[], Report]]] = {"federated": federated.full}


def main() -> int:
    """Run one benchmark and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS), metavar="NAME", help=", ".join(sorted(BENCHMARKS)))
    parser.add_argument("--json", action="store_true", help="print JSON")
    told = "ledger: build, reopen and verify one of N entries; console: so many instead of a million"
    told += "; round_size: parameters"
    parser.add_argument("--entries", type=int, metavar="N", help=told)
    parser.add_argument("--full", action="store_true", help="federated: parts and wholes of networks, too")
    arguments = parser.parse_args()
    if arguments.entries is not None and (arguments.name not in SIZED or arguments.entries < 1000):
        parser.error(f"--entries is for {' and '.join(SIZED)}, and at least 1000")
    if arguments.full:
        if arguments.name not in FULL or arguments.entries is not None:
            parser.error(f"--full is for {' and '.join(FULL)}, and by itself")
        print((as_json if arguments.json else as_table)(arguments.name, FULL[arguments.name]()))
        return 0
    entries = arguments.entries
    report = BENCHMARKS[arguments.name]() if entries is None else SIZED[arguments.name](entries)
    print((as_json if arguments.json else as_table)(arguments.name, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
