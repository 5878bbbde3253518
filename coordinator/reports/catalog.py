"""Every report and certificate from a coordinator's directory: the list, the formats, and how to make each.

The ledger is read as ``ledger export`` reads it, also while the coordinator serves, and everything is made from that
one snapshot under one signed checkpoint: every entry is read again, and none taken from the search index, which
nobody signed. For the command line and for the console alike: :data:`REPORTS`, :func:`snapshot`, :func:`make`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.pools.datasheet import Card, File, croissant_of_set
from coordinator.pools.selection import PoolRefusedError
from coordinator.reports import budgets, certificates, disclosure, dp_registry, gdpr, model_cards, refusals, sp800_226
from coordinator.reports.document import Document, ReportError, as_json, as_markdown
from coordinator.reports.html_renderer import as_html
from coordinator.reports.model_facts import model_facts
from coordinator.reports.overview import overview, views
from coordinator.reports.pdf_renderer import as_pdf
from coordinator.reports.report_inputs import Item, Particulars, ReportInputs, books_of
from coordinator.reports.run_facts import run_facts
from coordinator.reports.run_report import ReleasedModel, run_report
from coordinator.storage.directory import ORIGIN, CoordinatorDirectory, look_at_ledger
from coordinator.storage.witness_store import Witnesses
from policies.audit.certificate import ATTACHED, PAYLOAD, pdf_signature
from policies.audit.verifier_archive import archive, zip_bytes
from policies.ledger.store import export
from policies.statements import ID
from policies.tasks.released_model import SIGNED, TASK_FILE
from protos.common.dsse import pae, seal
from protos.operations import toml_file

_MEDIA: Final[Mapping[str, str]] = MappingProxyType(
    {
        "html": "text/html; charset=utf-8",
        "json": "application/json",
        "md": "text/markdown; charset=utf-8",
        "pdf": "application/pdf",
        "yaml": "application/yaml",
        "zip": "application/zip",
    }
)


@dataclass(frozen=True, slots=True)
class ReportFile:
    """A file to hand out."""

    name: str
    body: bytes
    media: str


@dataclass(frozen=True, slots=True)
class Report:
    """One kind of report: its title, what it is for, the forms it has, and whether it is about one release."""

    name: str
    title: str
    words: str
    forms: tuple[str, ...]
    about: str = ""  # "": the whole ledger; "release" or "model": one of those must be named


_PEOPLE: Final = ("html", "pdf", "json")
REPORTS: Final[Mapping[str, Report]] = MappingProxyType(
    {
        r.name: r
        for r in (
            Report(
                "certificate",
                "Release certificate",
                "What is promised for one release, signed by the ledger's key; checked offline with lazaret-verify.",
                ("pdf", "json"),
                "release",
            ),
            Report("burn-down", "Burn-down", "How each hospital's budget was used, over time and by run.", _PEOPLE),
            Report("denied", "Denied requests", "Every refusal with its reason and what to do.", _PEOPLE),
            Report(
                "processing",
                "Article 30 record and DPIA annex",
                "Rows for the record of processing and the impact assessment; you fill in what only you know.",
                _PEOPLE,
            ),
            Report(
                "sp-800-226",
                "NIST SP 800-226 checklist",
                "The guarantees with an epsilon, from epsilon down to the exposure of the collected data.",
                _PEOPLE,
            ),
            Report(
                "disclosure",
                "EMA / Health Canada annex",
                "Distinct patients behind each image (k at least 11), and what was tested.",
                _PEOPLE,
            ),
            Report(
                "card",
                "Model card or datasheet",
                "For the people who use a model or a set: what it is, what is promised, what it is not for.",
                ("html", "pdf", "md", "json"),
                "release",
            ),
            Report(
                "croissant",
                "Croissant description",
                "MLCommons Croissant 1.0 metadata of one set of images, for data catalogues.",
                ("json",),
                "release",
            ),
            Report(
                "registry",
                "DP Deployments Registry",
                "A draft entry for every release with an epsilon, in the registry's own schema.",
                ("json",),
            ),
            Report(
                "registry-entry",
                "DP Deployments Registry, one entry",
                "The draft entry of one release, ready to be completed and handed in.",
                ("yaml",),
                "release",
            ),
            Report(
                "bundle",
                "Ledger bundle",
                "The whole ledger with the offline verifier inside: for an auditor who has nothing of ours.",
                ("zip",),
            ),
        )
    }
)
_DOCUMENTS: Final[Mapping[str, Callable[[ReportInputs], Document]]] = MappingProxyType(
    {
        "burn-down": budgets.burn_down,
        "denied": refusals.denied,
        "processing": gdpr.processing,
        "sp-800-226": sp800_226.checklist,
        "disclosure": disclosure.annex,
    }
)


def snapshot(home: CoordinatorDirectory, now: dt.datetime) -> tuple[bytes, ReportInputs]:
    """The ledger's export as of now, and what is folded from it.

    Raises:
        LedgerUnsoundError: the ledger is not what its key committed last.
        ReportError: ``particulars.toml`` cannot be used.
    """
    with contextlib.closing(look_at_ledger(home)) as disk:
        raw = export(disk, ORIGIN, home.ledger_key(), Witnesses(home.witnesses).notes())
    filled = toml_file.read(home.root / "particulars.toml", Particulars, ReportError)
    return raw, books_of(raw, home.policy_text(), now, filled)


def make(
    home: CoordinatorDirectory,
    name: str,
    form: str,
    release: str,
    now: dt.datetime,
    *,
    step: Callable[[str], None] = lambda _what: None,
) -> ReportFile:
    """One report in one form.

    Args:
        home: the coordinator's.
        name: of :data:`REPORTS`.
        form: one of the report's.
        release: which release or run it is about, where it is about one.
        now: stands in it.
        step: is told what is done next, before each part that takes long where the ledger is long.
    Raises:
        ReportError: no such report, form or release; the text says what there is.
        KeyFileError, LedgerUnsoundError: the ledger's key or the ledger cannot be used.
    """
    known = REPORTS.get(name)
    if known is None:
        raise ReportError(f"there is no report of that name; there are {', '.join(REPORTS)}")
    if form not in known.forms:
        raise ReportError(f"{known.name} is made as {' or '.join(known.forms)}")
    if bool(known.about) is not bool(release):
        raise ReportError(f"{known.name} is about {'one release: name it' if known.about else 'the whole ledger'}")
    if release and not ID.fullmatch(release):
        raise ReportError("that is not the name of a release or run")
    step("reading the ledger")
    raw, inputs = snapshot(home, now)
    step(f"making {name} of {inputs.source.size} entries")
    stem = f"{name}-{release}" if release else name
    return ReportFile(f"{stem}.{form}", _body(home, raw, inputs, (name, form, release)), _MEDIA[form])


@dataclass(frozen=True, slots=True)
class RunReport:
    """What became of a run."""

    told: str  # in a few words
    files: Mapping[str, ReportFile]  # "html" and "json"


def make_run_report(home: CoordinatorDirectory, run: str, now: dt.datetime) -> RunReport:
    """The report of a run as a page and as JSON: from one snapshot, whatever became of the run.

    It is none of :data:`REPORTS`: those are about what the ledger admitted, and may be handed out.

    Raises:
        ReportError: no such run, or a file of it is damaged, or contradicts the ledger.
        KeyFileError, LedgerUnsoundError: the ledger's key or the ledger cannot be used.
    """
    _, inputs = snapshot(home, now)
    try:
        facts, model = run_facts(home.root / "runs", run, inputs.state, inputs.records), None
    except ReportError:  # it may have closed a round since the snapshot: of a newer one it is no contradiction
        _, inputs = snapshot(home, now)
        facts, model = run_facts(home.root / "runs", run, inputs.state, inputs.records), None
    if facts.state == "finished":
        item = inputs.item(run)
        model = ReleasedModel(item, model_facts(home, item))
    made = run_report(inputs, facts, model)
    texts = {"html": as_html(made), "json": as_json(made)}
    files = {form: ReportFile(f"run-{run}.{form}", text.encode(), _MEDIA[form]) for form, text in texts.items()}
    return RunReport(made.data["told"], files)


def overview_html(
    home: CoordinatorDirectory,
    measured: Mapping[str, Any] | None,
    now: dt.datetime,
    *,
    step: Callable[[str], None] = lambda _what: None,
) -> bytes:
    """The overview as HTML: the entire ledger, every stored release, and its evaluations.

    Args:
        home: the coordinator's.
        measured: as :func:`coordinator.reports.overview.overview` has it.
        now: stands in it.
        step: as for :func:`make`.
    Raises:
        UnsoundReportError: the ledger, or a file on the shelf, contradicts itself.
        LedgerUnsoundError, ReportError, KeyFileError: as for :func:`make`.
    """
    step("reading the ledger")
    _, inputs = snapshot(home, now)
    step(f"making the overview of {inputs.source.size} entries")
    return as_html(overview(inputs, views(home.releases), measured)).encode()


def _body(home: CoordinatorDirectory, raw: bytes, inputs: ReportInputs, asked: tuple[str, str, str]) -> bytes:
    name, form, release = asked
    if name == "bundle":
        return bundle(raw, inputs)
    if name == "registry":
        return dp_registry.as_yaml(dp_registry.entries(inputs)).encode()
    if name in _DOCUMENTS:
        return _as(form, _DOCUMENTS[name](inputs), inputs)
    item = inputs.item(release)
    if name == "certificate":
        return certificate(inputs, item, form, home.ledger_key())
    if name == "registry-entry":
        return dp_registry.as_yaml(dp_registry.entry(inputs, item)).encode()
    if name == "croissant":
        return croissant(home, inputs, item)
    return _as(form, model_cards.card(inputs, release, partial(model_facts, home)), inputs)


def _as(form: str, document: Document, inputs: ReportInputs) -> bytes:
    if form == "pdf":
        return as_pdf(document, inputs.made)
    text = {"html": as_html, "json": as_json, "md": as_markdown}[form](document)
    return text.encode()


def model_files(home: CoordinatorDirectory, name: str, now: dt.datetime) -> dict[str, bytes]:
    """What goes with a model to whoever uses it: its certificate, signed with its task's digest, its card, its task.

    Raises:
        ReportError: the ledger has no such model, or a file of it is not what it admitted.
    """
    if not ID.fullmatch(name):
        raise ReportError("that is not the name of a release or run")
    _, inputs = snapshot(home, now)
    item = inputs.item(name)
    task = model_facts(home, item).task
    told = model_cards.card(inputs, name, partial(model_facts, home))
    made = {f"card.{form}": _as(form, told, inputs) for form in ("json", "md")}
    made[SIGNED] = certificate(inputs, item, "json", home.ledger_key(), task.digest if task else "")
    return {**made, **({TASK_FILE: task.to_json().encode()} if task else {})}


def certificate(inputs: ReportInputs, item: Item, form: str, key: Ed25519PrivateKey, task: str = "") -> bytes:
    """A release's certificate, signed: a DSSE envelope, or a PDF with it inside, signed whole."""
    signed = seal(certificates.certificate(inputs, item, task).encode(), PAYLOAD, key)
    if form == "json":
        return signed + b"\n"
    printed = as_pdf(certificates.as_document(inputs, item), inputs.made, (ATTACHED, signed))
    printed = printed if printed.endswith(b"\n") else printed + b"\n"
    return printed + pdf_signature(key.sign(pae("application/pdf", printed)))


def croissant(home: CoordinatorDirectory, inputs: ReportInputs, item: Item) -> bytes:
    """The metadata of a stored set for a data catalogue.

    Raises:
        ReportError: it is no set of images, is encrypted, or is not on the shelf as the ledger admitted it.
    """
    part = item.parts[0]
    if model_cards.is_model(item) or part["artifact_type"] != "image-set" or part["reader"]:
        raise ReportError(f"{item.name} is not a set of images: ask for its card")
    path = home.releases / item.name / "images.tar"
    try:
        with path.open("rb") as stream:
            digest, size = hashlib.file_digest(stream, "sha256").hexdigest(), path.stat().st_size
    except FileNotFoundError:
        raise ReportError(f"{item.name}: the ledger admitted it, but its file is missing") from None
    if digest != item.facts["artifact_sha256"]:
        raise ReportError(f"{item.name}: the stored file is not the one that the ledger admitted: it was changed")
    p = inputs.particulars
    promised = f"{item.meaning} {item.claim}. {item.strength}."
    about = f"{item.method}, from patients of {item.sites}."
    try:
        card = Card(item.name, about[:200], p.licence, url=p.url, creator=p.controller, published=p.published)
    except PoolRefusedError as error:
        raise ReportError(f"particulars.toml: {error}") from None
    found = croissant_of_set(card, File("images.tar", size, digest), promised)
    return (json.dumps(found, indent=2, sort_keys=True) + "\n").encode()


def bundle(raw: bytes, inputs: ReportInputs) -> bytes:
    """A zip archive for an auditor: the ledger, the verifier as one file, how to use it, and the digests of both."""
    files = {"ledger.export": raw, "lazaret-verify.pyz": archive(), "README.txt": _readme(inputs).encode()}
    files["checkpoint.txt"] = inputs.export.checkpoint.encode()
    sums = "".join(f"{hashlib.sha256(body).hexdigest()}  {name}\n" for name, body in sorted(files.items()))
    files["SHA256SUMS"] = sums.encode()
    return zip_bytes(
        {f"ledger-bundle/{name}": body for name, body in files.items()}, ("ledger-bundle/lazaret-verify.pyz",)
    )


def _readme(inputs: ReportInputs) -> str:
    s = inputs.source
    return f"""\
The ledger {s.origin}: {s.size} entries until {s.until} UTC, taken {s.made} UTC.

What is here
  ledger.export       every entry, the signed statements that it rests on, and the signed head
  lazaret-verify.pyz  the verifier as one file; it needs Python 3.11 and the package cryptography, and no network
  checkpoint.txt      the signed head alone: keep it, and give it with --from next time
  SHA256SUMS          digests of these files: sha256sum -c SHA256SUMS

How to check it
  python3 lazaret-verify.pyz ledger.export --key {s.key}

  The key must be the one that the ledger's owner publishes elsewhere: compare it there, not here. Each hospital that
  takes part has it, too: lazaret-agent ledger fingerprint --coordinator
  It prints SOUND, the size {s.size} and the root
  {s.root}
  or NOT SOUND with the first reason. Without --key it prints CONSISTENT and exits with 3: the ledger is consistent
  with itself, and whose it is nobody has said. --witnesses N demands that N hospitals have cosigned its head.

Next time
  python3 lazaret-verify.pyz NEWER.export --key {s.key} --from checkpoint.txt
  shows that nothing of what you saw today was rewritten.

The verifier that comes with a ledger could lie for it. Whoever wants to be sure builds it from the public sources
(`python -m deploy.verifier OUT.pyz` writes the same bytes), and compares their SHA-256.
"""
