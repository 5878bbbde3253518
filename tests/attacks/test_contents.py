"""What is inside: archives, pictures and weights that nobody honest makes; sealed and granted all right."""

from __future__ import annotations

import itertools
import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.gateway.service import inspect_artifact
from coordinator.storage.directory import create
from policies.review.rules import Finding
from protos.artifacts.arrays import pack_vector
from protos.artifacts.chunks import CHUNK
from protos.artifacts.strict_safetensors import Architecture, pack_weights
from protos.encryption.hpke import fingerprint, make_reader, seal_to
from tests.attacks.artifacts import PICTURE, bomb_png, shard, weights
from tests.attacks.ground import Ground, now
from tests.support.federation_world import Federation, Site
from tests.support.ledger_world import DP, policy

LABEL = ("00000.txt", b"0")
_COUNT = itertools.count()


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One federation for all of them; each attack is a site's of its own, since its grant is spent by it."""
    with Federation(tmp_path_factory.mktemp("federation")) as made:
        attacked = Ground(made)
        yield attacked
        attacked.audit()


@pytest.fixture
def site(ground: Ground) -> Site:
    return ground.federation.join(f"site-{next(_COUNT)}")


@pytest.fixture
def grant(site: Site) -> str:
    return f"grant-{site.hospital.name}"


GOOD = shard(("00000.png", PICTURE), LABEL)


def findings(ground: Ground, site: Site, artifact: bytes) -> list[Finding]:
    """The coordinator's verdict on an image set that was granted; its grant is spent by it."""
    grant = f"grant-{site.hospital.name}"
    site.reserved(grant)
    with ground.refused("artifact_malformed", spends=grant):
        verdict = site.gateway().submit("k", site.seal(site.release(grant, artifact)), artifact)
    assert not list(ground.federation.uploads.root.glob("*/*/*"))
    return list(verdict.findings)


def test_the_set_that_the_attacks_bend_is_admitted_unbent(ground: Ground, site: Site, grant: str) -> None:
    site.reserved(grant)
    release = site.release(grant, GOOD)
    ground.honest.add(release.release)
    assert site.gateway().submit("k", site.seal(release), GOOD).admitted


NAMES = ("../../canary", "/tmp/canary", "a/../../canary.png", "..\\canary.png", "00000.png/x", "sub/00000.png")


@pytest.mark.parametrize("name", NAMES)
def test_a_path_in_the_place_of_a_name_is_refused(ground: Ground, site: Site, name: str, tmp_path: Path) -> None:
    (found,) = findings(ground, site, shard((name, PICTURE), LABEL))
    assert found.detail == "a member's name is a path"
    assert not list(tmp_path.rglob("*canary*"))


@pytest.mark.parametrize(
    ("kind", "link", "words"),
    [
        (tarfile.SYMTYPE, "/etc/passwd", "a symbolic link"),
        (tarfile.LNKTYPE, "00000.txt", "a hard link"),
        (tarfile.CHRTYPE, "", "a device"),
        (tarfile.BLKTYPE, "", "a device"),
        (tarfile.FIFOTYPE, "", "a pipe"),
        (tarfile.DIRTYPE, "", "a path"),
        (tarfile.XHDTYPE, "", "an extended header"),
        (tarfile.GNUTYPE_LONGNAME, "", "an extended header"),
        (tarfile.GNUTYPE_SPARSE, "", "an extended header"),
    ],
)
def test_a_member_that_is_no_plain_file_is_refused(
    ground: Ground, site: Site, kind: bytes, link: str, words: str
) -> None:
    (found,) = findings(ground, site, shard(("00000.png", b""), LABEL, kind=kind, link=link))
    assert words in found.detail


def _bent(at: int, new: bytes) -> bytes:
    """The good set with some bytes of its first header changed, and the header's checksum right."""
    head = bytearray(GOOD[:512])
    head[at : at + len(new)] = new
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + GOOD[512:]


HIDDEN = [
    (_bent(108, b"0001750\0"), "owner"),
    (_bent(136, b"14700000000\0"), "time"),
    (_bent(265, b"patient"), "owner's name"),
    (_bent(345, b"prefix"), "prefix"),
    (_bent(500, b"hidden"), "padding of the header"),
    (_bent(124, b"77777777777\0"), "length"),
    (GOOD[:-1] + b"x", "end"),
    (GOOD + bytes(10_240), "longer"),
    (shard(("00000.png", PICTURE), LABEL, ("extra.bin", b"covert")), "further member"),
    (shard(LABEL, ("00000.png", PICTURE)), "order"),
    (shard(("00000.png", PICTURE), ("00000.txt", b"0" * 33)), "long label"),
    (shard(("00000.png", PICTURE), ("00000.txt", b"\xc3\xa9")), "label"),
    (shard(("00000.png", PICTURE[:-12] + b"\0\0\0\x05tEXtMRN 1" + bytes(4) + PICTURE[-12:]), LABEL), "text chunk"),
    (shard(("00000.png", PICTURE + b"behind"), LABEL), "behind a picture"),
    (shard(("00000.zip", b"PK\x03\x04" + bytes(100)), LABEL), "zip"),
    (b"PK\x03\x04" + bytes(2000), "zip"),
    (b"\x1f\x8b\x08" + bytes(2000), "gzip"),
    (struct.pack("<Q", 10) + bytes(2000), "weights"),
]


@pytest.mark.parametrize(("artifact", "where"), HIDDEN, ids=[where for _, where in HIDDEN])
def test_no_byte_of_an_archive_is_free_for_a_second_message(
    ground: Ground, site: Site, artifact: bytes, where: str
) -> None:
    assert artifact != GOOD, where
    assert findings(ground, site, artifact)


@pytest.mark.parametrize(("side", "words"), [(2048, "compression"), (20_000, "sides of 1 to"), (2**31 - 1, "sides")])
def test_a_picture_that_inflates_is_refused_uninflated(ground: Ground, site: Site, side: int, words: str) -> None:
    """A kilobyte or so for gigapixels: nothing is inflated, since the one form holds nothing deflated."""
    bomb = bytearray(bomb_png(min(side, 2048), min(side, 2048)))
    bomb[16:24] = struct.pack(">II", side, side)
    artifact = shard(("00000.png", bytes(bomb)), LABEL)
    assert len(artifact) < 1 << 15
    (found,) = findings(ground, site, artifact)
    assert words in found.detail


VECTOR = np.linspace(-1, 1, 10).astype(np.float32)
HONEST = pack_vector(VECTOR)
_FLAT = {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}
_BODY = VECTOR.tobytes()


def _with(values: list[float]) -> bytes:
    changed = VECTOR.copy()
    changed[: len(values)] = values
    return HONEST[: -len(_BODY)] + changed.tobytes()


UPDATES = {
    "nan": _with([float("nan")]),
    "infinite": _with([1.0, float("inf")]),
    "minus infinite": _with([1.0, 1.0, float("-inf")]),
    "signalling nan": HONEST[:-4] + b"\x01\x00\x80\x7f",
    "renamed": weights({"flat2": _FLAT}, _BODY),
    "renamed to a patient": weights({"MRN-4711": _FLAT}, _BODY),
    "extra tensor": weights(
        {"flat": _FLAT, "covert": {"dtype": "F32", "shape": [10], "data_offsets": [40, 80]}}, _BODY * 2
    ),
    "empty extra tensor": weights(
        {"flat": _FLAT, "covert": {"dtype": "F32", "shape": [0], "data_offsets": [40, 40]}}, _BODY
    ),
    "metadata": weights({"__metadata__": {"note": "MRN 4711"}, "flat": _FLAT}, _BODY),
    "empty metadata": weights({"__metadata__": {}, "flat": _FLAT}, _BODY),
    "duplicate key": weights('{"flat":%s,"flat":%s}' % ((json.dumps(_FLAT, separators=(",", ":")),) * 2), _BODY),
    "other type": weights({"flat": {"dtype": "F64", "shape": [5], "data_offsets": [0, 40]}}, _BODY),
    "other shape": weights({"flat": {"dtype": "F32", "shape": [2, 5], "data_offsets": [0, 40]}}, _BODY),
    "hole": weights({"flat": {"dtype": "F32", "shape": [10], "data_offsets": [8, 48]}}, bytes(8) + _BODY),
    "behind": HONEST + b"covert channel",
    "spaces": weights({"flat": _FLAT}, _BODY)[:8] + b"",
    "other spelling": weights(json.dumps({"flat": _FLAT}), _BODY),
    "header of 2^63": b"\xff" * 7 + b"\x7f" + HONEST[8:],
    "pickle": b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}


@pytest.mark.parametrize("what", sorted(UPDATES))
def test_an_update_with_anything_but_finite_numbers_in_the_one_form_is_refused(
    ground: Ground, site: Site, grant: str, what: str
) -> None:
    artifact = UPDATES[what]
    site.reserved(grant, DP, "federated", "run-1")
    with ground.refused("artifact_malformed"):
        release = site.update(grant, artifact, 15, run="run-1", round=1)
        verdict = site.gateway().submit("k", site.seal(release), artifact)
    said = verdict.findings[0].detail
    assert not any(word in said for word in ("MRN", "4711", "covert", "flat2")), "a refusal quotes nothing"


def test_the_update_that_the_attacks_bend_is_admitted_unbent(ground: Ground, site: Site, grant: str) -> None:
    site.reserved(grant, DP, "federated", "run-1")
    release = site.update(grant, HONEST, 15, run="run-1", round=1)
    assert weights({"flat": _FLAT}, _BODY) == HONEST
    assert site.gateway().submit("k", site.seal(release), HONEST).admitted
    ground.updates.add(release.release)


LAYERS = {"a.weight": np.ones((3, 2), np.float32), "b.bias": np.zeros(4, np.float32)}
MODELS = {
    "renamed": {"a.weights": LAYERS["a.weight"], "b.bias": LAYERS["b.bias"]},
    "extra": {**LAYERS, "c.covert": np.zeros(1, np.float32)},
    "missing": {"a.weight": LAYERS["a.weight"]},
    "turned": {"a.weight": LAYERS["a.weight"].T.copy(), "b.bias": LAYERS["b.bias"]},
    "nan": {**LAYERS, "b.bias": np.full(4, np.nan, np.float32)},
    "float16": {**LAYERS, "b.bias": np.zeros(8, np.float16)},
}


@pytest.mark.parametrize("what", ["", *sorted(MODELS)])
def test_a_model_has_exactly_the_tensors_of_an_approved_architecture(site: Site, tmp_path: Path, what: str) -> None:
    """As the service looks into an artifact of that type, in its sandbox."""
    known = tmp_path / "architectures"
    known.mkdir()
    shape = Architecture.of({name: ("F32", array.shape) for name, array in LAYERS.items()})
    (known / "small.json").write_bytes(shape.encode())
    path = tmp_path / "model"
    body = _packed(MODELS[what]) if what else pack_weights(LAYERS)
    path.write_bytes(body)
    release = site.release("grant-1", body, artifact_type="model")
    rules = {finding.rule for finding in inspect_artifact(path, release, known)}
    assert rules == ({"artifact_malformed"} if what == "nan" else {"architecture"} if what else set())
    assert bool(rules) is bool(what)


def _packed(tensors: dict[str, np.ndarray]) -> bytes:  # type: ignore[type-arg]
    """As the library would, values unchecked."""
    header, body = {}, b""
    for name, array in sorted(tensors.items()):
        kind = {"float32": "F32", "float16": "F16"}[array.dtype.name]
        ends = [len(body), len(body) + array.nbytes]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": ends}
        body += array.tobytes()
    return weights(header, body)


def test_an_artifact_of_a_type_that_the_mechanism_does_not_make_is_refused(
    ground: Ground, site: Site, grant: str
) -> None:
    site.reserved(grant)
    for number, kind in enumerate(("model", "update", "volume-set", "masked-update", "pickle")):
        before = len(ground.federation.findings())
        release = site.release(grant, GOOD, artifact_type=kind)
        assert not site.gateway().submit(f"k{number}", site.seal(release), GOOD).admitted
        assert "artifact_type" in ground.federation.findings()[before], kind


READER, STRANGER = make_reader()[1], make_reader()[1]
NAMED = policy(readers=f'["{fingerprint(READER)}"]')


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A federation that lets one reader have what the coordinator cannot look into."""
    root = tmp_path_factory.mktemp("closed")
    create(root / "coordinator", 'listen = "127.0.0.1:0"\n', NAMED, now())
    with Federation(root) as made:
        attacked = Ground(made)
        yield attacked
        attacked.audit()


def _sealed(folder: Path, body: bytes, reader: bytes = READER) -> bytes:
    seal_to(reader, body, folder / "made")
    return (folder / "made").read_bytes()


PLAIN = b"patient 4711, in clear: not sealed to anybody"
CLAIMED = {
    "plain text": lambda _: PLAIN,
    "an image set in clear": lambda _: GOOD,
    "a head and too little behind it": lambda folder: _sealed(folder, b"")[:-16] + PLAIN[:15],
    "encrypted to another recipient": lambda folder: _sealed(folder, GOOD, STRANGER),
    "a byte too many": lambda folder: _sealed(folder, bytes(CHUNK)) + b"x",
    "cut within a tag": lambda folder: _sealed(folder, b"")[:-1],
}


@pytest.mark.parametrize("what", sorted(CLAIMED))
def test_what_is_declared_as_sealed_to_a_reader_and_is_not_is_refused(
    closed: Ground, tmp_path: Path, what: str
) -> None:
    """The name of a reader does not switch the look inside off: what has not the form of sealed bytes is refused."""
    site, artifact = closed.federation.join(f"site-{next(_COUNT)}", NAMED), CLAIMED[what](tmp_path)
    grant = f"grant-{site.hospital.name}"
    site.reserved(grant)
    with closed.refused("not_sealed", spends=grant):
        release = site.release(grant, artifact, reader=fingerprint(READER))
        verdict = site.gateway().submit("k", site.seal(release), artifact)
    assert [found.rule for found in verdict.findings] == ["not_sealed"]
    assert "4711" not in str(verdict.findings)


def test_what_is_sealed_to_the_reader_is_admitted(closed: Ground, tmp_path: Path) -> None:
    site, artifact = closed.federation.join(f"site-{next(_COUNT)}", NAMED), _sealed(tmp_path, GOOD)
    site.reserved(f"grant-{site.hospital.name}")
    release = site.release(f"grant-{site.hospital.name}", artifact, reader=fingerprint(READER))
    closed.honest.add(release.release)
    assert site.gateway().submit("k", site.seal(release), artifact).admitted
