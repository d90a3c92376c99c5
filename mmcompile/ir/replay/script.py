"""`Script`: what one forward of a model calls, as a replay recorded it; and which modules are called as one step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from mmcompile.ir.gradient_proof import GradientPaths
from mmcompile.ir.replay.values import Call, ModuleCall, Value, ValueKind, calls_in, modules_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The calls of one forward, as a tree of modules."""

    entries: Sequence[Call | ModuleCall] = field(repr=False)
    loss: Value = field(repr=False)
    paths: GradientPaths | None = field(default=None, repr=False)
    """Paths of the gradient that autograd recorded; None where modules did not run."""
    reads_floats: bool = False
    """True if Python, or host work, read values of float inputs."""

    def steps(self, wholes: frozenset[str]) -> list[Call]:
        """Return the steps in order; a call of a module in `wholes` is one step, whose own calls are left out."""
        return [call for call in self.calls(wholes) if call.role in ("step", "module")]

    def calls(self, wholes: frozenset[str]) -> list[Call]:
        """Return all calls in order; a call of a module in `wholes` is one call."""

        def visit(entries: Sequence[Call | ModuleCall]) -> Iterator[Call]:
            for entry in entries:
                if isinstance(entry, Call):
                    yield entry
                elif entry.path in wholes:
                    yield entry.call
                else:
                    yield from visit(entry.entries)

        return list(visit(self.entries))


def open_modules(script: Script) -> set[str]:
    """Return the paths of modules of which a call cannot be one step: it is not closed.

    A call is closed if Python reads no value in it; if it computes from its arguments, parameters and buffers alone, writes to
    nothing older than itself, and returns tensors that it made; and if no other tensor made in it is used outside.

    Args:
        script: a script of all modules.
    """
    escaped = _escaped(script)
    return {
        module.path
        for module in modules_in(script.entries)
        if not module.path or id(module) in escaped or not _is_closed(module)
    }


def outermost(paths: Collection[str]) -> frozenset[str]:
    """Return the paths of modules that are inside none of the others."""
    return frozenset(path for path in paths if not any(path.startswith(f"{outer}.") for outer in paths))


def differing_modules(one: Script, other: Script, wholes: frozenset[str]) -> set[str]:
    """Return those of `wholes` in which two scripts of all modules call something else."""
    pairs = zip(*([m for m in modules_in(s.entries) if m.path in wholes] for s in (one, other)), strict=False)
    return {ours.path for ours, theirs in pairs if _steps_in(ours) != _steps_in(theirs)}


def _steps_in(module: ModuleCall) -> list[tuple[object, ...]]:
    return [(call.key, call.structure, call.grad) for call in calls_in(module.entries) if call.role == "step"]


def _is_closed(module: ModuleCall) -> bool:
    inside = {id(call) for call in calls_in(module.entries)}
    given = {id(leaf) for leaf in module.call.leaves if isinstance(leaf, Value)}
    made = [value for value in module.outputs[1] if isinstance(value, Value)]

    def is_own(value: Value) -> bool:
        return bool(value.origins) and id(value.origins[0][0]) in inside

    if module.reads or not module.plain or not made or any(value.host or not is_own(value) for value in made):
        return False
    for call in calls_in(module.entries):
        for leaf in call.leaves:
            outer = isinstance(leaf, Value) and not is_own(leaf) and id(leaf) not in given
            if outer and (leaf.kind in (ValueKind.RESULT, ValueKind.INPUT) or leaf.written):
                return False
        target = call.leaves[0] if call.leaves else None
        if _writes(call) and isinstance(target, Value) and not is_own(target):
            return False
    return any(call.role == "step" for call in calls_in(module.entries))


def _writes(call: Call) -> bool:
    return call.name == "__setitem__" or (call.name.endswith("_") and not call.name.endswith("__"))


def _escaped(script: Script) -> set[int]:
    """Return identities of the module calls that made a tensor which is used outside, though they did not return it."""
    around: dict[int, tuple[ModuleCall, ...]] = {}
    used: list[tuple[tuple[ModuleCall, ...], Value]] = []

    def visit(entries: Sequence[Call | ModuleCall], above: tuple[ModuleCall, ...]) -> None:
        for entry in entries:
            if isinstance(entry, ModuleCall):
                used.extend((above, leaf) for leaf in entry.call.leaves if isinstance(leaf, Value))
                visit(entry.entries, (*above, entry))
            else:
                around[id(entry)] = above
                used.extend((above, leaf) for leaf in entry.leaves if isinstance(leaf, Value))

    visit(script.entries, ())
    escaped: set[int] = set()
    for above, value in [*used, ((), script.loss)]:
        if value.origins:
            returned = {id(call) for call, _ in value.origins}
            for module in around.get(id(value.origins[0][0]), ()):
                if all(module is not other for other in above) and id(module.call) not in returned:
                    escaped.add(id(module))
    return escaped
