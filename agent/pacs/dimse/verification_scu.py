"""C-ECHO (PS3.7 section 9.1.5), and whether an archive knows our listener: what a doctor asks of a PACS."""

from __future__ import annotations

import secrets
from typing import Final

from agent.edges.association import VERIFICATION
from agent.edges.identifiers import even, us, write_fields
from agent.edges.query import MOVE, SUCCESS, UNKNOWN_DESTINATION, Requestor
from agent.edges.remote import Failed, Remote, Unreachable

_IMPLICIT: Final = "1.2.840.10008.1.2"
_C_ECHO, _NO_DATA = 0x0030, 0x0101


class Echo(Requestor):
    """An association for verification alone."""

    def __init__(self, remote: Remote) -> None:
        """Open it.

        Raises:
            Unreachable: no connection, no TLS, rejected, or verification is not offered.
        """
        try:
            super().__init__(remote, [(VERIFICATION, _IMPLICIT)])
        except KeyError:  # the requestor has no word for a service that is no retrieval
            raise Unreachable(f"{remote.name}: it does not offer C-ECHO to us.") from None

    def echo(self) -> None:
        """Ask, and wait for the answer.

        Raises:
            Failed: it answers with a failure.
            PacsError: the association ended.
        """
        self._message = 1
        fields = {0x0002: even(VERIFICATION, b"\0"), 0x0100: us(_C_ECHO), 0x0110: us(1), 0x0800: us(_NO_DATA)}
        with self._told():
            self._send(write_fields(fields), b"")
            context, _, answer = self._next()
            status, _ = self._response(context, answer, _C_ECHO)
        if status:
            raise Failed(f"{self._remote.name}: it answers C-ECHO with status {status:04X}.")


def echo(remote: Remote) -> None:
    """C-ECHO there.

    Raises:
        PacsError: what is wrong.
    """
    with Echo(remote) as association:
        association.echo()


def knows_us(remote: Remote) -> bool | None:
    """Does the archive know the destination of C-MOVE? It is asked to move a study that nobody has.

    Returns:
        None where its answer does not tell: Orthanc gives the same one for a study it lacks.
    Raises:
        PacsError: it cannot be asked.
    """
    nobody = f"2.25.{secrets.randbits(120)}"
    with Requestor(remote, [(MOVE, _IMPLICIT)]) as association:
        outcome = association.move("STUDY", {"StudyInstanceUID": nobody}, remote.destination or remote.calling)
    return {SUCCESS: True, UNKNOWN_DESTINATION: False}.get(outcome.status)
