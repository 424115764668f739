"""The token kernels compiled ahead of time: rows move 16 bytes at a time, and no register spills."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
import triton
import triton.language as tl
from test_aot import TARGETS, accesses, assert_no_spill, each_target, each_target_in_turn
from triton.runtime.jit import JITFunction

from shardweave.bench.codegen import aot
from shardweave.bench.codegen.launches import KERNELS, OPTIONS, Layer, Specialisation, dispatches, specialisations
from shardweave.kernels.dtypes import ELEMENTS, poison_word
from shardweave.kernels.launch import registers_of_sm
from shardweave.kernels.tokens.columns import column_parts
from shardweave.kernels.tokens.combine_rows import combine_rows_kernel, gather_values_kernel
from shardweave.kernels.tokens.copy_columns import _constants as of_columns
from shardweave.kernels.tokens.copy_columns import copy_columns_kernel
from shardweave.kernels.tokens.copy_rows import copy_rows_kernel, fill_rows_kernel
from shardweave.kernels.tokens.count_pairs import (
    MOST_PHYSICAL_EXPERTS,
    count_few_pairs_kernel,
    count_pairs_kernel,
    count_rows,
    few_warps,
    place_rows_kernel,
    place_warps,
    share_counts_kernel,
    shared_rows,
)
from shardweave.kernels.tokens.group_rows import group_rows_kernel, group_warps, rank_rows
from shardweave.kernels.tokens.locate_rows import locate_rows_kernel, tokens_at_a_time
from shardweave.kernels.tokens.offer_rows import offer_rows_kernel
from shardweave.kernels.tokens.offer_tokens import offer_tokens_kernel
from shardweave.kernels.tokens.push_rows import push_rows_kernel
from shardweave.kernels.tokens.push_sums import push_sums_kernel
from shardweave.kernels.tokens.quantize_rows import (
    QUANTIZATIONS,
    QuantizedRows,
    _constants,
    quantize_rows_kernel,
)
from shardweave.kernels.tokens.receive_rows import receive_rows_kernel
from shardweave.kernels.tokens.route_rows import route_rows_kernel
from shardweave.kernels.tokens.rows import PROGRAMS_OF_SM, RowLaunch, row_alignment, row_constants
from shardweave.kernels.tokens.spread_rows import spread_rows_kernel
from shardweave.kernels.tokens.weigh_rows import weigh_rows_kernel
from shardweave.kernels.window_use import use_constants
from shardweave.runtime.moe.packed_rows import packed_rows

pytestmark = pytest.mark.aot

POINTERS = {
    "*i64": (
        "buffers matrices weight_buffers counts_out padded_out overflow_out counts padded_counts error words signals "
        "row_tables weight_tables sources targets"
    ),
    "*i32": (
        "expert_table expert_out block_counts block_bad expert_in place_in place_out start_in limit_in destination_in "
        "key_in row_in key_out row_out matrix first_table start_out limit_out offsets_out num_rows_out offsets "
        "num_rows choice matrix_out nodes once_out columns_out"
    ),
    "*fp32": "weights weight_gradient numbers_in numbers_out weight_in weight_out",
}
POINTER_OF = {name: kind for kind, names in POINTERS.items() for name in names.split()}


def signalling(target: str, num_warps: int, peers: int = 7) -> dict:
    """The constants of a kernel that waits for peers and signals them; with 0 peers of one that does not."""
    if not peers:
        return {"PEERS": 0, "TIMED": False, "PTX": False, "WIDTH": 1}
    nvidia = not target.startswith("gfx")
    constants = use_constants(peers, False, num_warps=num_warps, timed=nvidia, ptx=nvidia)
    return {name: constants[name] for name in ("PEERS", "TIMED", "PTX", "WIDTH")}


def compile_kernel(kernel, target: str, constants: dict, **pointers: str):
    constants = {name: value for name, value in constants.items() if name in (*kernel.arg_names, *OPTIONS)}
    if not isinstance(kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    numbers = {p.name: p.annotation_type for p in kernel.params if p.annotation_type}
    kinds = {**POINTER_OF, **numbers, **pointers}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    # What torch allocates is aligned, as the launcher finds it.
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    return aot.compile_kernel(kernel, target, constants, signature, aligned)


@each_target_in_turn("case", [(3, True), (256, False), (MOST_PHYSICAL_EXPERTS, True)])
def test_count_pairs_does_not_spill(target, case):
    physical_experts, looked_up = case
    padded, peers = max(32, triton.next_power_of_2(physical_experts)), 7 if looked_up else 0
    count = {"EXPERTS": padded, "HAS_TABLE": looked_up, "num_warps": 4}
    ids = {"ids": "*i64", "counts_out": "*i32"}
    assert_no_spill(compile_kernel(count_pairs_kernel, target, count, **ids), target)
    for pairs in (32, 1024):
        few = {"EXPERTS": padded, "PAIRS": pairs, "HAS_TABLE": looked_up, "num_warps": few_warps(pairs, padded)}
        few |= {
            "RANKS": shared_rows(padded, few_warps(pairs, padded)),
            **signalling(target, few_warps(pairs, padded), peers),
            **registers_of_sm(few_warps(pairs, padded)),
        }
        assert_no_spill(compile_kernel(count_few_pairs_kernel, target, few, **ids), target)
    place = {"EXPERTS": padded, "BLOCKS": 128, "ROWS": count_rows(padded), "num_warps": place_warps(peers)}
    place |= {"RANKS": shared_rows(padded, 16), **signalling(target, place_warps(peers), peers)}
    assert_no_spill(compile_kernel(place_rows_kernel, target, place, **ids), target)
    share = {"LENGTH": triton.next_power_of_2(physical_experts + 2), "HAS_WORD": True, "num_warps": 4}
    assert_no_spill(compile_kernel(share_counts_kernel, target, share, counts="*i32"), target)


@each_target_in_turn("physical_experts", [3, 300, MOST_PHYSICAL_EXPERTS])
def test_group_rows_does_not_spill(target, physical_experts):
    padded = max(32, triton.next_power_of_2(physical_experts))
    for batched in (False, True):
        constants = {"EXPERTS": padded, "RANKS": rank_rows(padded), "BATCHED": batched}
        constants["num_warps"] = group_warps(padded)
        assert_no_spill(compile_kernel(group_rows_kernel, target, constants), target)


@each_target_in_turn("case", [(3, 32), (256, 8), (MOST_PHYSICAL_EXPERTS, 1)])
def test_route_rows_does_not_spill(target, case):
    physical_experts, k = case
    padded, width = max(32, triton.next_power_of_2(physical_experts)), triton.next_power_of_2(k)
    constants = {"EXPERTS": padded, "RANKS": rank_rows(padded), "BATCHED": False, "CHECKED": True, "K": k, "KP": width}
    constants |= {"TOKENS": tokens_at_a_time(width), "num_warps": group_warps(padded)}
    assert_no_spill(compile_kernel(route_rows_kernel, target, constants), target)


@each_target_in_turn("k", [1, 3, 32])
def test_locate_rows_and_gather_values_do_not_spill(target, k):
    width = triton.next_power_of_2(k)
    constants = {"K": k, "KP": width, "TOKENS": tokens_at_a_time(width), "num_warps": 4}
    assert_no_spill(compile_kernel(locate_rows_kernel, target, constants), target)
    constants = {"K": k, "num_warps": 4, "POISON": poison_word(torch.float32)[0]}
    for peers in (0, 7):
        constants |= signalling(target, 4, peers)
        assert_no_spill(compile_kernel(gather_values_kernel, target, constants, out="*fp32"), target)


NOT_QUANTIZED = {"GROUP": 0, "POWERS": False, "ROW_BYTES": 0, "SCALES_AT": 0}
ROWS = [(torch.bfloat16, 7168, k) for k in (1, 3, 8)] + [(dtype, 7168, 8) for dtype in (torch.float32, torch.float16)]


def row_launch(dtype: torch.dtype, hidden: int) -> dict:
    launch = RowLaunch.for_rows(hidden, dtype.itemsize)
    return {"COLS": launch.columns, "num_warps": launch.num_warps, **row_constants(dtype, hidden)}


def wide(compiled, target: str) -> tuple[int, int]:
    """Loads and stores of 16 bytes."""
    results = accesses(compiled, target)
    return results["load", 16], results["store", 16]


def assert_equal_without_signals(got: int, want: int, constants: dict) -> None:
    """Kernels that signal have more accesses: of addresses of signals, and of an output that is overwritten."""
    assert got >= want if constants["PEERS"] else got == want, (got, want)


@each_target_in_turn("rows", ROWS)
def test_push_rows_is_vectorised_and_does_not_spill(target, rows):
    dtype, hidden, k = rows
    constants = {**row_launch(dtype, hidden), "K": k, "PADDING": 8, "HAS_WEIGHTS": True, "CHOSEN": False}
    constants |= {**NOT_QUANTIZED, "DTYPE": None}
    constants |= signalling(target, constants["num_warps"], peers=7 * (k == 8)) | registers_of_sm(16)
    compiled = compile_kernel(push_rows_kernel, target, constants)
    assert_no_spill(compiled, target)
    pieces = constants["COLS"] * dtype.itemsize // (16 * TARGETS[target].warp_size * constants["num_warps"])
    loads, stores = wide(compiled, target)
    # Each row is read once, and stored k times; zeros for the padding.
    assert_equal_without_signals(loads, pieces, constants)
    assert stores >= (k + 1) * pieces
    widths = {width for op, width in accesses(compiled, target) if op == "store"}
    assert widths - {8} == {4, 16}, widths  # 4: the weights; 8: signals


def fused_operations(compiled) -> list[str]:
    """The instructions that multiply and add with one rounding.

    On AMD GPUs `v_fma_mix` also converts 16-bit floats for a product (plus -0) or for a sum (of a term times 1), which
    round as the operation alone does.
    """
    if "ptx" in compiled.asm:
        return re.findall(r"\bfma\..*", compiled.asm["ptx"])
    fused = re.findall(r"v_(?:pk_)?(?:fma|mac|mad)(?:c|k)?_(?:mix|f32).*", compiled.asm["amdgcn"])
    return [line for line in fused if not re.search(r"_mix.* 1\.0,|_mix.*, (?:neg\()?0\b", line)]


@each_target_in_turn("case", [*((*rows, False) for rows in ROWS), (*ROWS[2], True)])
def test_combine_rows_is_vectorised_and_does_not_spill(target, case):
    dtype, hidden, k, nested = case
    constants = {**row_launch(dtype, hidden), "K": k, "DTYPE": ELEMENTS[dtype], "HAS_WEIGHTS": True, "HAS_ADD": True}
    constants |= {
        "SOFT": False,
        "enable_fp_fusion": False,
        "CHOSEN": True,
        "NESTED": nested,
        **NOT_QUANTIZED,
        "POISON": poison_word(dtype)[0],
    }
    constants |= signalling(target, constants["num_warps"], peers=7 * (k == 8))
    compiled = compile_kernel(combine_rows_kernel, target, constants)
    assert_no_spill(compiled, target)
    pieces = constants["COLS"] * dtype.itemsize // (16 * TARGETS[target].warp_size * constants["num_warps"])
    loads, stores = wide(compiled, target)
    assert_equal_without_signals(loads, (k + 1) * pieces, constants)
    assert_equal_without_signals(stores, pieces, constants)
    assert not fused_operations(compiled)


@each_target_in_turn("rows", ROWS)
def test_kernels_of_deduped_tokens_are_vectorised_and_do_not_spill(target, rows):
    dtype, hidden, k = rows
    constants = {**row_launch(dtype, hidden), "K": k, "KP": triton.next_power_of_2(k)}
    signals = signalling(target, constants["num_warps"])
    pieces = constants["COLS"] * dtype.itemsize // (16 * TARGETS[target].warp_size * constants["num_warps"])
    tables = {"TABLES": True, "TOKENS": 1024 // constants["KP"]}
    tables |= registers_of_sm(constants["num_warps"])
    offer = compile_kernel(offer_tokens_kernel, target, constants | tables | signals)
    assert_no_spill(offer, target)
    loads, stores = wide(offer, target)
    assert loads >= pieces and stores >= pieces
    spread = compile_kernel(spread_rows_kernel, target, constants | {"PADDING": 8, "NEW": True})
    assert_no_spill(spread, target)
    loads, stores = wide(spread, target)
    assert loads >= pieces and stores >= (k + 1) * pieces  # each token is read once, and stored k times
    sums = {"DTYPE": ELEMENTS[dtype], "HAS_WEIGHTS": True, "SOFT": False, "enable_fp_fusion": False, **NOT_QUANTIZED}
    sums |= registers_of_sm(constants["num_warps"])
    push = compile_kernel(push_sums_kernel, target, constants | sums | signals)
    assert_no_spill(push, target)
    loads, stores = wide(push, target)
    assert loads >= k * pieces and stores >= pieces
    assert not fused_operations(push)


@each_target_in_turn("dtype", [torch.bfloat16, torch.float32])
def test_weigh_rows_is_vectorised_and_does_not_spill(target, dtype):
    constants = {**row_launch(dtype, 7168), "DTYPE": ELEMENTS[dtype], "SOFT": False, "enable_fp_fusion": False}
    compiled = compile_kernel(weigh_rows_kernel, target, constants)
    assert_no_spill(compiled, target)
    loads, stores = wide(compiled, target)
    assert loads == 2 * stores > 0


@each_target
def test_copy_rows_is_vectorised_and_does_not_spill(target):
    constants = {"H": 7168, "COLS": 2048, "WORD": tl.int16, "ALIGN": 16, "num_warps": 4}
    compiled = compile_kernel(copy_rows_kernel, target, constants)
    assert_no_spill(compiled, target)
    assert wide(compiled, target) == (2048 * 2 // (16 * TARGETS[target].warp_size * 4),) * 2


@each_target_in_turn("dtype", [torch.bfloat16, torch.float32])
def test_receive_rows_and_offer_rows_in_windows(target, dtype):
    """Launches that wait for peers and signal them, with all that they can do besides."""
    constants = {**row_constants(dtype, 7168), "COLS": 4096 // dtype.itemsize, "num_warps": 4}
    receive = constants | {"COPY": True, "FILL": True, "HAS_NUMBERS": True, "POISON": poison_word(dtype)[0]}
    receive |= {"NUMBER_POISON": poison_word(torch.float32)[0], **signalling(target, 4)}
    receive |= registers_of_sm(4, PROGRAMS_OF_SM) | column_parts(None, None)
    compiled = compile_kernel(receive_rows_kernel, target, receive)
    assert_no_spill(compiled, target)
    pieces = 4096 // (16 * TARGETS[target].warp_size * 4)
    loads, stores = wide(compiled, target)
    assert loads >= pieces and stores >= 2 * pieces
    for wider in (1, 4):
        offer = constants | {"COLS": wider * 4096 // dtype.itemsize, "COPY": wider > 1, "num_warps": 4 * wider}
        offer |= {**registers_of_sm(4 * wider, PROGRAMS_OF_SM if wider == 1 else 1), **NOT_QUANTIZED, "DTYPE": None}
        compiled = compile_kernel(offer_rows_kernel, target, offer | signalling(target, 4 * wider))
        assert_no_spill(compiled, target)
        loads, stores = wide(compiled, target)
        assert loads >= pieces * (wider > 1) and stores == pieces * (wider > 1)


@each_target
def test_fill_rows_is_vectorised_and_does_not_spill(target):
    """From any first row on."""
    constants = {"H": 7168, "COLS": 2048, "WORD": tl.int16, "ALIGN": 16, "num_warps": 4}
    compiled = compile_kernel(fill_rows_kernel, target, constants)
    assert_no_spill(compiled, target)
    assert wide(compiled, target) == (0, 2048 * 2 // (16 * TARGETS[target].warp_size * 4))


@each_target_in_turn(
    "rows, quantize, counted",
    [(torch.bfloat16, 7168), (torch.float32, 4096), (torch.float16, 2501)],
    list(QUANTIZATIONS),
    [True, False],
)
def test_quantize_rows_is_vectorised_and_does_not_spill(target, rows, quantize, counted):
    """float8 by integers, on targets without it too."""
    dtype, hidden = rows
    align = row_alignment(dtype, hidden, 0)
    constants = _constants(dtype, hidden, align, QUANTIZATIONS[quantize], counted)
    names = [p.name for p in quantize_rows_kernel.params if p.is_constexpr]
    given = {**dict(zip(names, constants.values, strict=True)), **constants.options}
    compiled = compile_kernel(quantize_rows_kernel, target, given)
    assert_no_spill(compiled, target)
    results = accesses(compiled, target)
    if align == 16:
        # Elements are read 16 bytes at a time and stored at least 4 at a time; scales one at a time.
        loads = {width for op, width in results if op == "load"}
        assert loads - ({4} if counted else set()) == {16}  # the number of rows
        assert {width for op, width in results if op == "store"} & {4, 8, 16}


def quantizing(quantize: str, dtype: torch.dtype, hidden: int, columns: int) -> dict:
    """The constants of kernels that quantize rows into packed ones."""
    how, rows = QUANTIZATIONS[quantize], packed_rows("quantize", quantize, hidden)
    return how.constants(dtype, hidden, columns) | QuantizedRows(how, rows.begins[1]).places(rows.nbytes)


@each_target_in_turn(
    "rows, quantize",
    [(torch.bfloat16, 7168, 8), (torch.float32, 7168, 8), (torch.float16, 2500, 3)],
    list(QUANTIZATIONS),
)
def test_push_rows_quantizes_without_spills_by_wide_accesses(target, rows, quantize):
    """float8 by integers, on targets without it too; with all that else there is."""
    dtype, hidden, k = rows
    constants = row_launch(torch.bfloat16, hidden) | row_constants(dtype, hidden)
    constants |= quantizing(quantize, dtype, hidden, constants["COLS"])
    constants |= {"K": k, "PADDING": 8, "HAS_WEIGHTS": True, "CHOSEN": True}
    constants |= signalling(target, constants["num_warps"]) | registers_of_sm(16)
    compiled = compile_kernel(push_rows_kernel, target, constants)
    assert_no_spill(compiled, target)
    if hidden == 7168:
        each = 2048 // (TARGETS[target].warp_size * 4)  # float8 of a thread, stored at once for each pair
        pieces = each * dtype.itemsize // 16
        loads, _ = wide(compiled, target)
        assert loads >= pieces - (target == "gfx942")
        assert accesses(compiled, target)["store", each] >= k
        scale = 1 if quantize == "mxfp8" else 4
        widths = {width for op, width in accesses(compiled, target) if op == "store"}
        assert widths - {8, 16} == {scale, 4}, widths  # 4: the weights


@each_target_in_turn("rows, quantize", [(torch.bfloat16, 7168, 8), (torch.float32, 2500, 3)], list(QUANTIZATIONS))
def test_combine_rows_of_quantized_rows_does_not_spill(target, rows, quantize):
    dtype, hidden, k = rows
    how, rows = QUANTIZATIONS[quantize], packed_rows("quantize", quantize, hidden)
    constants = {**row_launch(dtype, hidden), "K": k, "DTYPE": ELEMENTS[dtype], "HAS_WEIGHTS": True, "HAS_ADD": False}
    constants |= {"SOFT": False, "enable_fp_fusion": False, "CHOSEN": True, "NESTED": False}
    constants |= {"POISON": poison_word(dtype)[0], "GROUP": how.group or hidden, "ROW_BYTES": rows.nbytes}
    constants |= {"POWERS": how.scale_dtype is not torch.float32, "SCALES_AT": rows.begins[1]}
    constants |= signalling(target, constants["num_warps"])
    compiled = compile_kernel(combine_rows_kernel, target, constants)
    assert_no_spill(compiled, target)
    elements = 2048 // (TARGETS[target].warp_size * 4)  # of a thread, each 1 byte
    if dtype is torch.bfloat16:
        assert accesses(compiled, target)["load", min(elements, 16)] >= k


@each_target_in_turn("size", [1, 4, 224, 226])
def test_copy_columns_does_not_spill(target, size):
    constants = of_columns(size)
    names = [p.name for p in copy_columns_kernel.params if p.is_constexpr]
    given = {**dict(zip(names, constants.values, strict=True)), **constants.options}
    compiled = compile_kernel(copy_columns_kernel, target, given)
    assert_no_spill(compiled, target)
    assert {width for op, width in accesses(compiled, target) if op == "store"} == {math.gcd(size, 16)}


@each_target_in_turn("hidden", [1, 3, 2500, 20])
def test_rows_of_any_length_compile(target, hidden):
    """Accesses are as wide as the length of a row allows."""
    dtype = torch.bfloat16
    width = {1: 2, 3: 2, 2500: 8, 20: 8}[hidden]
    assert row_constants(dtype, hidden)["ALIGN"] == width
    push = {**row_launch(dtype, hidden), "K": 3, "PADDING": 8, "HAS_WEIGHTS": False, "CHOSEN": True}
    push |= {**NOT_QUANTIZED, "DTYPE": None}
    push |= signalling(target, push["num_warps"]) | registers_of_sm(16)
    assert_no_spill(compile_kernel(push_rows_kernel, target, push), target)
    combine = {**row_launch(dtype, hidden), "K": 3, "DTYPE": tl.bfloat16, "HAS_WEIGHTS": False, "HAS_ADD": False}
    combine |= {
        "SOFT": False,
        "enable_fp_fusion": False,
        "CHOSEN": False,
        "NESTED": False,
        **NOT_QUANTIZED,
        "POISON": poison_word(dtype)[0],
    }
    combine |= signalling(target, combine["num_warps"])
    compiled = compile_kernel(combine_rows_kernel, target, combine)
    assert_no_spill(compiled, target)
    if hidden == 2500:
        results = accesses(compiled, target)
        assert results["load", width] and results["store", width]


# Small layers that cover both routing kernels, tables, weights, sums, padding and unaligned addresses.
LAYERS = (
    Layer("large", 7168, 8, 256, 2, 300, options={"align": 8, "zero_rows": True}),
    Layer("decode", 4096, 2, 8, 2, 4, torch.float32, torch.int32),
    Layer(
        "odd", 30, 3, 5, 2, 7, torch.float16, odd=True, experts_twice=True, options={"save": "copy", "zero_rows": True}
    ),
    Layer("batched", 64, 1, 5, 2, 7, options={"expert_capacity": 3, "layout": "batched"}),
    Layer("chunks", 64, 1, 5, 2, 7, options={"chunk_capacity": 1.25}),
    Layer("fp8", 7168, 8, 256, 2, 300, options={"quantize": "fp8_128", "quantize_output": "fp8_128"}),
    Layer("blocks", 7168, 8, 256, 2, 300, options={"quantize": "mxfp8", "scale_layout": "blocked", "align": 32}),
)


@pytest.fixture(scope="module")
def launched() -> list[Specialisation]:
    if not isinstance(push_rows_kernel, triton.runtime.jit.JITFunction):
        pytest.skip("TRITON_INTERPRET=1: no kernel is compiled in this process")
    return specialisations(dispatches(LAYERS))


def test_all_token_kernels_are_launched(launched: list[Specialisation]) -> None:
    on_boxes = {"copy_boxes", "reduce_boxes", "copy_direct", "copy_window", "reduce_window"}
    assert {s.kernel for s in launched} | on_boxes == set(KERNELS)
    assert {"signal", "count_few_pairs", "weigh_rows"} <= set(KERNELS)

    def of(kernel: str, name: str) -> set:
        return {s.constants[name] for s in launched if s.kernel == kernel}

    assert of("push_rows", "PADDING") == {1, 4, 8, 32, 64} and of("push_rows", "HAS_WEIGHTS") == {True, False}
    assert of("combine_rows", "NESTED") == {True, False}
    assert of("combine_rows", "HAS_ADD") == of("combine_rows", "HAS_WEIGHTS") == {True, False}
    assert of("route_rows", "BATCHED") == of("count_few_pairs", "HAS_TABLE") == {True, False}
    assert {s.constants["ALIGN"] for s in launched if s.kernel == "push_rows"} == {2, 4, 16}
    assert of("push_rows", "CHOSEN") == of("combine_rows", "CHOSEN") == of("offer_rows", "COPY") == {True, False}
    assert of("share_counts", "HAS_WORD") == of("receive_rows", "COPY") == of("receive_rows", "FILL") == {True, False}
    in_windows = (
        "count_few_pairs",
        "place_rows",
        "push_rows",
        "receive_rows",
        "offer_rows",
        "combine_rows",
        "offer_tokens",
        "push_sums",
    )
    assert all(of(kernel, "PEERS") == {0, 7} for kernel in in_windows)
    # A window's signals: wait with credit, barrier, leave and spoil with poison of every size, refusal, and failure.
    assert len([s for s in launched if s.kernel == "signal"]) == 2 + 4 + 4 + 2
    # Recording has ended, and addresses are those of memory again.
    assert JITFunction.run.__module__ == "triton.runtime.jit" and torch.empty(2).data_ptr() % 64 == 0


def test_recorded_launches_equal_triton_compilation(launched: list[Specialisation]) -> None:
    push = next(
        s
        for s in launched
        if s.kernel == "push_rows" and s.constants["K"] == 8 and s.constants["HAS_WEIGHTS"] and not s.quantizes
    )
    assert push.signature["x"] == "i64" and push.signature["tokens"] == "i32"
    assert push.signature["buffers"] == "*i64" and push.signature["row_in"] == "*i32"
    assert push.signature["weights"] == "*fp32" and push.signature["K"] == "constexpr"
    assert set(push.aligned) == {name for name, kind in push.signature.items() if kind.startswith("*")}
    assert push.constants["num_warps"] == 4 and "x" not in push.constants
    assert {s.signature["ids"] for s in launched if s.kernel == "count_few_pairs"} == {"*i32", "*i64"}
    assert all(not s.constants["enable_fp_fusion"] for s in launched if s.kernel in ("combine_rows", "weigh_rows"))
    signal = next(s for s in launched if s.kernel == "signal")
    assert signal.signature["host_error"] == signal.signature["words"] == "i64"


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_launched_token_kernels_are_vectorised(launched: list[Specialisation], target: str) -> None:
    once = {(s.kernel, s.constants.get("ALIGN")): s for s in reversed(launched)}
    assert len(once) >= len(KERNELS) - 2 + 5
    for s in once.values():
        results = aot.compiled_for(target, s)
        assert aot.faults(s, target, results) == [], (str(s), results)


def test_narrow_row_accesses_are_reported(launched: list[Specialisation]) -> None:
    push = next(
        s
        for s in launched
        if s.kernel == "push_rows" and s.constants["K"] == 8 and s.constants["HAS_WEIGHTS"] and not s.quantizes
    )
    assert push.vectors == (16, 16) and push.row_accesses == (1, 9)
    # 4 KiB a program of 128 threads: two accesses of 16 bytes for each piece.
    whole = aot.Compiled(40, 0, 0, {4: 20, 8: 9, 16: 2}, {4: 9, 16: 18})
    assert aot.faults(push, "sm_90", whole) == []
    wrong = aot.Compiled(40, 0, 0, {4: 28}, {4: 13, 16: 17})
    assert aot.faults(push, "sm_90", wrong) == [
        "loads of [4] bytes where 16 are possible",
        "stores of [4, 16] bytes where 16 are possible",
    ]
    assert aot.faults(push, "sm_90", aot.Compiled(40, 48, 0, {16: 2}, {16: 18})) == ["48 spilled"]
    narrow = next(s for s in launched if s.kernel == "push_rows" and s.constants["ALIGN"] == 2)
    # 64 bytes, one element for each of 32 threads.
    assert aot.faults(narrow, "sm_90", aot.Compiled(40, 0, 0, {2: 1}, {2: 4})) == []
    signal = next(s for s in launched if s.kernel == "signal")
    assert aot.faults(signal, "sm_90", aot.Compiled(40, 0, 8, {8: 3}, {})) == []
    with pytest.raises(KeyError):
        _ = dataclasses.replace(push, kernel="new_rows").row_accesses
