from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("seen", "cosigned")
    SEEN_FIELD_NUMBER: _ClassVar[int]
    COSIGNED_FIELD_NUMBER: _ClassVar[int]
    seen: int
    cosigned: str
    def __init__(self, seen: _Optional[int] = ..., cosigned: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("policy", "checkpoint", "ledger_key", "proof", "epoch", "restored", "restored_at", "restored_proof")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_KEY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_AT_FIELD_NUMBER: _ClassVar[int]
    RESTORED_PROOF_FIELD_NUMBER: _ClassVar[int]
    policy: str
    checkpoint: str
    ledger_key: bytes
    proof: _containers.RepeatedScalarFieldContainer[bytes]
    epoch: int
    restored: bytes
    restored_at: int
    restored_proof: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, policy: _Optional[str] = ..., checkpoint: _Optional[str] = ..., ledger_key: _Optional[bytes] = ..., proof: _Optional[_Iterable[bytes]] = ..., epoch: _Optional[int] = ..., restored: _Optional[bytes] = ..., restored_at: _Optional[int] = ..., restored_proof: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SealedRequest(_message.Message):
    __slots__ = ("key", "envelope", "seen")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    key: str
    envelope: bytes
    seen: int
    def __init__(self, key: _Optional[str] = ..., envelope: _Optional[bytes] = ..., seen: _Optional[int] = ...) -> None: ...

class SubmitPart(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: SealedRequest
    data: bytes
    def __init__(self, header: _Optional[_Union[SealedRequest, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("run", "mechanism", "config", "parameters", "sites", "rounds", "min_sites")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MECHANISM_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MIN_SITES_FIELD_NUMBER: _ClassVar[int]
    run: str
    mechanism: str
    config: bytes
    parameters: int
    sites: _containers.RepeatedScalarFieldContainer[str]
    rounds: int
    min_sites: int
    def __init__(self, run: _Optional[str] = ..., mechanism: _Optional[str] = ..., config: _Optional[bytes] = ..., parameters: _Optional[int] = ..., sites: _Optional[_Iterable[str]] = ..., rounds: _Optional[int] = ..., min_sites: _Optional[int] = ...) -> None: ...

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
