"""The policies of the demo's federation and hospitals: the preset "internal", and what the shown mechanisms need."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from agent.mechanisms.registry import MECHANISMS
from deploy.demo import chests, eyes, heads
from policies.review.policy import preset

SITES: Final = ("site-a", "site-b", "site-c")
POOR: Final = "site-c"  # its own policy has a smaller budget
_COHORTS: Final[Mapping[str, tuple[str, ...]]] = {  # what a site releases without an epsilon: one release counts one
    "ksame": SITES,
    "ksalsa": (eyes.SITE,),
    "anonfaces": (eyes.SITE,),
    "distill": (chests.SITES["distill"],),
    "remodel": (heads.SITE,),
}


def amended(policy: str, changes: Mapping[str, str]) -> str:
    """A policy's text with other values: whoever signs it has read what they mean."""
    for key, value in changes.items():
        policy, count = re.subn(rf"(?m)^{key} = .*?( +#.*)?$", rf"{key} = {value}\1", policy)
        assert count == 1, key
    return policy


def policies(mechanisms: Iterable[str], spare: Mapping[str, int] = MappingProxyType({})) -> dict[str, str]:
    """The texts of the federation's policy, of each site's own, and of the poor site's, as "poor".

    They are the preset "internal" with as many releases as the story has. What no preset admits is written into them
    if it is shown: level A* under secure aggregation, level C, and scans that an attacker recognises now and then.
    ``spare``: of a site, how many releases more, for whoever tries it afterwards.
    """
    shown = set(mechanisms)
    own = {site: sum(site in sites for name, sites in _COHORTS.items() if name in shown) for site in SITES}
    own = {site: count + spare.get(site, 0) for site, count in own.items()}
    most = max(own.values())
    levels = ["A", *(["A*"] if "federated-masked" in shown else []), "B"]
    levels += ["C"] if not shown.isdisjoint(("distill", "remodel")) else []
    changes = {"levels": json.dumps(levels)}
    if "C" in levels:
        changes["components"] = '["public", "private"]'
    if "remodel" in shown:
        changes |= {"mechanisms": json.dumps(list(MECHANISMS)), "max_reid_rate": "0.4"}
        changes["artifact_types"] = (
            '["image-set", "volume-set", "model", "update", "masked-update", "evaluation", "masked-evaluation"]'
        )
        changes["max_artifact_bytes"] = str(1 << 27)
    if not shown.isdisjoint(("centroids", "distill-dp")):
        changes["epsilon"] = "16.0"
    law = amended(preset("internal"), changes)
    texts = {site: amended(law, {"max_releases_per_patient": str(max(count, 1))}) for site, count in own.items()}
    texts["federation"] = amended(law, {"max_releases_per_patient": str(max(most, 1))})
    texts["poor"] = amended(texts[POOR], {"epsilon": "2.0"})
    return texts
