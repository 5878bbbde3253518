"""Entries for the Differential Privacy Deployments Registry (OpenDP, Harvard, Oblivious; paper arXiv 2509.13509).

Fields and values follow the registry's own schema, ``schemas/deployments-schema.yaml`` of its public data. An entry
is JSON, which is valid YAML 1.2, so it can be submitted as a ``.yaml`` file. Its status is Draft: people add what the
ledger does not contain, and the registry's board reviews it. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from coordinator.explanations import epsilon_text
from coordinator.reports.document import ReportError, plain
from coordinator.reports.report_inputs import Item, ReportInputs, together
from protos.common.text import DATE, utc

_OPEN: Final = "TO BE FILLED IN"
_TYPES: Final[Mapping[str, str]] = {"model": "Machine learning model", "image-set": "Synthetic data"}
_COMPOSITION: Final = (
    "Sequential, by a Rényi filter at one integer order that was fixed when the account was opened. Every release is "
    "charged to one account for the lifetime of the hospital's data before an image is read; later requests may "
    "depend on earlier results."
)
_MECHANISMS: Final = (
    "Gaussian mechanism; noise from the operating system's generator, on a lattice; contributions are bounded for "
    "each patient. Prices are computed in decimals and rounded up. The export of the ledger can be recomputed "
    "offline by anybody."
)
_FIXED: Final = "The configuration is public, and fixed before an image is read."
_POST: Final = "What is made from the noisy result without another look at patients is post-processing."


def entries(inputs: ReportInputs) -> dict[str, Any]:
    """File name -> entry, for every release with an epsilon.

    Raises:
        ReportError: there is none.
    """
    found = {f"{item.name}.yaml": entry(inputs, item) for item in inputs.items() if item.epsilon}
    if not found:
        raise ReportError("no release has an epsilon: the registry is about differential privacy alone")
    return found


def entry(inputs: ReportInputs, item: Item) -> dict[str, Any]:
    """One release as the registry describes it.

    Raises:
        ReportError: the release has no epsilon; it belongs in no registry of differential privacy.
    """
    epsilon = item.dearest["epsilon"]
    if not epsilon:
        raise ReportError(f"{item.name}: it has no epsilon, and it is not 0: the registry is not about it")
    return {
        "url_slug": item.name,
        "deployment": {
            "basic": _basic(inputs, item),
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"medical images ({item.parts[0]['modality']}) of the patients of {item.sites}",
                "unprotected_quantities": "none that the ledger knows of; that a hospital took part is public",
            },
            "privacy_loss": _loss(item, epsilon),
            "deployment_model": _model(item),
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": _FIXED,
                "mechanisms": f"{item.method}. {item.claim}. {_MECHANISMS}",
                "composition": _COMPOSITION,
                "post_processing": _POST,
                "justification": _OPEN,
            },
            "administrative": {
                "status": "Draft",
                "registry_authors": [inputs.particulars.authors or _OPEN],
                "tier": 3,
            },
        },
    }


def _basic(inputs: ReportInputs, item: Item) -> dict[str, Any]:
    p = inputs.particulars
    kind = item.facts["kind"] if item.facts["kind"] == "model" else str(item.parts[0]["artifact_type"])
    return {
        "name": item.name,
        "data_curators": [
            {"data_curator_name": p.controller or item.sites, "data_curator_type": p.curator_type or _OPEN}
        ],
        "description": f"{item.method}, from the patients of {item.sites}.",
        "intended_use": p.intended_use or p.purposes or _OPEN,
        "data_product_type": _TYPES.get(kind, "Dataset"),
        "data_product_region": p.region or _OPEN,
        "data_product_sector": "Healthcare",
        "publication_date": p.published or utc(item.parts[-1]["admitted_at"], DATE),
    }


def _loss(item: Item, epsilon: Mapping[str, Any]) -> dict[str, Any]:
    priced = {p["site"]: p["epsilon"] for p in item.parts if p["epsilon"]}
    each = [f"{site}: {epsilon_text(e['value'])}{together(e)}" for site, e in priced.items()]
    extra = "" if len(each) < 2 else " A patient who was in several of the hospitals is covered by the sum of theirs."
    return {
        "privacy_unit": f"{str(epsilon['unit']).capitalize()}-level",
        "privacy_unit_details": (
            f"One {epsilon['unit']} at a hospital, with all of their images. Neighbouring data sets differ by one "
            f"{epsilon['unit']} added or removed."
        ),
        "privacy_parameters": {"epsilon": float(epsilon_text(epsilon["value"])), "delta": float(epsilon["delta"])},
        "privacy_parameters_details": (
            f"By hospital, at Rényi order {epsilon['order']}: {'; '.join(each)}.{extra} "
            + (f"Assumption: {item.facts['assumption']}." if item.facts["assumption"] else "")
        ).strip(),
    }


def _model(item: Item) -> dict[str, Any]:
    federated = item.facts["kind"] == "model"
    return {
        "model_name": "Federated" if federated else "Central",
        "actors": (
            "The hospitals hold the images and add the noise. The coordinator sees what they release. Recipients of "
            "the data product see that alone, and may know anything else."
        ),
        "release_type": "One release",
        "release_type_details": "The hospital's lifetime budget bounds this and every other release together.",
        "data_source_type": "Static",
        "access_type": "Non-interactive",
    }


def as_yaml(found: Mapping[str, Any]) -> str:
    """An entry as a file; JSON is YAML 1.2."""
    return json.dumps(_printable(found), indent=2, sort_keys=False, ensure_ascii=False, allow_nan=False) + "\n"


def _printable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _printable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_printable(v) for v in value]
    return plain(value) if type(value) is str else value
