"""Short commands beside a running service and without one: the same words, the same exit status, the same ledger."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.runtime import open_runtime
from agent.service.ledger_access import SharedLedger
from agent.service.site import ACTS, site_app
from policies.governance import acts
from protos.common.errors import LazaretError
from protos.identity.key_files import pem, write_private
from protos.service.control_client import SOCKET, ServiceFaultError, connect
from tests.support.command_line import CommandResult, Typed, at, typed
from tests.support.federation_world import Federation, Site
from tests.support.ledger_world import Person
from tests.support.release_site import entries, filled, held, kept, killed, site
from tests.support.site_serving import serving

__all__ = ["site", "typed"]  # fixtures

PERSONS = {"dpo-1": "compliance", "physician-1": "hospital"}


def governed(typed: Typed, site: Site, folder: Path) -> list[CommandResult]:
    """Everything that persons decide by command at a site, and what of it is refused."""
    said = []

    def types(*words: object) -> None:
        said.append(typed(*at(site), *words))

    folder.mkdir(mode=0o700)
    for name, role in PERSONS.items():
        person = Person(name, role)
        write_private(folder / f"{name}.key", pem(person.key))
        types("ledger", "appoint", name, role, person.public.hex())
    types("ledger", "appoint", "dpo-1", "compliance", Person("eve", "compliance").public.hex())
    types("ledger", "appoint", "No/Name", "compliance", Person("eve", "compliance").public.hex())
    types("ledger", "propose", "site-a/rdp", "2.0")
    types("ledger", "propose", "site-z/rdp", "2.0")
    types("ledger", "limit", "site-a/rdp", "2.0", "--serial", "s-1")
    files = []
    for name in PERSONS:
        files.append(folder / f"{name}.approval")
        signing = ("--person", name, "--serial", "s-1", "--key", folder / f"{name}.key", "--out", files[-1])
        types("ledger", "sign", "limit", "site-a/rdp", "2.0", *signing)
    types("ledger", "approve", *files)
    types("ledger", "approve", folder / "dpo-1.key")
    types("ledger", "limit", "site-a/rdp", "2.0", "--serial", "s-1")
    types("ledger", "limit", "site-a/rdp", "900", "--serial", "s-2")
    types("ledger", "dismiss", "dpo-1")
    policy = site.home.root / "policy.toml"
    policy.write_text(policy.read_text().replace("approvals = []", 'approvals = ["compliance"]'))
    types("ledger", "amend")
    for word in ("send", "withdraw"):
        types("release", word, "r-none")
    types("release", "inspect", "r-none", "--out", folder / "none")
    return said


def test_every_decision_says_the_same_and_leaves_the_same_beside_a_service_and_without_one(
    typed: Typed, tmp_path: Path
) -> None:
    found = {}
    for way in ("here", "there"):
        (tmp_path / way).mkdir()
        with Federation(tmp_path / way) as federation:
            site = filled(federation.join("site-a"), tmp_path / way)
            if way == "here":
                said = governed(typed, site, tmp_path / way / "people")
            else:
                with serving(site):
                    said = governed(typed, site, tmp_path / way / "people")
            assert not (site.home.root / SOCKET).exists()
            # keys, and with them digests, are drawn anew in each world
            texts = [(one.status, re.sub(r"[0-9a-f]{40,}", "HEX", one.out + one.err)) for one in said]
            found[way] = (texts, entries(site))
    assert found["here"] == found["there"]
    statuses = [status for status, _ in found["here"][0]]
    assert statuses == [0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1]
    assert found["here"][1].count("LimitSet") == 1


def test_a_made_release_leaves_by_the_service_under_the_grant_that_it_had(
    typed: Typed, site: Site, tmp_path: Path
) -> None:
    killed(site, tmp_path, "before-submit")
    (name,) = kept(site)
    with serving(site):
        looked = typed(*at(site), "release", "inspect", name, "--out", tmp_path / "look")
        assert (looked.status, "missing: nobody" in looked.out) == (0, True), looked.err
        said = typed(*at(site), "release", "send", name, "--json")
        assert (said.status, said.line["admitted"], said.line["mechanism"]) == (0, True, "ksame"), said.err
    assert (held(site), kept(site)) == ((0, 1), [])
    assert list(site.federation.store.state.releases) == [name]


def test_a_made_release_is_withdrawn_by_the_service(typed: Typed, site: Site, tmp_path: Path) -> None:
    killed(site, tmp_path, "before-submit")
    (name,) = kept(site)
    with serving(site):
        assert typed(*at(site), "release", "withdraw", name).status == 0
    assert (held(site), kept(site)) == ((0, 1), [])
    assert site.federation.store.state.releases == {}


def test_a_coordinator_that_does_not_answer_is_one_sentence_there_too(
    typed: Typed, site: Site, tmp_path: Path
) -> None:
    killed(site, tmp_path, "before-submit")
    (name,) = kept(site)
    with serving(site):
        site.federation.server.stop(0).wait()
        said = typed(*at(site), "release", "send", name)
    assert (said.status, "no answer from the coordinator" in said.err) == (1, True), said.err
    assert kept(site) == [name]


@pytest.mark.parametrize("beside", [False, True])
def test_a_release_is_withdrawn_nowhere_while_the_coordinator_is_away(
    typed: Typed, site: Site, tmp_path: Path, beside: bool
) -> None:
    killed(site, tmp_path, "before-submit")
    (name,) = kept(site)
    with serving(site) if beside else nullcontext():
        site.federation.server.stop(0).wait()
        said = typed(*at(site), "release", "withdraw", name)
    assert said.status == 1, said.out
    assert (kept(site), held(site)) == ([name], (1, 0)), "nothing is spent or forgotten"


def test_the_socket_knows_the_acts_and_no_others(site: Site) -> None:
    with open_runtime(site.home.root, lambda *_: None) as runtime:
        app = site_app(site.home, SharedLedger(runtime), runtime.log)
    paths = {path.removeprefix("/v1").removeprefix("/") for path in app.openapi()["paths"]}
    assert paths == {"", "health", *acts.ACTS, *ACTS}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.sampled_from(["", "main", "r-1", "dpo-1", "site-a/rdp", "2.0", "{}", "\0", "../..", "\ud800"]) | st.text(
    max_size=9
)
JOB: dict[str, Any] = {
    "words": ["tune"], "project": "main", "by": "me", "price": {}, "cuda": False, "key": "", "priority": "low",
}  # fmt: skip
OF_KIND: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: st.integers(-1, 3) | st.integers(),
    bool: st.booleans(),
    float: st.floats(),
    dict[str, Any]: st.fixed_dictionaries({}, optional={name: st.just(value) | JSON for name, value in JOB.items()}),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An act, with its own fields: of their kinds, or of any, or left out."""
    name = draw(st.sampled_from(sorted({**acts.ACTS, **ACTS})))
    act = {**acts.ACTS, **ACTS}[name]
    hints, fields = get_type_hints(act), list(inspect.signature(act).parameters)[1:]
    kinds = {field: OF_KIND.get(hints[field], JSON) for field in fields}
    return name, draw(
        st.fixed_dictionaries(kinds)
        | st.fixed_dictionaries({}, optional={field: kind | JSON for field, kind in kinds.items()})
    )


def test_whatever_is_asked_for_gets_an_answer_or_a_sentence(site: Site) -> None:
    """A fuzz of every act of the socket: nothing that may be said there is a fault of the service."""
    with serving(site):

        @settings(max_examples=400, deadline=None, database=None)
        @given(requests())
        @example(("jobs/add", {"job": {}}))
        @example(("makings/reserve", {"statement": "\ud800"}))
        @example(("jobs/add", {"job": {**JOB, "words": []}}))
        @example(("jobs/propose", {"job": {**JOB, "price": [1]}}))
        def ask(asked: tuple[str, dict[str, Any]]) -> None:
            name, fields = asked
            service = connect(site.home.root)
            assert service is not None
            with service:
                try:
                    service.ask(f"/{name}", fields)
                except ServiceFaultError as fault:
                    raise AssertionError(asked) from fault
                except LazaretError:
                    pass  # a sentence

        ask()
        service = connect(site.home.root)
        assert service is not None
        with service:
            assert service.ask("/jobs/list", {})["broken"] == []
