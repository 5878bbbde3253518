"""Why a site takes no part in a run: found before anything is held, from its configuration and public bounds."""

from __future__ import annotations

from collections.abc import Iterator

from agent.federation.run_mechanism import update_bytes
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from agent.release.ports import SiteContext
from policies.review.rules import Finding
from policies.tasks.evaluation import TRAINED


def findings(site: SiteContext, modality: str, run: str, mechanism: Federated | FederatedMasked) -> Iterator[Finding]:
    """Everything that speaks against the run here; nothing of it hangs on how many patients there are.

    Args:
        site: its ledger, its policy and what it declares of labels.
        modality: that it takes part with.
        run: its name.
        mechanism: as the run configures it.
    """
    delta = float(site.ledger.account(site.name, mechanism.claim()).opened.delta)
    if run in site.ledger.runs():
        yield Finding("run_spent", "this run was priced before, and its grant is spent")
    if not delta * mechanism.public_patients < 1:
        yield Finding("delta", "delta must be below 1 / patients, by the job's public bound")
    size, most = update_bytes(mechanism), site.ledger.policy_of(site.name).max_artifact_bytes
    if not size <= most:
        yield Finding("artifact_size", f"each update takes {size} bytes, and the policies admit {most}")
    seen = mechanism.task.input.modality
    if seen != modality:
        yield Finding("modality", f"the task is of {seen}, and this site takes part with {modality}")
    if misfit := site.label_misfit(mechanism.examples(TRAINED)):
        yield Finding("labels", misfit)
