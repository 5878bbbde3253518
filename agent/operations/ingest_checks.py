"""What ``doctor`` checks of ingest: listeners, folders, receivers."""

from __future__ import annotations

import errno
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.errors import SiteConfigError
from agent.ingest.config import Ingestion, read_ingestion
from agent.ingest.errors import EXPECTED, sentence
from agent.ingest.folders import Folder
from agent.ingest.ocr import Ocr, OcrSettings
from agent.ingest.patient_lists import read_lists
from agent.ingest.retrieval import check_reachable
from agent.pacs.dicomweb.stow_process import StowSettings
from agent.pacs.secret_files import read_secret
from agent.storage.site_directory import SiteDirectory
from protos.identity.key_files import KeyFileError

_LEAST_FREE: Final = 2 * 2**30


def doctor(home: SiteDirectory) -> dict[str, str | None]:
    """What is wrong with ingest, by check; None where nothing is."""
    found: dict[str, str | None] = {"ingest.toml": None}
    try:
        ingestion = read_ingestion(home)
    except (SiteConfigError, KeyFileError) as error:
        return {"ingest.toml": str(error)}
    if ingestion.ocr is not None:
        found["tesseract"] = _tried(lambda: Ocr(ingestion.ocr or OcrSettings(), b""))
    free = shutil.disk_usage(home.root).free
    found["room on the disk"] = None if free > _LEAST_FREE else "less than 2 GiB are free: listeners refuse images"
    found |= _of_listeners(ingestion) | _of_folders(home, ingestion)
    for name, archive in {**ingestion.pacs, **ingestion.webs}.items():
        found[f"archive {name} answers"] = _tried(lambda archive=archive: check_reachable(archive))  # type: ignore[misc]
    return found


def _of_listeners(ingestion: Ingestion) -> dict[str, str | None]:
    """Can what the listeners need be read, does it fit together, and are their ports to be had?"""
    found: dict[str, str | None] = {}
    listener, stow = ingestion.listener, ingestion.stow
    if listener is not None:
        if listener.tls is not None:
            found["[listener] tls"] = _fitting(listener.tls.context)
        found |= _port("listener", listener.host, listener.port)
    if stow is not None:
        if stow.certificate is not None:
            found["[stow] certificate and key"] = _fitting(lambda: _stow_context(stow))
        if stow.token_file is not None:
            found["[stow] token_file"] = _tried(lambda: read_secret(stow.token_file or Path(), "token_file"))
        found |= _port("stow", stow.host, stow.port)
    return found


def _stow_context(settings: StowSettings) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # a key that wants a passphrase is refused: nobody can type it for `serve`
    context.load_cert_chain(str(settings.certificate), str(settings.key), password="")
    if settings.client_ca is not None:
        context.load_verify_locations(str(settings.client_ca))


def _fitting(build: Callable[[], object]) -> str | None:
    try:
        build()
    except OSError as error:  # ssl.SSLError is one
        why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        return f"a file cannot be read, is no PEM, or certificate and key do not fit: {why or type(error).__name__}"
    return None


def _port(table: str, host: str, port: int) -> dict[str, str | None]:
    """Could it be listened on? That it is taken is no fault: the agent's own serve may have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return {f"[{table}] port {port} is free": None}
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return {f"[{table}] port {port} is in use: by this agent's own serve, or something else": None}
        why = error.strerror or "host is not an address of this machine"
        return {f"[{table}] port {port} is free": f"cannot listen there: {why}"}


def _of_folders(home: SiteDirectory, ingestion: Ingestion) -> dict[str, str | None]:
    """Are the folders there, and can their lists be read?"""
    usual = Folder(home.settings().input)
    known = [("folder of site.toml", usual)] if usual.path.is_dir() else []
    known += [(f"[[folder]] {number}", folder) for number, folder in enumerate(ingestion.folders, 1)]
    return {what: _tried(lambda one=one: read_lists(one.path, one.columns)) for what, one in known}  # type: ignore[misc]


def _tried(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (*EXPECTED, OSError) as error:
        return sentence(error)
    return None
