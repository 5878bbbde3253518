"""Approval of proposed jobs, by persons: who must approve, who has, and what follows.

An approval lets the work start. It is no signature, decides nothing about budget, and never replaces the signed
approvals of the finished release. The caller has made sure who the person is (the console does, by the person's own
certificate); here the ledger is asked whether that person is in office, and for which role.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agent.service import jobs
from agent.service.jobs import Job, JobStateError, JobStore
from agent.service.ledger_access import Site
from agent.storage.site_ledger import site_policy
from policies.ledger.approvals import APPROVING
from policies.ledger.state import State
from protos.common.errors import RefusedError


class NotTheirApprovalError(RefusedError):
    """This person cannot approve or refuse this proposal; the text says why."""


def approving(site: Site) -> frozenset[str]:
    """The roles that must approve a proposal, by the policy that binds the site today."""
    return site_policy(site.home, site.ledger.read()).approvals


def missing(job: Job, roles: Iterable[str], state: State) -> list[str]:
    """The roles that have not approved a proposal yet. An approval counts while its person is in office in that role.

    ``state``: of the site's ledger.
    """
    in_office = {name: person.role for name in job.approved.values() if (person := state.active_person(name))}
    given = {role for role, by in job.approved.items() if in_office.get(by) == role}
    return sorted(set(roles) - given) if job.state == jobs.PROPOSED else []


def reasons(site: Site, found: Iterable[Job]) -> dict[int, str]:
    """Why proposals wait, by number. The ledger is read only where there are some."""
    proposed = [job for job in found if job.state == jobs.PROPOSED]
    if not proposed:
        return {}
    roles, state = approving(site), site.ledger.read().state
    return {job.number: _reason(missing(job, roles, state)) for job in proposed}


def _reason(roles: list[str]) -> str:
    if not roles:  # the policy of today asks for fewer than that of yesterday
        return "waits for approval by any one approving role"
    return f"waits for approval by {' and '.join(roles)}"


def approve(site: Site, number: int, by: str) -> dict[str, Any]:
    """Approve a proposal, as the role that the ledger gives the person; with the last one the job is queued.

    Returns:
        ``state`` of the job, and ``missing``: roles whose approval it still waits for.
    Raises:
        JobStateError: it is no proposal.
        NotTheirApprovalError: the person proposed it, is not in office, or of a role that is not asked, or has been.
    """
    role, roles, state = _role(site, by), approving(site), site.ledger.read().state

    def approved(known: Job) -> Job:
        _must_be_proposed(known)
        if known.history[0].by == by:
            raise NotTheirApprovalError(f"job {number} was proposed by {by}: somebody else approves it")
        if by in known.approved.values():
            raise NotTheirApprovalError(f"job {number} is approved by {by} already")
        open_roles = missing(known, roles, state)
        if open_roles and role not in open_roles:
            raise NotTheirApprovalError(
                f"the approval of {role} is not missing: job {number} waits for {' and '.join(open_roles)}"
            )
        after = known.approving(role, by)
        return after if missing(after, roles, state) else after.now(jobs.QUEUED)

    job = JobStore(site.home.root).change(number, approved)
    site.log.info("job_approved", job=number, role=role, state=job.state)
    return {"state": job.state, "missing": missing(job, roles, state)}


def refuse(site: Site, number: int, by: str, why: str) -> dict[str, Any]:
    """Refuse a proposal. It never starts; its files stay with it, until it is deleted like any other ended job.

    Args:
        site: where.
        number: of the job.
        by: the person.
        why: in the person's words; it stands in the job's history.
    Returns:
        ``state``: "refused".
    Raises:
        JobStateError: it is no proposal.
        NotTheirApprovalError: the person is not in office, or of no deciding role.
    """
    role = _role(site, by)

    def refused(known: Job) -> Job:
        _must_be_proposed(known)
        return known.now(jobs.REFUSED, why, by)

    job = JobStore(site.home.root).change(number, refused)
    site.log.info("job_refused", job=number, role=role)
    return {"state": job.state}


def _role(site: Site, by: str) -> str:
    person = site.ledger.read().state.active_person(by)
    if person is None:
        raise NotTheirApprovalError(f"nobody named {by} is in office: `ledger show` lists the persons")
    if person.role not in APPROVING:
        raise NotTheirApprovalError(f"only {' and '.join(sorted(APPROVING))} decide this, and {by} is {person.role}")
    return str(person.role)


def _must_be_proposed(job: Job) -> None:
    if job.state != jobs.PROPOSED:
        raise JobStateError(f"job {job.number} is {job.state}: it waits for no approval")
