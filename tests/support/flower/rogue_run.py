"""A process in the place of coordinator.federation.run_main that was taken over; the order's config says what it
does.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time

from coordinator.federation.run_messages import TO_RUN, Pipe, RunSpec
from protos.artifacts.arrays import pack_vector


def main(descriptor: int) -> None:
    """Read the order, then misbehave."""
    end = socket.socket(fileno=descriptor)
    pipe = Pipe(end, TO_RUN)
    order = RunSpec.of(pipe.receive())
    vector, moments = pack_vector(order.plan.model.vector), order.plan.model.moments.to_bytes()
    match order.plan.config:
        case b"noise":
            end.sendall(os.urandom(4096))
        case b"announce":
            end.sendall(struct.pack(">8sQQQ", b"done\0\0\0\0", 2, 1 << 40, 0) + b"{}")
        case b"done":
            pipe.send("done", {"round": 0, "used": ["north"], "refused": {}}, vector, moments)
        case b"over":
            pipe.send("over")
        case b"part":
            end.sendall(struct.pack(">8sQQQ", b"over\0\0\0\0", 2, 0, 0))
            return
        case b"fault":
            pipe.send("fault", {"kind": "patient 4711"})
    time.sleep(600.0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
