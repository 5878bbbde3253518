from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("seen", "cosigned", "own", "looks")
    SEEN_FIELD_NUMBER: _ClassVar[int]
    COSIGNED_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    seen: int
    cosigned: str
    own: SiteHead
    looks: bool
    def __init__(self, seen: _Optional[int] = ..., cosigned: _Optional[str] = ..., own: _Optional[_Union[SiteHead, _Mapping]] = ..., looks: _Optional[bool] = ...) -> None: ...

class SiteHead(_message.Message):
    __slots__ = ("checkpoint", "since", "proof", "restored", "restored_at", "restored_proof")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_AT_FIELD_NUMBER: _ClassVar[int]
    RESTORED_PROOF_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    since: int
    proof: _containers.RepeatedScalarFieldContainer[bytes]
    restored: bytes
    restored_at: int
    restored_proof: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, checkpoint: _Optional[str] = ..., since: _Optional[int] = ..., proof: _Optional[_Iterable[bytes]] = ..., restored: _Optional[bytes] = ..., restored_at: _Optional[int] = ..., restored_proof: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("policy", "checkpoint", "ledger_key", "proof", "epoch", "restored", "restored_at", "restored_proof", "own_seen")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_KEY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_AT_FIELD_NUMBER: _ClassVar[int]
    RESTORED_PROOF_FIELD_NUMBER: _ClassVar[int]
    OWN_SEEN_FIELD_NUMBER: _ClassVar[int]
    policy: str
    checkpoint: str
    ledger_key: bytes
    proof: _containers.RepeatedScalarFieldContainer[bytes]
    epoch: int
    restored: bytes
    restored_at: int
    restored_proof: _containers.RepeatedScalarFieldContainer[bytes]
    own_seen: int
    def __init__(self, policy: _Optional[str] = ..., checkpoint: _Optional[str] = ..., ledger_key: _Optional[bytes] = ..., proof: _Optional[_Iterable[bytes]] = ..., epoch: _Optional[int] = ..., restored: _Optional[bytes] = ..., restored_at: _Optional[int] = ..., restored_proof: _Optional[_Iterable[bytes]] = ..., own_seen: _Optional[int] = ...) -> None: ...

class SealedRequest(_message.Message):
    __slots__ = ("key", "envelope", "seen", "own")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    key: str
    envelope: bytes
    seen: int
    own: SiteHead
    def __init__(self, key: _Optional[str] = ..., envelope: _Optional[bytes] = ..., seen: _Optional[int] = ..., own: _Optional[_Union[SiteHead, _Mapping]] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("sealed", "chunks")
    SEALED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    sealed: SealedRequest
    chunks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sealed: _Optional[_Union[SealedRequest, _Mapping]] = ..., chunks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("upload", "missing", "decided")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    upload: str
    missing: bytes
    decided: VerdictReply
    def __init__(self, upload: _Optional[str] = ..., missing: _Optional[bytes] = ..., decided: _Optional[_Union[VerdictReply, _Mapping]] = ...) -> None: ...

class UploadPart(_message.Message):
    __slots__ = ("upload", "chunk")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    upload: str
    chunk: Chunk
    def __init__(self, upload: _Optional[str] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    def __init__(self, accepted: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "run")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    kind: str
    run: str
    def __init__(self, kind: _Optional[str] = ..., run: _Optional[str] = ...) -> None: ...

class FleetPart(_message.Message):
    __slots__ = ("path", "headers", "status", "data")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PATH_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    path: str
    headers: _containers.ScalarMap[str, str]
    status: int
    data: bytes
    def __init__(self, path: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., status: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: bytes
    def __init__(self, envelope: _Optional[bytes] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("state", "fingerprint", "waiting_certificate", "certificate", "policy", "ledger_key", "returning_certificate")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WAITING_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LEDGER_KEY_FIELD_NUMBER: _ClassVar[int]
    RETURNING_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    state: str
    fingerprint: str
    waiting_certificate: bytes
    certificate: bytes
    policy: str
    ledger_key: bytes
    returning_certificate: bytes
    def __init__(self, state: _Optional[str] = ..., fingerprint: _Optional[str] = ..., waiting_certificate: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., policy: _Optional[str] = ..., ledger_key: _Optional[bytes] = ..., returning_certificate: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("csr",)
    CSR_FIELD_NUMBER: _ClassVar[int]
    csr: bytes
    def __init__(self, csr: _Optional[bytes] = ...) -> None: ...

class ReturnRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: bytes
    def __init__(self, envelope: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate", "returning_certificate")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    RETURNING_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    returning_certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., returning_certificate: _Optional[bytes] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("rule", "detail")
    RULE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    rule: str
    detail: str
    def __init__(self, rule: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class VerdictReply(_message.Message):
    __slots__ = ("admitted", "findings", "level", "seq", "checkpoint", "known", "proof", "entry", "inclusion")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    INCLUSION_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    level: str
    seq: int
    checkpoint: str
    known: bool
    proof: _containers.RepeatedScalarFieldContainer[bytes]
    entry: bytes
    inclusion: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, admitted: _Optional[bool] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., level: _Optional[str] = ..., seq: _Optional[int] = ..., checkpoint: _Optional[str] = ..., known: _Optional[bool] = ..., proof: _Optional[_Iterable[bytes]] = ..., entry: _Optional[bytes] = ..., inclusion: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OutcomeRequest(_message.Message):
    __slots__ = ("key", "seen")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    key: str
    seen: int
    def __init__(self, key: _Optional[str] = ..., seen: _Optional[int] = ...) -> None: ...

class LaunchRequest(_message.Message):
    __slots__ = ("run", "mechanism", "config", "parameters", "sites", "rounds", "min_sites", "strategy", "all_or_none", "secure", "round_seconds", "approval_days", "evaluate", "required_sites", "wait_seconds", "canary")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MECHANISM_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MIN_SITES_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    ALL_OR_NONE_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    APPROVAL_DAYS_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_SITES_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    run: str
    mechanism: str
    config: bytes
    parameters: int
    sites: _containers.RepeatedScalarFieldContainer[str]
    rounds: int
    min_sites: int
    strategy: str
    all_or_none: bool
    secure: bool
    round_seconds: int
    approval_days: int
    evaluate: _containers.RepeatedScalarFieldContainer[int]
    required_sites: _containers.RepeatedScalarFieldContainer[str]
    wait_seconds: int
    canary: bool
    def __init__(self, run: _Optional[str] = ..., mechanism: _Optional[str] = ..., config: _Optional[bytes] = ..., parameters: _Optional[int] = ..., sites: _Optional[_Iterable[str]] = ..., rounds: _Optional[int] = ..., min_sites: _Optional[int] = ..., strategy: _Optional[str] = ..., all_or_none: _Optional[bool] = ..., secure: _Optional[bool] = ..., round_seconds: _Optional[int] = ..., approval_days: _Optional[int] = ..., evaluate: _Optional[_Iterable[int]] = ..., required_sites: _Optional[_Iterable[str]] = ..., wait_seconds: _Optional[int] = ..., canary: _Optional[bool] = ...) -> None: ...

class CheckReply(_message.Message):
    __slots__ = ("sites", "refused")
    SITES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.RepeatedCompositeFieldContainer[CheckedSite]
    refused: str
    def __init__(self, sites: _Optional[_Iterable[_Union[CheckedSite, _Mapping]]] = ..., refused: _Optional[str] = ...) -> None: ...

class CheckedSite(_message.Message):
    __slots__ = ("site", "code", "version", "plan", "device", "seconds", "down", "up", "round_seconds", "wrong", "could", "down_bytes", "up_bytes", "down_seconds", "up_seconds", "aggregated")
    SITE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    COULD_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AGGREGATED_FIELD_NUMBER: _ClassVar[int]
    site: str
    code: str
    version: str
    plan: str
    device: str
    seconds: float
    down: float
    up: float
    round_seconds: float
    wrong: _containers.RepeatedScalarFieldContainer[str]
    could: bool
    down_bytes: int
    up_bytes: int
    down_seconds: float
    up_seconds: float
    aggregated: bool
    def __init__(self, site: _Optional[str] = ..., code: _Optional[str] = ..., version: _Optional[str] = ..., plan: _Optional[str] = ..., device: _Optional[str] = ..., seconds: _Optional[float] = ..., down: _Optional[float] = ..., up: _Optional[float] = ..., round_seconds: _Optional[float] = ..., wrong: _Optional[_Iterable[str]] = ..., could: _Optional[bool] = ..., down_bytes: _Optional[int] = ..., up_bytes: _Optional[int] = ..., down_seconds: _Optional[float] = ..., up_seconds: _Optional[float] = ..., aggregated: _Optional[bool] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: str
    def __init__(self, state: _Optional[str] = ...) -> None: ...

class PlanReply(_message.Message):
    __slots__ = ("sites", "refused", "noise_multiplier")
    SITES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    NOISE_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.RepeatedCompositeFieldContainer[SiteCost]
    refused: str
    noise_multiplier: float
    def __init__(self, sites: _Optional[_Iterable[_Union[SiteCost, _Mapping]]] = ..., refused: _Optional[str] = ..., noise_multiplier: _Optional[float] = ...) -> None: ...

class SiteCost(_message.Message):
    __slots__ = ("site", "fits", "epsilon", "delta", "amount", "left", "reason", "pld_epsilon")
    SITE_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLD_EPSILON_FIELD_NUMBER: _ClassVar[int]
    site: str
    fits: bool
    epsilon: str
    delta: str
    amount: int
    left: int
    reason: str
    pld_epsilon: str
    def __init__(self, site: _Optional[str] = ..., fits: _Optional[bool] = ..., epsilon: _Optional[str] = ..., delta: _Optional[str] = ..., amount: _Optional[int] = ..., left: _Optional[int] = ..., reason: _Optional[str] = ..., pld_epsilon: _Optional[str] = ...) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ("site",)
    SITE_FIELD_NUMBER: _ClassVar[int]
    site: str
    def __init__(self, site: _Optional[str] = ...) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ("invitation", "token", "fingerprint")
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    invitation: bytes
    token: str
    fingerprint: str
    def __init__(self, invitation: _Optional[bytes] = ..., token: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class EnrolmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EnrolmentsReply(_message.Message):
    __slots__ = ("pending",)
    PENDING_FIELD_NUMBER: _ClassVar[int]
    pending: _containers.RepeatedCompositeFieldContainer[Pending]
    def __init__(self, pending: _Optional[_Iterable[_Union[Pending, _Mapping]]] = ...) -> None: ...

class Pending(_message.Message):
    __slots__ = ("site", "state", "fingerprint", "digest", "until")
    SITE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    site: str
    state: str
    fingerprint: str
    digest: str
    until: int
    def __init__(self, site: _Optional[str] = ..., state: _Optional[str] = ..., fingerprint: _Optional[str] = ..., digest: _Optional[str] = ..., until: _Optional[int] = ...) -> None: ...

class ApproveRequest(_message.Message):
    __slots__ = ("site", "serial", "approvals")
    SITE_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    site: str
    serial: str
    approvals: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, site: _Optional[str] = ..., serial: _Optional[str] = ..., approvals: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("site", "certificate", "reason")
    SITE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    site: str
    certificate: str
    reason: str
    def __init__(self, site: _Optional[str] = ..., certificate: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RoundEvent(_message.Message):
    __slots__ = ("run", "round", "state", "sites", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    state: str
    sites: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., state: _Optional[str] = ..., sites: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...
