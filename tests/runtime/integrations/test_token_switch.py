"""TokenSwitch, torch 2.15's interface of expert parallelism: received rows, sums and gradients by a dense reference."""

from __future__ import annotations

import copy
import hashlib
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from moe_reference import Tokens, assert_near, dense, expert, matrices_of, tokens_of
from rank_processes import run_ranks
from test_processes import poisoned
from torch.distributed.device_mesh import init_device_mesh

from shardweave.runtime.integrations.token_switch.switch_engine import SwitchEngine

THERE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
needs_token_switch = pytest.mark.skipif(not THERE, reason="needs torch 2.15, for torch.distributed._token_switch")
LAYOUTS = ("flat", "expert_major")
K, H, MOST = 3, 12, 9
COUNTS = (7, 0, 9, 4)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def bounds_of(experts: int, ranks: int) -> list[int]:
    each, more = divmod(experts, ranks)
    return [r * each + min(r, more) for r in range(ranks + 1)]


def rows_of(layout: str, tokens: list[Tokens], low: int, high: int) -> list[tuple[int, int, list[int]]]:
    """The rows that a rank with experts low to high receives, by definition: source, token, and its k in order."""
    pairs = [
        (source, t, [k for e in range(low, high) for k, i in enumerate(ids) if i == e])
        for source, of_source in enumerate(tokens)
        for t, ids in enumerate(of_source.ids.tolist())
    ]
    if layout == "flat":
        return [pair for pair in pairs if pair[2]]
    return [
        (source, t, [k])
        for e in range(low, high)
        for source, t, ks in pairs
        for k in ks
        if tokens[source].ids[t, k] == e
    ]


def assert_received(layout: str, tokens: list[Tokens], bounds: list[int], rank: int, most: int, got, counts) -> None:
    """Compare the results of a dispatch bit by bit, unused rows included."""
    low, high = bounds[rank], bounds[rank + 1]
    rows = rows_of(layout, tokens, low, high)[:most]
    x, weights, ids = got
    want_x, want_weights = torch.zeros_like(x), torch.zeros_like(weights)
    want_ids, want_counts = torch.full((len(x), K), -1), [0] * (high - low)
    for row, (source, t, ks) in enumerate(rows):
        want_x[row] = tokens[source].x[t]
        for at, k in enumerate(ks):
            local = int(tokens[source].ids[t, k]) - low
            want_counts[local] += 1
            want_ids[row, at] = local
            want_weights[(row, at) if layout == "flat" else row] = tokens[source].weights[t, k]
    assert torch.equal(x, want_x) and torch.equal(weights, want_weights)
    assert torch.equal(ids, want_ids) if layout == "flat" else ids is None
    assert counts.tolist() == [*want_counts, -5]


def kept_pairs(layout: str, tokens: list[Tokens], bounds: list[int], most: int, rank: int) -> torch.Tensor:
    """Return which pairs of a rank are among the first rows of their destinations, bool [T, K]."""
    kept = torch.zeros(tokens[rank].ids.shape, dtype=torch.bool)
    for low, high in pairwise(bounds):
        for source, t, ks in rows_of(layout, tokens, low, high)[:most]:
            if source == rank:
                kept[t, ks] = True
    return kept


def run_experts(layout: str, got, counts: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return the experts' outputs for the rows of a dispatch, weighted."""
    x, weights, ids = got
    if layout == "flat":
        y = torch.zeros_like(x)
        for e, matrix in enumerate(matrices):
            y = y + ((weights * (ids == e)).sum(1, keepdim=True) * expert(x, matrix).float()).to(x.dtype)
        return y
    parts = x.split([*counts[:-1].tolist(), len(x) - int(counts[:-1].sum())])
    made = [expert(part, matrix) for part, matrix in zip(parts, matrices, strict=False)]
    return (torch.cat([*made, parts[-1]]).float() * weights[:, None]).to(x.dtype)


def most_rows(layout: str, size: int) -> int:
    return sum(COUNTS[:size]) * (1 if layout == "flat" else K)


def switch_of(experts: int, rows: int, group=None, **more):
    from shardweave.integrations.token_switch import TokenSwitch  # needs torch 2.15

    return TokenSwitch(group, experts, MOST, rows, 4 * H + 8, **more)


def case(rank: int, switch, layout: str, experts: int, rows: int, routing: str, dtype: torch.dtype, seed: int) -> None:
    """A layer's forward and backward on one rank, against float64."""
    size = dist.get_world_size()
    tokens = [tokens_of(r, COUNTS[r], K, experts, H, dtype, routing, seed) for r in range(size)]
    mine, bounds = tokens[rank], bounds_of(experts, size)
    matrices = matrices_of(experts, H, dtype)
    x, weights, own = leaf(mine.x), leaf(mine.weights), leaf(matrices[bounds[rank] : bounds[rank + 1]])
    ids, given_x, given_weights = mine.ids, x, weights
    if seed % 2:  # strided
        ids, given_x, given_weights = (
            ids.t().contiguous().t().int(),
            x.t().contiguous().t(),
            weights.repeat(1, 2)[:, :K],
        )
    counts = torch.full((2 * len(own) + 2,), -5, dtype=torch.int32)[::2]
    routed = switch.create_routing(ids, counts, layout=layout)
    assert routed.layout == layout and routed.topk_idx is ids
    got = switch.dispatch(routed, given_x, given_weights, rows + 2 * (seed % 3))
    assert_received(layout, tokens, bounds, rank, rows, got, counts)
    received = min(rows, len(rows_of(layout, tokens, *bounds[rank : rank + 2])))
    assert int(routed.handle.num_rows) == received
    kept = [kept_pairs(layout, tokens, bounds, rows, r) for r in range(size)]
    lost = sum(len(rows_of(layout, tokens, low, high)[rows:]) for low, high in pairwise(bounds))
    assert (int(routed.handle.dropped), int(routed.handle.bad_ids)) == (lost, 0)
    output = run_experts(layout, got, counts, own)
    if seed % 2:  # only the rows with tokens, strided
        output = output[:received].t().contiguous().t()
    else:  # NaN in the others, to find code that reads them
        output = torch.cat((output[:received], torch.full_like(output[received:], float("nan"))))
    y = switch.combine(routed, output)
    y.backward(mine.gradient)
    want = dense(mine, matrices, kept[rank])
    for name, result in (("y", y.detach()), ("x", x.grad), ("weights", weights.grad)):
        assert_near(result, want[name], dtype, f"{layout}, {routing}, {name}")
    all_ranks = [dense(t, matrices, k)["matrices"] for t, k in zip(tokens, kept, strict=True)]
    want_own = sum(all_ranks)[bounds[rank] : bounds[rank + 1]]  # type: ignore[index]
    assert_near(torch.zeros_like(own) if own.grad is None else own.grad, want_own, dtype, "matrices")


def cases(rank: int, transport: str) -> None:
    poisoned()
    size = dist.get_world_size()
    for experts in (5, 2):  # uneven; on four ranks two have none
        for layout in LAYOUTS:
            rows = most_rows(layout, size)
            switch = switch_of(experts, rows, transport=transport)
            for seed, routing in enumerate(("holes", "zipf", "hot", "none", "uniform")):
                case(rank, switch, layout, experts, rows, routing, DTYPES[seed % 3], seed)
            switch.check()
    for layout in LAYOUTS:
        for rows in (5, 0):
            small = switch_of(5, rows, transport=transport, overflow="drop")
            case(rank, small, layout, 5, rows, "holes", torch.float32, 6)
            case(rank, small, layout, 5, rows, "hot", torch.float32, 7)


TRANSPORTS = ["shared_memory", "process_group", "symmetric_memory", "hierarchical"]
DTYPES = torch.float32, torch.bfloat16, torch.float16


@needs_token_switch
@pytest.mark.multi
@pytest.mark.parametrize(
    "size, transport",
    [
        *[(4, transport) for transport in TRANSPORTS[:3]],
        pytest.param(4, TRANSPORTS[3], marks=pytest.mark.long),
        (2, TRANSPORTS[0]),
        (1, TRANSPORTS[0]),
    ],
)
def test_layer_equals_the_dense_one(size, transport):
    run_ranks(cases, size, transport)


def given_of(rank: int, seed: int, experts: int = 5, hidden: int = H, dtype: torch.dtype = torch.float32) -> Tokens:
    return tokens_of(rank, COUNTS[rank], K, experts, hidden, dtype, "holes", seed)


def weighted(layout: str, got) -> torch.Tensor:
    """Return the rows times their weights."""
    x, weights, _ = got
    return (x.float() * (weights.sum(1) if layout == "flat" else weights)[:, None]).to(x.dtype)


def assert_weighted(tokens: Tokens, y, x_grad, weights_grad) -> None:
    """Compare a layer of experts that return their rows: y = x * sum of weights."""
    x, weights, there = tokens.x.double(), tokens.weights.double(), tokens.ids >= 0
    g, share, dtype = tokens.gradient.double(), (weights * there).sum(1, keepdim=True), tokens.x.dtype
    assert_near(y.detach(), x * share, dtype, "y")
    assert_near(x_grad, g * share, dtype, "x")
    assert_near(weights_grad, (x * g).sum(1, keepdim=True) * there, dtype, "weights")


def rows_per_token(layout: str, ids: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    if layout == "expert_major":
        return (ids >= 0).sum(1)
    on = [((ids >= low) & (ids < high)).any(1).long() for low, high in pairwise(bounds)]
    return torch.stack(on).sum(0)


def reused(rank: int, transport: str) -> None:
    """Several switches and routings, each with several dispatches in flight, whose backwards run late."""
    poisoned()
    bounds, kinds = bounds_of(5, 2), [(H, torch.float32), (4, torch.bfloat16), (H, torch.float32)]
    for layout in LAYOUTS:
        rows, flights = most_rows(layout, 2), []
        switches = [switch_of(5, rows, transport=transport) for _ in range(2)]
        for seed, switch in enumerate(switches):
            ids = given_of(rank, seed).ids
            with torch.inference_mode():
                routed = switch.create_routing(ids.clone(), layout=layout)
            sums = switch.combine(routed, torch.ones(rows, 2, dtype=torch.float16))  # before any dispatch
            assert torch.equal(sums[:, 0].long(), rows_per_token(layout, ids, bounds))
            for i, (hidden, dtype) in enumerate(kinds):
                tokens = given_of(rank, 10 * seed + i, hidden=hidden, dtype=dtype)
                tokens.ids = ids
                x, weights = leaf(tokens.x), leaf(tokens.weights)
                got = switch.dispatch(routed, x, weights, rows)
                flights.append((switch, routed, tokens, x, weights, got))
        done = [
            (tokens, x, weights, switch.combine(routed, weighted(layout, got)))
            for switch, routed, tokens, x, weights, got in flights[::-1]
        ]
        for tokens, x, weights, y in done[1:] + done[:1]:
            y.backward(tokens.gradient, retain_graph=True)
            first = x.grad.clone(), weights.grad.clone()
            assert_weighted(tokens, y, *first)
            x.grad = weights.grad = None
            y.backward(tokens.gradient)  # again
            assert torch.equal(x.grad, first[0]) and torch.equal(weights.grad, first[1])


@needs_token_switch
@pytest.mark.multi
@pytest.mark.parametrize(
    "transport",
    ["shared_memory", *[pytest.param(t, marks=pytest.mark.long) for t in ("process_group", "symmetric_memory")]],
)
def test_several_switches_and_dispatches_in_flight(transport):
    run_ranks(reused, 2, transport)


def into_buffers(rank: int, transport: str) -> None:
    """With `out`, the same results and no gradients; by torch's own autograd functions, the same gradients."""
    from torch.distributed import _token_switch

    poisoned()
    for layout in LAYOUTS:
        rows, tokens = most_rows(layout, 2), given_of(rank, 3)
        switch = switch_of(5, rows, transport=transport)
        assert isinstance(switch, _token_switch.TokenSwitch) and copy.deepcopy(switch) is switch
        routed = switch.create_routing(tokens.ids, layout=layout)
        assert isinstance(routed, _token_switch.Routing)
        x, weights = leaf(tokens.x), leaf(tokens.weights)
        want = switch.dispatch(routed, x, weights, rows)
        for most, strided in ((rows, False), (rows + 3, True)):
            rows_out = torch.full((H, most), float("nan")).t() if strided else torch.full((most, H), float("nan"))
            shape = (most, K) if layout == "flat" else (most,)
            weights_out = torch.full(shape, float("nan"), dtype=torch.float64 if strided else torch.float32)
            ids_out = torch.full(shape, -7, dtype=torch.int32) if layout == "flat" else None
            out = rows_out, weights_out, ids_out
            assert switch.dispatch(routed, x, weights, out=out) is out
            assert not rows_out.requires_grad and not weights_out.requires_grad
            for got, value, unused in zip(out, want, (0, 0, -1), strict=True):
                assert (got is None) == (value is None)
                if got is not None:
                    assert torch.equal(got[:rows].to(value.dtype), value) and (got[rows:] == unused).all()
            alone = torch.full((most, H), float("nan"))
            switch.dispatch(routed, x, weights, out=(alone, None, None))
            assert torch.equal(alone, rows_out)
        y = switch.combine(routed, want[0])
        y_out = torch.full((H, len(x)), float("nan")).t()
        assert switch.combine(routed, want[0], out=y_out) is y_out and not y_out.requires_grad
        assert torch.equal(y_out, y)
        y.backward(tokens.gradient)
        theirs, expert_tokens = leaf(tokens.x), leaf(want[0])
        got = _token_switch._DispatchAutograd.apply(switch, routed, theirs, tokens.weights, rows)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))
        _token_switch._CombineAutograd.apply(switch, routed, got[0]).backward(tokens.gradient)
        assert torch.equal(theirs.grad, x.grad)
        received = int(routed.handle.num_rows)
        gradients = []
        for combined in (switch.combine, partial(_token_switch._CombineAutograd.apply, switch)):
            expert_tokens.grad = None
            combined(routed, expert_tokens[:received]).backward(tokens.gradient)
            gradients.append(expert_tokens.grad.clone())
        assert torch.equal(*gradients) and not gradients[0][received:].any()


@needs_token_switch
@pytest.mark.multi
@pytest.mark.parametrize(
    "transport", ["shared_memory", "symmetric_memory", pytest.param("process_group", marks=pytest.mark.long)]
)
def test_buffers_of_the_caller_and_functions_of_torch(transport):
    run_ranks(into_buffers, 2, transport)


def parts_of_gradients(rank: int) -> None:
    """Gradients of tokens alone, of weights alone, and of none."""
    for layout in LAYOUTS:
        rows, tokens = most_rows(layout, 2), given_of(rank, 4)
        switch = switch_of(5, rows)
        routed = switch.create_routing(tokens.ids, layout=layout)

        def gradients(of_x: bool, of_weights: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            x = tokens.x.clone().requires_grad_(of_x)  # noqa: B023
            weights = tokens.weights.double().requires_grad_(of_weights)  # noqa: B023
            got = switch.dispatch(routed, x, weights, rows)  # noqa: B023
            assert got[1].dtype is torch.float64
            y = switch.combine(routed, weighted(layout, got))  # noqa: B023
            if of_x or of_weights:
                y.backward(tokens.gradient)  # noqa: B023
            else:
                assert not any(part is not None and part.requires_grad for part in (y, *got))
            return x.grad, weights.grad

        want_x, want_weights = gradients(True, True)
        only_x, none = gradients(True, False)
        assert torch.equal(only_x, want_x) and none is None
        none, only_weights = gradients(False, True)
        assert torch.equal(only_weights, want_weights) and none is None and want_weights.dtype is torch.float64
        assert gradients(False, False) == (None, None)
        x, weights = leaf(tokens.x), leaf(tokens.weights)
        switch.dispatch(routed, x, weights, rows + 1)[1].sum().backward()  # by the weights alone
        assert torch.equal(weights.grad, (tokens.ids >= 0).float()) and not x.grad.any()


@needs_token_switch
@pytest.mark.multi
def test_gradients_of_tokens_or_weights_alone():
    run_ranks(parts_of_gradients, 2)


def in_a_mesh(rank: int) -> None:
    """Two interleaved groups of two ranks, in a layer that torch.compile traces around the switch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    switch = switch_of(5, most_rows("flat", 4), mesh["ep"])
    tokens = given_of(rank, 5)
    x, weights = leaf(tokens.x), leaf(tokens.weights)

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routed = switch.create_routing(tokens.ids, layout="flat")
        return switch.combine(routed, weighted("flat", switch.dispatch(routed, x, weights, 40))) * 1

    y = torch.compile(layer, backend="eager")(x, weights)
    y.backward(tokens.gradient)
    assert_weighted(tokens, y, x.grad, weights.grad)


@needs_token_switch
@pytest.mark.multi
def test_groups_of_a_mesh_under_torch_compile():
    run_ranks(in_a_mesh, 4)


def engine_rounds(rank: int, transport: str) -> str:
    """Return a digest of all results of the engine, which needs no torch 2.15."""
    parts = []
    for layout in LAYOUTS:
        rows, tokens, device = most_rows(layout, 2), given_of(rank, 7), torch.device("cpu")
        engine = SwitchEngine(None, 5, MOST, rows, 4 * H, overflow="drop", device=device, transport=transport)

        def layer() -> list[torch.Tensor | None]:
            handle, counts = engine.route(tokens.ids, layout)  # noqa: B023
            got = engine.dispatch(handle, tokens.x, tokens.weights, None)  # noqa: B023
            y = engine.combine(handle, weighted(layout, got))  # noqa: B023
            of_rows = engine.combine_backward(handle, tokens.gradient)  # noqa: B023
            x, weights, _ = got
            of_weights = (of_rows * x).sum(1)
            if layout == "flat":  # noqa: B023
                of_weights, share = of_weights[:, None].expand(-1, K), weights.sum(1, keepdim=True)
            else:
                share = weights[:, None]
            of_tokens = engine.dispatch_backward(handle, of_rows * share, of_weights)  # noqa: B023
            return [y, *of_tokens, counts, *got]

        results = layer()  # makes the dispatchers
        again = layer()
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(results, again, strict=True))
        assert_weighted(tokens, *results[:3])
        parts += [part.contiguous().view(torch.uint8).numpy().tobytes() for part in results if part is not None]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def each_algorithm(rank: int) -> list[str]:
    poisoned()
    return [engine_rounds(rank, transport) for transport in TRANSPORTS]


@pytest.mark.multi
def test_engines_of_all_transports_agree():
    assert all(len(set(digests)) == 1 for digests in run_ranks(each_algorithm, 2))
