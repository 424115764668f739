"""What `make gpu` runs, in order: whether results are right, then how long calls take, then where time goes.

If a signal does not arrive, no later section can pass.
"""

from __future__ import annotations

from dataclasses import dataclass

_TRANSPORTS, _RUNTIME = "tests/runtime/transports", "tests/runtime"
_SYMMETRIC, _PROGRAMS = f"{_TRANSPORTS}/test_symmetric.py", f"{_RUNTIME}/executor/test_gpu_programs.py"


@dataclass(frozen=True)
class Section:
    """A command with a time limit, in a process of its own.

    Attributes:
        seconds: the limit.
        arguments: of pytest, or of python where the first is -m or -c; {out} is the folder of results.
        marker: of the tests. `dry`: pytest's options in place of it without a GPU, where kernels are interpreted.
        first: of each test function only the first case.
        split: tests are shared out to several processes, since most of the time is spent on compiling.
        timeout: SHARDWEAVE_TIMEOUT: ranks that share a GPU report a rank that does not come before the time is up.
        test_seconds: that a test may take; 0: as long as those of other sections.
    """

    name: str
    seconds: float
    arguments: tuple[str, ...]
    marker: str = "gpu"
    dry: tuple[str, ...] = ()
    first: bool = False
    split: bool = False
    timeout: str = ""
    test_seconds: float = 0

    @property
    def is_python(self) -> bool:
        return self.arguments[0] in ("-m", "-c")


SECTIONS = (
    Section("environment", 90, ("-m", "shardweave.bench.gpu.environment")),
    Section("signal", 90, ("tests/kernels/test_signal.py", "-k", "one_device"), dry=("-m", "interp")),
    Section("one-of-each-kernel", 120, ("tests/kernels",), dry=("-m", "interp", "-k", "cpu"), first=True, split=True),
    Section("rendezvous", 90, (_SYMMETRIC, "-k", "two_hundred_calls"), first=True, timeout="3"),
    Section("capture", 120, (_SYMMETRIC, _PROGRAMS, "-k", "captured or graph_replay"), first=True, timeout="3"),
    Section("missing-peer", 90, (_SYMMETRIC, "-k", "missing_rank"), timeout="3"),
    Section("token-windows", 120, (f"{_RUNTIME}/moe/test_windows.py",), timeout="3"),
    Section("leases", 60, (f"{_TRANSPORTS}/test_buffer_pool.py",)),
    Section("kernels", 180, ("tests/kernels",), split=True),
    Section("programs", 180, (_PROGRAMS, f"{_TRANSPORTS}/test_hierarchical.py", *(
        f"{_RUNTIME}/{name}.py"
        for name in ("moe/test_compile", "moe/test_permute_indices", "moe/test_scale_layout",
                     "integrations/test_torchtitan_dispatcher")))),
    Section("ranks-on-one-gpu", 180, (_SYMMETRIC, "tests/cli/test_replay_on_gpus.py"), timeout="3"),
    Section("ranks-on-several-gpus", 180, (_SYMMETRIC, *(
        f"{_TRANSPORTS}/test_{name}.py" for name in ("symmetric_hierarchical", "process_group_on_devices")),
        f"{_RUNTIME}/moe/test_two_level_windows.py"), marker="multigpu"),
    Section("timings", 240, ("-m", "shardweave.bench.gpu.timings", "--out", "{out}")),
    Section("profile", 90, ("-m", "shardweave.bench.gpu.timings", "--profile")),
    Section("sanitizer", 400, ("tests/bench/test_sanitizer.py",), test_seconds=380),
)  # fmt: skip
