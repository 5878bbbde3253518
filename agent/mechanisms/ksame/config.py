"""The configuration of ``release ksame``: a basis, and what is typed. It imports torch only for a vetting."""

from __future__ import annotations

import argparse

from agent.domain import Selection
from agent.mechanisms.common.linear_codec import load_vouched_basis
from agent.mechanisms.common.synthesis import ReleaseConfig
from agent.mechanisms.ksame.mechanism import KSame


def read_release(arguments: argparse.Namespace, vouched: frozenset[str]) -> ReleaseConfig:
    """Read what ``release ksame`` is configured by.

    Args:
        arguments: as :mod:`agent.mechanisms.ksame.options` has them.
        vouched: SHA-256 of the files that the site says are public.
    Raises:
        LinearBasisError: the file holds no basis.
        OSError: it cannot be read.
        SiteConfigError: the file of the vetting is not as it should be.
        UnsupportedClaimError: k or l cannot be claimed.
    """
    basis = load_vouched_basis(arguments.basis.read_bytes(), vouched)
    mechanism = KSame(arguments.k, arguments.l_diversity, basis)
    selection = Selection(arguments.modality, mechanism.shape)
    if arguments.vetting is None:
        return ReleaseConfig(mechanism, selection)
    from agent.mechanisms.common.config import read_vetting  # noqa: PLC0415 - torch: few releases need it

    return ReleaseConfig(mechanism, selection, read_vetting(arguments.vetting, vouched))
