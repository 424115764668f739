"""Functions that torch.compile keeps as one call in the graph that it records, instead of tracing their Python code.

AOTAutograd runs the call when it traces the graph, and records the operators in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh

from ..statistics import count_ignored_by_dynamo

F = TypeVar("F", bound=Callable[..., object])
_calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def _constant_when_traced(function: F) -> F:
    """Have torch.compile run a function while it traces, and take its result for a constant.

    As `torch.compiler.assume_constant_result`, without the import of torch._dynamo, which takes longer than
    shardweave's.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_when_traced
def remember(
    function: Callable[..., torch.Tensor], *arguments: Any, transport: str | None = None, **options: Any
) -> str:
    """A text that stands for `function(x, *arguments, **options)` in `call_in_graph`. `transport` has no effect.

    Equal calls have equal texts in all processes, so that graphs in torch's caches keep their meaning.
    """
    if transport is not None:
        count_ignored_by_dynamo("transport")
    torch.compiler.allow_in_graph(call_in_graph)
    arguments, options = tuple(map(_real, arguments)), {name: _real(value) for name, value in options.items()}
    values = [*arguments, *(part for option in sorted(options.items()) for part in option)]
    text = ", ".join([function.__name__, *map(_text, values)])
    _calls[text] = lambda x: function(x, *arguments, **options)
    return text


def call_in_graph(x: torch.Tensor, text: str) -> torch.Tensor:
    """The result of a call that was remembered."""
    return _calls[text](x)


def _real(value: Any) -> Any:
    """With the meshes and process groups for which Dynamo passes stand-ins."""
    if isinstance(value, list | tuple):
        return type(value)(map(_real, value))
    return value.real_obj if isinstance(value, FakeScriptObject) else value


def _text(value: Any) -> str:
    """`repr`, which for meshes and process groups does not say which ranks they have."""
    if isinstance(value, dist.ProcessGroup):
        return repr((str(value.group_name), dist.get_process_group_ranks(value)))
    if isinstance(value, DeviceMesh):
        groups = value.get_all_groups() if value.get_coordinate() is not None else []
        return f"{value!r} of {_text(groups)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)
