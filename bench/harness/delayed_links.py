"""Links on which every packet takes a while, for kernels without the queue `netem` of `tc`."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from .namespaces import SWITCH, HostsUnavailable, end_with_parent, run

_ALL_PROTOCOLS = 3  # ETH_P_ALL
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_PACKET_OUTGOING = 4
_MOST_BYTES = 1 << 17  # packets that are not yet cut for the wire are up to 64 KiB long


class DelayedLinks:
    """Puts a link between each port and the switch, whose ends `run` connects.

    Args:
        ports: of the switch, one of each host.
        delay_ms: how long a packet from a host is held back; a round trip takes twice as long.

    Raises:
        HostsUnavailable: this machine does not allow sockets with the packets of an interface.
    """

    def __init__(self, ports: Sequence[str], delay_ms: float) -> None:
        self._others: dict[socket.socket, tuple[socket.socket, float]] = {}
        for port in ports:
            inner, outer = f"in-{port}", f"out-{port}"
            run(
                "ip",
                f"link set {port} nomaster\nlink add {inner} type veth peer name {outer}\n"
                f"link set {inner} up\nlink set {outer} master {SWITCH} up",
            )
            host, switch = _socket(port), _socket(inner)
            self._others[host], self._others[switch] = (switch, delay_ms / 1e3), (host, 0.0)

    def run(self) -> None:
        """Pass on packets until the parent process ends."""
        end_with_parent()
        with suppress(OSError):  # before the ranks, which would delay packets further; not allowed to all users
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        waiting: deque[tuple[float, socket.socket, bytes]] = deque()
        while True:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _send(*waiting.popleft()[1:])
            ready, _, _ = select.select(list(self._others), [], [], waiting[0][0] - now if waiting else None)
            for source in ready:
                packet, (_, _, kind, *_) = source.recvfrom(_MOST_BYTES)
                if kind == _PACKET_OUTGOING:
                    continue
                target, delay = self._others[source]
                if delay:
                    waiting.append((time.monotonic() + delay, target, packet))
                else:
                    _send(target, packet)


def _socket(interface: str) -> socket.socket:
    """A socket with all packets of an interface, each after a header about what its sender has left to the hardware:
    checksums, and cuts into packets that fit."""
    try:
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    except PermissionError as error:
        raise HostsUnavailable(f"packet sockets: {error}") from None
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.bind((interface, _ALL_PROTOCOLS))
    return made


def _send(target: socket.socket, packet: bytes) -> None:
    with suppress(OSError):  # a full queue, or a link that is down, drops it
        target.send(packet)
