"""How a release is written: the form of its images, its reader, and its statement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agent.release.ports import SiteContext
from policies.accounting.claims import Claim, KAnonymous
from policies.review.rules import TERMS
from policies.statements import Release, release_id
from protos.artifacts.shards import Form, Png, pack_shard

if TYPE_CHECKING:  # all mechanisms import torch, which not all releases need
    from agent.mechanisms.registry import Mechanism


@dataclass(frozen=True, slots=True)
class ReleaseFormat:
    """How an image set is written, and whether to one reader only."""

    form: Form = Png()  # noqa: RUF009 - frozen, and without a field
    reader: str = ""  # fingerprint of the reader's key
    seal: Callable[[bytes], bytes] | None = None

    def pack(self, images: NDArray[np.uint8], labels: tuple[str, ...]) -> bytes:
        """(m, h, w[, 3]) images with a label each, as a shard.

        Raises:
            ArtifactFormatError: the form cannot hold them.
        """
        return pack_shard(list(images), labels, self.form)


def draft_of(site: SiteContext, mechanism: Mechanism, grant: str, modality: str, claim: Claim) -> Release:
    """All but the artifact's digest and the epsilon, which :func:`agent.release.pipeline.sign_release` fills in."""
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
        vetted_against=terms.vetted or ("private" if isinstance(claim, KAnonymous) else "nothing"),
        modality=modality,
        reid_rate=None,
        approvals={},
        reader="",
    )
