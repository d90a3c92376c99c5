"""`script_digest`: equal for two scripts with the same calls on the same sizes, in any process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mmcompile.ir.replay.learning import LearnedTemplate
from mmcompile.ir.replay.script import Script
from mmcompile.ir.replay.values import Structure, Value, ValueKind, is_plain

_VALUED = (ValueKind.BUFFER, ValueKind.CONSTANT)


def script_digest(script: Script) -> str:
    """Return a digest of all calls of a forward: functions, plain arguments, sizes, and the host constants among arguments."""
    return _digest(_Numbers().lines(script))


def template_digest(learned: LearnedTemplate) -> str:
    """Return a digest of a template: its script, its modules that are one step, and from which input each hole is filled."""
    numbers = _Numbers()
    lines = [*numbers.lines(learned.template.script), *sorted(learned.template.wholes)]
    sources = learned.sources
    lines += sorted(f"{numbers.of(value)} = {name}" for value, name in sources.tensors.items())
    lines += sorted(f"{numbers.of(value)} = {name} {layout}" for value, (name, layout) in sources.gathers.items())
    calls = learned.template.script.calls(learned.template.wholes)
    places = {id(call): place for place, call in enumerate(calls)}
    lines += sorted(f"{places[call]} {leaf} = {source}" for (call, leaf), source in sources.numbers.items())
    lines += (f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in learned.given.items())
    lines += (f"{name} {sorted(dims)}" for name, dims in sorted(learned.varying.items()))
    return _digest(lines)


class _Numbers:
    """Numbers of the values of a script, in order of first use."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}

    def of(self, value: Value) -> int:
        return self._found.setdefault(id(value), len(self._found))

    def lines(self, script: Script) -> Iterator[str]:
        """Yield one line for each call of a script."""
        for call in script.calls(frozenset()):
            leaves = ", ".join(self._leaf(leaf) for leaf in call.leaves)
            made = ", ".join(f"{self.of(value)} {_kind(value)}" for value in call.results)
            yield f"{made} = {call.role} {call.name}{_structure(call.structure)} {call.grad} ({leaves})"
        yield f"loss {self.of(script.loss)}"

    def _leaf(self, leaf: object) -> str:
        if isinstance(leaf, Value):
            known = leaf.host and leaf.kind in _VALUED
            return f"{self.of(leaf)} {_kind(leaf)} {_values(leaf.tensor) if known else ''}"
        return repr(leaf) if is_plain(leaf) else type(leaf).__qualname__


def _kind(value: Value) -> str:
    return f"{value.kind} {value.name} {value.host} {value.tensor.dtype} {tuple(value.tensor.shape)}"


def _values(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()


def _structure(structure: Structure) -> str:
    if structure is None:
        return "."
    kind, *children = structure
    if issubclass(kind, dict):
        children = [f"{name}: {_structure(child)}" for name, child in children]
    else:
        children = [_structure(child) for child in children]
    return f"{kind.__qualname__}[{' '.join(children)}]"


def _digest(lines: Iterable[str]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for line in lines:
        made.update(f"{line}\n".encode())
    return made.hexdigest()
