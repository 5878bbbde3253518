"""DICOM over TLS: the profile of BCP 195, and what an AE title may be."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

AE_TITLE: Final = re.compile(r"[\x21-\x5b\x5d-\x7e](?:[\x20-\x5b\x5d-\x7e]{0,14}[\x21-\x5b\x5d-\x7e])?")  # PS3.5 6.2


CIPHERS: Final = (  # RFC 9325 section 4.2; TLS 1.3 has its own
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
    "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384"
)


@dataclass(frozen=True, slots=True)
class Tls:
    """DICOM's non-downgrading BCP 195 RFC 9325 profile (PS3.15 annex B.12): TLS >= 1.2, both sides certified."""

    certificate: Path  # PEM, with the intermediate ones
    key: Path  # PEM
    authorities: Path  # PEM: who certifies the senders

    def context(self) -> ssl.SSLContext:
        """For a server which admits nobody without a certificate.

        Raises:
            OSError: a file is missing or no PEM (``ssl.SSLError`` is one).
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.authorities)
        context.load_cert_chain(self.certificate, self.key)
        return context
