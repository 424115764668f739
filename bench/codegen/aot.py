"""Every kernel that programs launch, compiled for GPUs that need not be here: registers, spills, shared memory, and how
wide it accesses memory.

`python -m shardweave.bench.codegen.aot --out bench/results/aot.md` compiles all specialisations for all targets. It
fails where one does not compile, spills registers, or accesses memory in narrower pieces than its
alignment allows.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardweave.bench.codegen.launches import KERNELS, OPTIONS, Specialisation, specialisations
from shardweave.bench.harness.machine import provenance
from shardweave.bench.harness.markdown import provenance_lines, table
from shardweave.bench.harness.writable import check_writable
from shardweave.errors import ArgumentError

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WITHOUT_FLOAT8 = ("sm_80", "gfx942")  # or with another one, on AMD
_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "byte": 1,
               "sbyte": 1, "sshort": 2}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """One specialisation on one target.

    Attributes:
        spills: bytes of registers in memory; on AMD registers. None where it is not known.
        shared: bytes.
        loads, stores: how many accesses of data the program has, by their bytes.
    """

    registers: int | None
    spills: int | None
    shared: int
    loads: dict[int, int]
    stores: dict[int, int]


def compile_kernel(
    kernel: Any, target: str, constants: dict[str, Any], signature: dict[str, str], aligned: Sequence[str]
) -> Any:
    """The kernel with these constants (`num_warps` and other options among them), as for a launch with arguments of
    these types of which `aligned` are multiples of 16."""
    constants = dict(constants)
    options = {name: constants.pop(name) for name in OPTIONS if name in constants}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options=options)


def accesses(compiled: Any, target: str) -> Counter[tuple[str, int]]:
    """How often the program accesses global memory, by ("load" or "store", bytes); descriptors included."""
    if target.startswith("gfx"):
        matches = re.findall(r"(?:global|buffer|flat)_(load|store)_(\w+)", compiled.asm["amdgcn"])
        width = {kind: next(w for name, w in _AMD_WIDTHS.items() if kind.startswith(name)) for _, kind in matches}
        return Counter((op, width[kind]) for op, kind in matches)
    matches = re.findall(r"(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    return Counter(({"ld": "load", "st": "store"}[op], int(v or 1) * int(b) // 8) for op, v, b in matches)


def resources(compiled: Any, target: str) -> tuple[int | None, int | None]:
    """Registers of a thread, and how many bytes of them are spilled (on AMD registers)."""
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        spilled = re.findall(r"\.(?:v|s)gpr_spill_count:\s*(\d+)", text)
        registers = re.findall(r"\.vgpr_count:\s*(\d+)", text)
        return max(map(int, registers)), sum(map(int, spilled))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, 0 if ".local" not in compiled.asm["ptx"] else None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def constants_on(target: str, specialisation: Specialisation) -> dict[str, Any]:
    """Where a GPU has no float8_e4m3fn, it is decoded by integers. Only PTX has a timer and ordered stores."""
    constants = dict(specialisation.constants)
    if target.startswith("gfx"):
        constants |= {name: False for name in ("TIMED", "PTX") if name in constants}
    if "SOFT" in constants:
        constants["SOFT"] = constants.get("FROM") == tl.float8e4nv and target in WITHOUT_FLOAT8
    return constants


def compiled_for(target: str, s: Specialisation) -> Compiled:
    compiled = compile_kernel(KERNELS[s.kernel], target, constants_on(target, s), s.signature, s.aligned)
    counts = accesses(compiled, target)
    loads, stores = ({n: c for (o, n), c in sorted(counts.items()) if o == op} for op in ("load", "store"))
    return Compiled(*resources(compiled, target), compiled.metadata.shared, loads, stores)


def faults(s: Specialisation, target: str, compiled: Compiled) -> list[str]:
    """What is wrong: spills, or accesses narrower than alignment and the tile's size allow.

    Of kernels on boxes all accesses of data count; of others those of rows, of which some bytes may not move in
    narrower accesses than they could.
    """
    wrong = [f"{compiled.spills} spilled"] if compiled.spills else []
    if not s.on_boxes and not any(s.row_accesses):
        return wrong
    c, threads = s.constants, TARGETS[target].warp_size * s.constants["num_warps"]
    for name, widths, pieces, word, vector in zip(
        ("loads", "stores"), (compiled.loads, compiled.stores), s.row_accesses, s.words, s.vectors, strict=True
    ):
        # A tile of few words gives each thread fewer than a vector has.
        each = max(c.get("ROWS", 1) * c["COLS"] // threads, 1) * word  # bytes of a thread
        if s.on_boxes:
            wanted = min(vector, each, 16 * word // max(s.words))  # of a cast, the wider side fills a vector first
            allowed = {8} if name == "loads" else set()  # descriptors
            if s.kernel.endswith(("_window", "_direct")):
                allowed = {1, 2, 4, 8}  # counts, and the overwriting of the output after a failure
            narrow = not any(w >= wanted for w in widths) or any(w < wanted for w in widths.keys() - allowed)
        else:
            wanted = min(vector, each)
            narrow = sum(width * number for width, number in widths.items() if width >= wanted) < pieces * each
        if narrow:
            wrong.append(f"{name} of {sorted(widths)} bytes where {wanted} are possible")
    return wrong


def _compile_all(specialisation: Specialisation) -> dict[str, Compiled | str]:
    results: dict[str, Compiled | str] = {}
    for target in TARGETS:
        try:
            results[target] = compiled_for(target, specialisation)
        except Exception as error:  # compilers raise any exception
            results[target] = f"{type(error).__name__}: {error}".splitlines()[0]
    return results


def measure(requested: Sequence[Specialisation]) -> list[tuple[Specialisation, dict[str, Compiled | str]]]:
    """Compile each for every target: the result, or why it did not compile."""
    # The compiler is not to be forked after torch has started threads.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return list(zip(requested, pool.map(_compile_all, requested), strict=True))


_EXPLAINED = """
Every kernel, in every specialisation that the programs, windows and token dispatchers of `bench/codegen/launches.py`
launch. Programs: real models at their full size; pairs of layouts, even and uneven, in all dtypes; transposed and
unaligned inputs; in one process, by messages, through windows that are pushed into or pulled from, into outputs of
peers, and through windows inside nodes. Dispatchers: training and decoding of known shapes, in both directions, in all
dtypes, alignments and layouts. Registers are a thread's (on gfx942 vector registers), the most of any specialisation;
spills are bytes (registers on gfx942), of all; shared memory is bytes, the most of any.
"""


def report(results: Sequence[tuple[Specialisation, dict[str, Compiled | str]]]) -> str:
    """A table with a row for each kernel, in Markdown."""
    targets = list(results[0][1])
    rows = []
    for kernel in sorted({s.kernel for s, _ in results}):
        some = [(s, by) for s, by in results if s.kernel == kernel]
        good = [c for _, by in some for c in by.values() if isinstance(c, Compiled)]
        registers = (max((c.registers or 0 for _, by in some if isinstance(c := by[target], Compiled)), default=0)
                     for target in targets)  # fmt: skip
        rows.append((
            kernel, len(some), sum(s.launches for s, _ in some), f"{len(good)} of {len(some) * len(targets)}",
            sum(c.spills or 0 for c in good), max((c.shared for c in good), default=0), *registers,
        ))  # fmt: skip
    heads = ("kernel", "specialisations", "launches", "compiled", "spilled", "shared",
             *(f"registers, {target}" for target in targets))  # fmt: skip
    lines = ["# Kernels, compiled ahead of time", "", *provenance_lines(provenance()), _EXPLAINED]
    return "\n".join([*lines, *table(heads, rows)]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardweave.bench.codegen.aot", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there (default: print it)")
    arguments = parser.parse_args(argv)
    try:
        check_writable("--out", arguments.out)
    except ArgumentError as error:
        parser.error(str(error))
    results = measure(specialisations())
    text = report(results)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    wrong = 0
    for s, by in results:
        for target, c in by.items():
            for fault in [c] if isinstance(c, str) else faults(s, target, c):
                wrong += 1
                print(f"{s.kernel} {s} ({s.example}) on {target}: {fault}", file=sys.stderr)
    print(f"{len(results)} specialisations on {len(TARGETS)} targets: {wrong} faults", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
