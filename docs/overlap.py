"""`python docs/overlap.py` writes `docs/pictures/overlap.svg`: a profile of `examples/two_microbatches.py`.

Two hosts of one rank on this machine, with a link of 1 Gbit/s between them (Linux namespaces, which need root or user
namespaces; `iproute2` and `matplotlib`). Prints the median times of forward and of a step with and without overlap, in
one run, and the time during which rows travel and the program computes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from shardweave.bench.harness.hosts import Hosts

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "overlap.svg"
GIGABITS = 1.0
OPTIONS = "--tokens 512 --hidden 1024 --width 256 --layers 4 --steps 9 --profiles 5 --transport process_group".split()
COLOURS = {
    "router": "#8f8f8f", "shared experts": "#3b7dd8", "experts": "#1d4f91", "dispatch": "#e08a2e", "combine": "#c2562c",
}  # fmt: skip
Span = tuple[str, float, float]
"""A name, and milliseconds of its begin and end."""


def example() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    return import_module("two_microbatches")


def rank_main(rank: int) -> tuple[dict[str, Any], dict[str, list[Span]]]:
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile

    torch.set_num_threads(1)
    spans: dict[str, list[list[Span]]] = {}

    @contextmanager
    def profiled(name: str) -> Iterator[None]:
        # Rows travel on a thread of their own.
        with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as found:
            yield
        named = [(e.name.removeprefix("shardweave::"), e.time_range) for e in found.events()]
        spans.setdefault(name, []).append([(of, t.start / 1e3, t.end / 1e3) for of, t in named if of in COLOURS])

    module = example()
    found = module.train(module.arguments(OPTIONS), profiled)
    return found, {name: sorted(profiles, key=duration)[len(profiles) // 2] for name, profiles in spans.items()}


def duration(spans: list[Span]) -> float:
    return max(end for *_, end in spans) - min(start for _, start, _ in spans)


def together(spans: list[Span]) -> float:
    """Return the milliseconds of computing during which a dispatch or combine was under way."""
    moving = [span for span in spans if span[0] in ("dispatch", "combine")]
    computing = [span for span in spans if span[0] not in ("dispatch", "combine")]
    return sum(max(min(end, e) - max(start, s), 0.0) for _, start, end in moving for _, s, e in computing)


def draw(profiles: dict[str, list[Span]], texts: dict[str, str]) -> None:
    """Draw the profile of rank 0: for each way, one line that computes and one on which rows travel."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    pyplot.rcParams["svg.fonttype"], pyplot.rcParams["svg.hashsalt"] = "none", "shardweave"
    figure, axes = pyplot.subplots(len(profiles), 1, figsize=(10, 4), sharex=True, layout="constrained")
    for axis, (name, spans) in zip(axes, profiles.items(), strict=True):
        begin = min(start for _, start, _ in spans)
        for kind, start, end in spans:
            line = 0 if kind in ("dispatch", "combine") else 1
            axis.broken_barh([(start - begin, end - start)], (line - 0.4, 0.8), color=COLOURS[kind], linewidth=0)
        axis.set_yticks([0, 1], ["rows travel", "computes"])
        axis.set_title(texts[name], loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("milliseconds of a forward of rank 0, that of median duration")
    axes[-1].set_xlim(left=0)
    legend = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    with Hosts([[0], [1]], GIGABITS) as hosts:
        by_rank = hosts.run(rank_main, timeout=900.0)
    module, texts = example(), {}
    for found, _ in by_rank:
        assert found["losses"]["in turn"] == found["losses"]["overlapped"], found["losses"]  # to the bit
    found, profiles = by_rank[0]
    steps = module.arguments(OPTIONS).steps
    print(f"losses of {steps + 1} steps equal to the bit on both ranks; {' '.join(OPTIONS)}; {GIGABITS:g} Gbit/s")
    for name, seconds in found["seconds"].items():
        forward, step = module.medians(seconds)
        texts[name] = f"{name}: forward {forward:.0f} ms, a step of training {step:.0f} ms, medians of {len(seconds)}"
        print(f"{texts[name]}; computes for {together(profiles[name]):.0f} ms of a forward while rows travel")
    draw(profiles, texts)
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
