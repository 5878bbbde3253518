"""Average each cluster: the mean of its patients' codes or pixels, and their majority label.

k-Same-PCA and k-Centroid are both :func:`average` (k-SALSA, section 4.2); the codec makes the difference. The
weighted mean of AnonFACES, Eq. 1, is :mod:`agent.mechanisms.anonfaces.identity_mixing`, whose weights never leave it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from agent.domain import Clusters, Cohort, Latents, Patient


def average(latents: Latents, clusters: Clusters) -> NDArray[np.float32]:
    """Average the codes of each cluster's patients, every patient with the same weight.

    k-SALSA, Eq. 4 (Euclidean average, w_0); Newton, Sweeney & Malin 2005.

    Returns:
        (m, d) float32, in the clusters' order. Summed in float64.
    Raises:
        ValueError: a cluster names a patient who has no code, or is empty.
    """
    row = {patient: i for i, patient in enumerate(latents.patients)}
    codes = np.empty((len(clusters.members), latents.codes.shape[1]), np.float32)
    for j, cluster in enumerate(clusters.members):
        if not cluster or not all(patient in row for patient in cluster):
            raise ValueError("every cluster must hold patients, each with a code")
        codes[j] = latents.codes[[row[patient] for patient in cluster]].mean(axis=0, dtype=np.float64)
    return codes


def patient_label(patient: Patient) -> str:
    """The label that most of the patient's images carry."""
    return majority(image.label for image in patient.images)


def aggregate_labels(cohort: Cohort, clusters: Clusters) -> tuple[str, ...]:
    """The majority label of each cluster: one vote for each patient, however many images they have.

    Ties go to the label that sorts first ("" first of all), so the answer is a function of the multiset of labels
    alone: neither the order of pseudonyms nor chance can change it, and an observer learns nothing about *who* holds
    which label. Counts are never released, only the winner.

    Raises:
        ValueError: a cluster names a patient who is not in the cohort, or is empty.
    """
    labels = {patient.pseudonym: patient_label(patient) for patient in cohort.patients}
    for cluster in clusters.members:
        if not cluster or not all(patient in labels for patient in cluster):
            raise ValueError("every cluster must hold patients of the cohort")
    return tuple(majority(labels[patient] for patient in cluster) for cluster in clusters.members)


def majority(labels: Iterable[str]) -> str:
    """The commonest label; of several the one that sorts first."""
    counts = Counter(labels)
    return min(counts, key=lambda label: (-counts[label], label))
