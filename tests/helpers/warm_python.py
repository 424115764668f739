"""Runs `python …` for tests without the seconds of importing torch, by forking a process that has imported it.

There is one such server for each value of TRITON_INTERPRET, which is read when kernels are decorated. The first process
of the test session that needs it starts it; it forks a server for each process of tests that connects, and ends after
the last of these. Servers have one thread and run nothing themselves, so that their forks are fresh interpreters with
torch, shardweave and pytest imported. Commands that need a new process from the start (those that are killed, or that
read an environment variable while torch is imported) are started by `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any, NoReturn

_PRELOADED = (
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",  # whose imports are those of the first DTensor of a process
    "torch.distributed.checkpoint",
    "shardweave",
    "pytest",
)
_SESSION = "SHARDWEAVE_TEST_SESSION"


def name_session() -> None:
    """Let the processes of tests that this process starts share servers with it."""
    os.environ.setdefault(_SESSION, secrets.token_hex(8))


def run_python(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(command, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True)`, forked.

    Args:
        command: `sys.executable`, then `-m module …` or `-c code …`.

    Raises:
        subprocess.TimeoutExpired: the process took longer, and was killed.
    """
    executable, *arguments = map(os.fspath, command)
    if executable != sys.executable or arguments[0] not in ("-m", "-c"):
        raise ValueError(f"command: {command!r}; allowed: {sys.executable} -m … or {sys.executable} -c …")
    environment = dict(os.environ if env is None else env)
    server = _server(environment.get("TRITON_INTERPRET") == "1")
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pickle.dump((arguments, environment, os.fspath(cwd or os.getcwd())), request)
        request.flush()
        socket.send_fds(server, [b"."], [request.fileno(), out.fileno(), err.fileno()])
        pid = int(server.recv(32))
        on_time = bool(select.select([server], [], [], timeout)[0])
        if not on_time:
            os.kill(pid, signal.SIGKILL)
        status = int(server.recv(32))
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    if not on_time:
        raise subprocess.TimeoutExpired(list(command), timeout, *texts)
    return subprocess.CompletedProcess(list(command), status, *texts)


@functools.cache
def _server(interpreted: bool) -> socket.socket:
    name_session()
    # An abstract address: there is no file, and it is free again when the server has ended.
    address = f"\0shardweave-tests-{os.environ[_SESSION]}-{interpreted:d}"
    deadline = time.monotonic() + 60
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, suppress(OSError):
            listener.bind(address)  # fails if another process has started the server
            listener.listen(64)  # connections wait there until the server has imported torch
            _start(listener, interpreted)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(address)
            if connection.recv(1):
                return connection  # its server ends when this process closes its end
        except OSError:
            pass  # the server ended, or its starter is not listening yet
        connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no server of warm interpreters at {address!r} within 60 s")
        time.sleep(0.05)


def _start(listener: socket.socket, interpreted: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    subprocess.Popen(
        [sys.executable, __file__, str(listener.fileno())],
        pass_fds=[listener.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _accept(listener: socket.socket) -> None:
    """Fork a server for each connection, until the last of them has ended."""
    gc.disable()
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # garbage collections in forked processes skip these objects
    servers: dict[int, int] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in servers:  # it has ended
                poll.unregister(fd)
                os.close(fd)
                os.waitpid(servers.pop(fd), 0)
                continue
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                for other in servers:
                    os.close(other)
                with suppress(ConnectionError):  # the process of tests may end at any time
                    connection.send(b".")
                    _serve(connection)
                os._exit(0)
            connection.close()
            ended = os.pidfd_open(pid)
            servers[ended] = pid
            poll.register(ended, select.POLLIN)
        if not servers:
            return


def _serve(connection: socket.socket) -> None:
    while True:
        request, fds, *_ = socket.recv_fds(connection, 1, 3)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(*fds)
        for fd in fds:
            os.close(fd)
        connection.send(str(pid).encode())
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(request: int, out: int, err: int) -> NoReturn:
    """Run the requested command in this forked process, and exit as an interpreter does."""
    status: Any = 1
    try:
        with open(request, "rb") as file:
            file.seek(0)
            arguments, environment, cwd = pickle.load(file)
        for fd, standard in ((out, 1), (err, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[0:1] = ["" if arguments[0] == "-c" else cwd, *(path for path in given if path not in sys.path)]
        kind, what, *rest = arguments
        sys.argv, sys.orig_argv = [kind, *rest], [sys.executable, *arguments]
        util.spawnv_passfds = functools.partial(_fork_server, util.spawnv_passfds)
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec", dont_inherit=True), main.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit((status or 0) & 0xFF)


def _fork_server(spawn: Any, path: bytes, arguments: Sequence[str | bytes], fds: Sequence[int]) -> int:
    """`multiprocessing.util.spawnv_passfds`, but the server that forks ranks is forked as well, where there is only one
    thread, torch's own included: it need not import torch again."""
    *_, kind, code = map(os.fsdecode, arguments)
    threads = len(os.listdir("/proc/self/task"))
    if kind != "-c" or not code.startswith("from multiprocessing.forkserver ") or threads > 1:
        return spawn(path, arguments, fds)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            # As in a new process: the server ends when the writers of a pipe have closed it, and is one of them now.
            for fd in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *fds}:
                with suppress(OSError):  # that of the list itself
                    os.close(fd)
            forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # it was held at the fork
            exec(code, {"__name__": "__main__"})
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("hint_checks").check_hints_once()  # in all that is forked
        importlib.import_module("bounds_checks").check_bounds_once()
    sys.path[0] = str(Path.cwd())
    _accept(socket.socket(fileno=int(sys.argv[1])))
