"""What `explain()` prints, as golden files. `python tests/planner/test_explain.py` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardweave.planner import NVLINK_INFINIBAND, Mesh, plan

pytestmark = pytest.mark.plan

GOLDEN = Path(__file__).parent / "golden"
DP_TP = Mesh((2, 4), ("dp", "tp"))
REQUESTS: dict[str, tuple] = {
    "identity": ((2, 2), (8, 6), "float32", "S0 S1", "S0 S1"),
    "local": ((2, 2), (8, 6), "float32", "R R", "S0 S1"),
    "swap": ((2, 2), (8, 6), "float32", "S0 S1", "S1 S0"),
    "reversed_order": (DP_TP, (128257, 4096), "bfloat16", "S0 S0", "S0 S0 @ 0:1,0"),
    "gradient": (DP_TP, (14336, 4096), "float32", "P S0", "S0 S0"),
    "all_reduce": (DP_TP, (7, 4096), "bfloat16", "R Pavg", "R R"),
    "shard_to_partial": ((2, 2), (8, 6), "float32", "S0 R", "Pmax R"),
}
ON_NODES: dict[str, tuple] = {
    "gather_over_nodes": (Mesh((4, 8), ("node", "gpu")), (8192, 8192), "bfloat16", "S0 S0", "R R"),
    "sum_over_nodes": (Mesh((4, 8), ("node", "gpu")), (8192, 8192), "bfloat16", "P P", "R R"),
    "transpose_over_nodes": (Mesh((4, 8), ("node", "gpu")), (512, 512), "bfloat16", "S0 S0", "S1 S1"),
}


def explained(name: str) -> str:
    request, topology = (ON_NODES[name], NVLINK_INFINIBAND) if name in ON_NODES else (REQUESTS[name], None)
    program = plan(*request, topology=topology)
    one = plan(*request, rank=1, topology=topology)
    return f"{program.explain()}\n\n{one.explain()}\n"


@pytest.mark.parametrize("name", [*REQUESTS, *ON_NODES])
def test_explain(name: str) -> None:
    assert explained(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_golden_files_are_all_used() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {*REQUESTS, *ON_NODES}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in [*REQUESTS, *ON_NODES]:
        (GOLDEN / f"{name}.txt").write_text(explained(name), encoding="utf-8")
