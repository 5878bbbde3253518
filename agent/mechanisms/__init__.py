"""The mechanisms: one file each, a frozen dataclass of public configuration with ``claim()`` and a run.

``MECHANISMS`` is the whole list of what this agent can make; nothing is ever imported by name (P13). To add one,
write the file, its entry here and its terms in ``policies/review.py`` (a test compares the two), and a case in the
conformance suite in ``tests/agent/test_mechanisms.py``, which fails until there is one.
"""

from agent.mechanisms.anonfaces import AnonFaces
from agent.mechanisms.centroids import Centroids
from agent.mechanisms.distill import Distill, DistillDp
from agent.mechanisms.federated import Federated, FederatedMasked
from agent.mechanisms.ksalsa import KSalsa
from agent.mechanisms.ksame import KSame
from agent.mechanisms.privimage import PrivImage
from agent.mechanisms.remodel import Remodel

Synthesis = KSame | KSalsa | AnonFaces  # claim: k-anonymous; run(cohort, rng)
Private = PrivImage | Centroids | DistillDp  # claim: (epsilon, delta)-DP per patient
Resumable = Private | Distill  # run(cohort, entropy, bench): it takes long, and goes on where it was interrupted
Mechanism = Synthesis | Resumable | Remodel | Federated | FederatedMasked

MECHANISMS: dict[str, type[Mechanism]] = {
    "ksame": KSame,
    "ksalsa": KSalsa,
    "anonfaces": AnonFaces,
    "privimage": PrivImage,
    "centroids": Centroids,
    "distill": Distill,  # claim: none; vetted against the patients
    "distill-dp": DistillDp,  # claim: that of its teacher; vetted against public pictures
    "remodel": Remodel,  # claim: none; another face on patients' own scans; run(scans, examine, rng)
    "federated": Federated,  # claim: (epsilon, delta)-DP per patient; run_round(cohort, update, entropy)
    "federated-masked": FederatedMasked,  # claim: the same of the sum alone; run_round gives one site's part of it
}

__all__ = [
    "MECHANISMS",
    "AnonFaces",
    "Centroids",
    "Distill",
    "DistillDp",
    "Federated",
    "FederatedMasked",
    "KSalsa",
    "KSame",
    "Mechanism",
    "PrivImage",
    "Private",
    "Remodel",
    "Resumable",
    "Synthesis",
]
