"""Conditions of an expression in disjunctive normal form: alternatives, each a set of claims about a query and a key."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import fx

from mmcompile.passes.masks.mask_expression import (
    Axis,
    Elementwise,
    Expression,
    Form,
    NodeElement,
    Number,
    applied,
    axes_of,
    dtype_of,
    linear,
    per_token,
)
from mmcompile.passes.values import op_name

HIDDEN = -1e4
"""Bias on scores at or below which a key is hidden: its weight is 0 in any float format beside a visible key. [Empirical]"""
_MAX_ALTERNATIVES = 64


class UnrecognisedMask(Exception):
    """A mask that mask words cannot express; the message names the part that does not fit."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Atomic condition on a query q and a key k.

    `reach`: q - k >= distance. `same`: an expression is equal at q and k. `holds`: an expression is true at q, or at k.
    """

    kind: Literal["reach", "same", "holds"]
    positive: bool
    distance: int = 0
    of: Expression = Number(0)
    axis: Axis = "t"

    def __invert__(self) -> Claim:
        return Claim(self.kind, not self.positive, self.distance, self.of, self.axis)


Alternatives = frozenset[frozenset[Claim]]
"""Disjunction of conjunctions of claims: true if all claims of at least one set hold."""
_TRUE: Alternatives = frozenset((frozenset(),))
_FALSE: Alternatives = frozenset()
CAUSAL = Claim("reach", True, 0)


def holds(expression: Expression, positive: bool = True) -> Alternatives:
    """Return the conditions under which an expression is true (not 0), or is false (0) if `positive` is False."""
    match expression:
        case Number(value):
            return _TRUE if bool(value) == positive else _FALSE
        case Elementwise("not", (source,)):
            return holds(source, not positive)
        case Elementwise("to", (source,)) if not (dtype_of(source).is_floating_point and _is_integer(expression)):
            return holds(source, positive)
        case Elementwise("and" | "mul", (left, right)) if positive or not _one_sided(expression):
            return (_all if positive else _any)(holds(left, positive), holds(right, positive))
        case Elementwise("or", (left, right)) if not positive or not _one_sided(expression):
            return (_any if positive else _all)(holds(left, positive), holds(right, positive))
        case Elementwise("eq" | "ne" | "lt" | "le" | "gt" | "ge" as op, (left, right)):
            return _compared(op, left, right, expression, positive)
        case Elementwise("where", (condition, yes, no)) if not _one_sided(expression):
            return _any(
                _all(holds(condition), holds(yes, positive)), _all(holds(condition, False), holds(no, positive))
            )
    return _token_claim(expression, positive)


def _is_integer(expression: Elementwise) -> bool:
    return not expression.dtype.is_floating_point and expression.dtype != torch.bool


def _one_sided(expression: Expression) -> bool:
    axes = axes_of(expression)
    return "h" not in axes and len(axes & {"q", "k"}) <= 1


def _token_claim(expression: Expression, positive: bool) -> Alternatives:
    if not _one_sided(expression):
        raise UnrecognisedMask(_reason(expression))
    axis: Axis = "q" if "q" in axes_of(expression) else "k"
    return frozenset((frozenset((Claim("holds", positive, of=per_token(expression), axis=axis),)),))


def _reason(expression: Expression) -> str:
    match expression:
        case Elementwise() if "h" in axes_of(expression):
            return f"{_described(expression.node)} differs by head"
        case Elementwise():
            return f"{_described(expression.node)} mixes queries and keys in a way that words cannot say"
        case NodeElement(node, _):
            return f"{_described(node)} has a value for every query and key"
        case _:
            return f"it depends on {expression}"


def _described(node: fx.Node) -> str:
    what = {"placeholder": "an input", "get_attr": "a tensor of the model"}.get(node.op)
    return f"{node.name} ({what or op_name(node)})"


def _compared(op: str, left: Expression, right: Expression, whole: Elementwise, positive: bool) -> Alternatives:
    if op == "ne":
        return _compared("eq", left, right, applied("eq", (left, right), whole.node, torch.bool), not positive)
    difference = linear(applied("sub", (left, right), whole.node, torch.int64))
    if difference is not None:
        factors, constant = difference
        reversed_form: Form = {axis: -factor for axis, factor in factors.items()}, -constant

        def at_least(positive: bool) -> Alternatives:
            return _non_negative(difference, applied("ge", (left, right), whole.node, torch.bool), positive)

        def at_most(positive: bool) -> Alternatives:
            return _non_negative(reversed_form, applied("le", (left, right), whole.node, torch.bool), positive)

        if op == "eq":
            return _all(at_least(True), at_most(True)) if positive else _any(at_least(False), at_most(False))
        # a > b is not (a <= b): every comparison is one of the two forms, or its opposite.
        return at_least(positive == (op == "ge")) if op in ("ge", "lt") else at_most(positive == (op == "le"))
    if op == "eq":
        if left == right:
            return _TRUE if positive else _FALSE
        sides = [axes_of(side) & {"q", "k"} for side in (left, right)]
        if per_token(left) == per_token(right) and sorted(map(sorted, sides)) == [["k"], ["q"]]:
            return frozenset((frozenset((Claim("same", positive, of=per_token(left)),)),))
        if right == Number(0) and _one_sided(left):
            return holds(left, not positive)
    if _one_sided(whole):
        return _token_claim(whole, positive)
    return _any(
        *(
            _all(condition, _compared_numbers(op, values, whole, positive))
            for condition, values in _cases((left, right))
        )
    )


def _non_negative(form: Form, whole: Elementwise, positive: bool) -> Alternatives:
    factors, constant = form
    if all(factor > 0 for factor in factors.values()) and constant >= 0:
        return _TRUE if positive else _FALSE
    if all(factor < 0 for factor in factors.values()) and constant < 0:
        return _FALSE if positive else _TRUE
    if factors == {"q": 1, "k": -1}:
        return frozenset((frozenset((Claim("reach", positive, -constant),)),))
    if factors == {"q": -1, "k": 1}:
        return frozenset((frozenset((Claim("reach", not positive, constant + 1),)),))
    return _token_claim(whole, positive)


def _compared_numbers(op: str, values: tuple[Expression, ...], whole: Elementwise, positive: bool) -> Alternatives:
    left, right = values
    if not isinstance(left, Number) or not isinstance(right, Number):
        raise UnrecognisedMask(_reason(whole))
    result = {
        "eq": left.value == right.value,
        "lt": left.value < right.value,
        "le": left.value <= right.value,
        "gt": left.value > right.value,
        "ge": left.value >= right.value,
    }[op]
    return _TRUE if result == positive else _FALSE


def unbiased(expression: Expression) -> Alternatives:
    """Return the conditions under which a bias on scores is 0. Raises UnrecognisedMask if it does not hide all other keys."""
    visible = _FALSE
    for condition, (value,) in _cases((expression,)):
        if not isinstance(value, Number) or not (value.value == 0 or value.value <= HIDDEN):
            what = f"a bias of {value.value}" if isinstance(value, Number) else _bias_reason(value)
            raise UnrecognisedMask(f"{what} neither shows nor hides a key")
        if value.value == 0:
            visible = _any(visible, condition)
    return visible


def _bias_reason(value: Expression) -> str:
    return f"the bias {_described(value.node)}" if isinstance(value, (Elementwise, NodeElement)) else "a bias"


Cases = list[tuple[Alternatives, tuple[Expression, ...]]]


def _cases(values: tuple[Expression, ...]) -> Cases:
    parts = [[(c, v) for c, v in _split(value) if c != _FALSE] for value in values]
    if len(parts) == 1:
        return [(condition, (value,)) for condition, value in parts[0]]
    found: Cases = []
    for (first, left), (second, right) in product(*parts):
        condition = _all(first, second)
        if condition != _FALSE:
            found.append((condition, (left, right)))
    return found


def _split(value: Expression) -> list[tuple[Alternatives, Expression]]:
    if isinstance(value, (Elementwise, NodeElement)) and dtype_of(value) == torch.bool:
        return [(holds(value), Number(1)), (holds(value, False), Number(0))]
    match value:
        case Elementwise("to", (source,)):
            return _split(source)
        case Elementwise("where", (condition, yes, no)):
            no = Number(0) if _is_zero_unless(condition, no) else no
            return [(_all(holds(condition), c), v) for c, v in _split(yes)] + [
                (_all(holds(condition, False), c), v) for c, v in _split(no)
            ]
        case Elementwise("add" | "sub" | "mul" as op, operands):
            if not any(_has_cases(operand) for operand in operands):
                return [(_TRUE, value)]
            return [(c, _folded(op, left, right, value)) for c, (left, right) in _cases(operands)]
    return [(_TRUE, value)]


def _has_cases(value: Expression) -> bool:
    if isinstance(value, (Elementwise, NodeElement)) and dtype_of(value) == torch.bool:
        return True
    return isinstance(value, Elementwise) and (value.op == "where" or any(map(_has_cases, value.args)))


def _is_zero_unless(condition: Expression, value: Expression) -> bool:
    """Return whether `value` is 0 wherever `condition` is false, as `where(x != 0, ..., x)` is for the condition x != 0."""
    match condition:
        case Elementwise("to", (source,)):
            return dtype_of(condition) == torch.bool and source == value
        case Elementwise("ne", (source, Number(0))):
            return source == value
    return False


def _folded(op: str, left: Expression, right: Expression, whole: Elementwise) -> Expression:
    if isinstance(left, Number) and isinstance(right, Number):
        numbers = torch.tensor(left.value, dtype=torch.float64), torch.tensor(right.value, dtype=torch.float64)
        return Number({"add": torch.add, "sub": torch.sub, "mul": torch.mul}[op](*numbers).item())
    return applied(op, (left, right), whole.node, whole.dtype)


def _any(*parts: Alternatives) -> Alternatives:
    return _limited(frozenset().union(*parts))


def _all(left: Alternatives, right: Alternatives) -> Alternatives:
    return _limited(frozenset(c for a, b in product(left, right) if (c := conjunction(a | b)) is not None))


def _limited(alternatives: Alternatives) -> Alternatives:
    alternatives = absorbed(alternatives)
    if len(alternatives) > _MAX_ALTERNATIVES:
        raise UnrecognisedMask(f"it has more than {_MAX_ALTERNATIVES} alternatives")
    return alternatives


def absorbed(alternatives: Alternatives) -> Alternatives:
    """Return the alternatives (sets of conditions) that are no superset of another: {{a}, {a, b}, {c}} -> {{a}, {c}}."""
    return frozenset(a for a in alternatives if not any(other < a for other in alternatives))


def conjunction(claims: frozenset[Claim]) -> frozenset[Claim] | None:
    """Return the claims without redundant ones; None if they contradict each other."""
    if any(~claim in claims for claim in claims):
        return None
    least = max((f.distance for f in claims if f.kind == "reach" and f.positive), default=None)
    below = min((f.distance for f in claims if f.kind == "reach" and not f.positive), default=None)
    if least is not None and below is not None and least >= below:
        return None
    kept = {f for f in claims if f.kind != "reach"}
    kept |= {Claim("reach", True, least)} if least is not None else set()
    kept |= {Claim("reach", False, below)} if below is not None else set()
    return frozenset(kept)
