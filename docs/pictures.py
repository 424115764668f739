"""`python docs/pictures.py` writes `docs/pictures/*.svg`: the programs that the pages show, drawn."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import shardweave

FOLDER = Path(__file__).with_name("pictures")
MESH, SHAPE, DTYPE = (2, 2), (8, 6), "float32"
DTENSOR_PATH = ("S0 S1", "S0 R", "S1 R", "S1 S0")
"""The layouts that DTensor's default planner passes through. A test compares them with the planner."""


def pictures() -> dict[str, str]:
    """File name to SVG."""
    nodes_of_2 = replace(shardweave.NVLINK_INFINIBAND, name="two nodes of 2", node_size=2)
    generator = shardweave.Mesh((3,), ranks=(6, 7, 8))
    direct = shardweave.plan(MESH, SHAPE, DTYPE, DTENSOR_PATH[0], DTENSOR_PATH[-1])
    programs = {
        "swap": direct,
        "order": shardweave.plan(MESH, SHAPE, DTYPE, "S0 S0", "S0 S0 @ 0:1,0"),
        "uneven": shardweave.plan(MESH, (7, 5), DTYPE, "S0 S1", "R S1"),
        "gradient": shardweave.plan(MESH, SHAPE, DTYPE, "P S0", "S0 S0"),
        "all_reduce": shardweave.plan((4,), SHAPE, DTYPE, "P", "R"),
        "two_nodes": shardweave.plan(MESH, (4096, 4096), "bfloat16", "S0 S0", "R R", topology=nodes_of_2),
        "two_meshes": shardweave.plan((2, 3), SHAPE, DTYPE, "S0 S1", "S1", target_mesh=generator),
    }
    found = {f"{name}.svg": shardweave.draw(program) for name, program in programs.items()}
    found["both_plans.svg"] = stacked(
        {
            "DTensor's plan: an all-gather, an all-to-all, a slice": labelled(
                shardweave.draw(dtensor_program(), panel_width=80)
            ),
            "shardweave's plan: one exchange": shardweave.draw(direct, panel_width=80),
        }
    )
    return found


def labelled(drawing: str) -> str:
    """The drawing of DTensor's plan with its collectives in place of step kinds."""
    for kind, collective in (
        ("1. exchange", "1. all-gather"),
        ("2. exchange", "2. all-to-all"),
        ("3. local", "3. slice"),
    ):
        assert f">{kind}<" in drawing, kind
        drawing = drawing.replace(f">{kind}<", f">{collective}<")
    return drawing


def dtensor_program() -> shardweave.Program:
    """DTensor's plan as a program: each of its steps as shardweave plans that step."""
    parts = [
        shardweave.plan(MESH, SHAPE, DTYPE, before, after)
        for before, after in zip(DTENSOR_PATH, DTENSOR_PATH[1:], strict=False)
    ]
    steps = tuple([step for part in parts for step in part.steps])
    return shardweave.Program(shardweave.Mesh(MESH), SHAPE, DTYPE, parts[0].source, parts[-1].target, steps)


def stacked(drawings: dict[str, str]) -> str:
    """One SVG of several drawings; each gets its key as heading, in place of its first line of text."""
    parts, width, height = [], 0.0, 0.0
    for heading, text in drawings.items():
        text = re.sub(r"(<text[^>]*>)[^<]*", rf"\g<1>{heading}", text, count=1)
        size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
        assert size is not None
        body = re.sub(r"^<svg [^>]*>\n|</svg>\n$|<title>[^<]*</title>\n(?=<style>)", "", text)
        parts.append(f'<g transform="translate(0,{height:g})">\n{body}</g>\n')
        width, height = max(width, float(size[1])), height + float(size[2])
    title = "; ".join(drawings)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="shardweave" role="img" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}">\n<title>{title}</title>\n'
        f'<rect class="paper" width="{width:g}" height="{height:g}"/>\n' + "".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
