"""DICOM associations as an acceptor (PS3.8): who may open one; units read under a bound and a deadline.

pynetdicom brings the codecs of association requests and the negotiation of presentation contexts. Its reactor is not
used: it reads a unit of whatever length a stranger announces (680 MB of memory within a second, before any
association), holds a slot for who sends a byte now and then, and costs some 4 ms of processor per CT image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydicom.uid import UID
from pynetdicom import ALL_TRANSFER_SYNTAXES, AllStoragePresentationContexts, build_context
from pynetdicom.pdu import A_ASSOCIATE_AC, A_ASSOCIATE_RQ
from pynetdicom.pdu_primitives import (
    A_ASSOCIATE,
    ImplementationClassUIDNotification,
    ImplementationVersionNameNotification,
    MaximumLengthNotification,
    UserIdentityNegotiation,
)
from pynetdicom.presentation import PresentationContext, negotiate_as_acceptor

from agent.pacs.dimse.config import Identity, ListenerSettings
from agent.pacs.dimse.pdu import MALFORMED, AssociationEnded

IMPLEMENTATION: Final = "2.25.258074292115660802519645974668088767564"
VERSION: Final = "LAZARET_1"
VERIFICATION: Final = "1.2.840.10008.1.1"
STORAGE: Final = frozenset(str(cx.abstract_syntax) for cx in AllStoragePresentationContexts)
_REFERENCED: Final = frozenset(f"1.2.840.10008.1.2.4.{n}" for n in (94, 95, 204, 205))  # JPIP: no pixels
_LIVE: Final = "1.2.840.10008.1.2.7."  # SMPTE ST 2110: no files
STORABLE: Final = tuple(
    str(s) for s in ALL_TRANSFER_SYNTAXES if s not in _REFERENCED and not str(s).startswith(_LIVE)
)
_APPLICATION: Final = "1.2.840.10008.3.1.1.1"  # DICOM's application context, PS3.7 annex A
_PLAIN: Final = ("1.2.840.10008.1.2.1", "1.2.840.10008.1.2", "1.2.840.10008.1.2.2")


@dataclass(frozen=True, slots=True)
class Rejected:
    """No association: the event's code, and result, source, reason of PS3.8 section 9.3.4."""

    code: str
    told: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Accepted:
    """An association: who called, SOP class and transfer syntax by presentation context, and the A-ASSOCIATE-AC."""

    calling: str
    contexts: Mapping[int, tuple[str, str]]
    reply: bytes


CONGESTED: Final = Rejected("rejected_limit", (2, 3, 2))  # transient, local limit exceeded
STRANGER: Final = Rejected("rejected_calling", (1, 1, 3))  # permanent, calling AE title not recognised
_MISCALLED: Final = Rejected("rejected_called", (1, 1, 7))
_NOT_DICOM: Final = Rejected("rejected_protocol", (1, 1, 2))
_OTHER_VERSION: Final = Rejected("rejected_protocol", (1, 2, 2))
_NOBODY: Final = Rejected("rejected_identity", (1, 2, 1))  # PS3.7 annex D.3.3.7: permanent, ACSE, no reason


def _decoded(unit: bytes) -> A_ASSOCIATE:
    try:
        request = A_ASSOCIATE_RQ()
        request.decode(unit)
        primitive = request.to_primitive()
        contexts = primitive.presentation_context_definition_list
        numbers = {cx.context_id for cx in contexts}
        sound = len(numbers) == len(contexts) and all(cx.abstract_syntax and cx.transfer_syntax for cx in contexts)
    except Exception:  # noqa: BLE001 - the codec raises anything, and its text quotes the bytes
        raise AssociationEnded("malformed", MALFORMED) from None
    if not sound or not contexts:
        raise AssociationEnded("malformed", MALFORMED)
    return primitive


def negotiate(unit: bytes, address: str, settings: ListenerSettings) -> Accepted | Rejected:
    """Decide on an A-ASSOCIATE-RQ (PS3.8 section 9.3.2), given with its header.

    Who is not on the list learns nothing else: the pair of title and address is looked at first.

    Raises:
        AssociationEnded: it is not one.
    """
    if len(unit) < 74:
        raise AssociationEnded("malformed", MALFORMED)
    version = int.from_bytes(unit[6:8])
    called, calling = (unit[a : a + 16].decode("latin-1").strip(" \0") for a in (10, 26))
    if not any(c.ae_title == calling and c.at(address) for c in settings.callers):
        return STRANGER
    if not version & 1:
        return _OTHER_VERSION
    if called != settings.ae_title:
        return _MISCALLED
    request = _decoded(unit)
    if request.application_context_name != _APPLICATION:
        return _NOT_DICOM
    shown = [i for i in request.user_information if isinstance(i, UserIdentityNegotiation)]
    if settings.identities and not (len(shown) == 1 and _identified(shown[0], settings.identities)):
        return _NOBODY
    answers = [_context(cx) for cx in request.presentation_context_definition_list]
    return Accepted(
        calling,
        {
            cx.context_id or 0: (str(cx.abstract_syntax), str(cx.transfer_syntax[0]))
            for cx in answers
            if not cx.result
        },
        _accepting(request, answers, settings, bool(shown and shown[0].positive_response_requested)),
    )


def _identified(shown: UserIdentityNegotiation, identities: tuple[Identity, ...]) -> bool:
    if shown.user_identity_type != 2 or shown.primary_field is None or shown.secondary_field is None:
        return False
    return any([one.shown(shown.primary_field, shown.secondary_field) for one in identities])  # all: equal time


def _context(proposed: PresentationContext) -> PresentationContext:
    """The answer to one presentation context: the sender's first choice, so that it need not re-encode either."""
    name = str(proposed.abstract_syntax)
    ours = STORABLE if name in STORAGE else _PLAIN
    chosen = [str(s) for s in proposed.transfer_syntax if s in ours] or list(ours)
    known = [build_context(name, [*chosen])] if name in STORAGE or name == VERIFICATION else []
    answers, _ = negotiate_as_acceptor([proposed], known)
    return answers[0]


def _accepting(
    request: A_ASSOCIATE, answers: list[PresentationContext], settings: ListenerSettings, identified: bool
) -> bytes:
    length, implementation = MaximumLengthNotification(), ImplementationClassUIDNotification()
    version = ImplementationVersionNameNotification()
    length.maximum_length_received = settings.max_pdu
    implementation.implementation_class_uid = UID(IMPLEMENTATION)
    version.implementation_version_name = VERSION
    reply = A_ASSOCIATE()
    reply.application_context_name = UID(_APPLICATION)
    reply.calling_ae_title, reply.called_ae_title = request.calling_ae_title, request.called_ae_title
    reply.result, reply.result_source = 0, 1
    reply.presentation_context_definition_results_list = answers
    reply.user_information = [length, implementation, version]
    if identified and settings.identities:
        confirmed = UserIdentityNegotiation()
        confirmed.server_response = b""  # PS3.7 annex D.3.3.7.2: empty for a name and passcode
        reply.user_information.append(confirmed)
    unit = A_ASSOCIATE_AC()
    unit.from_primitive(reply)
    return bytes(unit.encode())
