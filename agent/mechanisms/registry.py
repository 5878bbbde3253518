"""The mechanisms: a folder each. Its ``mechanism.py`` holds a frozen dataclass with ``claim()`` and a run.

``MECHANISMS`` is the whole list of what this agent can make; nothing is ever imported by name (P13).
``CONTRIBUTING.md`` shows how to add a k-anonymous one: a folder, and its lines in ``agent/mechanisms/kanonymous.py``.
Any other is named here, in ``agent/cli/options.py`` and in the match of ``agent/cli/main.py``. The terms of each are
in ``policies/review/mechanism_terms.py`` (a test compares the two).
"""

from agent.mechanisms.anonfaces.mechanism import AnonFaces
from agent.mechanisms.centroids.mechanism import Centroids
from agent.mechanisms.common.synthesis import Synthesis
from agent.mechanisms.distillation.mechanism import Distill, DistillDp
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from agent.mechanisms.federated.task_model import TaskModel
from agent.mechanisms.kanonymous import OPTIONS, parts_of
from agent.mechanisms.ksalsa.mechanism import KSalsa
from agent.mechanisms.ksame.mechanism import KSame
from agent.mechanisms.privimage.mechanism import PrivImage
from agent.mechanisms.remodel.mechanism import Remodel

Private = PrivImage | Centroids | DistillDp | TaskModel  # claim: (epsilon, delta)-DP per patient
Resumable = Private | Distill  # run(cohort, entropy, bench): it takes long, and goes on where it was interrupted
Mechanism = Synthesis | Resumable | Remodel | Federated | FederatedMasked

MECHANISMS: dict[str, type[Mechanism]] = {
    **{name: parts_of(name)[0] for name in OPTIONS},  # claim: k-anonymous; run(cohort, rng)
    "privimage": PrivImage,
    "centroids": Centroids,
    "distill": Distill,  # claim: none; vetted against the patients
    "distill-dp": DistillDp,  # claim: that of its teacher; vetted against public images
    "model": TaskModel,  # claim: that of all steps, and of a look at the model; run(cohorts by part, entropy, bench)
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
    "TaskModel",
]
