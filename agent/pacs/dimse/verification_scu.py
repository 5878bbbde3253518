"""C-ECHO (PS3.7 section 9.1.5), and a check that an archive has our listener configured: the doctor's PACS tests."""

from __future__ import annotations

import secrets
from typing import Final

from agent.pacs.archive import ArchiveConfig, ArchiveQueryError, ArchiveUnreachableError
from agent.pacs.dimse.acceptor import VERIFICATION
from agent.pacs.dimse.identifiers import even, us, write_fields
from agent.pacs.dimse.query_retrieve_scu import MOVE, SUCCESS, UNKNOWN_DESTINATION, QueryRetrieveScu

_IMPLICIT: Final = "1.2.840.10008.1.2"
_C_ECHO, _NO_DATA = 0x0030, 0x0101


class Echo(QueryRetrieveScu):
    """An association for verification alone."""

    def __init__(self, remote: ArchiveConfig) -> None:
        """Open it.

        Raises:
            ArchiveUnreachableError: no connection, no TLS, rejected, or verification is not offered.
        """
        try:
            super().__init__(remote, [(VERIFICATION, _IMPLICIT)])
        except KeyError:  # the requestor has no word for a service that is no retrieval
            raise ArchiveUnreachableError(f"{remote.name}: it does not offer C-ECHO to this site.") from None

    def echo(self) -> None:
        """Ask, and wait for the answer.

        Raises:
            ArchiveQueryError: it answers with a failure.
            ArchiveError: the association ended.
        """
        self._message = 1
        fields = {0x0002: even(VERIFICATION, b"\0"), 0x0100: us(_C_ECHO), 0x0110: us(1), 0x0800: us(_NO_DATA)}
        with self._told():
            self._send(write_fields(fields), b"")
            context, _, answer = self._next()
            status, _ = self._response(context, answer, _C_ECHO)
        if status:
            raise ArchiveQueryError(f"{self._remote.name}: it answers C-ECHO with status {status:04X}.")


def echo(remote: ArchiveConfig) -> None:
    """C-ECHO there.

    Raises:
        ArchiveError: what is wrong.
    """
    with Echo(remote) as association:
        association.echo()


def knows_us(remote: ArchiveConfig) -> bool | None:
    """Check that the archive has the destination of C-MOVE, by a request to move a study that does not exist.

    Returns:
        None where its answer does not tell: Orthanc gives the same one for a study it lacks.
    Raises:
        ArchiveError: it cannot be asked.
    """
    nobody = f"2.25.{secrets.randbits(120)}"
    with QueryRetrieveScu(remote, [(MOVE, _IMPLICIT)]) as association:
        outcome = association.move("STUDY", {"StudyInstanceUID": nobody}, remote.destination or remote.calling)
    return {SUCCESS: True, UNKNOWN_DESTINATION: False}.get(outcome.status)
