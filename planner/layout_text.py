"""Layouts as text: the form of shardweave's own, and what torch prints of placements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from ..errors import LayoutSyntaxError, shown
from .dtypes import REDUCE_OPS
from .placements import LARGEST, Partial, Placement, Replicate, Shard, StridedShard

_REPLICATE, _shard = Replicate(), lru_cache(maxsize=64)(Shard)  # few objects for many layouts
_LONGEST = 10_000  # characters
_Read = tuple[list[Placement], dict[int, tuple[int, ...]]]


def read(text: str) -> _Read:
    """Placements, and orders of the tensor dims that have one.

    Raises:
        LayoutSyntaxError: the text does not parse.
    """
    if len(text) > _LONGEST:
        raise LayoutSyntaxError(text, _LONGEST, f"{len(text)} characters; allowed: up to {_LONGEST}")
    return _torchs(text) if _TORCHS.search(text) else _own(text)


def _own(text: str) -> _Read:
    """Placements and orders of the text form that `str` gives."""
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
        raise LayoutSyntaxError(text, 0, "no placements; one token per mesh dim is needed")
    orders: dict[int, tuple[int, ...]] = {}
    for match in re.finditer(r"\S+", tail):
        word, position = match.group(), len(head) + 1 + match.start()
        if not re.fullmatch(r"[0-9]+:[0-9]+(,[0-9]+)*", word):
            raise LayoutSyntaxError(text, position, f"{shown(word)} is no order; allowed: <tensor dim>:<mesh dim>,…")
        dim_text, _, order_text = word.partition(":")
        dim = _number(text, position, dim_text)
        if dim in orders:
            raise LayoutSyntaxError(text, position, f"a second order for tensor dim {dim}")
        order = tuple(_number(text, position, mesh_dim) for mesh_dim in order_text.split(","))
        orders[dim] = _order(text, position, tokens, dim, order)
    if at and not orders:
        raise LayoutSyntaxError(text, len(head), "no order after '@'")
    return tokens, orders


_TORCHS = re.compile(r"[(\[]|^\s*RR+\s*$")  # no text of the own form has such
_WRAPPED = re.compile(r"\s*(?:Spec\([^()]*\((?P<spec>.*)\)\)|\((?P<tuple>.*)\)|\[(?P<list>.*)\])\s*", re.DOTALL)
_TOKEN = re.compile(
    r"""[\s,]*(?:(?P<replicate>Replicate\(\)|R)
    |(?:Shard|S)\(\s*(?:dim=)?(?P<dim>-?[0-9]+)\s*\)
    |(?:_StridedShard|_S)\(\s*(?:dim=)?(?P<strided>-?[0-9]+)\s*,\s*(?:sf=|split_factor=)?(?P<split>[1-9][0-9]*)\s*\)
    |(?P<partial>Partial|P)(?:\(\s*(?:reduce_op=)?(?P<quote>['"]?)(?P<op>\w*)(?P=quote)\s*\))?
    )(?:\[(?P<place>[0-9]+)\])?[\s,]*""",
    re.VERBOSE | re.ASCII,
)


def _torchs(text: str) -> _Read:
    """Placements and orders of what torch prints."""
    wrapped = _WRAPPED.fullmatch(text)
    position, end = wrapped.span(str(wrapped.lastgroup)) if wrapped else (0, len(text))
    tokens: list[Placement] = []
    places: dict[int, dict[int, int]] = {}  # tensor dim -> place in its order -> mesh dim
    while position < end:
        m = _TOKEN.match(text, position, end)
        if m is None:
            position += len(text[position:end]) - len(text[position:end].lstrip(" ,"))
            raise LayoutSyntaxError(
                text, position, "no placement; allowed: Replicate(), Shard(dim), Partial(op), _StridedShard(dim, split)"
            )
        digits = m["dim"] or m["strided"]
        if digits:
            at = m.start("dim" if m["dim"] else "strided")
            if digits[0] == "-":
                raise LayoutSyntaxError(text, at, "a tensor dim counted from the last; allowed: 0 and up")
            dim = _number(text, at, digits)
            split = m["split"] and _number(text, m.start("split"), m["split"])
            tokens.append(StridedShard(dim, split) if split else _shard(dim))
            if m["place"]:
                place = _number(text, m.start("place"), m["place"])
                if place in places.setdefault(dim, {}):
                    raise LayoutSyntaxError(text, m.start("place"), f"a second place {place} for tensor dim {dim}")
                places[dim][place] = len(tokens) - 1
        elif m["replicate"]:
            tokens.append(_REPLICATE)
        else:
            op = {"": "sum", "product": "prod"}.get(m["op"] or "", m["op"])
            if op not in REDUCE_OPS:
                raise LayoutSyntaxError(
                    text, m.start("op"), f"unknown op {shown(m['op'])}; allowed: {', '.join(REDUCE_OPS)}"
                )
            tokens.append(Partial(op))
        if m["place"] and not digits:
            raise LayoutSyntaxError(text, m.start("place"), "a place in an order; allowed: of a shard")
        position = m.end()
    if not tokens:
        raise LayoutSyntaxError(text, 0, "no placements; one per mesh dim is needed")
    return tokens, {
        d: _order(text, 0, tokens, d, tuple(by_place[place] for place in sorted(by_place)))
        for d, by_place in places.items()
    }


def _order(text: str, position: int, tokens: Sequence[Placement], dim: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """An order that the text has for a tensor dim, checked."""
    cut_by = [m for m, t in enumerate(tokens) if isinstance(t, Shard) and t.dim == dim]
    said = ",".join(map(str, order))
    if len(set(order)) != len(order):
        raise LayoutSyntaxError(text, position, f"the order {said} names a mesh dim twice")
    if sorted(order) != cut_by:
        raise LayoutSyntaxError(text, position, f"tensor dim {dim} is cut by mesh dims {cut_by}, not {said}")
    strided = [t for m in cut_by if isinstance(t := tokens[m], StridedShard)]
    if order != tuple(cut_by) and not all(t.own for t in strided):
        raise LayoutSyntaxError(text, position, f"tensor dim {dim} is strided and has an order as well")
    return order


def _number(text: str, position: int, digits: str) -> int:
    # Python itself reads no more than 4,300 digits.
    if len(digits) > 18 or int(digits) > LARGEST:
        raise LayoutSyntaxError(text, position, f"a number of {len(digits)} digits; allowed: up to 2**58")
    return int(digits)
