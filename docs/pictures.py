"""`python docs/pictures.py` writes `docs/pictures/*.svg`: the programs that the pages show, drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import shardweave

FOLDER = Path(__file__).with_name("pictures")


def pictures() -> dict[str, str]:
    """File name to SVG."""
    nodes_of_2 = replace(shardweave.NVLINK_INFINIBAND, name="two nodes of 2", node_size=2)
    generator = shardweave.Mesh((3,), ranks=(6, 7, 8))
    programs = {
        "swap": shardweave.plan((2, 2), (8, 6), "float32", "S0 S1", "S1 S0"),
        "order": shardweave.plan((2, 2), (8, 6), "float32", "S0 S0", "S0 S0 @ 0:1,0"),
        "uneven": shardweave.plan((2, 2), (7, 5), "float32", "S0 S1", "R S1"),
        "gradient": shardweave.plan((2, 2), (8, 6), "float32", "P S0", "S0 S0"),
        "all_reduce": shardweave.plan((4,), (8, 6), "float32", "P", "R"),
        "two_nodes": shardweave.plan((2, 2), (4096, 4096), "bfloat16", "S0 S0", "R R", topology=nodes_of_2),
        "two_meshes": shardweave.plan((2, 3), (8, 6), "float32", "S0 S1", "S1", target_mesh=generator),
    }
    return {f"{name}.svg": shardweave.draw(program) for name, program in programs.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
