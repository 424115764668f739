"""Parses the text form of layouts, and the forms in which torch prints placements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from ...errors import LayoutSyntaxError, shown
from .dtypes import REDUCE_OPS
from .placements import LARGEST, Partial, Placement, Replicate, Shard, StridedShard

_REPLICATE, _shard = Replicate(), lru_cache(maxsize=64)(Shard)  # few objects for many layouts
_MAX_LENGTH = 10_000  # characters
_Parsed = tuple[list[Placement], dict[int, tuple[int, ...]]]


def parse_layout_text(text: str) -> _Parsed:
    """The placements of a layout's text form, and the shard orders that it gives, by tensor dim.

    Raises:
        LayoutSyntaxError: the text cannot be parsed.
    """
    if len(text) > _MAX_LENGTH:
        raise LayoutSyntaxError(text, _MAX_LENGTH, f"{len(text)} characters; allowed: up to {_MAX_LENGTH}")
    return _parse_torch_form(text) if _TORCH_FORM.search(text) else _parse_own_form(text)


def _parse_own_form(text: str) -> _Parsed:
    """Parse the form that `str(layout)` gives."""
    head, at, tail = text.partition("@")
    tokens: list[Placement] = []
    for match in re.finditer(r"\S+", head):
        word, position = match.group(), match.start()
        if word == "R":
            tokens.append(_REPLICATE)
        elif m := re.fullmatch(r"S([0-9]+)(?:(//?)([1-9][0-9]*))?", word):
            dim = _number(text, position + 1, m[1])
            if m[2]:
                tokens.append(StridedShard(dim, _number(text, position + m.start(3), m[3]), m[2] == "//"))
            else:
                tokens.append(_shard(dim))
        elif word[0] == "P" and word[1:] in ("", *REDUCE_OPS):
            tokens.append(Partial(word[1:] or "sum"))
        elif word[0] == "P":
            raise LayoutSyntaxError(
                text, position + 1, f"unknown op {shown(word[1:])}; allowed: {', '.join(REDUCE_OPS)}"
            )
        else:
            raise LayoutSyntaxError(
                text, position, f"unknown token {shown(word)}; allowed: R, S<dim>, S<dim>/<split>, P<op>"
            )
    if not tokens:
        raise LayoutSyntaxError(text, 0, "no placements; allowed: one token per mesh dim")
    orders: dict[int, tuple[int, ...]] = {}
    for match in re.finditer(r"\S+", tail):
        word, position = match.group(), len(head) + 1 + match.start()
        if not re.fullmatch(r"[0-9]+:[0-9]+(,[0-9]+)*", word):
            raise LayoutSyntaxError(
                text, position, f"{shown(word)} is not an order; allowed: <tensor dim>:<mesh dim>,…"
            )
        dim_text, _, order_text = word.partition(":")
        dim = _number(text, position, dim_text)
        if dim in orders:
            raise LayoutSyntaxError(text, position, f"second order for tensor dim {dim}; allowed: one")
        order = tuple(_number(text, position, mesh_dim) for mesh_dim in order_text.split(","))
        orders[dim] = _checked_order(text, position, tokens, dim, order)
    if at and not orders:
        raise LayoutSyntaxError(text, len(head), "no order after '@'; allowed: <tensor dim>:<mesh dim>,…")
    return tokens, orders


_TORCH_FORM = re.compile(r"[(\[]|^\s*RR+\s*$")  # never in the form of `str(layout)`
_WRAPPED = re.compile(r"\s*(?:Spec\([^()]*\((?P<spec>.*)\)\)|\((?P<tuple>.*)\)|\[(?P<list>.*)\])\s*", re.DOTALL)
_TOKEN = re.compile(
    r"""[\s,]*(?:(?P<replicate>Replicate\(\)|R)
    |(?:Shard|S)\(\s*(?:dim=)?(?P<dim>-?[0-9]+)\s*\)
    |(?:_StridedShard|_S)\(\s*(?:dim=)?(?P<strided>-?[0-9]+)\s*,\s*(?:sf=|split_factor=)?(?P<split>[1-9][0-9]*)\s*\)
    |(?P<partial>Partial|P)(?:\(\s*(?:reduce_op=)?(?P<quote>['"]?)(?P<op>\w*)(?P=quote)\s*\))?
    )(?:\[(?P<index>[0-9]+)\])?[\s,]*""",
    re.VERBOSE | re.ASCII,
)


def _parse_torch_form(text: str) -> _Parsed:
    """Parse the forms in which torch prints placements and DTensorSpecs."""
    wrapped = _WRAPPED.fullmatch(text)
    position, end = wrapped.span(str(wrapped.lastgroup)) if wrapped else (0, len(text))
    tokens: list[Placement] = []
    orders: dict[int, dict[int, int]] = {}  # tensor dim -> index in its order -> mesh dim
    while position < end:
        m = _TOKEN.match(text, position, end)
        if m is None:
            position += len(text[position:end]) - len(text[position:end].lstrip(" ,"))
            raise LayoutSyntaxError(
                text,
                position,
                "not a placement; allowed: Replicate(), Shard(dim), Partial(op), _StridedShard(dim, split)",
            )
        digits = m["dim"] or m["strided"]
        if digits:
            at = m.start("dim" if m["dim"] else "strided")
            if digits[0] == "-":
                raise LayoutSyntaxError(text, at, "negative tensor dim; allowed: 0 and up")
            dim = _number(text, at, digits)
            split = m["split"] and _number(text, m.start("split"), m["split"])
            tokens.append(StridedShard(dim, split) if split else _shard(dim))
            if m["index"]:
                index = _number(text, m.start("index"), m["index"])
                if index in orders.setdefault(dim, {}):
                    raise LayoutSyntaxError(
                        text,
                        m.start("index"),
                        f"second index {index} in the order of tensor dim {dim}; allowed: each once",
                    )
                orders[dim][index] = len(tokens) - 1
        elif m["replicate"]:
            tokens.append(_REPLICATE)
        else:
            op = {"": "sum", "product": "prod"}.get(m["op"] or "", m["op"])
            if op not in REDUCE_OPS:
                raise LayoutSyntaxError(
                    text, m.start("op"), f"unknown op {shown(m['op'])}; allowed: {', '.join(REDUCE_OPS)}"
                )
            tokens.append(Partial(op))
        if m["index"] and not digits:
            raise LayoutSyntaxError(text, m.start("index"), "index in an order; allowed: after a shard only")
        position = m.end()
    if not tokens:
        raise LayoutSyntaxError(text, 0, "no placements; allowed: one per mesh dim")
    return tokens, {
        d: _checked_order(text, 0, tokens, d, tuple(by_index[index] for index in sorted(by_index)))
        for d, by_index in orders.items()
    }


def _checked_order(
    text: str, position: int, tokens: Sequence[Placement], dim: int, order: tuple[int, ...]
) -> tuple[int, ...]:
    """`order`, or LayoutSyntaxError if it is not a permutation of the mesh dims that cut the tensor dim."""
    cut_by = [m for m, t in enumerate(tokens) if isinstance(t, Shard) and t.dim == dim]
    order_text = ",".join(map(str, order))
    if len(set(order)) != len(order):
        raise LayoutSyntaxError(text, position, f"order {order_text} repeats a mesh dim; allowed: each once")
    if sorted(order) != cut_by:
        raise LayoutSyntaxError(
            text, position, f"order {order_text} of tensor dim {dim}; allowed: a permutation of mesh dims {cut_by}"
        )
    strided = [t for m in cut_by if isinstance(t := tokens[m], StridedShard)]
    if order != tuple(cut_by) and not all(t.own for t in strided):
        raise LayoutSyntaxError(
            text, position, f"tensor dim {dim} has both a strided shard and an order; allowed: one of them"
        )
    return order


def _number(text: str, position: int, digits: str) -> int:
    # Python's int() raises for more than 4,300 digits.
    if len(digits) > 18 or int(digits) > LARGEST:
        raise LayoutSyntaxError(text, position, f"a number of {len(digits)} digits; allowed: up to 2**58")
    return int(digits)
