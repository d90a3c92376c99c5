"""Ranks that share the tensors of a chain, where that is decided before a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmcompile.errors import PlanError
from mmcompile.planner.pricing.chains import ChainSet


def with_shared_tensors(sets: Sequence[ChainSet], wanted: Mapping[str, int]) -> list[ChainSet]:
    """The chain sets whose chains can have the degrees wanted.

    Args:
        wanted: chain or component name -> ranks that share its tensors; 1 for those not named.

    Raises:
        PlanError: a name that is neither of a chain nor of a component, a number below 1, or no set can.
    """
    names = dict.fromkeys(name for each in sets for chain in each.chains for name in (chain.name, *chain.components))
    for name, number in wanted.items():
        if name not in names:
            raise PlanError(
                f"no chain {name!r} to give tensor parallel degree {number}; chains and components are {', '.join(names)}"
            )
        if number < 1:
            raise PlanError(f"{name} cannot have tensor parallel degree {number}; give 1 or more")
    fitting = [
        each for each in sets if all(len(_degrees(chain.name, chain.components, wanted)) <= 1 for chain in each.chains)
    ]
    if not fitting:
        chains = " | ".join(", ".join("+".join(chain.components) for chain in each.chains) for each in sets)
        asked = ", ".join(f"{name} {number}" for name, number in wanted.items())
        raise PlanError(
            f"no placement gives tensor parallel degrees {asked}: components of one chain have the same; chains are {chains}"
        )
    return fitting


def _degrees(name: str, components: Sequence[str], wanted: Mapping[str, int]) -> set[int]:
    return {wanted[each] for each in (name, *components) if each in wanted}
