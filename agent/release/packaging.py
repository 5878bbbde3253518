"""How what was made is written: the form of its pictures, who may read it, and what its statement says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.mechanisms import Mechanism, Synthesis
from agent.site import Site
from policies.claims import Claim
from policies.review import TERMS
from policies.statement import Release, release_id
from protos.shards import Form, Png, pack_shard


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How an image set is written, and whether to one reader only."""

    form: Form = Png()  # noqa: RUF009 - frozen, and without a field
    reader: str = ""  # fingerprint of the reader's key
    seal: Callable[[bytes], bytes] | None = None

    def pack(self, images: NDArray[np.uint8], labels: tuple[str, ...]) -> bytes:
        """(m, h, w[, 3]) images with a label each, as a shard.

        Raises:
            BadArtifact: the form cannot hold them.
        """
        return pack_shard(list(images), labels, self.form)


def draft_of(site: Site, mechanism: Mechanism, grant: str, modality: str, claim: Claim) -> Release:
    """All but the artifact's digest and the epsilon, which :func:`agent.pipeline.parcel` fills in."""
    terms = TERMS[mechanism.name]
    return Release(
        release=release_id(site.name, grant, 0),
        grant=grant,
        site=site.name,
        run="",
        round=0,
        mechanism=mechanism.name,
        artifact_type=terms.artifact_type,
        artifact_sha256="0" * 64,
        artifact_bytes=0,
        claim=claim,
        epsilon_nano=None,
        delta=None,
        components=mechanism.components(),
        # synthesis compares every representative with the patients' images, and refuses a copy (P7)
        vetted_against=terms.vetted or ("private" if isinstance(mechanism, Synthesis) else "nothing"),
        modality=modality,
        reid_rate=None,
        approvals={},
        reader="",
    )
