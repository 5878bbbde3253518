"""The thread that keeps a search index level with its ledger (:mod:`policies.index.search`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from policies.index.search import BATCH, Index

PATIENCE_S: Final = 15.0  # after a failure


class IndexFollower:
    """A thread that keeps an index level with its ledger, so that no page has much left to take."""

    def __init__(self, index: Index, every_s: float = 2.0, failed: Callable[[], None] = lambda: None) -> None:
        """Calls ``failed`` whenever the index cannot continue; pages then show how far it got. The follower tries
        again.
        """
        self._index, self._every_s, self._failed = index, every_s, failed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index", daemon=True)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                while not self._index.follow(BATCH) and not self._over.is_set():
                    pass
            except Exception:  # noqa: BLE001 - a cache that cannot be written stops no gateway
                self._failed()
                self._over.wait(PATIENCE_S)
            self._over.wait(self._every_s)

    def __enter__(self) -> IndexFollower:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Stop after the batch in progress."""
        self._over.set()
        self._thread.join()
