"""The bundle's bill of materials, CycloneDX 1.6: what every wheel is, its licence, its digest and what it needs."""

from __future__ import annotations

import datetime as dt
import email.message
import email.parser
import hashlib
import json
import uuid
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from deploy.bundle.closure import BundleError

_SAID: Final = "License ::"  # a classifier, of packages that write no expression
_MOST: Final = 120  # characters of a licence's name: some packages put the whole text there


def metadata(wheel: Path) -> email.message.Message:
    """A wheel's METADATA.

    Raises:
        BundleError: it has none, or several.
    """
    with zipfile.ZipFile(wheel) as packed:
        names = [n for n in packed.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")]
        if len(names) != 1:
            raise BundleError(f"{wheel.name} has no METADATA of its own")
        return email.parser.Parser().parsestr(packed.read(names[0]).decode())


def sbom(wheels: Sequence[Path], about: NormalizedName, when: dt.datetime) -> str:
    """The document, as JSON that its own schema admits; the same text for the same wheels.

    Args:
        wheels: every wheel of the bundle.
        about: the name of the one that is ours.
        when: the time that it shall state, UTC.
    Raises:
        BundleError: a wheel says too little of itself, or the document does not fit its schema.
    """
    said = {canonicalize_name(str(m["Name"])): (wheel, m) for wheel in wheels for m in [metadata(wheel)]}
    parts = {name: _component(wheel, of) for name, (wheel, of) in sorted(said.items())}
    digests = "".join(str(one.hashes[0].content) for one in parts.values())
    serial = uuid.uuid5(uuid.NAMESPACE_OID, digests)
    bom = Bom(components=parts.values(), serial_number=serial, metadata=BomMetaData(timestamp=when))
    bom.metadata.component = Component(
        name=about, version=parts[about].version, type=ComponentType.APPLICATION, bom_ref="bundle"
    )
    for name, (_, of) in said.items():
        bom.register_dependency(parts[name], [parts[n] for n in _needs(of) if n in parts])
    bom.register_dependency(bom.metadata.component, [parts[about]])
    text = json.dumps(json.loads(JsonV1Dot6(bom).output_as_string()), indent=1, sort_keys=True) + "\n"
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        raise BundleError("the bill of materials does not fit CycloneDX's schema")
    return text


def _component(wheel: Path, of: email.message.Message) -> Component:
    name, version = canonicalize_name(str(of["Name"])), str(of["Version"])
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}@{version}",
        purl=PackageURL("pypi", name=name, version=version),
        licenses=[_licence(of)],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(wheel.read_bytes()).hexdigest())],
        description=str(of["Summary"] or "")[:200] or None,
    )


def _licence(of: email.message.Message) -> License:
    """What a package says of its licence: the expression, the field, the classifiers, or that it is silent."""
    lines = str(of["License"] or "").strip().splitlines()
    classed = [c.rpartition("::")[2].strip() for c in of.get_all("Classifier", []) if c.startswith(_SAID)]
    if of["License-Expression"]:
        return LicenseFactory().make_from_string(str(of["License-Expression"]))
    named = lines[0][:_MOST] if lines else " / ".join(classed)[:_MOST]
    return DisjunctiveLicense(name=named or "not stated by the package")


def _needs(of: email.message.Message) -> Iterable[NormalizedName]:
    """Names of what it asks for on this machine, optional things too: which of them are here, the caller knows."""
    return sorted({canonicalize_name(Requirement(line).name) for line in of.get_all("Requires-Dist", [])})
