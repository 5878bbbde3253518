"""Reports say what the books say, with unit, relation and delta; never more, and what nobody knows is left open."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped] # it ships no types
import pytest

from coordinator import claim_descriptions, explanations
from coordinator.reports import disclosure, dp_registry, gdpr, model_cards, sp800_226
from coordinator.reports.catalog import REPORTS, ReportFile, make, snapshot
from coordinator.reports.certificates import revocations
from coordinator.reports.document import (
    OPEN,
    Curve,
    Document,
    Line,
    Points,
    ReportError,
    ReportTable,
    Text,
    as_markdown,
)
from coordinator.reports.html_renderer import as_html, drawn
from coordinator.reports.ledger_view import LedgerView
from coordinator.reports.model_facts import ModelFacts
from coordinator.reports.pdf_renderer import as_pdf
from coordinator.reports.report_inputs import Item, Particulars, ReportInputs, books_of
from policies.accounting.rounding import epsilon_text
from policies.ledger.entries import encode
from protos.operations import toml_file
from tests.support.html_pages import HtmlPage
from tests.support.peers import lacking
from tests.support.report_world import LAX, NOW, Stage, stage

EVIL = "\"><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}'\u202e`|*"
WHOLE = [name for name, report in REPORTS.items() if not report.about and "html" in report.forms]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("hub")) as shown:
        yield shown


@pytest.fixture(scope="module")
def inputs(world: Stage) -> ReportInputs:
    return snapshot(world.home, NOW)[1]


def made(world: Stage, name: str, form: str, release: str = "") -> str:
    return make(world.home, name, form, release, NOW).body.decode()


def every(world: Stage) -> Iterator[ReportFile]:
    """Every report, in every form, about everything that it can be about."""
    for report in REPORTS.values():
        for form in report.forms:
            for subject in [*world.names.values(), world.run, world.shared] if report.about else [""]:
                try:
                    yield make(world.home, report.name, form, subject, NOW)
                except ReportError:
                    assert report.name in ("croissant", "registry-entry")


ZERO = re.compile(r"""(epsilon|ε)["']?\s*(=|of|:|is)?\s*["']?0(?![.\d]*[1-9])""")
LOSS = re.compile(r" at delta \S+ per patient, neighbours differ by one patient added or removed\b")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"epsilon": 0, "k": 11}', True),
        ('{"epsilon":0.0}', True),
        ('{"epsilon": "0"}', True),
        ("epsilon = 0", True),
        ("ε of 0.00", True),
        ('{"epsilon": 0.5}', False),
        ("epsilon 0.01", False),
        ('{"epsilon": null, "k": 0}', False),
    ],
)
def test_an_epsilon_of_nothing_is_seen_in_prose_and_in_json(text: str, found: bool) -> None:
    assert bool(ZERO.search(text)) is found


def test_no_report_claims_more_than_the_level_or_gives_a_crowd_an_epsilon(world: Stage, tmp_path: Path) -> None:
    seen = 0
    for report in every(world):
        if report.name.endswith("zip"):
            continue
        text = report.body.decode("latin-1")
        if report.name.endswith(".pdf") and not lacking("pdftotext"):
            (tmp_path / "x.pdf").write_bytes(report.body)
            text = subprocess.run(
                ["pdftotext", tmp_path / "x.pdf", "-"], capture_output=True, text=True, check=True
            ).stdout
        text = " ".join(text.split())
        seen += 1
        assert not re.search(r"(?<!k-)\banonym(ous|ised|ized|e)\b", text), report.name
        assert not ZERO.search(text), report.name
        for found in re.finditer(r"epsilon \d[\d.]*", text):
            assert LOSS.match(text, found.end()), (report.name, found[0])
    assert seen > 50


def test_an_epsilon_has_its_unit_relation_and_order(world: Stage) -> None:
    for name, form in (("card", "md"), ("card", "html")):
        text = HtmlPage(made(world, name, form, world.run)).text
        assert "at delta 4e-06 per patient, neighbours differ by one patient added or removed; Rényi" in text


def test_the_burn_down_ends_where_the_books_are(world: Stage, inputs: ReportInputs) -> None:
    data = json.loads(made(world, "burn-down", "json"))
    for account in data["accounts"]:
        state = inputs.state.accounts[account["account"]]
        last = account["history"][-1]
        assert (last["spent"], last["held"], last["limit"]) == (state.spent, state.held, state.limit)
        used = [moment["spent"] + moment["held"] for moment in account["history"]]
        assert used == sorted(used), "nothing was given back in this history"
    text = HtmlPage(made(world, "burn-down", "html")).text
    assert "epsilon 8 at delta 4e-06 per patient, neighbours differ by one patient added or removed" in text
    share = 100 * inputs.state.accounts["north/rdp"].spent / inputs.state.accounts["north/rdp"].limit
    printed = float(re.findall(r"([\d.]+) %: epsilon", text)[0])
    assert share <= printed <= share + 0.11


def test_a_curve_is_drawn_in_steps_and_never_of_what_is_no_number() -> None:
    picture = drawn(Curve("x", "%", (Line("a", ((0, 0.0), (10, 50.0), (20, 50.0))),)))
    assert picture["lines"][0]["path"].startswith("M52.0 176.0L340.0 176.0L340.0 94.0")
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="finite"):
            Curve("x", "%", (Line("a", ((0, bad),)),))


def test_every_refusal_is_listed_with_its_reason_and_what_a_hospital_gave_up_is_not_one(world: Stage) -> None:
    text = HtmlPage(made(world, "denied", "html")).text
    assert "2 refusals, and 1 grant given up by hospitals." in text
    for rule in ("min_k", "artifact_changed", "restart"):
        why, todo = explanations.RULES[rule]
        assert why in text
        assert todo in text or rule == "restart"
    data = json.loads(made(world, "denied", "json"))
    assert [e["findings"] for e in data["refused"]] == [["min_k"], ["artifact_changed"]]
    assert [e["findings"] for e in data["given_up"]] == [["restart"]]


def crowd(inputs: ReportInputs, world: Stage, k: int, level: str = "B") -> Item:
    item = inputs.item(world.names["eleven"])
    part = {**item.parts[0], "claim": {**item.parts[0]["claim"], "k": k}}
    return Item("x", {**item.facts, "parts": [part], "level": level})


@pytest.mark.parametrize(("k", "met"), [(2, False), (10, False), (11, True), (12, True), (1000, True)])
def test_the_threshold_is_eleven_patients_and_not_a_risk_below_nine_hundredths(
    inputs: ReportInputs, world: Stage, k: int, met: bool
) -> None:
    """1/11 is 0.0909..., more than 0.09: who compares risks asks for 12 without saying so."""
    assert disclosure.compare_with_threshold(crowd(inputs, world, k)).startswith("met: ") is met
    assert ("NOT met" in disclosure.compare_with_threshold(crowd(inputs, world, k))) is not met


def test_the_threshold_is_said_to_be_about_cells_and_nothing_else(inputs: ReportInputs, world: Stage) -> None:
    for subject in (world.run, world.names["taught"]):
        assert disclosure.compare_with_threshold(inputs.item(subject)).startswith("not about this release")
    assert disclosure.compare_with_threshold(crowd(inputs, world, 50, "C")).startswith("not about this release"), (
        "void at level C"
    )
    data = json.loads(made(world, "disclosure", "json"))
    assert [(r["k"], r["meets_k_11"]) for r in data["releases"]] == [
        (11, True), (5, False), *[(None, None)] * 4,
    ]  # fmt: skip
    assert "0.09" not in re.sub(r"0\.09 is about cells", "", HtmlPage(made(world, "disclosure", "html")).text)


def test_what_only_the_controller_knows_is_left_open_until_it_is_filled_in(inputs: ReportInputs) -> None:
    def rows(given: Particulars) -> str:
        return HtmlPage(as_html(gdpr.processing(dataclasses.replace(inputs, particulars=given)))).text

    assert rows(Particulars()).count(OPEN) == 10
    filled = Particulars(controller="Clinic of Łódź", contact="dpo@clinic.example", purposes="research", officer="X")
    assert rows(filled).count(OPEN) == 7
    assert "Clinic of Łódź; dpo@clinic.example" in rows(filled)
    assert "No finding is made here that a release is, or is not, personal data" in rows(filled)


@pytest.mark.parametrize(
    "text",
    [
        "x =",
        'controler = "a"',
        "controller = 3",
        f'controller = "{"x" * 2001}"',
        'published = "soon"',
        'curator_type = "x"',
    ],
)
def test_a_misspelt_or_odd_particular_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ReportError, match=r"particulars\.toml"):
        toml_file.parse(text, Particulars, "particulars.toml", Path(), ReportError)


def test_nothing_that_is_filled_in_becomes_markup(inputs: ReportInputs) -> None:
    evil = Particulars(
        **{f.name: EVIL for f in dataclasses.fields(Particulars) if f.name not in ("curator_type", "published")}
    )
    odd = dataclasses.replace(inputs, particulars=evil)
    for document in (gdpr.processing(odd), disclosure.annex(odd), sp800_226.checklist(odd)):
        page = as_html(document)
        assert {tag for tag, _ in HtmlPage(page).tags} & {"script", "img", "iframe", "object", "link"} == set()
        assert "\u202e" not in page
        assert "{{ 7*7 }}" in HtmlPage(page).text or document.name == "sp-800-226"
        assert as_pdf(document, NOW).startswith(b"%PDF-")
        text = as_markdown(document)
        assert "<script" not in text.replace("\\<", "")
        assert "\u202e" not in text


def test_a_page_loads_nothing_and_runs_nothing(world: Stage) -> None:
    for name in WHOLE:
        text = made(world, name, "html")
        page = HtmlPage(text)
        assert "default-src 'none'" in text
        for tag, attributes in page.tags:
            assert tag not in ("script", "img", "link", "iframe")
            assert not {"src", "href", "style", "onclick"} & set(attributes), (name, tag)


def test_a_report_of_the_same_books_has_the_same_bytes(world: Stage) -> None:
    for name, form, subject in (("burn-down", "pdf", ""), ("bundle", "zip", ""), ("certificate", "pdf", world.run)):
        assert make(world.home, name, form, subject, NOW).body == make(world.home, name, form, subject, NOW).body


# The fields, types and values of the registry's schemas/deployments-schema.yaml, of May 2026; texts are not copied.
_TEXT = {"type": "string"}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _choice(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _texts(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, _TEXT)


SCHEMA = _object(
    ("url_slug", "deployment"),
    url_slug=_TEXT,
    deployment=_object(
        ("basic", "administrative"),
        basic=_object(
            (
                "name", "data_curators", "description", "intended_use", "data_product_type", "data_product_region",
                "publication_date",
            ),
            **_texts("name", "description", "intended_use", "data_product_region"),
            data_curators={
                "type": "array",
                "minItems": 1,
                "items": _object(
                    ("data_curator_name", "data_curator_type"),
                    data_curator_name=_TEXT,
                    data_curator_type=_choice("Government", "Industry", "Nonprofit"),
                ),
            },
            data_product_type=_choice(
                "Summary statistics", "Machine learning model", "Dataset", "Synthetic data", "Interactive API",
                "SQL queries",
            ),
            data_product_sector=_choice(
                "Technology", "Healthcare", "Education", "Government", "Energy", "Finance"
            ),
            publication_date={"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
        ),
        dp_variant=_object(
            (),
            variant_name=_choice("Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"),
            **_texts("data_domain", "unprotected_quantities"),
        ),
        privacy_loss=_object(
            (),
            **_texts("privacy_unit", "privacy_unit_details", "privacy_parameters_details"),
            number_of_privacy_units={"type": "integer"},
            privacy_parameters=_object(
                (), epsilon={"type": "number"}, delta={"type": ["number", "string"]}, rho={"type": "number"}
            ),
        ),
        deployment_model=_object(
            (),
            model_name=_choice("Local", "Central", "Shuffle", "Federated", "Varies"),
            release_type=_choice("One release", "Many releases"),
            data_source_type=_choice("Static", "Dynamic"),
            access_type=_choice("Interactive", "Non-interactive"),
            **_texts(
                "model_name_details", "trust_assumptions", "actors", "release_type_details",
                "data_source_type_details", "access_type_details",
            ),
        ),
        implementation=_object(
            (),
            **_texts(
                "preprocessing_and_hyperparameter_tuning", "mechanisms", "composition", "post_processing",
                "justification", "utility", "additional_information",
            ),
        ),
        administrative=_object(
            ("status", "registry_authors", "tier"),
            status=_choice("Draft", "Pending"),
            registry_authors={"type": "array", "items": _TEXT, "minItems": 1},
            tier={"type": "integer", "enum": [1, 2, 3]},
        ),
    ),
)  # fmt: skip


def test_a_registry_entry_is_in_the_registrys_schema_once_the_open_fields_are_filled_in(
    world: Stage, inputs: ReportInputs
) -> None:
    item = inputs.item(world.run)
    wrong = list(jsonschema.Draft7Validator(SCHEMA).iter_errors(dp_registry.entry(inputs, item)))
    assert [list(e.path)[-1] for e in wrong] == ["data_curator_type"], "an open field is not guessed"
    filled = dataclasses.replace(inputs, particulars=Particulars(curator_type="Nonprofit", authors="A"))
    entry = dp_registry.entry(filled, item)
    jsonschema.validate(entry, SCHEMA, jsonschema.Draft7Validator)
    loss = entry["deployment"]["privacy_loss"]
    exact = max(float(part["epsilon"]["value"]) for part in item.parts)
    assert loss["privacy_parameters"]["epsilon"] == float(epsilon_text(exact)) >= exact
    assert loss["privacy_unit"] == "Patient-level"
    assert "covered by the sum of theirs" in loss["privacy_parameters_details"]
    assert json.loads(dp_registry.as_yaml(entry)) == entry


def test_only_a_release_with_an_epsilon_enters_the_registry(world: Stage, inputs: ReportInputs) -> None:
    assert set(json.loads(made(world, "registry", "json"))) == {f"{world.run}.yaml", f"{world.shared}.yaml"}
    for name in world.names.values():
        with pytest.raises(ReportError, match="it has no epsilon, and it is not 0"):
            dp_registry.entry(inputs, inputs.item(name))


def test_a_card_says_what_it_is_not_for_and_what_nobody_measured(world: Stage) -> None:
    model = made(world, "card", "md", world.run)
    assert model.startswith("# Model card: trial")
    assert "Diagnosis or treatment of a patient: it was not tested for that." in model
    assert "metrics of a model are a release of their own" in model
    assert "It may leave: the ledger admitted it under the policies of the federation" in model
    tested = made(world, "card", "md", world.names["taught"])
    assert "at most 3 %" in tested
    assert "Empirical only: tested by attacks, without a guarantee." in tested
    assert "k = 11; there is no epsilon, and it is not 0" in made(world, "card", "md", world.names["eleven"])


def test_the_croissant_description_is_of_the_very_file_on_the_shelf(world: Stage, tmp_path: Path) -> None:
    name = world.names["five"]
    found = json.loads(made(world, "croissant", "json", name))
    archive = world.home.releases / name / "images.tar"
    shard = found["distribution"][0]
    assert shard["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    known = {part["@id"] for part in found["distribution"]}
    for records in found["recordSet"]:
        assert records["key"]["@id"] in {field["@id"] for field in records["field"]}
        assert {field["source"]["fileSet"]["@id"] for field in records["field"]} <= known
    assert found["rai:personalSensitiveInformation"].startswith("At least k distinct patients behind every image")
    assert "at least 5 different patients" in found["rai:personalSensitiveInformation"]
    kept = archive.read_bytes()
    archive.write_bytes(kept + b"\0")
    try:
        with pytest.raises(ReportError, match="it was changed"):
            make(world.home, "croissant", "json", name, NOW)
    finally:
        archive.write_bytes(kept)
    with pytest.raises(ReportError, match="not a set of images"):
        make(world.home, "croissant", "json", world.run, NOW)


def test_the_bundle_can_be_checked_with_what_is_inside_it(world: Stage, tmp_path: Path) -> None:
    body = make(world.home, "bundle", "zip", "", NOW).body
    with zipfile.ZipFile(io.BytesIO(body)) as opened:
        opened.extractall(tmp_path)
    folder = tmp_path / "ledger-bundle"
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    (command,) = re.findall(
        r"python3 (lazaret-verify\.pyz ledger\.export --key [0-9a-f]{64})", (folder / "README.txt").read_text()
    )
    checked = (*command.split(), "--from", "checkpoint.txt")
    done = subprocess.run([sys.executable, "-I", *checked], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "SOUND"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "form", "release", "says"),
    [
        ("no-such", "pdf", "", "there is no report of that name"),
        ("burn-down", "exe", "", "is made as html or pdf or json"),
        ("burn-down", "pdf", "trial", "about the whole ledger"),
        ("certificate", "pdf", "", "one release: name it"),
        ("certificate", "pdf", "release-0", "admitted no release of that name"),
        ("certificate", "pdf", "../../keys/ledger", "not the name of a release"),
        ("card", "md", "trial\n", "not the name of a release"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_to_do(
    world: Stage, name: str, form: str, release: str, says: str
) -> None:
    with pytest.raises(ReportError, match=re.escape(says)):
        make(world.home, name, form, release, NOW)


def test_an_empty_ledger_has_every_report_that_is_about_all_of_it(tmp_path: Path) -> None:
    import datetime as dt

    from coordinator.storage import directory as homes

    home = homes.create(tmp_path / "home", 'listen = "127.0.0.1:7443"\n', LAX, dt.datetime.now(dt.UTC))
    with homes.open_ledger(home):
        for name in WHOLE:
            for form in REPORTS[name].forms:
                assert make(home, name, form, "", NOW).body
        with pytest.raises(ReportError, match="no release has an epsilon"):
            make(home, "registry", "json", "", NOW)


def test_what_a_font_lacks_is_printed_as_such_and_never_stops_a_report(inputs: ReportInputs) -> None:
    document = Document("x", "名前 Łódź Ω", "☐ ✓", (), inputs.source)
    assert as_pdf(document, NOW).startswith(b"%PDF-")


def test_a_table_with_a_cell_too_few_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="another number of cells"):
        ReportTable("x", ("a", "b"), (("1",),))
    assert Text("x").tone == ""


def test_a_changed_export_makes_no_report(world: Stage) -> None:
    raw, _ = snapshot(world.home, NOW)
    with pytest.raises(ValueError, match=r"checkpoint|form|export"):
        books_of(raw[:-20] + (b"B" if raw[-20:-19] == b"A" else b"A") + raw[-19:], LAX, NOW)


# -- what was released decides what is said


def tables(document: Document, caption: str) -> list[ReportTable]:
    blocks = [block for section in document.sections for block in section.blocks]
    return [block for block in blocks if isinstance(block, ReportTable) and caption in block.caption]


def test_the_epsilon_of_shared_noise_is_never_told_without_what_it_stands_on(
    world: Stage, inputs: ReportInputs
) -> None:
    item, given = inputs.item(world.shared), "it holds if in every sum at least 2 of the 2 sites add their share"
    assert item.level == "A*"
    assert re.search(rf"^epsilon .*; {given}", item.strength)
    assert given not in inputs.item(world.run).strength
    for name in ("sp-800-226", "disclosure", "processing"):
        assert given in HtmlPage(made(world, name, "html")).text, name
    listed = json.loads(made(world, "sp-800-226", "json"))["items"]
    assert [(i["level"], bool(i["assumption"])) for i in listed] == [("A", False), ("A*", True)]
    told = json.loads(made(world, "disclosure", "json"))["releases"]
    assert [given in (r["assumption"] or "") for r in told if r["epsilon"]] == [False, True]
    (table,) = tables(sp800_226.checklist(inputs), "Releases with an epsilon")
    assert [row[table.head.index("Level")] for row in table.rows] == ["A", "A*"]


def test_what_is_bounded_if_hospitals_are_honest_is_said_to_be_so_and_the_rest_is_not(inputs: ReportInputs) -> None:
    (table,) = tables(gdpr.processing(inputs), "WP216")
    rows = {row[0].partition(":")[0]: row[1:] for row in table.rows if "heads" not in row[0]}
    assert list(rows) == ["A", "A*", "B", "C"]
    assert all("under the same assumption" in cell or "not bounded otherwise" in cell for cell in rows["A*"])
    assert "assumption" not in " ".join(rows["A"])


def test_bare_figures_in_a_table_are_bound_by_its_caption(world: Stage) -> None:
    for subject, bare in ((world.run, True), (world.shared, True), (world.names["eleven"], False)):
        text = made(world, "card", "md", subject)
        caption = re.search(r"Training data, by hospital(.*)", text)
        assert caption is not None
        assert ("per patient, neighbours differ by one patient added or removed" in caption[1]) is bare


def before(inputs: ReportInputs, world: Stage) -> ReportInputs:
    """The same ledger until the heads left."""
    kept = [r for r in inputs.records if getattr(r.entry, "grant", "") != "g-heads"]
    return dataclasses.replace(inputs, told=LedgerView([encode(r) for r in kept], inputs.export.envelopes))


def test_patients_own_heads_are_never_told_as_images_that_stay_or_as_synthetic(
    world: Stage, inputs: ReportInputs
) -> None:
    """C-DeID-GAN: what leaves is the patient's own scan, and whoever has the brain knows whose it is."""
    pages = [
        [HtmlPage(as_html(report(shown))).text for shown in (inputs, before(inputs, world))]
        for report in (gdpr.processing, disclosure.annex)
    ]
    for after, old in pages:
        assert after.count(claim_descriptions.BRAIN) >= 3
        assert claim_descriptions.BRAIN not in old, "nothing is said of heads where none left"
    (record, old), (annex, _) = pages
    stays = "Images stay at the hospital."
    assert (stays in record, stays in old) == (False, True)
    assert "All other images stay at the hospital." in record
    assert "patients' own heads leave with another face" in record
    assert "another scan of the same brain links a head to its patient" in record
    assert "with another face, no synthetic images" in annex
    assert claim_descriptions.BRAIN in made(world, "card", "md", world.names["heads"]).partition("Caveats")[2]


def test_a_card_warns_of_what_its_own_promise_lacks_and_of_no_other(world: Stage, inputs: ReportInputs) -> None:
    noise = ("sum of the hospitals' epsilons", "Noise costs small groups")
    for subject in (world.run, world.shared):
        text = as_markdown(model_cards.card(inputs, subject))
        assert all(words in text for words in noise)
        assert "does not compose" not in text
    crowd, tested = (as_markdown(model_cards.card(inputs, world.names[name])) for name in ("eleven", "taught"))
    assert "k-anonymity does not compose" in crowd
    assert "There is no guarantee: an attack that was not tried" in tested
    assert not any(words in text for words in noise for text in (crowd, tested))


def test_a_card_says_what_was_revoked_of_the_hospitals_behind_it(world: Stage, inputs: ReportInputs) -> None:
    gone = {"site": "north", "number": "", "why": "stolen", "entry": 9, "at": 1_772_366_400}
    for subject, what in ((world.run, "Model card"), (world.names["eleven"], "Datasheet")):
        whole = inputs.item(subject)
        (told,) = revocations(Item(subject, {**whole.facts, "revoked": [gone]}))
        assert told.tone == "warn"
        assert told.text.startswith("The site north was revoked on ")

        def card(item: Item) -> str:
            made = model_cards._model_card(inputs, item, ModelFacts()) if model_cards.is_model(item) else None
            return as_markdown(made or model_cards._datasheet(inputs, item))

        assert what in card(whole)
        assert "was revoked" not in card(whole)
        assert "The site north was revoked on " in card(Item(subject, {**whole.facts, "revoked": [gone]}))


def test_only_methods_that_were_used_are_methods_in_use(world: Stage, inputs: ReportInputs) -> None:
    def told(shown: ReportInputs) -> list[str]:
        (section,) = (s for s in disclosure.annex(shown).sections if s.title == "Methods in use")
        return [words.partition(":")[0] for b in section.blocks if isinstance(b, Points) for words in b.items]

    noise, crowd = ["Differential privacy", "Differential privacy with shared noise"], "k-anonymous averaging"
    assert told(inputs) == [*noise, crowd, "Tested only", "Tested only"]
    assert told(before(inputs, world)) == [*noise, crowd, "Tested only"]
    nothing = dataclasses.replace(inputs, told=LedgerView((), ()))
    assert told(nothing) == []
    assert "No set and no model was released yet." in HtmlPage(as_html(disclosure.annex(nothing))).text
    assert "no set and no model was released yet" in HtmlPage(as_html(gdpr.processing(nothing))).text


def test_the_record_of_processing_knows_that_staff_are_in_the_ledger(inputs: ReportInputs) -> None:
    filled = dataclasses.replace(inputs, particulars=Particulars(subjects="Patients of two clinics"))
    for shown, subjects in ((inputs, "patients of the hospitals"), (filled, "Patients of two clinics")):
        (table,) = tables(gdpr.processing(shown), "Article 30")
        rows = {row[0]: row[1] for row in table.rows}
        assert rows["(c) categories of data subjects"].startswith(subjects)
        assert "; staff" in rows["(c) categories of data subjects"]
    for row in ("(c) categories of personal data", "(f) the ledger"):
        assert all(part in rows[row] for part in ("names under which they are appointed", "roles", "public keys"))
    assert "for as long as the ledger is kept" in " ".join(rows["(f) the ledger"].split())
    sections = {s.title: str(s.blocks) for s in gdpr.processing(inputs).sections}
    assert ["35(9)" in title for title, blocks in sections.items() if "Views of patients" in blocks] == [True]
