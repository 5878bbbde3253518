"""A gRPC channel to the coordinator: the only kind of connection that an agent opens.

The site's settings alone decide the network path. Proxy variables of the environment (``https_proxy``,
``no_proxy``...) are ignored in both directions: they neither add a proxy nor remove the configured one.
"""

from __future__ import annotations

from typing import Final

import grpc

from protos.protocol_version import USER_AGENT

MAX_MESSAGE: Final = 4 << 20  # bytes of one gRPC message, either way; what is larger travels in parts
_KEEPALIVE_MS: Final = 60_000  # a half-open connection is noticed after this and the next
_KEEPALIVE_TIMEOUT_MS: Final = 20_000
_AGAIN_MS: Final = 500  # before a connection that was cut is dialled again,
_AGAIN_AT_MOST_MS: Final = 1_000  # and at most: gRPC's own is two minutes


def of_another_root(details: str | None) -> bool:
    """Whether a call failed because the certificate that answered is not of this site's root, by gRPC's own words.

    One that is over or not valid yet, by this clock, is not meant: its root may be the right one.
    """
    said = details or ""
    return "CERTIFICATE_VERIFY_FAILED" in said and not any(word in said for word in ("has expired", "not yet valid"))


def open_channel(target: str, credentials: grpc.ChannelCredentials, proxy: str = "", agent: str = "") -> grpc.Channel:
    """A channel to ``target``; nothing is sent before the first call.

    Args:
        target: host:port of the coordinator.
        credentials: the site's certificate and the federation's root (TLS; the proxy sees neither).
        proxy: host:port of the hospital's HTTP proxy, which is asked to CONNECT to ``target``; "": none.
        agent: which protocols are spoken; "": all that this program speaks.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _AGAIN_MS),
        ("grpc.max_reconnect_backoff_ms", _AGAIN_AT_MOST_MS),
        ("grpc.enable_http_proxy", 0),  # of the environment
        ("grpc.use_local_subchannel_pool", 1),  # fresh credentials must mean a fresh connection
        ("grpc.primary_user_agent", agent or USER_AGENT),  # which protocols this agent speaks
    ]
    if not proxy:
        return grpc.secure_channel(target, credentials, options)
    # gRPC's own proxy option heeds no_proxy, so the proxy is dialled as such, and told where to connect. The
    # certificate must still be the coordinator's.
    host = target.rpartition(":")[0].strip("[]")
    return grpc.secure_channel(
        proxy,
        credentials,
        [
            *options,
            ("grpc.http_connect_server", target),
            ("grpc.default_authority", target),
            ("grpc.ssl_target_name_override", host),
        ],
    )
