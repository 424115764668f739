"""Linux namespaces, mounts and network links: what `hosts.py` makes hosts of.

Every function raises `HostsUnavailable` with the reason where this machine does not allow it, and RuntimeError or
OSError if it fails for another reason.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

SWITCH = "switch0"  # the bridge that links all hosts
INTERFACE = "eth0"  # of each host
SHARED = Path("/tmp/shared")  # a folder that all hosts see, as a network file system
_QUEUE_MS = 100

_libc = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = {
    "mount": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip
_NEW_USER = 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 4096, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG = 1


_NOT_ALLOWED = {
    errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL, errno.ENOSPC, errno.EUSERS, errno.ENODEV,
}  # fmt: skip
"""Errors of system calls that this kernel or its settings do not allow: ENOSPC and EUSERS for one more namespace."""
_NOT_ALLOWED_TEXTS = (
    "Operation not permitted", "Permission denied", "Operation not supported", "Unknown device type",
    "qdisc kind is unknown",
)  # fmt: skip
"""What `ip` and `tc` print then."""


class HostsUnavailable(RuntimeError):
    """This machine does not allow hosts; the text is the reason."""


def check_programs() -> None:
    """
    Raises:
        HostsUnavailable: not on Linux, or without `ip` or `tc`.
    """
    if not sys.platform.startswith("linux"):
        raise HostsUnavailable(f"namespaces need Linux; this is {sys.platform}")
    for program in ("ip", "tc"):
        if shutil.which(program, path=_PATH) is None:
            raise HostsUnavailable(f"the program {program} (package iproute2) is not installed")


def end_with_parent() -> None:
    """Let the kernel end this process as soon as its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, 9)


def unshare_all() -> None:
    """Move this process into new namespaces, as root or as the root of a new user namespace. Its next child is process
    1 of the new process namespace."""
    as_user = os.geteuid() != 0
    flags = sum(_NAMESPACES.values())
    uid, gid = os.geteuid(), os.getegid()
    if as_user:
        flags |= _NEW_USER
    if _libc.unshare(flags):
        raise _error_of(f"unshare as {'an unprivileged user namespace' if as_user else 'root'}")
    if as_user:
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        except OSError as error:
            raise HostsUnavailable(f"user namespace: {error}") from None
    mount("none", "/", flags=_RECURSIVE | _PRIVATE)


def fork_into(child: Callable[[], None]) -> int:
    """Fork a process that runs `child` and ends. Returns its id."""
    pid = os.fork()
    if pid == 0:
        exit_after(child)
    return pid


def exit_after(function: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        function()
        status = 0
    finally:
        os._exit(status)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    encoded = None if kind is None else kind.encode()
    if _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), None):
        raise _error_of(f"mount {kind or source} on {target}")


def _error_of(what: str) -> Exception:
    """The error after a system call has failed."""
    number = ctypes.get_errno()
    if number in _NOT_ALLOWED:
        return HostsUnavailable(f"{what}: {os.strerror(number)}")
    return OSError(number, os.strerror(number), what)


def bind(source: str | Path, target: str | Path) -> None:
    mount(str(source), str(target), flags=_BIND)


def mount_system(*kept_folders: Path) -> None:
    """Mount /proc, /sys, /dev/shm and /tmp of this process's namespaces. Of what is in /tmp, these folders, the
    interpreter and the package stay visible."""
    kept = [path for path in dict.fromkeys((*kept_folders, *_own_folders())) if path.is_relative_to("/tmp")]
    opened = [os.open(path, os.O_PATH) for path in kept]
    mount("proc", "/proc", "proc")
    mount("sysfs", "/sys", "sysfs")
    mount("tmpfs", "/dev/shm", "tmpfs")
    mount("tmpfs", "/tmp", "tmpfs")
    os.chmod("/tmp", 0o1777)
    for path, descriptor in zip(kept, opened, strict=True):
        path.mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", str(path), flags=_BIND | _RECURSIVE)
        os.close(descriptor)


def _own_folders() -> Iterable[Path]:
    return Path(__file__).resolve().parents[2], Path(sys.prefix), Path(sys.base_prefix)


def identify(name: str, names: dict[str, str]) -> None:
    """Give this host its name and a boot id, and the addresses of all hosts by name."""
    socket.sethostname(name)
    boot_id, table = Path("/tmp/boot_id"), Path("/tmp/hosts")
    boot_id.write_text(f"{uuid.uuid4()}\n")
    # The second spelling is that of a peer of an IPv6 socket, as the store's is.
    lines = [f"{address} {host}\n::ffff:{address} {host}\n" for host, address in names.items()]
    table.write_text("127.0.0.1 localhost\n" + "".join(lines))
    bind(boot_id, "/proc/sys/kernel/random/boot_id")
    bind(table, "/etc/hosts")


def make_switch() -> None:
    run("ip", f"link set lo up\nlink add {SWITCH} type bridge forward_delay 0\nlink set {SWITCH} up")


def plug(port: str, pid: int) -> None:
    """Link `INTERFACE` of a process's network namespace to a port of the switch."""
    run("ip", f"link add {port} type veth peer name {INTERFACE} netns {pid}\nlink set {port} master {SWITCH} up")


def configure(address: str) -> None:
    """Set up this host's links, and TCP as on most machines, with CUBIC, the default of Linux; the default of this
    kernel may differ, and BBR leaves a part of a shaped link idle. Without CUBIC it is Reno, which every kernel has.
    """
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    run("ip", f"link set lo up\naddress add {address}/24 dev {INTERFACE}\nlink set {INTERFACE} up")
    network = f"{address.rpartition('.')[0]}.0/24"
    # For a route every algorithm is allowed that the kernel has, for a namespace only some.
    with suppress(RuntimeError):
        run("ip", f"route replace {network} dev {INTERFACE} src {address} congctl cubic")


def congestion_control() -> str:
    """That of TCP between this host and the others."""
    route = run("ip", "", "route", "show", "dev", INTERFACE).split()
    return route[route.index("congctl") + 1] if "congctl" in route else "reno"


def shape(interface: str, gigabits: float, queue_bytes: int | None = None) -> None:
    """Limit what an interface sends.

    Args:
        queue_bytes: what waits beyond this is dropped; None: a queue of 100 ms.
    """
    # A bucket of 4 ms, so that the timer of the kernel keeps up with the rate.
    burst = max(int(gigabits * 1e9 / 8 * 4e-3), 1 << 17)
    queue = f"latency {_QUEUE_MS}ms" if queue_bytes is None else f"limit {queue_bytes}"
    run("tc", f"qdisc replace dev {interface} root tbf rate {gigabits * 1e3:.0f}mbit burst {burst} {queue}")


def set_link(port: str, up: bool) -> None:
    run("ip", f"link set {port} {'up' if up else 'down'}")


def port_bytes(port: str) -> tuple[int, int]:
    """The bytes that have gone into and out of the host at a port of the switch, headers included."""
    folder = Path("/sys/class/net", port, "statistics")
    into, out = (int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
    return into, out


def dropped(interface: str) -> int:
    """The packets that the queue of an interface has dropped."""
    text = run("tc", "", "-s", "qdisc", "show", "dev", interface)
    return int(text.partition("dropped ")[2].partition(",")[0])


_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))  # where users' PATH has neither program


def run(program: str, lines: str, *arguments: str) -> str:
    """Run `ip` or `tc` with commands, one a line. Returns the output."""
    path = shutil.which(program, path=_PATH)
    assert path is not None, "check_programs"
    done = subprocess.run(
        [path, *(arguments or ("-batch", "-"))], input=lines + "\n", capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        what = "; ".join(filter(None, (lines.replace("\n", "; "), " ".join(arguments))))
        allowed = not any(text in done.stderr for text in _NOT_ALLOWED_TEXTS)
        raise (RuntimeError if allowed else HostsUnavailable)(f"{program} {what}: {' '.join(done.stderr.split())}")
    return done.stdout
