"""Whether this site may use a model: what its policy says of the run, and what its officers decided. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from policies.ledger.approvals import MODEL_USE, refusal
from policies.ledger.state import State
from policies.review.policy import Policy
from policies.review.rules import Finding, review_use
from policies.statements import Release
from protos.common.canonical_json import canonical
from protos.common.errors import RefusedError

ACTION: Final = "use"  # what persons sign: use MODEL SHA-256
OFFICER: Final = frozenset({"compliance"})  # who decides where the policy names nobody for runs


class ModelNotApprovedError(RefusedError):
    """The site's policy would not have approved the model's run; the text says which rule, and who has to decide."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The use of one model at this site, and what speaks against it."""

    name: str  # of the run or the release
    sha256: str  # of the model's file
    findings: tuple[Finding, ...]

    @property
    def digest(self) -> str:
        """What a person signs: this model, in spite of these findings and no others."""
        against = [[one.rule, one.detail] for one in self.findings]
        return hashlib.sha256(canonical({"model": self.sha256, "findings": against})).hexdigest()

    @property
    def serial(self) -> str:
        """Under which they do. Nobody can ask for other words under it: see :mod:`policies.ledger.approvals`."""
        return f"{MODEL_USE}{self.digest[:32]}"

    def words(self) -> tuple[str, str, str]:
        """Action, subject and value of an approval."""
        return ACTION, self.name, self.digest

    def missing(self, state: State, policy: Policy) -> frozenset[str]:
        """The roles that have not approved it in the site's ledger; nobody has to where nothing speaks against it.

        Raises:
            ModelNotApprovedError: a person has refused it.
        """
        if not self.findings:
            return frozenset()
        refused = state.proposals.get(refusal(self.serial))
        if refused is not None and refused.approvals:
            raise ModelNotApprovedError(f"the use of {self.name} was refused here; that is final for these findings")
        return (policy.run_approvals or OFFICER) - set(state.approvals(self.serial, *self.words()))


def use_of(
    name: str, sha256: str, facts: Mapping[str, Any], statements: Sequence[Release], site: str, policy: Policy
) -> ModelUse:
    """What the site's policy has against a model.

    Args:
        name: of the run or release.
        sha256: of its file.
        facts: of its certificate, which was checked.
        statements: that the certificate rests on.
        site: this one.
        policy: the strictest of the site's and the federation's.
    """
    epsilons = {part["release"]: part["epsilon"] for part in facts["parts"]}
    found = [one for said in statements for one in review_use(said, epsilons.get(said.release), policy)]
    found += [Finding("revoked", f"the ledger has revoked {one['site']}") for one in facts.get("revoked", ())]
    if policy.run_approvals and site not in facts["sites"]:
        who = " and ".join(sorted(policy.run_approvals))
        found.append(
            Finding("run_approvals", f"the policy wants runs approved by {who}, and this site was in none of it")
        )
    unique = dict.fromkeys((one.rule, one.detail) for one in found)
    return ModelUse(name, sha256, tuple(Finding(*one) for one in sorted(unique)))
