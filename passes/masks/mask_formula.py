"""`MaskFormula`: the one form of a mask that int64 words, one a token, can express, recognised however the model computes it.

visible(q, k) = valid(k) and documents(q) = documents(k) and (k <= q and q - k < window or islands(q) = islands(k))

Query q sees key k if k is no padding, both are in one packed document, and either k is not after q and within the window, or
both are in one island (tokens, such as those of an image, that see each other in both directions).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from mmcompile.passes.masks.mask_expression import Axis, AxisIndex, Elementwise, Expression, NodeElement, Number
from mmcompile.passes.masks.mask_positions import with_places
from mmcompile.passes.masks.mask_reader import MaskReader
from mmcompile.passes.masks.predicates import (
    CAUSAL,
    Alternatives,
    Claim,
    UnrecognisedMask,
    absorbed,
    conjunction,
    holds,
    unbiased,
)
from mmcompile.passes.values import shape

Test = tuple[Expression, bool]
"""(bool expression per token, True if it must hold or False if it must not)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskFormula:
    """A mask that int64 words, one a token, can express; each expression is a function of batch row b and one token t."""

    causal: bool
    valid: tuple[Test, ...] = ()
    """Tests that must all hold for a token to be seen."""
    documents: Expression | None = None
    islands: Expression | None = None
    island_tests: tuple[Test, ...] = ()
    """Tests that a token must all pass to be in an island: a group of tokens that see each other in both directions."""
    window: int | None = None
    window_bounds_islands: bool = False


def recognise(mask: fx.Node | None, reader: MaskReader, *, causal: bool) -> MaskFormula:
    """Return the formula of a mask.

    Args:
        mask: node [..., queries, keys], bool or added to scores; None if there is no mask.
        reader: reader of the mask's nodes.
        causal: True if attention without a mask is causal.

    Raises:
        UnrecognisedMask: the mask is not of the form of `MaskFormula`.
    """
    if mask is None:
        return MaskFormula(causal=causal)
    sizes = shape(mask)
    axes: tuple[Axis, ...] = ("b", "h", "q", "k")
    places = tuple(
        Number(0) if size == 1 else AxisIndex(axis) for size, axis in zip(sizes, axes[4 - len(sizes) :], strict=True)
    )
    expression, documents = with_places(reader.at(mask, places), reader)
    found = holds(expression) if mask.meta["val"].dtype == torch.bool else unbiased(expression)
    formula = _matched(absorbed(frozenset(c for claims in found if (c := conjunction(_of_keys(claims))) is not None)))
    if documents is not None and formula.documents != documents:
        raise UnrecognisedMask("it compares position_ids of tokens of different documents")
    return formula


def _of_keys(claims: frozenset[Claim]) -> frozenset[Claim]:
    """Return `claims`, where tests of the query that follow from an id shared by query and key are made tests of the key.

    If documents(q) = documents(k), then documents(q) != 0 means the same as documents(k) != 0.
    """
    ids = [claim.of for claim in claims if claim.kind == "same" and claim.positive]
    return frozenset(
        Claim("holds", f.positive, of=f.of, axis="k")
        if f.kind == "holds" and any(_made_of(f.of, same) for same in ids)
        else f
        for f in claims
    )


def _made_of(expression: Expression, source: Expression) -> bool:
    if expression == source or isinstance(expression, Number):
        return True
    return isinstance(expression, Elementwise) and all(_made_of(arg, source) for arg in expression.args)


def _matched(alternatives: Alternatives) -> MaskFormula:
    if not alternatives:
        raise UnrecognisedMask("it hides every key")
    if len(alternatives) > 2:
        raise UnrecognisedMask(
            f"it shows a key in {len(alternatives)} ways, and words can say two: causality and an island"
        )
    common = frozenset.intersection(*alternatives)
    rests = [claims - common for claims in alternatives]
    if len(rests) == 1:
        causal = {claim for claim in common if claim.kind == "reach"}
        documents, valid, window = _shared(common - causal)
        return _with_window(MaskFormula(causal=CAUSAL in causal, documents=documents, valid=valid), causal)
    rests.sort(key=lambda rest: CAUSAL not in rest)
    if CAUSAL not in rests[0] or any(claim.kind != "reach" for claim in rests[0]):
        raise UnrecognisedMask("it shows keys in two ways, of which none is causality")
    documents, valid, window = _shared(common)
    islands, tests = _island(rests[1])
    formula = MaskFormula(
        causal=True,
        documents=documents,
        valid=valid,
        islands=islands,
        island_tests=tests,
        window=window,
        window_bounds_islands=window is not None,
    )
    return _with_window(formula, rests[0])


def _with_window(formula: MaskFormula, reaches: set[Claim] | frozenset[Claim]) -> MaskFormula:
    window = formula.window
    for claim in reaches:
        if not claim.positive and formula.causal:
            window = claim.distance if window is None else min(window, claim.distance)
        elif claim != CAUSAL:
            raise UnrecognisedMask(
                f"it bounds the distance of keys without causality: keys {'at least' if claim.positive else 'less than'} "
                f"{claim.distance} before the query"
            )
    return replace(formula, window=window)


def _shared(claims: frozenset[Claim]) -> tuple[Expression | None, tuple[Test, ...], int | None]:
    """Return (document ids or None, tests of keys, window in tokens or None) from conditions that hold if a query sees a key."""
    same, keys, queries = _by_side(claims)
    reach = [claim for claim in claims if claim.kind == "reach"]
    if len(same) > 1 or any(not claim.positive for claim in same):
        raise UnrecognisedMask("it compares several ids of query and key, or wants different ones")
    if queries - keys:
        raise UnrecognisedMask(f"it hides queries where {_text(queries - keys)} but shows their keys")
    if any(claim.positive for claim in reach):
        raise UnrecognisedMask("causality bounds its islands too")
    window = reach[0].distance if reach else None
    return (same[0].of if same else None), _ordered(keys), window


def _island(claims: frozenset[Claim]) -> tuple[Expression, tuple[Test, ...]]:
    """Return (island ids, tests that a token of an island must pass) from the conditions under which a query sees a later key.

    An island is a group of tokens, such as those of an image, that attend to each other in both directions.
    """
    same, keys, queries = _by_side(claims)
    if any(claim.kind == "reach" or (claim.kind == "same" and not claim.positive) for claim in claims) or len(same) > 1:
        raise UnrecognisedMask("keys besides causal ones are not those of an equal id")
    own = {test for test in keys if same and _made_of(test[0], same[0].of)}
    if (keys - own) != queries:
        raise UnrecognisedMask(f"it shows keys after the query by a test of one side, {_text(keys ^ queries)}")
    return (same[0].of if same else Number(0)), _ordered(keys)


def _by_side(claims: frozenset[Claim]) -> tuple[list[Claim], set[Test], set[Test]]:
    tests = [(claim.axis, (claim.of, claim.positive)) for claim in claims if claim.kind == "holds"]
    keys, queries = ({test for axis, test in tests if axis == side} for side in ("k", "q"))
    return [claim for claim in claims if claim.kind == "same"], keys, queries


def _ordered(tests: set[Test]) -> tuple[Test, ...]:
    return tuple(sorted(tests, key=lambda test: (_text({test}), test[1])))


def _text(tests: set[Test]) -> str:
    return ", ".join(sorted(_name(expression) for expression, _ in tests))


def _name(expression: Expression) -> str:
    return expression.node.name if isinstance(expression, (Elementwise, NodeElement)) else str(expression)
