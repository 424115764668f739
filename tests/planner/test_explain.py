"""Golden files of `explain()`. `python tests/planner/test_explain.py` rewrites them."""

from __future__ import annotations

from dataclasses import replace
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
    "scalar_sum": ((2, 2), (), "float64", "P P", "R R"),
    "empty": ((2, 2), (0, 4), "float32", "S0 R", "S1 R"),
    "uneven_rows_to_columns": ((2, 2), (128257, 4096), "bfloat16", "S0 R", "S1 R"),
    "replicated_to_sum_of_integers": ((2, 2), (7, 3), "int64", "R R", "P S0"),
    "one_partial_to_another": ((2, 2), (8, 6), "float32", "P R", "Pmax R"),
    "strided_order": ((2, 2), (1792, 512), "bfloat16", "S0/2 S0", "R S0"),
    "mesh_dim_of_one": ((1, 4), (9, 5), "float32", "S0 S0", "S1 S1"),
    "three_mesh_dims": (Mesh((2, 2, 2), ("pp", "dp", "tp")), (64, 64), "float32", "P S0 S1", "S0 R S1 @ 0:0"),
    "strided_index_set": ((2, 2), (24, 12), "float32", "S1 R", "S0 S1/3"),
    "smaller_than_the_mesh": ((2, 4), (3,), "float32", "S0 S0", "R S0"),
}
ON_NODES: dict[str, tuple] = {
    "gather_over_nodes": (Mesh((4, 8), ("node", "gpu")), (8192, 8192), "bfloat16", "S0 S0", "R R"),
    "sum_over_nodes": (Mesh((4, 8), ("node", "gpu")), (8192, 8192), "bfloat16", "P P", "R R"),
    "one_mesh_dim_over_nodes": (Mesh((32,), ("fsdp",)), (65536, 4096), "bfloat16", "S0", "R"),
    "transpose_over_nodes": (Mesh((4, 8), ("node", "gpu")), (512, 512), "bfloat16", "S0 S0", "S1 S1"),
}
TRAINER, GENERATOR = Mesh((2, 8), ("dp", "tp")), Mesh((8,), ranks=range(16, 24))
CROSS_MESH: dict[str, tuple] = {
    "gradient_to_another_mesh": (Mesh((2, 2)), (8, 6), "float32", "P S0", "S0", Mesh((3,), ranks=(2, 3, 4)), None),
    "weights_to_a_generator": (
        TRAINER,
        (4096, 4096),
        "bfloat16",
        "S0 S0",
        "R",
        Mesh((8,), ranks=range(16, 24)),
        NVLINK_INFINIBAND,
    ),
}
NAMES = [*REQUESTS, *ON_NODES, *CROSS_MESH]


def explained(name: str) -> str:
    if name in CROSS_MESH:
        *request, target_mesh, topology = CROSS_MESH[name]
    else:
        request, topology = (ON_NODES[name], NVLINK_INFINIBAND) if name in ON_NODES else (REQUESTS[name], None)
        target_mesh = None
    program = plan(*request, target_mesh=target_mesh, topology=topology)
    one = plan(*request, rank=1, target_mesh=target_mesh, topology=topology)
    return f"{program.explain()}\n\n{one.explain()}\n"


@pytest.mark.parametrize("name", NAMES)
def test_explain(name: str) -> None:
    assert explained(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_golden_files_are_all_used() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(NAMES)


def test_no_cost_of_empty_tensors() -> None:
    """Rejected paths take as much time: none."""
    topology = replace(NVLINK_INFINIBAND, node_size=2)
    text = plan((2, 4), (0, 3), "float32", "P P", "R R", topology=topology).explain()
    assert "0.0 µs on" in text and text.endswith("(R R R): 0.0 µs")


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in NAMES:
        (GOLDEN / f"{name}.txt").write_text(explained(name), encoding="utf-8")
