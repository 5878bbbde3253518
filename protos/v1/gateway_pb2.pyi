from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("policy", "checkpoint", "ledger_key")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_KEY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    checkpoint: str
    ledger_key: bytes
    def __init__(self, policy: _Optional[str] = ..., checkpoint: _Optional[str] = ..., ledger_key: _Optional[bytes] = ...) -> None: ...

class SealedRequest(_message.Message):
    __slots__ = ("key", "envelope")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    key: str
    envelope: bytes
    def __init__(self, key: _Optional[str] = ..., envelope: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("admitted", "findings", "level", "seq", "checkpoint", "known")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    level: str
    seq: int
    checkpoint: str
    known: bool
    def __init__(self, admitted: _Optional[bool] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., level: _Optional[str] = ..., seq: _Optional[int] = ..., checkpoint: _Optional[str] = ..., known: _Optional[bool] = ...) -> None: ...

class OutcomeRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

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
