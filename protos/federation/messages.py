"""What the two ends of a federated round agree on: messages, records, keys, codes, the stub, the tunnel.

Agent and coordinator never import each other; both import this. A run has six kinds of message, as
`flwr.app.Message`. Records and keys are exact: anything missing or extra is refused by the receiver.

``query.price``, coordinator to site: one ConfigRecord ``order`` {run: str, round: int, config: bytes}
    reply: one ConfigRecord ``answer`` {envelope: bytes}, or an Error; at the price, the site's sealed reservation
``query.plan``, coordinator to site, before the price where persons approve runs: the same ``order``
    reply: ``answer`` with an empty envelope: nothing here waits; or an Error, ``waiting`` while persons decide
``query.secure``, coordinator to site: ``order`` {run, round, config, step: str} and one ArrayRecord
``payload`` {data: (n,) uint8}
    reply: one ArrayRecord ``payload`` {data: (m,) uint8}, or an Error. What the bytes mean is
    protos/secagg/member.py's
``query.check``, coordinator to site: ``order``, and ``payload`` {data: (n,) uint8}, by which the line is measured
    reply: ``payload`` with a report (protos/federation/site_check.py), a line feed, and as many zeros
    a canary: ``order`` also has {step: "canary"}, and the bytes are a model, p float32. In place of the zeros come
    the numbers of a round on made patients: float32, the bits of bfloat16, or the words of the ring, without masks,
    and no envelope. An agent of before canaries declines it as malformed
``train``, coordinator to site: the same ``order`` and one ArrayRecord ``parameters`` {flat: (n,) float32}
    reply: the same ``answer`` and one ArrayRecord ``parameters`` {flat: (n,) float32}, or an Error; where the run's
    configuration says bfloat16, {flat: (n,) uint16} with its bits
``evaluate``, coordinator to site: as ``train``
    reply: as to ``train``, with the noisy sums of one look (policies/tasks/evaluation.py) in place of parameters,
    always float32

``run`` is Lazaret's run id (not Flower's), ``round`` counts from 0 (always 0 in ``query.price``),
``config`` is the mechanism's public configuration, opaque here. Since a job names its times, every ``order`` also has
{seconds: int, approve_by: int}: how long a round may take, and until when persons may approve the run (seconds since
1970; 0: no site that is asked wants that). Without the two, a round takes at most 150 seconds.

Parameters travel as one flat tensor, because Flower's cost is per tensor; bytes as an array, because Flower cuts only
arrays into pieces that fit a call. An Error carries a code of `CODES` and that code's name as its reason, never other
text.

Flower starts a run from an app bundle. Lazaret runs no received code, so the bundle is a stub: it is
built here, byte for byte the same everywhere, both sides know its SHA-256, and nobody unpacks it.

Flower's own calls (protobuf over ``POST /v1/fleet/...``) go through the gRPC method ``Fleet``: the first part of
a request carries path and headers, the first of a reply the HTTP status; the bodies follow in parts.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from typing import Final

PRICE: Final = "query.price"
PLAN: Final = "query.plan"
TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
SECURE: Final = "query.secure"
CHECK: Final = "query.check"
CANARY: Final = "canary"  # the step of a check that is one
KINDS: Final = frozenset({PLAN, PRICE, TRAIN, EVALUATE, SECURE, CHECK})

ORDER: Final = "order"
RUN: Final = "run"
ROUND: Final = "round"
CONFIG: Final = "config"
STEP: Final = "step"
SECONDS: Final = "seconds"
APPROVE_BY: Final = "approve_by"

ANSWER: Final = "answer"
ENVELOPE: Final = "envelope"

PARAMETERS: Final = "parameters"
FLAT: Final = "flat"
PAYLOAD: Final = "payload"
DATA: Final = "data"

MAX_RUN: Final = 128  # characters of a run id
MAX_CONFIG: Final = 1 << 20  # bytes
MAX_ENVELOPE: Final = 1 << 20  # bytes
MAX_STEP: Final = 64  # characters
MAX_PARAMETERS: Final = 100_000_000
MAX_SUMS: Final = 1 << 16  # numbers of one look
MAX_PAYLOAD: Final = 8 * MAX_PARAMETERS + (1 << 20)  # bytes: one ring element for each parameter, and some more
PIECE: Final = 1 << 20  # bytes of an array in one call: what is whole is not carried again after a cut
MAX_OBJECTS: Final = 800  # of one message: its records, and arrays in pieces, 764 for the longest payload

# The calls of Flower's Fleet API that a site makes: not among them are registering a node and fetching a bundle.
FLEET_CALLS: Final = frozenset(
    f"/v1/fleet/{call}"
    for call in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "pull-object",
        "push-object",
        "confirm-message-received",
    )
)
FLEET_HEADERS: Final = frozenset(
    {
        "content-type",
        "flwr-public-key",
        "flwr-timestamp",
        "flwr-signature",
        "flwr-package-name",
        "flwr-package-version",
        "flwr-component-name",
    }
)
STAGE: Final = "lazaret-stage"  # header of each call: what the site is at, one of STAGES. More it does not say:
# "working" is also the pause until an answer may leave, so that it tells nothing that the answer does not.
STAGES: Final = frozenset({"idle", "receiving", "working", "sending"})
FLEET_PART: Final = 1 << 20  # bytes of a body in one part
FLEET_BODY: Final = 32 << 20  # bytes of one body; agents of earlier versions cut arrays into objects of 5 MB

# Why a site declines. Codes below 1000 are Flower's own. A cause that depends on patients (too few of
# them, none at all, data that cannot be read) has one code only, "unavailable": the coordinator's side
# must not be able to tell such causes apart.
CODES: Final[Mapping[str, int]] = {
    "internal": 1000,  # something failed at the site; its log knows what
    "bundle": 1001,  # the run's bundle is not the pinned stub
    "message_type": 1002,
    "malformed": 1003,  # records, keys, types or sizes are not as above
    "policy": 1004,  # the site's policy forbids it
    "budget": 1005,  # the site's account does not cover it
    "mechanism": 1006,  # unknown mechanism or configuration
    "not_granted": 1007,  # training was asked for without a grant
    "unavailable": 1008,
    "waiting": 1009,  # persons at the site have not approved the run yet
    "run_spent": 1010,  # the site has had a grant in this run, which is over
    "behind": 1011,  # a later round of the run has left this site
}

_WORDS: Final = '"""A stub. It does nothing: Lazaret runs only code that is installed locally."""\n'
STUB_FILES: Final[Mapping[str, str]] = {
    "pyproject.toml": (
        '[project]\nname = "lazaret-stub"\nversion = "1.0.0"\n'
        'description = "Does nothing: Lazaret runs only code that is installed locally."\n'
        'license = "Apache-2.0"\ndependencies = []\n\n'
        '[tool.flwr.app]\npublisher = "lazaret"\n\n'
        '[tool.flwr.app.components]\nserverapp = "stub:nothing"\nclientapp = "stub:nothing"\n\n'
        "[tool.flwr.app.config]\n"
    ),
    "stub.py": _WORDS + "nothing = None\n",
}


def bundle(files: Mapping[str, str]) -> bytes:
    """A Flower app bundle of text ``files`` (path to content): a zip with a manifest of SHA-256 digests.

    Stored uncompressed with fixed dates and modes, so that equal files give equal bytes with every
    version of zlib. The manifest line is Flower's: ``path,sha256,size in bits``.
    """
    manifest = "\n".join(
        f"{path},{hashlib.sha256(text.encode()).hexdigest()},{len(text.encode()) * 8}" for path, text in files.items()
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path, text in {**files, ".info/CONTENT": manifest}.items():
            entry = zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # "made on Unix", wherever it is made
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, text.encode())
    return out.getvalue()


STUB_BUNDLE: Final = bundle(STUB_FILES)
STUB_DIGEST: Final = hashlib.sha256(STUB_BUNDLE).hexdigest()
