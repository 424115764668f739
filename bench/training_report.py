"""What two trainings on the same ranks found: whether they are equal, and how long a step took.

What has to be equal. The passes gather, which is exact, and add up: activations along tp, gradients along dp. With two
ranks along a mesh dim a sum has two terms, and a + b is b + a to the bit, so losses and parameters have to be bitwise
equal. With more, gloo's ring begins each part of a tensor at another rank and shardweave adds in ascending order of
ranks, so float32 sums differ in their last bits and training carries that on: the losses have to agree within
`TOLERANCE`. On both sides gloo adds up the gradients' norms, over both mesh dims: they are of a placement that
`install()` leaves to torch.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from .against_stock import mesh_for

SIDES = ("torch", "shardweave")
# Of a loss, where sums have more than two terms. 60 steps of 8 ranks, tp4, came to 2.3e-7, about two float32
# roundings; the rest is room for other meshes and machines.
TOLERANCE = 1e-5
_ROWS = 8  # steps or faults shown


@dataclass(frozen=True)
class Outcome:
    """What all ranks sent. `losses[side]` and `seconds[side]`: [steps, ranks], of both halves."""

    mesh: tuple[int, int]
    losses: dict[str, list[list[float]]]
    seconds: dict[str, list[list[float]]]
    parameters: int
    parameters_equal: bool
    calls: dict[str, int]
    delegations: dict[str, int]

    @classmethod
    def of(cls, by_rank: list[list[dict[str, Any]]]) -> Outcome:
        """From the messages of each rank."""
        *steps, last = zip(*by_rank, strict=True)
        return cls(
            mesh=mesh_for(len(by_rank)),
            losses={side: [[found[side]["loss"] for found in step] for step in steps] for side in SIDES},
            seconds={side: [[found[side]["seconds"] for found in step] for step in steps] for side in SIDES},
            parameters=last[0]["parameters"],
            parameters_equal=all(found["parameters_equal"] for found in last),
            calls=last[0]["calls"],
            delegations=last[0]["delegations"],
        )

    @property
    def steps(self) -> int:
        """Of a half."""
        return len(self.losses["torch"]) // 2

    @property
    def exact(self) -> bool:
        """Both sides sum to the same bits."""
        return max(self.mesh) <= 2

    def mean_losses(self, side: str) -> list[float]:
        """Over all sequences, at each step."""
        return [statistics.fmean(step) for step in self.losses[side]]

    @property
    def largest_difference(self) -> float:
        """Of a loss on a rank, in parts of torch's."""
        pairs = zip(*(chain.from_iterable(self.losses[side]) for side in SIDES), strict=True)
        return max(abs(a - b) / abs(a) for a, b in pairs)

    def faults(self) -> list[str]:
        """What is not as the head of this file says it has to be."""
        found = []
        bound = 0.0 if self.exact else TOLERANCE
        for step, (theirs, ours) in enumerate(zip(self.losses["torch"], self.losses["shardweave"], strict=True)):
            for rank, (a, b) in enumerate(zip(theirs, ours, strict=True)):
                if not abs(a - b) <= bound * abs(a):  # so that a NaN is a fault
                    found.append(f"step {step + 1}, rank {rank}: loss {b!r}, torch's is {a!r}")
                first = rank - rank % self.mesh[1]  # ranks along tp compute the same loss
                if b != ours[first]:
                    found.append(f"step {step + 1}: ranks {first} and {rank} have losses {ours[first]!r} and {b!r}")
        if self.exact and not self.parameters_equal:
            found.append("the parameters after the last step differ")
        return found

    def step_seconds(self, side: str) -> list[float]:
        """Of the slowest rank, in the second half."""
        return [max(step) for step in self.seconds[side][self.steps :]]

    @property
    def ratio(self) -> float:
        return statistics.median(self.step_seconds("torch")) / statistics.median(self.step_seconds("shardweave"))

    def to_dict(self) -> dict[str, Any]:
        return {
            "mesh": self.mesh,
            "steps": self.steps,
            "parameters": self.parameters,
            "losses": {side: self.mean_losses(side) for side in SIDES},
            "exact": self.exact,
            "largest_difference": self.largest_difference,
            "parameters_equal": self.parameters_equal,
            "faults": self.faults(),
            "step_seconds": {side: self.step_seconds(side) for side in SIDES},
            "ratio": self.ratio,
            "calls": self.calls,
            "delegations": self.delegations,
        }


def show(console: Console, outcome: Outcome) -> None:
    """Losses, and where they are as they have to be, times."""
    terms = max(outcome.mesh)
    console.print(_losses(outcome))
    console.print()
    if faults := outcome.faults():
        console.print(
            f"[red]The sides differ by more than they may[/red] ({len(faults)} faults), so no times are shown:"
        )
        for fault in faults[:_ROWS]:
            console.print(f"  {fault}")
        return
    steps = outcome.steps
    if outcome.exact:
        console.print(
            f"Losses of {2 * steps} steps on every rank, and all parameters after them, are equal to the bit: a sum "
            f"has {terms} terms at most, and a + b is b + a."
        )
    else:
        console.print(
            f"Losses of {2 * steps} steps differ by {outcome.largest_difference:.1e} of a loss at most, where "
            f"{TOLERANCE:g} is allowed: sums have up to {terms} terms, which gloo's ring begins at another rank for "
            f"each part of a tensor and shardweave adds in ascending order of ranks. Ranks along tp have equal losses "
            f"under shardweave."
        )
    console.print(f"\nA step, median of {steps} further ones of the slowest rank (quartiles), both sides in turns:")
    for side in SIDES:
        console.print(f"  {side:<10} {_milliseconds(outcome.step_seconds(side))}")
    theirs, ours = (statistics.median(outcome.step_seconds(side)) for side in SIDES)
    console.print(f"[bold]  ratio {outcome.ratio:.2f}, {(theirs - ours) * 1e3:.0f} ms saved[/bold]")
    console.print("\nRedistributions a step, and FSDP2's gathers and reduce-scatters, on rank 0:")
    for world, count in outcome.calls.items():
        console.print(f"  {count / steps:g} by shardweave, on {world}")
    for reason, count in outcome.delegations.items():
        console.print(f"  {count / steps:g} left to torch: {reason.partition(';')[0]}", markup=False)


def _losses(outcome: Outcome) -> Table:
    """Some steps of the first half, the first and the last among them."""
    view = Table(header_style="bold", show_edge=False, pad_edge=False)
    for name in ("step", "loss, torch", "loss, shardweave", "difference"):
        view.add_column(name, justify="right")
    theirs, ours = (outcome.mean_losses(side) for side in SIDES)
    last = outcome.steps - 1
    for step in sorted({round(row * last / (_ROWS - 1)) for row in range(_ROWS)}):
        difference = ours[step] - theirs[step]
        view.add_row(
            str(step + 1), f"{theirs[step]:.7f}", f"{ours[step]:.7f}", f"{difference:.1e}" if difference else "0"
        )
    return view


def _milliseconds(seconds: list[float]) -> str:
    low, middle, high = (value * 1e3 for value in statistics.quantiles(seconds, n=4, method="inclusive"))
    return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"
