"""Whether a command left a site and its coordinator as they were, to the last byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.runtime import open_runtime
from tests.support.federation_world import Site


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything below a folder; SQLite's logs come and go with whoever opens a file."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in found if not p.name.endswith(("-wal", "-shm"))}


def opened_once(site: Site) -> None:
    """A site whose ledger is there, as after its first command."""
    with open_runtime(site.home.root, lambda *_: None):
        pass


@contextmanager
def untouched(site: Site) -> Iterator[None]:
    """What happens within writes nothing: no file of the site, no entry and no word at the coordinator."""
    before, entries = files_of(site.home.root), site.federation.store.state.size
    heard = len(site.federation.recorder.messages)
    yield
    after = files_of(site.home.root)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed
    assert (site.federation.store.state.size, len(site.federation.recorder.messages)) == (entries, heard)
