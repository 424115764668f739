"""What `explain()` prints, as golden files. `python tests/planner/test_explain.py` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardweave.planner import Mesh, plan

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


def explained(name: str) -> str:
    program = plan(*REQUESTS[name])
    one = plan(*REQUESTS[name], rank=1)
    return f"{program.explain()}\n\n{one.explain()}\n"


@pytest.mark.parametrize("name", REQUESTS)
def test_explain(name: str) -> None:
    assert explained(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_golden_files_are_all_used() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(REQUESTS)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in REQUESTS:
        (GOLDEN / f"{name}.txt").write_text(explained(name), encoding="utf-8")
