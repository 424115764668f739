"""Runs the blocks of a page in processes forked from one that has imported torch; ranks as torchrun starts them."""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import os
import re
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pages import NOT_RUN, ROOT, Block, Command, Page, commands, not_run
from rank_preload import rank_context

_LIMIT = 120.0  # seconds for the ranks of a page
FOUND_OFF = 1  # doctor's status if it finds a fault of this machine


def run_page(page: Page, folder: Path, in_a_shell: bool = False) -> list[str]:
    """Run all blocks in `folder` and return their faults as text.

    Args:
        in_a_shell: run commands by a shell, not in forked processes.
    """
    faults = list(page.faults)
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in page.blocks:
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    python = [block for block in page.blocks if block.language == "python" and not block.file]
    for ranks in sorted({block.ranks for block in python}):
        mine = [block for block in python if block.ranks == ranks]
        faults += _run_blocks(page.name, mine, ranks, folder)
    for block in page.blocks:
        if block.language == "bash":
            run = _run_in_a_shell if in_a_shell else run_commands
            faults += run(block, folder)
    return [f"{page.name}, {fault}" for fault in faults]


def _run_blocks(name: str, blocks: list[Block], ranks: int, folder: Path) -> list[str]:
    printed, error = started(_execute, ranks, folder, name, [(b.line, b.text) for b in blocks])
    faults = [
        fault for block, text in zip(blocks, printed or [], strict=False) if (fault := block.fault_of_output(text))
    ]
    return faults + ([error] if error else [])


def _execute(name: str, blocks: list[tuple[int, str]]) -> list[str]:
    """Run blocks in one namespace; return the output of each."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for line, text in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * (line - 1) + text, name, "exec", dont_inherit=True), namespace)
        printed.append(out.getvalue())
    return printed


def run_commands(block: Block, folder: Path) -> list[str]:
    """Run the commands of a shell block in forked processes; return faults."""
    printed = ""
    for command in commands(block):
        if not_run(command):
            if fault := _not_there(command):
                return [f"line {command.line}: {' '.join(command.words)}: {fault}"]
            continue
        words = [path for word in command.words for path in (_expanded(word, folder) if "*" in word else [word])]
        if words[0] == "mkdir":
            (folder / words[1]).mkdir()
            continue
        with_errors = words[-1] == "2>&1"
        words = words[: len(words) - with_errors]
        ranks, argv = _torchrun(words) if words[0] == "torchrun" else (0, words[1:] if words[0] == "python" else [])
        if not argv:
            return [f"line {command.line}: {' '.join(words)}: no test runs such a command"]
        out, error = started(_main, ranks, folder, argv, dict(command.environment), with_errors)
        if error:
            return [f"line {command.line}: {' '.join(words)}:\n{error}"]
        printed += out
    fault = block.fault_of_output(printed)
    return [fault] if fault else []


def _main(argv: list[str], environment: dict[str, str], with_errors: bool = False) -> str:
    """Run `python …` and return its output.

    Args:
        with_errors: what it writes to standard error is output too.
    """
    os.environ.update(environment)
    for name in [
        name for name in os.environ if name.startswith("PYTEST_")
    ]:  # a reader's command does not run under pytest
        del os.environ[name]
    # Nor has it this folder as a path of modules, where `kernels` would be ours.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]
    if argv[:3] == ["-m", "shardweave", "replay"]:
        _do_not_time()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if with_errors:
            sys.stderr = out
        try:
            if argv[0] == "-m":
                sys.argv = argv[1:]
                runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = argv
                sys.path.insert(0, str(Path(argv[0]).absolute().parent))
                runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code and not (argv[:3] == ["-m", "shardweave", "doctor"] and end.code == FOUND_OFF):
                raise RuntimeError(f"ended with status {end.code}: {out.getvalue()}") from end
    return out.getvalue()


def _do_not_time() -> None:
    """Replace times by made-up ones: pages ignore figures, and the order of cases must not depend on how
    busy the machine is. Each case costs a tenth of the one before it, which moves more bytes. Both sides are still run
    and checked."""
    from shardweave.cli import replay, replay_ranks

    made_up = (10.0**-place for place in itertools.count())

    def time_sides(*_: Any, **__: Any) -> dict[str, list[float]]:
        seconds = next(made_up)
        return {"stock": [seconds], "ours": [seconds / 2]}

    replay_ranks.time_sides = time_sides
    replay.last_level_cache = lambda: 1


def _not_there(command: Command) -> str | None:
    """The fault of a command that is not run, if any."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    first, target, *_ = command.words
    return f"no target {target}" if first == "make" and target not in targets else None


def _run_in_a_shell(block: Block, folder: Path) -> list[str]:
    """Run all commands of a block except those of `NOT_RUN`."""
    lines = [line for line in block.text.split("\n") if not line.startswith(tuple(NOT_RUN))]
    if not any(map(str.strip, lines)):
        return []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)],
        cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    if done.returncode and not ("doctor" in block.text and done.returncode == FOUND_OFF):
        return [f"line {block.line}: status {done.returncode}\n{done.stdout}\n{done.stderr}"]
    return []


def _expanded(word: str, folder: Path) -> Iterable[str]:
    return sorted(str(Path(found).relative_to(folder)) for found in glob.glob(str(folder / word))) or [word]


def _torchrun(words: list[str]) -> tuple[int, list[str]]:
    """The number of ranks of a torchrun command, and the arguments after it."""
    at = words.index("--nproc-per-node")
    ranks, rest = int(words[at + 1]), [w for w in words[1:at] + words[at + 2 :] if w != "--standalone"]
    return ranks, rest


def started(body: Callable[..., Any], ranks: int, folder: Path, *args: Any) -> tuple[Any, str | None]:
    """Call `body(*args)` in `folder` on ranks as torchrun starts them; with 0 ranks in one plain process.

    Returns:
        The result of the first rank, and the errors of all, or None.
    """
    context = rank_context()
    # The store is in this process, as torchrun's is in its agent.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(max(ranks, 1)):
        mine, theirs = context.Pipe(duplex=False)
        given = theirs, str(folder), rank, ranks, store.port, body, args
        processes.append(context.Process(target=_become, args=given))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    first, errors = None, []
    waiting, deadline = {pipe: rank for rank, pipe in enumerate(pipes)}, time.monotonic() + _LIMIT
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                value, error = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                value, error = None, "ended without a report"
            first = value if rank == 0 else first
            if error:
                errors.append(f"rank {rank}: {error}")
                # Other ranks may wait for it; give them time to report their own error.
                deadline = min(deadline, time.monotonic() + 5.0)
    errors += [f"rank {rank}: no end within {_LIMIT:g} s" for rank in waiting.values() if not errors]
    for process in processes:
        process.join(5.0 if not errors else 1.0)
        if process.is_alive():
            process.kill()
            process.join()
    return first, "\n".join(errors) or None


def _become(pipe: Any, folder: str, rank: int, ranks: int, port: int, body: Callable[..., Any], args: tuple) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    if ranks:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
        )  # fmt: skip
    try:
        value = body(*args)
        if dist.is_initialized():
            dist.barrier()  # the store must outlive the other ranks' waits
            dist.destroy_process_group()
        pipe.send((value, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        pipe.close()
        os._exit(1)
