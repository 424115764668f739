"""`python docs/api_reference.py` writes `docs/api/*.md`: everything public, from its docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import shardweave
from shardweave import checkpoint, errors
from shardweave.integrations import autoparallel, megatron, spmd_types, torchtitan, transformers, vllm
from shardweave.runtime.statistics import Redistribution, Statistics
from shardweave.runtime.tracing.recording import Recording

FOLDER = Path(__file__).with_name("api")

PAGES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "redistribution": (
        "Redistribution",
        {
            "DTensors": (
                "redistribute", "redistribute_batch", "explain", "prepare", "prepare_redistribute",
            ),
            "Shared memory": ("empty_cache", "pool_memory", "PoolMemory", "set_pool_limit"),
        },
    ),
    "dtensor": (
        "DTensor, FSDP2, checkpoints",
        {
            "Drop-in": ("install", "installed", "uninstall", "is_installed"),
            "FSDP2": ("adapt_fsdp", "restore_fsdp", "FSDPAllGather", "FSDPReduceScatter"),
            "Checkpoints": ("SavePlanner", "LoadPlanner", "checkpointable_tensor"),
        },
    ),
    "planner": (
        "Planner",
        {
            "Plans": ("plan", "plan_batch", "redistribute_cost", "Program", "Batch", "draw", "simulate"),
            "Meshes and layouts": ("Mesh", "Layout", "Replicate", "Shard", "StridedShard", "Partial"),
            "Topologies": ("Topology", "Link", "NVLINK_NODE", "NVLINK_INFINIBAND"),
        },
    ),
    "token_dispatch": (
        "Token dispatch",
        {
            "Dispatch and combine": (
                "TokenDispatcher", "DispatchOptions", "RoutedTokens", "PendingTokens", "TokenLoad", "silu_and_mul",
                "VirtualTokenDispatcher",
            ),
            "Balance": ("balance_experts", "BalancedExperts", "move_experts", "sum_replicas"),
            "In models": ("ExpertParallel", "shard_tokens", "gather_tokens", "generate_permute_indices"),
        },
    ),
    "integrations": (
        "Integrations",
        {
            "Redistribution": ("redistribute_spmd", "redistribute_local_tensor", "ordered_redistribute_local_tensor"),
            "Token dispatch": (
                "TorchtitanDispatcher", "token_dispatcher", "MegatronDispatcher", "use_megatron_dispatchers",
                "VLLMPrepareFinalize", "shard_experts", "experts_forward",
            ),
        },
    ),
    "tracing": (
        "Statistics, traces and flight records",
        {
            "Statistics": ("stats", "Statistics", "Redistribution"),
            "Traces": ("record", "Recording"),
            "Flight records": ("dump_flight_records",),
        },
    ),
    "errors": (
        "Errors",
        {
            "Exceptions": (
                "ShardweaveError", "ArgumentError", "LayoutSyntaxError", "UnsupportedError", "CapacityError",
                "TransportError", "DisagreementError", "PeerError", "MeetingTimeoutError",
            ),
        },
    ),
}  # fmt: skip
"""File name to title and sections."""
MODULES = (
    shardweave, errors, shardweave.moe, shardweave.fsdp, checkpoint, shardweave.memory, shardweave.tracing,
    autoparallel, spmd_types, torchtitan, megatron, vllm, transformers,
)  # fmt: skip
"""The public modules; `shardweave.integrations.token_switch` needs torch 2.15."""
RESULTS = {kind.__name__: kind for kind in (Statistics, Redistribution, Recording)}
"""Types of results that are not exported by name."""

_INTERNAL = {
    "TokenDispatcher": ("run", "start"),
    "VirtualTokenDispatcher": ("run", "start"),
    "Layout": ("unchecked", "cuts"),
    "Recording": ("begin", "end", "note", "note_entry", "trace"),
    "Statistics": ("kind",),
}
"""Used between the packages; not part of the public interface."""
_WIDTH = 100
_LONGEST = 120  # characters of a line of a list
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises)\b(.*):$")


def reference() -> dict[str, str]:
    """File name to text: the index and its pages.

    Raises:
        ValueError: a public name is in no section or in two, or has no docstring.
    """
    public = _public()
    listed = [name for _, sections in PAGES.values() for names in sections.values() for name in names]
    if sorted(listed) != sorted({*public, *RESULTS}):
        raise ValueError(f"listed once, or to be: {sorted(set(listed) ^ {*public, *RESULTS})}, {listed}")
    found = {"index.md": _index()}
    for page, (title, sections) in PAGES.items():
        parts = [f"# {title}\n", "From the docstrings. [All pages of the reference](index.md).\n"]
        for section, names in sections.items():
            parts.append(f"## {section}\n")
            parts.append(_wrapped(" · ".join(f"[`{name}`](#{name.lower()})" for name in names)) + "\n")
            for name in names:
                owner = public.get(name)
                parts += _entry(name, RESULTS[name] if owner is None else getattr(owner, name), owner)
        found[f"{page}.md"] = re.sub("\n{3,}", "\n\n", "\n".join(parts))
    return found


def _public() -> dict[str, ModuleType]:
    """The public names and the modules that have them, the package itself first."""
    owners: dict[str, ModuleType] = {}
    for module in MODULES:
        for name in module.__all__:
            if not inspect.ismodule(getattr(module, name, None)):
                owners.setdefault(name, module)
    return owners


def _index() -> str:
    parts = [
        "# API reference\n",
        "`make docs` writes these pages from the docstrings. A name is an attribute of `shardweave`, or of\n"
        "the module that its entry states; "
        f"{', '.join(f'`{name}`' for name in RESULTS)} are types of results and not exported.\n",
    ]
    for page, (title, sections) in PAGES.items():
        parts.append(f"## [{title}]({page}.md)\n")
        for section, names in sections.items():
            links = " · ".join(f"[`{name}`]({page}.md#{name.lower()})" for name in names)
            parts.append(_wrapped(f"- {section}: {links}", "  "))
        parts.append("")
    return "\n".join(parts)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _LONGEST, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _entry(name: str, thing: Any, owner: ModuleType | None) -> Iterator[str]:
    yield f"### `{name}`\n"
    if owner not in (None, shardweave):
        yield f"In `{owner.__name__}`.\n"
    if inspect.isclass(thing):
        yield from _class(name, thing)
    elif callable(thing):
        yield from _function(name, thing)
    else:
        yield f"A `{type(thing).__name__}`. {_constant_docstring(name, thing)}\n"


def _class(name: str, kind: type) -> Iterator[str]:
    bases = [base.__name__ for base in kind.__bases__ if base is not object and not base.__name__.startswith("_")]
    if issubclass(kind, Exception):
        yield f"An exception: {', '.join(f'`{base}`' for base in bases)}.\n"
    # A constructor of torch differs between versions.
    owner = next(k for k in kind.__mro__ if "__init__" in vars(k))
    if _is_ours(owner):
        yield _signature(name, kind) + "\n"
    yield _text(name, kind) + "\n"
    for member, (what, function) in sorted(_members(kind).items(), key=lambda item: item[1][0] != "attribute"):
        if what == "class":
            yield f"#### `{name}.{member}`\n"
            yield from _class(f"{name}.{member}", function)
        elif what == "attribute":
            kind_of = inspect.signature(function).return_annotation
            yield f"#### `{name}.{member}`: {_code(kind_of)}\n"
            yield _text(f"{name}.{member}", function) + "\n"
        else:
            yield f"#### `{name}.{member}`\n"
            yield _signature(member, function, without_self=what == "method") + "\n"
            yield _text(f"{name}.{member}", function) + "\n"


def _members(kind: type) -> dict[str, tuple[str, Any]]:
    """The public members that shardweave defines, in order; without overrides of torch's and those in `_INTERNAL`."""
    theirs = {name for base in kind.__mro__ if not _is_ours(base) for name in vars(base)}
    found: dict[str, tuple[str, Any]] = {}
    for base in reversed([base for base in kind.__mro__ if _is_ours(base)]):
        for name, value in vars(base).items():
            hidden = name.startswith("_") or name in theirs
            if (hidden and name != "__call__") or name in _INTERNAL.get(kind.__name__, ()):
                continue
            if isinstance(value, property):
                found[name] = "attribute", value.fget
            elif isinstance(value, cached_property):
                found[name] = "attribute", value.func
            elif isinstance(value, classmethod | staticmethod):
                found[name] = "class method", value.__func__
            elif inspect.isfunction(value):
                found[name] = "method", value
            elif inspect.isclass(value):
                found[name] = "class", value
    return found


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("shardweave")


def _function(name: str, function: Callable[..., Any]) -> Iterator[str]:
    yield _signature(name, function) + "\n"
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        yield "A context manager.\n"
    yield _text(name, function) + "\n"


def _signature(name: str, function: Callable[..., Any], without_self: bool = True) -> str:
    """The signature as an indented block, on one line if it fits."""
    signature = inspect.signature(function)
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name.startswith("_") or parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        text = parameter.name if parameter.annotation is parameter.empty else f"{parameter.name}: {_type(parameter)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        parts.append(text)
    returns = signature.return_annotation
    end = "" if inspect.isclass(function) or returns in ("None", None) else f" -> {str(returns).strip(chr(39))}"
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) > _WIDTH:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"
    return textwrap.indent(line, "    ")


def _type(parameter: inspect.Parameter) -> str:
    return str(parameter.annotation).strip("'")


def _default(value: object) -> str:
    for name in ("NVLINK_NODE", "NVLINK_INFINIBAND"):
        if value is getattr(shardweave, name):
            return name
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _code(annotation: object) -> str:
    return f"`{str(annotation).strip(chr(39))}`"


def _constant_docstring(name: str, value: Any) -> str:
    """The docstring after the constant's assignment, in the module of its class."""
    module = inspect.getmodule(type(value))
    assert module is not None
    body = ast.parse(inspect.getsource(module)).body
    for at, node in enumerate(body[:-1]):
        docstring = body[at + 1]
        if (
            isinstance(node, ast.Assign)
            and [ast.unparse(target) for target in node.targets] == [name]
            and isinstance(docstring, ast.Expr)
            and isinstance(docstring.value, ast.Constant)
        ):
            return str(docstring.value.value)
    raise ValueError(f"{name} has no docstring")


def _text(name: str, thing: Any) -> str:
    """The docstring as Markdown, its sections as lists."""
    docstring = inspect.getdoc(thing) if "__doc__" in dir(thing) else None
    if not docstring or (inspect.isclass(thing) and docstring.startswith(f"{thing.__name__}(")):
        raise ValueError(f"{name} has no docstring")
    lines, out = docstring.split("\n"), []
    at = 0
    while at < len(lines):
        heading = _SECTION.match(lines[at])
        if heading is None:
            out.append(lines[at])
            at += 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
        out += [f"**{'Arguments' if heading[1] == 'Args' else heading[1]}**{heading[2]}", ""]
        out += [*_items(lines[at + 1 : end]), ""]
        at = end
    return "\n".join(out).strip() + "\n"


def _items(lines: list[str]) -> list[str]:
    """A section's lines as one list item for each name, or as a paragraph without names."""
    found: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).strip().split("\n"):
        named = re.match(r"([A-Za-z_][\w, .]*): (.*)", line)
        if named:
            names = ", ".join(f"`{name}`" for name in named[1].split(", "))
            found.append(f"- {names}: {named[2]}")
        elif found:
            found[-1] += f" {line.strip()}" if line.strip() else ""
        else:
            found.append(line)
    return [_wrapped(item, "  " if item.startswith("- ") else "") for item in found]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in reference().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
