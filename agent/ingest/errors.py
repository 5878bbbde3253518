"""Errors of ingest, and their messages for the operator."""

from __future__ import annotations

from typing import Final

from agent.deidentify.errors import REASONS, FileRejectedError
from agent.errors import ParserError, SiteConfigError
from agent.ingest.ocr import OcrMissingError
from agent.ingest.patient_lists import PatientListError
from agent.pacs.archive import ArchiveError
from agent.pacs.dicomweb.config import DicomWebError
from agent.pacs.dicomweb.stow_process import StowError
from agent.pacs.dimse.listener_process import ListenerError
from agent.pacs.secret_files import SecretFileError
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.spool import SpoolError

EXPECTED: Final = (
    PatientListError,
    SiteConfigError,
    ListenerError,
    OcrMissingError,
    ArchiveError,
    ParserError,
    FileRejectedError,
    SpoolError,
    SecretFileError,
    StowError,
    VaultError,
    DicomWebError,
)


def sentence(error: BaseException) -> str:
    """What is wrong, for the operator: of a refusal what to do about it, of a fault of the system no path."""
    if isinstance(error, FileRejectedError):
        return f"{error.code}: {REASONS[error.code]}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)
