"""The Python client beside a serving agent: what it tells, what it hands out, and what it cannot do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import client
from agent.cli import detach, main
from agent.cli.detach import WouldBeRefusedError
from agent.client import JobNotDoneError, NetworkWeights, NoServiceError, ReleasedSet, Site, SiteJob
from agent.errors import CommandError, SiteConfigError, SiteStorageError
from agent.service.job_outputs import keep_released
from agent.service.jobs import JobStateError, JobStore
from agent.storage import projects
from protos.artifacts.arrays import unpack_images
from protos.common.errors import InvariantError, LazaretError
from protos.identity.key_files import pem, write_private
from protos.service.control_client import ServiceRefusedError
from protos.service.control_socket import control_socket
from tests.support.command_line import Typed, at, typed
from tests.support.control_service import Log, app
from tests.support.federation_world import Site as EnrolledSite
from tests.support.ledger_world import Person
from tests.support.picture_folders import write_pictures
from tests.support.release_site import PATIENTS, entries, held, kept, site
from tests.support.site_serving import serving

__all__ = ["site", "typed"]  # fixtures

NOBODY = 65534
SOON = {"every_s": 0.1}


@pytest.fixture
def ward(site: EnrolledSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EnrolledSite]:
    """The site, served with its jobs; a notebook runs in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    with serving(site, jobs=True):
        yield site


def ksame(**more: Any) -> dict[str, Any]:
    return {"basis": "basis.safetensors", "k": 5, "modality": "OT", **more}


def governed(typed: Typed, ward: EnrolledSite, folder: Path) -> None:
    """Somebody of compliance must approve what leaves."""
    person = Person("dpo-1", "compliance")
    write_private(folder / "dpo-1.key", pem(person.key))
    assert typed(*at(ward), "ledger", "appoint", person.name, person.role, person.public.hex()).status == 0
    policy = ward.home.root / "policy.toml"
    policy.write_text(policy.read_text().replace("approvals = []", 'approvals = ["compliance"]'))
    assert typed(*at(ward), "ledger", "amend").status == 0


# -- from the cohort to the set


def test_a_release_goes_from_its_price_to_its_images(ward: EnrolledSite, typed: Typed) -> None:
    one = Site("site-a")
    assert repr(one) == "Site(site-a)"
    (ready,) = [found for found in one.cohort() if found.state == "eligible"]
    (line,) = [
        found for found in json.loads(typed(*at(ward), "cohort", "--json").out) if found["state"] == "eligible"
    ]
    assert (ready.patients, ready.modality) == (line["patients"], line["modality"]) == (PATIENTS, "OT")
    quoted = one.price("ksame", **ksame(sheet="none-yet.html"))
    assert (quoted.claim["kind"], quoted.amount, quoted.left, quoted.findings) == ("k-anonymous", 1, 1, ())
    assert (quoted.samples, quoted.shape) == (4, (8, 8))
    assert "Reserved" not in entries(ward)

    job = one.release("ksame", **ksame())
    seen = list(job.follow(**SOON))
    assert job.wait(**SOON) == seen[-1], "it has ended"
    assert (seen[-1].state, seen[-1].command, seen[-1].price["amount"]) == ("done", "release ksame", 1)
    assert [event.state for event in job.history()][:2] == ["queued", "running"]
    assert [status.number for status in one.jobs()] == [one.job(job.number).number] == [1]

    made = job.fetch()
    assert isinstance(made, ReleasedSet)
    admitted = [path.read_bytes() for path in ward.federation.home.releases.rglob("*") if path.is_file()]
    assert made.file in admitted, "as the coordinator has it"
    images, labels = unpack_images(made.file)
    assert (made.samples == images).all()
    assert (made.form, made.labels) == ("png", labels)
    assert made.tensor().shape == (len(labels), 1, 8, 8)
    assert made.tensor().dtype == torch.uint8
    assert list(made.frame()["label"]) == list(labels)
    assert "samples" not in repr(made)

    (account,) = [found for found in one.budgets() if found.kind == "k"]
    assert (account.limit, account.spent, account.held, account.left) == (1, 1, 0, 0)
    told = one.ledger()
    (last,) = [entry for entry in told if entry.kind == "admitted"]
    assert (last.values["release"], told[last.seq]) == (seen[-1].release, last)
    shown = typed(*at(ward), "ledger", "show", "--json").line["entries"]
    assert shown[last.seq] == {"seq": last.seq, "at": last.at, "type": last.kind, **last.values}

    quoted = one.price("ksame", **ksame())
    assert {finding.rule for finding in quoted.findings} == {"budget", "cohort"}
    with pytest.raises(WouldBeRefusedError, match=r"so it is not queued: .*budget: "):
        one.release("ksame", **ksame())
    assert len(one.jobs()) == 1


def test_after_an_opt_out_a_set_is_not_handed_out_any_more(ward: EnrolledSite) -> None:
    job = Site("site-a").release("ksame", **ksame())
    job.wait(**SOON)
    with closing(projects.open_vault(ward.home, "main")) as vault:
        person = next(iter(vault.heads())).person
    projects.opt_out(ward.home, person)
    with pytest.raises(SiteStorageError, match="has left, and is not here: it is deleted, as after an opt-out"):
        job.fetch()


def test_a_network_is_trained_from_options_in_a_file_or_a_dictionary(
    ward: EnrolledSite, typed: Typed, tmp_path: Path
) -> None:
    dice = np.random.default_rng(3)
    write_pictures(tmp_path, {f"{n}.png": dice.integers(0, 256, (16, 16), np.uint8) for n in range(24)})
    config = {"pictures": "pictures", "side": 16, "grey": True, "steps": 9}
    (tmp_path / "features.toml").write_text('pictures = "pictures"\nside = 16\ngrey = true\nsteps = 9\n')
    one = Site("site-a")
    jobs = [one.train("features", config, steps=2), one.train("features", "features.toml", steps=2)]
    with pytest.raises(SiteStorageError, match="job 2 has written no network"):
        jobs[1].fetch()
    made = []
    for job in jobs:
        assert job.wait(**SOON).state == "done", (JobStore(ward.home.root).folder(job.number) / "stderr").read_text()
        made.append(job.fetch())
    first, second = made
    assert isinstance(first, NetworkWeights)
    assert isinstance(second, NetworkWeights)
    assert first.sha256 == second.sha256 == hashlib.sha256(first.file).hexdigest(), "the same training"
    assert first.tensors().keys() == first.arrays.keys()
    assert all((first.tensors()[name].numpy() == one).all() for name, one in first.arrays.items())
    assert typed(*at(ward), "jobs", "fetch", 1, "--out", tmp_path / "fetched").status == 0
    assert (tmp_path / "fetched" / "features" / "features.safetensors").read_bytes() == first.file
    (file,) = (JobStore(ward.home.root).folder(1) / "out").glob("*/features.safetensors")
    file.write_bytes(b"\0" + first.file[1:])
    with pytest.raises(SiteStorageError, match="was changed since it was trained"):
        jobs[0].fetch()


# -- what it cannot do


def test_what_persons_must_approve_waits_for_them_and_is_not_handed_out(
    ward: EnrolledSite, typed: Typed, tmp_path: Path
) -> None:
    governed(typed, ward, tmp_path)
    one = Site("site-a")
    job = one.release("ksame", **ksame())
    status = job.wait(**SOON)
    assert (status.state, status.reason) == ("made", "persons must approve it, then it is sent")
    assert (kept(ward), held(ward)) == ([status.release], (1, 0))
    with pytest.raises(JobStateError, match=f"has not left; `release inspect {status.release}` shows it"):
        job.fetch()
    with pytest.raises(ServiceRefusedError, match="release withdraw"):
        job.cancel(spend=True)
    with pytest.raises(ServiceRefusedError, match="nothing is to be tried again"):
        job.retry()
    assert (kept(ward), held(ward)) == ([status.release], (1, 0)), "nothing has left, and nothing is spent"

    assert typed(*at(ward), "release", "send", status.release).status == 1, "not by who runs the site alone either"
    with closing(projects.open_vault(ward.home, "main")) as vault:
        digest = json.loads(vault.note("pending")[status.release]["statement"])["predicate"]["artifact_sha256"]
    signing = ("--serial", status.release, "--person", "dpo-1", "--key", tmp_path / "dpo-1.key")
    words = ("ledger", "sign", "release", status.release, digest, *signing, "--out", tmp_path / "yes")
    assert typed(*at(ward), *words).status == 0
    assert typed(*at(ward), "ledger", "approve", tmp_path / "yes").status == 0
    with pytest.raises(JobStateError, match="has not left"):
        job.fetch()
    assert typed(*at(ward), "release", "send", status.release).status == 0
    made = job.fetch()
    assert hashlib.sha256(made.file).hexdigest() == digest, "what was approved, and nothing else"


def test_a_record_that_says_done_is_no_leave(ward: EnrolledSite, typed: Typed, tmp_path: Path) -> None:
    """The ledger decides: whoever edits the job's record, and lays bytes into the vault, is not handed them."""
    governed(typed, ward, tmp_path)
    job = Site("site-a").release("ksame", **ksame())
    job.wait(**SOON)
    with closing(projects.open_vault(ward.home, "main")) as vault:
        vault.place(f"job/{job.number}/release").write(b"made, and not admitted")
    JobStore(ward.home.root).change(job.number, lambda known: known.now("done"))
    with pytest.raises(JobStateError, match="job 1 is done: its release has not left"):
        job.fetch()


def test_the_client_has_no_call_that_approves_sends_or_spends() -> None:
    """What it can do is listed here: a new call is a decision."""
    found = {name for kind in (Site, SiteJob) for name in vars(kind) if not name.startswith("_")}
    of_site = {"home", "cohort", "ledger", "budgets", "price", "release", "train", "jobs", "job"}
    of_job = {"site", "number", "status", "history", "follow", "wait", "cancel", "retry", "fetch"}
    assert found | {"home"} == of_site | of_job
    source = Path(client.__file__).read_text()
    for act in ("ledger/", "releases/", "makings/"):
        assert f'"{act}' not in source, "acts of other kinds are not asked for"


@pytest.mark.parametrize("name", ["blank", "config", "detach", "dry_run", "home", "json", "out"])
def test_an_option_that_the_client_sets_is_refused(ward: EnrolledSite, name: str) -> None:
    told: dict[str, Any] = {name: "x"}
    with pytest.raises(CommandError, match=f"{name}: the client sets this itself"):
        Site("site-a").train("features", told)
    if name != "config":
        with pytest.raises(CommandError, match=f"{name}: the client sets this itself"):
            Site("site-a").release("ksame", **ksame(), **told)


def test_what_leaves_while_somebody_opts_out_is_not_kept(ward: EnrolledSite, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Site("site-a").release("ksame", **ksame())
    job.wait(**SOON)
    release, raw = job.status().release, job.fetch().file
    with closing(projects.open_vault(ward.home, "main")) as vault:
        before, person = vault.opted_out(), next(iter(vault.heads())).person
    projects.opt_out(ward.home, person)
    keep_released(ward.home, release, raw, before)
    with pytest.raises(SiteStorageError, match="is not here"):
        job.fetch()
    keep_released(ward.home, release, raw, before | {person})
    assert job.fetch().file == raw


# -- jobs


def test_a_job_that_nobody_runs_is_cancelled_and_begun_anew(
    site: EnrolledSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (site.home.root / "jobs.toml").write_text('hours = "00:00-00:01"\nmemory_gib = 100000.0\n')
    with serving(site, jobs=True):
        job = Site("site-a").release("ksame", **ksame())
        waiting = job.wait(timeout_s=0.0)
        assert (waiting.state, waiting.stopped, waiting.reason != "") == ("queued", False, True)
        with pytest.raises(JobStateError, match="job 1 is queued: its release has not left; `jobs show 1`"):
            job.fetch()
        job.cancel()
        with pytest.raises(JobNotDoneError, match=r"job 1 is cancelled; `retry\(\)` tries again"):
            job.wait()
        with pytest.raises(ServiceRefusedError, match="has ended already"):
            job.cancel()
        again = job.retry()
        assert (again.number, again.status().state, again.status().proposed_by) == (2, "queued", job.status().by)
        with pytest.raises(ServiceRefusedError, match="there is no job 7"):
            Site("site-a").job(7)
    with pytest.raises(NoServiceError):
        job.status()


def test_a_failed_job_is_an_error_with_its_own_sentence(ward: EnrolledSite, tmp_path: Path) -> None:
    write_pictures(tmp_path, {"one.png": np.zeros((16, 16), np.uint8)})
    job = Site("site-a").train("recogniser", pictures="pictures", side=16, identities="basis.safetensors", steps=1)
    with pytest.raises(JobNotDoneError, match=r"job 1 is refused: .*basis"):
        job.wait(**SOON)


def test_a_job_that_writes_no_release_has_none_to_fetch(ward: EnrolledSite, typed: Typed, tmp_path: Path) -> None:
    words = ["release", "ksame", "--basis", tmp_path / "basis.safetensors", "--k", 5, "--modality", "OT", "--detach"]
    assert typed(*at(ward), *words, "--json").status == 0
    job = Site("site-a").job(1)
    job.wait(**SOON)
    with pytest.raises(JobStateError, match=r"was told to write no release: `release \.\.\. --out FILE"):
        job.fetch()


# -- configurations


def test_a_configuration_of_tables_is_read_as_its_file_would_be(
    ward: EnrolledSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "generator.safetensors").write_bytes(b"weights")
    tables = {
        "mechanism": "ksalsa",
        "cohort": {"modality": "OT", "labels": ["a b", 'c"\\d']},
        "clusters": {"k": np.int64(5), "l_diversity": 1},
        "networks": {"generator": "stylegan2-ada:nets/generator.safetensors", "style": "random"},
        "alignment": {"rate": 1e-5, "bf16": False},
    }
    seen: list[dict[str, Any]] = []

    def look(arguments: Any) -> int:
        seen.append(tomllib.loads(arguments.config.read_text()))
        raise SiteConfigError("looked")

    monkeypatch.setattr(main, "carry_out", look)
    for act in (Site("site-a").price, Site("site-a").release):
        with pytest.raises(SiteConfigError, match="looked"):
            act("ksalsa", tables)
    priced, queued = seen
    assert priced["networks"].pop("generator") == f"stylegan2-ada:{tmp_path / 'nets' / 'generator.safetensors'}"
    assert queued["networks"].pop("generator") == "stylegan2-ada:1-generator.safetensors", "a copy, beside its copy"
    expected: Any = {**tables, "networks": {"style": "random"}}
    assert priced == queued == expected
    assert not list((ward.home.root / "jobs").glob("[0-9]*")), "and nothing is queued"


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_every_value_is_read_back_as_it_was(value: Any) -> None:
    assert tomllib.loads(f"value = {client._toml(value)}")["value"] == value


@pytest.mark.parametrize("value", [None, {"a": object()}, [b"raw"]])
def test_what_toml_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(CommandError, match="a configuration holds tables"):
        client._toml({"key": [value]})


# -- errors


def test_without_a_service_one_sentence_says_how_to_start_it(site: EnrolledSite, tmp_path: Path) -> None:
    told = "no service runs in site-a: start it with `lazaret-agent --home site-a serve`"
    for home in (site.home.root, tmp_path / "site-a"):
        with pytest.raises(NoServiceError, match=told):
            Site(home)


def test_a_coordinators_service_is_none_of_a_site(tmp_path: Path) -> None:
    made = app()
    with control_socket(tmp_path, made, Log()):
        Site(tmp_path)
    made = app()
    for route in made.routes:
        if route.path == "/v1":
            made.routes.remove(route)
    made.get("/v1")(lambda: {"api": 1, "side": "coordinator"})
    with control_socket(tmp_path, made, Log()), pytest.raises(CommandError, match="is a coordinator's directory"):
        Site(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_another_user_of_the_machine_is_refused(tmp_path: Path) -> None:
    program = f"""
import os, sys
from agent.client import Site
os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    Site(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
"""
    with control_socket(tmp_path, app(), Log()):
        for folder in (tmp_path, *tmp_path.parents[:-1]):
            if folder.owner() == "root" and folder.name.startswith(("pytest", "test")):
                folder.chmod(0o755)
        words = [sys.executable, "-c", program, str(tmp_path)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"ServiceRefusedError the service in {tmp_path.name} runs under another user"), said


def test_what_is_wrong_with_the_words_is_one_sentence(ward: EnrolledSite) -> None:
    one = Site("site-a")
    for act, told in (
        (lambda: one.price("ksame", k=5, modality="OT"), "required: --basis"),
        (lambda: one.price("ksame", **ksame(colour="red")), "unrecognized arguments: --colour=red"),
        (lambda: one.release("ksame", **ksame(k="five")), "invalid int value: 'five'"),
        (lambda: one.price("ksalsi"), "invalid choice: 'ksalsi'"),
        (lambda: one.release("send", out_of="r-1"), "unrecognized|required: release"),
        (lambda: one.price("withdraw"), "required: release"),
        (lambda: one.release("inspect"), "required: release"),
        (lambda: one.train("features", "nowhere.toml"), "nowhere.toml: not a TOML file"),
        (lambda: one.release("ksame", **ksame(basis="nowhere")), "nowhere: no such file"),
        (lambda: one.price("ksame", **ksame(basis="nowhere")), "nowhere: no such file"),
        (
            lambda: one.price("ksalsa", {"mechanism": "ksalsa", "networks": {"k": 5}}),
            "ksalsa.toml: .*networks: unknown keys: k",
        ),
        (lambda: one.cohort("retina"), "there is no project retina"),
    ):
        with pytest.raises(LazaretError, match=told):
            act()
    assert one.jobs() == ()


def test_a_fault_says_its_class_and_nothing_that_it_holds(
    ward: EnrolledSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P14: a notebook keeps the text of every error, and is passed on."""
    for fault in (ValueError("patient 7"), InvariantError("patient 7")):

        def broken(*_: Any, fault: Exception = fault) -> Any:
            raise fault

        monkeypatch.setattr(detach, "dry_run", broken)
        with pytest.raises(InvariantError) as told:
            Site("site-a").price("ksame", **ksame())
        assert str(told.value) == f"internal fault ({type(fault).__name__})"


def test_without_pandas_the_labels_are_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    made = ReleasedSet("png-rgb", np.zeros((2, 4, 5, 3), np.uint8), ("a", "b"), b"")
    with pytest.raises(CommandError, match="pandas is not installed: `pip install pandas`, or use `labels`"):
        made.frame()
    assert made.tensor().shape == (2, 3, 4, 5)
