"""Associations as a requestor (PS3.8): the connection, the proposal, and the validated response.

pynetdicom brings the codecs. Its reactor was rejected here as in :mod:`agent.pacs.dimse.acceptor`: as a requestor too
it reads a unit of whatever length the other side announces, and keeps no deadline for it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Mapping
from typing import Final

from pydicom.uid import UID
from pynetdicom import build_context
from pynetdicom.pdu import A_ASSOCIATE_AC, A_ASSOCIATE_RQ
from pynetdicom.pdu_primitives import (
    A_ASSOCIATE,
    ImplementationClassUIDNotification,
    ImplementationVersionNameNotification,
    MaximumLengthNotification,
    SCP_SCU_RoleSelectionNegotiation,
    UserIdentityNegotiation,
)
from pynetdicom.presentation import PresentationContext

from agent.pacs.archive import ArchiveConfig, ArchiveUnreachableError
from agent.pacs.dimse.acceptor import IMPLEMENTATION, STORABLE, STORAGE, VERSION
from agent.pacs.dimse.pdu import MALFORMED, AssociationEnded, PduStream

MOST_CONTEXTS: Final = 128  # odd numbers of one byte, PS3.8 section 9.3.2.2
_APPLICATION: Final = "1.2.840.10008.3.1.1.1"  # DICOM's application context, PS3.7 annex A
_PDU_BYTES: Final = 131072  # what the other side is told
_USUAL_FIRST: Final = tuple(  # plain, RLE, JPEG lossless, JPEG 2000, JPEG-LS, JPEG
    "1.2.840.10008.1.2" + end for end in (".1", "", ".5", ".4.70", ".4.90", ".4.80", ".4.50", ".4.91", ".4.81", ".2")
)
SYNTAXES: Final = _USUAL_FIRST + tuple(s for s in STORABLE if s not in _USUAL_FIRST)
_REJECTED: Final = {  # source and reason of PS3.8 section 9.3.4
    (1, 2): "it does not speak DICOM's application context.",
    (1, 3): "it does not know this site's AE title (calling). Enter it there, with this machine's address.",
    (1, 7): "its AE title is not the one in aet.",
    (2, 2): "it speaks another version of the protocol.",
    (3, 1): "it is too busy for another association.",
    (3, 2): "it has too many associations open.",
}


def storage_contexts(classes: Iterable[str], most: int = MOST_CONTEXTS - 1) -> list[tuple[str, str]]:
    """SOP class and transfer syntax of each context to propose: one pair each, so that nothing need be re-encoded.

    Args:
        classes: storage SOP classes, at least one and ``most`` at the most.
        most: contexts. The usual transfer syntaxes come first when not all fit.
    """
    names = sorted(set(classes))
    if not 0 < len(names) <= most:
        raise ValueError("no SOP class, or more than one association can carry")
    each = SYNTAXES[: most // len(names)]
    return [(name, syntax) for name in names for syntax in each]


def connected(remote: ArchiveConfig) -> PduStream:
    """A connection to the archive, TLS when the site says so.

    Raises:
        ArchiveUnreachableError: nobody listens there, or not with the TLS that is asked for.
    """
    context = remote.client_context()
    try:
        sock = socket.create_connection((remote.host, remote.port), timeout=remote.connect_seconds)
    except OSError:
        text = "nothing answers at its host and port."
        raise ArchiveUnreachableError(f"{remote.name}: {text}", passing=True) from None
    if context is None:
        return PduStream(sock)
    try:
        return PduStream(context.wrap_socket(sock, server_hostname=remote.host))
    except ssl.SSLCertVerificationError:
        sock.close()
        text = "its TLS certificate is from another authority, has expired, or is for another host."
        raise ArchiveUnreachableError(f"{remote.name}: {text}") from None
    except OSError:
        sock.close()
        text = "it does not accept TLS there, or not in a safe version, or not with this site's certificate."
        raise ArchiveUnreachableError(f"{remote.name}: {text}") from None


def request(remote: ArchiveConfig, contexts: Mapping[int, tuple[str, str]], *, stores: bool = False) -> bytes:
    """The A-ASSOCIATE-RQ (PS3.8 section 9.3.2).

    Args:
        remote: whom we call, and as whom.
        contexts: SOP class and transfer syntax by odd number. For storage we propose to be the provider (PS3.7
            annex D.3.3.4), as C-GET needs it.
        stores: we send objects there: then we propose nothing of it, and are the user.
    """
    length, implementation = MaximumLengthNotification(), ImplementationClassUIDNotification()
    version = ImplementationVersionNameNotification()
    length.maximum_length_received = _PDU_BYTES
    implementation.implementation_class_uid = UID(IMPLEMENTATION)
    version.implementation_version_name = VERSION
    asked = A_ASSOCIATE()
    asked.application_context_name = UID(_APPLICATION)
    asked.calling_ae_title, asked.called_ae_title = remote.calling, remote.aet
    asked.presentation_context_definition_list = [_context(n, *pair) for n, pair in contexts.items()]
    asked.user_information = [length, implementation, version]
    for name in () if stores else sorted({name for name, _ in contexts.values()} & STORAGE):
        role = SCP_SCU_RoleSelectionNegotiation()
        role.sop_class_uid, role.scu_role, role.scp_role = UID(name), False, True
        asked.user_information.append(role)
    if remote.user:
        identity = UserIdentityNegotiation()
        identity.user_identity_type = 2
        identity.primary_field, identity.secondary_field = remote.user.encode(), remote.passcode()
        asked.user_information.append(identity)
    unit = A_ASSOCIATE_RQ()
    unit.from_primitive(asked)
    return bytes(unit.encode())


def _context(number: int, name: str, syntax: str) -> PresentationContext:
    context = build_context(name, [syntax])
    context.context_id = number
    return context


def accepted(unit: bytes, proposed: Mapping[int, tuple[str, str]]) -> tuple[dict[int, tuple[str, str]], int]:
    """The contexts that an A-ASSOCIATE-AC (PS3.8 section 9.3.3) accepts, and the longest unit; 0: unlimited.

    Raises:
        AssociationEnded: it is none, or accepts what nobody proposed.
    """
    try:
        answer = A_ASSOCIATE_AC()
        answer.decode(unit)
        primitive = answer.to_primitive()
        told = [i for i in primitive.user_information if isinstance(i, MaximumLengthNotification)]
        largest = int(told[0].maximum_length_received or 0) if told else 0
        results = [
            (cx.context_id or 0, str(cx.transfer_syntax[0]))
            for cx in primitive.presentation_context_definition_results_list
            if cx.result == 0
        ]
    except Exception:  # noqa: BLE001 - the codec raises anything, and its text quotes the bytes
        raise AssociationEnded("malformed", MALFORMED) from None
    sound = all(number in proposed and proposed[number][1] == syntax for number, syntax in results)
    if not sound or 0 < largest < 128:
        raise AssociationEnded("malformed", MALFORMED)
    return {number: proposed[number] for number, _ in results}, largest


def rejection(remote: ArchiveConfig, result: int, why: tuple[int, int]) -> ArchiveUnreachableError:
    """An A-ASSOCIATE-RJ (PS3.8 section 9.3.4) as a sentence.

    Args:
        remote: who rejected us.
        result: 2 for one that may pass.
        why: source and reason.
    """
    text = _REJECTED.get(why)
    if text is None and remote.user:
        text = "it rejected this site: the user or the passcode is wrong, or it does not know this site."
    return ArchiveUnreachableError(
        f"{remote.name}: {text or 'it rejected this site without a reason.'}", passing=result == 2
    )
