"""The federation that every test here copies."""

from __future__ import annotations

from tests.support.process_world import enrolled

__all__ = ["enrolled"]  # a fixture
