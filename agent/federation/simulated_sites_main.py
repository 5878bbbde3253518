"""The process of some simulated sites: ``python -m agent.federation.simulated_sites_main FD``.

``lazaret-coordinator round simulate`` starts it, in an installation that has the agent's packages. It reads a folder
of public images and answers questions over its pipe (:mod:`protos.operations.pipe_messages`). It has no site, vault
or key. An answer is a JSON object with ``error`` where the question or the folder is at fault, ``diverged`` where
a training came to numbers that are not finite, and ``fault`` for anything else.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.errors import DivergedError
from agent.federation.public_folder import PublicFolder
from agent.federation.simulated_sites import SimulatedSites, simulated_mechanism
from policies.tasks.task import task_from_json
from protos.common.errors import LazaretError
from protos.operations.pipe_messages import receive, send

_MOST_BYTES: Final = 1 << 30  # of a vector

Numbers = NDArray[Any]


def main(descriptor: str) -> None:
    """Answer until the other side is gone."""
    with socket.socket(fileno=int(descriptor)) as pipe, pipe.makefile("rb") as source, pipe.makefile("wb") as sink:
        sites: SimulatedSites | None = None
        while True:
            try:
                asked, parts = receive(source, _MOST_BYTES)
            except EOFError:
                return
            try:
                if asked["ask"] == "open":
                    sites = _open(asked)
                    send(sink, _told(sites))
                    continue
                assert sites is not None, "the folder is opened first"
                if asked["ask"] == "left out":
                    send(sink, {"left_out": sites.folder.left_out})
                    continue
                send(sink, {}, [_answer(sites, asked, np.frombuffer(parts[0], np.float32)).tobytes()])
            except DivergedError:
                send(sink, {"diverged": True})
            except LazaretError as fault:
                send(sink, {"error": str(fault)})
            except Exception as fault:  # noqa: BLE001 - told by its kind
                send(sink, {"fault": type(fault).__name__})


def _open(asked: dict[str, Any]) -> SimulatedSites:
    folder = PublicFolder.open(Path(asked["folder"]), task_from_json(asked["task"]))
    weights = [Path(name).read_bytes() for name in asked["weights"]]
    files = {hashlib.sha256(raw).hexdigest(): raw for raw in weights}
    sites = SimulatedSites(folder, files, asked["sizes"])
    for seed in asked["seeds"]:
        sites.deal(seed)
    return sites


def _told(sites: SimulatedSites) -> dict[str, Any]:
    deal = sites.deal(0)  # as many for every seed
    return {
        "source": sites.folder.source,
        "digest": sites.folder.digest,
        "parameters": sites.parameters(),
        "spare": {name: len(patients) for name, patients in deal.parts.items()},
    }


def _answer(sites: SimulatedSites, asked: dict[str, Any], vector: Numbers) -> Numbers:
    mechanism = simulated_mechanism(asked["config"])
    match asked["ask"]:
        case "round":
            return sites.round(mechanism, (asked["site"], asked["seed"]), vector)
        case "look":
            return sites.look(mechanism, (asked["site"], asked["seed"]), vector)
        case "without privacy":
            return sites.round_without_privacy(mechanism, (asked["site"], asked["seed"]), vector, asked["rate"])
        case _:
            part = (asked["part"], asked["seed"], asked["share"], asked["shares"])
            return sites.exact_sums(mechanism, part, vector)


if __name__ == "__main__":
    main(sys.argv[1])
