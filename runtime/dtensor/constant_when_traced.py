"""torch.compiler.assume_constant_result, without the import of torch._dynamo, which takes longer than shardweave's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_when_traced(function: F) -> F:
    """Have torch.compile run a function while it traces, and take its result for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
