"""The only code that admits: pure reviews of a site's signed statement, against its account and the policy.

Every comparison is written so that NaN, a missing value or a wrong type is a finding. A verdict without
findings is an admission; the caller appends it, refusals too, to the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from policies.accounting.claims import (
    RELATION,
    UNIT,
    Claim,
    DistributedGaussian,
    Evaluated,
    Gaussian,
    KAnonymous,
    NoClaim,
    Stepwise,
    UnsupportedClaimError,
    assumption,
    looks_of,
    training_of,
)
from policies.accounting.rdp import allowance, cost, epsilon_nano
from policies.accounting.rounding import epsilon_at_least, epsilon_text, format_rounded_up
from policies.ledger.state import Account, Grant
from policies.review.mechanism_terms import ARTIFACT_TYPES, EVALUATIONS, TERMS, Terms
from policies.review.policy import Policy
from policies.statements import (
    Release,
    Reservation,
    claim_from,
    claim_json,
    decimal,
    load_json,
    malformed,
    menu_of,
    release_id,
)
from protos.common.canonical_json import canonical

__all__ = ["ARTIFACT_TYPES", "TERMS", "Terms"]
# Of planted near-duplicates, the share that the vetting of a release of level C must at least have caught: nothing
# else stands behind such a release, and a low rate of re-identification says little where vetting misses copies. It
# is a lower bound: 35 planted copies suffice if all of them are caught (Wilson's 95 % interval then begins at 0.901).
LEAST_POWER: Final = 0.9


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason against: the rule's name, stable for machines, and a sentence for people."""

    rule: str
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision: admitted when there is no finding. ``level`` is the claim level printed on the certificate."""

    findings: tuple[Finding, ...]
    level: str = ""  # "A" | "A*" | "B" | "C", weaker in this order; "" where nothing is released
    amount: int = 0  # what the account is charged (reservation) or the grant has used so far (release)

    @property
    def admitted(self) -> bool:
        """True only without a single finding."""
        return not self.findings


@dataclass(frozen=True, slots=True)
class AccountContext:
    """The ledger's context of the statement under review."""

    account: Account | None
    grant: Grant | None = None
    reviewed_before: bool = False  # this release id or this envelope already has a verdict
    frozen: bool = False  # the ledger was restored from a backup, and a site's receipts are missing
    revoked: bool = False  # the site was barred
    run_spent: bool = False  # the site has had a grant in that run: what it made under it is in the run's model


_BARRED: Final = Finding("revoked", "the site was revoked; it must be enrolled again first")
_RUN_SPENT: Final = Finding("run_spent", "the site was granted its part in that run before: a new run has a new name")


def price(claim: Claim, account: Account) -> int:
    """What a claim takes from an account: nano-nats at its order, or, without an epsilon, one release per patient.

    Raises:
        UnsupportedClaimError: the claim cannot be priced in an account of that kind.
    """
    if isinstance(claim, KAnonymous | NoClaim) and account.opened.order == 0:
        return 1
    return cost(claim, account.opened.order)


def _terms(mechanism: str, claim: Claim, policy: Policy) -> Iterator[Finding]:
    """The mechanism and its claim, whatever is done with them."""
    terms = TERMS.get(mechanism)
    if terms is None:
        yield Finding("unknown_mechanism", f"no mechanism is named {mechanism}")
        return
    if mechanism not in policy.mechanisms:
        yield Finding("mechanism_not_allowed", f"the policy {policy.name} does not admit {mechanism}")
    if not terms.admits(claim):
        yield Finding("claim_kind", f"{mechanism} must claim {terms.claim.__name__}, not {type(claim).__name__}")
    if isinstance(claim, KAnonymous):
        if not claim.k >= policy.k_min:
            yield Finding("min_k", f"k = {claim.k} is below the policy's {policy.k_min}")
        if not claim.l_diversity >= policy.l_diversity:
            yield Finding("l_diversity", f"{claim.l_diversity} labels are below the policy's {policy.l_diversity}")
        if not claim.releases_per_patient <= policy.max_releases_per_patient:
            yield Finding("releases_per_patient", "a patient would be in more releases than the policy admits")


def _place(statement: Reservation | Release) -> Iterator[Finding]:
    """Run, round and name: what is made in rounds names both, everything else neither; nobody chooses an id."""
    terms = TERMS.get(statement.mechanism)
    rounds = terms is not None and terms.rounds
    if bool(statement.run) is not rounds:
        yield Finding("run", "a mechanism of rounds names its run, and no other does")
    if isinstance(statement, Release):
        if (statement.round >= 1) is not rounds:
            yield Finding("round", "a release of a run names its round, and no other does")
        claim, looks = training_of(statement.claim), looks_of(statement.claim)
        if (
            isinstance(claim, DistributedGaussian)
            and assumption(claim)
            and not claim.steps + looks <= statement.round
        ):
            yield Finding("one_step", "where sites share the noise of a sum, every step is a round of its own")
        if statement.release != release_id(statement.site, statement.grant, statement.round):
            yield Finding("release_id", "a release's id follows from its site, grant and round")


def _scope(statement: Reservation | Release, policy: Policy) -> Iterator[Finding]:
    """Whose privacy, against which neighbours (P1, P2), and of which images."""
    claim = statement.claim
    if not isinstance(claim, NoClaim) and (claim.unit, claim.relation) != (UNIT, RELATION):
        yield Finding("unit", f"the unit must be {UNIT} and the relation {RELATION}")
    if statement.modality not in policy.modalities:
        yield Finding("modality", f"the policy {policy.name} does not admit {statement.modality}")


def review_reservation(reservation: Reservation, standing: AccountContext, policy: Policy) -> Verdict:
    """Review a reservation. Depends on configuration and the ledger only, never on an image (P1, P9)."""
    wrong = malformed(reservation)
    if wrong:
        return Verdict((Finding("malformed", wrong),))
    findings = [*_terms(reservation.mechanism, reservation.claim, policy), *_scope(reservation, policy)]
    findings += [*_provenance(reservation, policy), *_place(reservation)]
    findings += _attainable(reservation.claim, policy)
    account = standing.account
    if standing.grant is not None:
        findings.append(Finding("grant_exists", "a grant of that name was given before"))
    if standing.run_spent and reservation.run:
        findings.append(_RUN_SPENT)
    if standing.revoked:
        findings.append(_BARRED)
    if standing.frozen:
        findings.append(Finding("frozen", "the ledger was restored; every site must present its receipts first"))
    if account is None:
        findings.append(Finding("no_account", "the site has no account of that kind"))
    else:
        findings += _payable(reservation.mechanism, account)
    if findings or account is None:
        return Verdict(tuple(findings))
    amount = price(reservation.claim, account)
    if not amount <= remaining(account, policy):
        findings.append(Finding("budget", _shortage(reservation.claim, account)))
    return Verdict(tuple(findings), amount=amount)


def _attainable(claim: Claim, policy: Policy) -> Iterator[Finding]:
    """What follows from the claim alone is asked for before anything is made: the level, and looks at a training."""
    level = "C" if isinstance(claim, NoClaim) else "A*" if assumption(claim) else ""
    if level and level not in policy.levels:
        yield _too_weak(level, policy)
    if isinstance(claim, Evaluated):
        masked = isinstance(claim.training, DistributedGaussian)
        kind = "masked-evaluation" if masked else "evaluation"
        if kind not in policy.artifact_types:
            yield Finding("artifact_type_not_allowed", f"the policy {policy.name} does not admit {kind}")


def _too_weak(level: str, policy: Policy) -> Finding:
    return Finding("level", f"the policy {policy.name} does not admit releases of level {level}")


def review_use(release: Release, epsilon: Mapping[str, Any] | None, policy: Policy) -> Iterator[Finding]:
    """Why a site's policy would not have admitted what others released, before the site itself uses it.

    Args:
        release: a hospital's statement, whose signature was verified.
        epsilon: ``value`` and ``delta`` of record, from its certificate; None: it has none.
        policy: of the site that is to use it.
    """
    yield from _terms(release.mechanism, release.claim, policy)
    yield from _scope(release, policy)
    yield from _provenance(release, policy)
    if (level := level_of(release)) not in policy.levels:
        yield _too_weak(level, policy)
    if release.artifact_type not in policy.artifact_types & ARTIFACT_TYPES:
        yield Finding("artifact_type_not_allowed", f"the policy {policy.name} does not admit {release.artifact_type}")
    if epsilon is not None and not float(epsilon["value"]) <= policy.epsilon:
        limit = f"{epsilon_at_least(policy.epsilon)} of the policy {policy.name}"
        yield Finding("epsilon", f"epsilon {epsilon_text(epsilon['value'])} is above the {limit}")
    if epsilon is not None and not float(epsilon["delta"]) <= policy.delta:
        limit = format_rounded_up(policy.delta)
        yield Finding("delta", f"delta {epsilon['delta']} is above the {limit} of the policy {policy.name}")


def account_name(site: str, mechanism: str) -> str:
    """The account that pays for a mechanism; an unknown mechanism has none."""
    terms = TERMS.get(mechanism)
    return f"{site}/{terms.kind}" if terms else ""


def review_together(
    asked: Sequence[Reservation],
    alone: Sequence[Verdict],
    left: Mapping[str, int],
    least: int | None = None,
    required: Collection[str] = (),
) -> list[Verdict]:
    """The verdicts of several simultaneous requests: no account pays twice from the same remaining budget.

    Args:
        asked: the reservations, in the order in which they are served.
        alone: the verdict on each, had it been the only one.
        left: :func:`remaining` of every account that they touch, by name.
        least: those that are refused are left out, if so many are granted; fewer, and none is. None: all or none.
        required: sites of which each must be granted, or none is.
    """
    each = [(account_name(r.site, r.mechanism), r, said) for r, said in zip(asked, alone, strict=True)]
    total, taken, grants, runs = Counter[str](), Counter[str](), set[str](), set[tuple[str, str]]()
    for name, _, verdict in each:
        total[name] += verdict.amount
    out: list[Verdict] = []
    for name, r, verdict in each:
        wanted, said = total[name] if least is None else taken[name] + verdict.amount, verdict
        if said.admitted and r.grant in grants:
            said = Verdict((Finding("grant_exists", "the same request names that grant twice"),))
        elif said.admitted and (r.site, r.run) in runs:
            said = Verdict((_RUN_SPENT,))
        elif said.admitted and not wanted <= left[name]:
            said = Verdict((Finding("budget", "together they cost more than the account holds"),))
        elif said.admitted:
            taken[name] += said.amount
            runs |= {(r.site, r.run)} if r.run else set()
        grants.add(r.grant)
        out.append(said)
    granted = {r.site for (_, r, _), said in zip(each, out, strict=True) if said.admitted}
    if sum(v.admitted for v in out) >= (len(out) if least is None else least) and set(required) <= granted:
        return out
    other = Verdict((Finding("together", "another part of the same request was refused"),))
    return [other if v.admitted else v for v in out]


def remaining(account: Account, policy: Policy) -> int:
    """The amount that can still be reserved under today's policy; negative if tightened below what is used."""
    return min(account.limit, _ceiling(account, policy)) - account.held - account.spent


def _payable(mechanism: str, account: Account) -> Iterator[Finding]:
    terms, opened = TERMS.get(mechanism), account.opened
    kind = "k" if opened.order == 0 else "rdp"
    sane = opened.order == 0
    if 2 <= opened.order <= 1024:
        try:
            sane = 0 < float(opened.delta) < 1
        except ValueError:
            sane = False
    if terms is None or terms.kind != kind or not sane:
        yield Finding("account_kind", "the account is of another kind")


def _ceiling(account: Account, policy: Policy) -> int:
    """What the policy of today allows in an account that was opened under an earlier one: tightening binds (P12)."""
    if account.opened.order == 0:
        return policy.max_releases_per_patient
    return allowance(policy.epsilon, float(account.opened.delta), account.opened.order)


def _shortage(claim: Claim, account: Account) -> str:
    opened = account.opened
    if opened.order == 0:
        return f"every patient may be in {account.limit} release(s), and that is used up"
    share = max(0.0, 100 * account.left / account.limit) if account.limit else 0.0
    wanted = epsilon_nano(claim, float(opened.delta), opened.order) / 1e9
    return (
        f"the claim alone is epsilon {epsilon_text(wanted)} at delta {opened.delta} (order {opened.order}); "
        f"the budget is epsilon {epsilon_text(account.epsilon)} per {UNIT}, {share:.0f} % of it left"
    )


def _granted(claim: bytes) -> Claim | None:
    """The claim in a grant's entry; None when it cannot be read."""
    try:
        return claim_from(load_json(claim))
    except ValueError:
        return None


def _within(part: Claim, whole: Claim) -> bool:
    """Is ``part`` the claim ``whole`` with as many steps, or fewer, and with as many looks, or fewer, or none?"""
    steps, of = training_of(part), training_of(whole)
    if not isinstance(steps, Stepwise) or not isinstance(of, Stepwise):
        return False
    if isinstance(part, Evaluated) and not (isinstance(whole, Evaluated) and part.query == whole.query):
        return False
    fewer = steps.steps <= of.steps and looks_of(part) <= looks_of(whole)
    return fewer and replace(of, steps=steps.steps) == steps


def _covered(release: Release, grant: Grant, account: Account) -> Iterator[Finding]:
    """Does the grant cover everything released under it, this release included?"""
    held = grant.reserved
    if grant.state != "held":
        yield Finding("grant_closed", f"the grant is {grant.state}")
    if (held.site, held.mechanism, held.run) != (release.site, release.mechanism, release.run):
        yield Finding("grant_of_another", "the grant was given for another site, mechanism or run")
        return
    granted, claim = _granted(held.claim), release.claim
    rounds = TERMS[release.mechanism].rounds  # the review has ended before this if it is unknown
    if rounds:
        covered = granted is not None and _within(claim, granted)
    else:  # all of it or nothing: fewer steps, or a part of a composed claim, are another claim
        covered = canonical(claim_json(claim)) == held.claim
    if not covered:
        yield Finding("claim_not_granted", "the claim is not covered by the one that was granted")
    elif not price(claim, account) <= held.amount:
        yield Finding("claim_not_granted", "the claim costs more than was granted")
    elif not rounds:
        if grant.used:
            yield Finding("grant_used", "the grant's one release was made before")
    elif not price(claim, account) > grant.used or not release.round > grant.last_round or _shrunk(claim, grant):
        yield Finding("round_repeated", "this round's steps were released before")


def _shrunk(claim: Claim, grant: Grant) -> bool:
    """Does a claim leave out steps or looks of the newest release that was admitted under its grant?"""
    last = _granted(grant.claim)  # None before the first one
    return last is not None and not _within(last, claim)


def _epsilon(release: Release, account: Account, policy: Policy) -> Iterator[Finding]:
    """Declared equals recomputed (P11); k-anonymity and no claim have no epsilon at all (P4)."""
    if not isinstance(release.claim, Gaussian):
        if release.epsilon_nano is not None or release.delta is not None:
            yield Finding("epsilon_of_k", "such a release has no epsilon, and none may be declared")
        return
    if release.delta != account.opened.delta or not float(account.opened.delta) <= policy.delta:
        yield Finding("delta", f"delta must be the account's {account.opened.delta}")
        return
    truth = epsilon_nano(release.claim, float(account.opened.delta), account.opened.order)
    if release.epsilon_nano != truth:
        declared = "nothing" if release.epsilon_nano is None else f"{release.epsilon_nano / 1e9:.9f}"
        yield Finding("epsilon", f"declared {declared}, recomputed {truth / 1e9:.9f}")


def _provenance(statement: Reservation | Release, policy: Policy) -> Iterator[Finding]:
    """Every component that an artifact contains or is decoded by, and where it comes from (P6)."""
    terms = TERMS.get(statement.mechanism)
    if terms is not None and set(statement.components) != terms.components:
        yield Finding("components", f"the components to declare are {', '.join(sorted(terms.components))}")
    for component, provenance in sorted(statement.components.items()):
        if provenance not in policy.components:
            yield Finding("provenance", f"the {component} is {provenance}; the policy does not admit that")
        elif terms is not None and terms.vetted and provenance != "public" and component not in terms.stays:
            # a policy that admits a teacher, which stays here, admits nothing private that leaves with the rest
            yield Finding("provenance", f"the {component} of {statement.mechanism} must be public (P6)")


def _contents(release: Release, policy: Policy) -> Iterator[Finding]:
    """What the artifact is, and what it was made with."""
    terms = TERMS.get(release.mechanism)
    if terms is not None and release.artifact_type not in terms.artifact_types:
        yield Finding("artifact_type", f"{release.mechanism} releases {' or '.join(terms.artifact_types)}")
    if release.artifact_type in EVALUATIONS and not looks_of(release.claim):
        yield Finding("artifact_type", "an evaluation is released under a claim that counts looks")
    if release.artifact_type not in policy.artifact_types & ARTIFACT_TYPES:
        yield Finding("artifact_type_not_allowed", f"the policy does not admit {release.artifact_type}")
    if not 0 < release.artifact_bytes <= policy.max_artifact_bytes:
        yield Finding("artifact_size", f"the artifact must have 1 to {policy.max_artifact_bytes} bytes")
    yield from _provenance(release, policy)
    if release.vetted_against not in ("nothing", "public", "private"):
        yield Finding("vetting", "vetted_against must be nothing, public or private")
    elif terms is not None and terms.vetted and release.vetted_against != terms.vetted:
        yield Finding("vetting", f"{release.mechanism} is vetted against {terms.vetted} images (P7)")
    if release.reader and release.reader not in policy.readers:
        yield Finding("reader", "the policy does not name the reader that the artifact is encrypted to")
    yield from _searched(release)
    missing = policy.approvals - set(release.approvals)
    if missing:
        yield Finding("approval", f"it must be approved by: {', '.join(sorted(missing))}")


def _searched(release: Release) -> Iterator[Finding]:
    """A search for k reads patients: every k that was tried is declared, and the one taken is among them."""
    if release.menu and not (isinstance(release.claim, KAnonymous) and release.claim.k in menu_of(release.menu)):
        yield Finding("menu", "k was searched for, and is none of those that were tried")


def _vetted(release: Release, level: str, policy: Policy) -> Iterator[Finding]:
    """What was measured is bounded; level C, which promises nothing else, must have been measured, at good power."""
    alone = level == "C"  # nothing else stands behind it
    least = LEAST_POWER if alone else 0.0
    rate, power = _figure(release.reid_rate), _figure(release.vetting_power)
    terms = TERMS.get(release.mechanism)
    if alone and release.vetted_against == "public" and not (terms and terms.vetted):  # else it was said already
        yield Finding("vetting", "level C rests on figures of patients: it is vetted against private images")
    nothing = release.vetted_against == "nothing"
    if release.reid_rate is None and alone:
        yield Finding("reid_rate", "a release of level C rests on a measured re-identification rate")
    elif release.reid_rate is not None and (nothing or not 0 <= rate <= policy.max_reid_rate):
        yield Finding("reid_rate", f"the rate must be measured, and at most {policy.max_reid_rate}")
    if release.vetting_power is None and alone:
        yield Finding("vetting_power", "a release of level C states how many of planted copies its vetting caught")
    elif release.vetting_power is not None and (nothing or not least <= power <= 1):
        yield Finding("vetting_power", f"the power of the vetting must be measured, and lie in [{least}, 1]")


def _figure(text: str | None) -> float:
    """A number that a site states; NaN when it is none, or below zero, which no comparison lets pass."""
    try:
        number = decimal(text)
        return number if not str(text).startswith("-") else float("nan")
    except UnsupportedClaimError:
        return float("nan")


def level_of(release: Release) -> str:
    """The claim level: what the certificate may print, and nothing stronger (design section 5, P7)."""
    public = bool(release.components) and all(p == "public" for p in release.components.values())
    if isinstance(release.claim, Gaussian) and release.vetted_against != "private" and public:
        return "A*" if assumption(release.claim) else "A"
    once = isinstance(release.claim, KAnonymous) and release.claim.releases_per_patient == 1  # P5: B is once, ever
    return "B" if once and public else "C"


def review(release: Release, standing: AccountContext, policy: Policy) -> Verdict:
    """May this release be admitted? The artifact's bytes are checked against the statement by the caller."""
    wrong = malformed(release)
    if wrong:
        return Verdict((Finding("malformed", wrong),))
    findings = [
        *_terms(release.mechanism, release.claim, policy),
        *_scope(release, policy),
        *_contents(release, policy),
    ]
    findings += _place(release)
    level = level_of(release)
    findings += _vetted(release, level, policy)
    if level not in policy.levels:
        findings.append(_too_weak(level, policy))
    if standing.revoked:
        findings.append(_BARRED)
    if standing.reviewed_before:
        findings.append(Finding("replay", "this release was reviewed before"))
    account, grant = standing.account, standing.grant
    if grant is None or account is None:
        findings.append(Finding("no_grant", "nothing was granted under that name"))
        return Verdict(tuple(findings), level=level)
    findings += _payable(release.mechanism, account)
    if findings:
        return Verdict(tuple(findings), level=level)
    findings += [*_covered(release, grant, account), *_epsilon(release, account, policy)]
    amount = 0 if findings else price(release.claim, account)
    return Verdict(tuple(findings), level=level, amount=amount)
