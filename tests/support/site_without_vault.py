"""A site as the release pipeline knows it, with its ledger and its client, and no vault."""

from __future__ import annotations

from pathlib import Path

from agent.domain import TaskCohort
from agent.release.ports import SiteContext as PipelineSite
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import Store
from policies.ledger_service import LedgerService
from policies.review.policy import parse as parse_policy
from policies.statements import PAYLOAD_TYPE, Enrolment, parse
from protos.common.dsse import open_sealed
from tests.support.federation_world import Site
from tests.support.ledger_world import Clock


def pipeline_site(site: Site, folder: Path) -> PipelineSite:
    """What the pipeline needs to present receipts."""
    policy = parse_policy(site.hospital.policy_text, "p")
    key = site.home.sign_key()
    store = Store(open_sqlite(folder / f"{site.hospital.name}.db"), f"lazaret/{site.hospital.name}", key, Clock())
    register = LedgerService(store, lambda _: policy)
    if not store.state.sites:
        envelope = (site.home.root / "request.json").read_bytes()
        statement = parse(open_sealed(envelope, PAYLOAD_TYPE, {"x": key.public_key().public_bytes_raw()}).payload)
        assert isinstance(statement, Enrolment)
        register.enrol(statement, envelope, policy)
    return PipelineSite(
        name=site.hospital.name,
        ledger=register,
        gateway=site.gateway(),
        vault=None,  # type: ignore[arg-type] - nothing is read
        seal=site.seal,
        read=lambda raw: None,  # type: ignore[arg-type, return-value]
        new_id=lambda prefix: prefix,
        say=lambda *_: None,
        examples=lambda rule: TaskCohort(()),
        public_file=lambda digest: None,
        label_misfit=lambda rule: "",
    )
