"""`Connection`: the groups of one generation, and calls on them that end when the generation does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from mmcompile.runtime.control.errors import Superseded
from mmcompile.runtime.control.membership import Generation, Membership
from mmcompile.runtime.control.store import open_store
from mmcompile.runtime.groups import Groups, PeerLost
from mmcompile.runtime.runner import Runner

T = TypeVar("T")
_CONNECT_S = 15.0


class Connection:
    def __init__(self, membership: Membership, runner: Runner, groups: Groups) -> None:
        self.groups = groups
        self._membership = membership
        self._runner = runner
        self._over = False

    def check(self) -> None:
        if self._over or self._membership.superseded:
            raise Superseded("the generation is over")

    def call(self, function: Callable[[], T]) -> T:
        try:
            return self._runner.call(function, self._membership.check)
        except PeerLost as error:
            self._membership.fault(str(error).splitlines()[0])
            raise AssertionError("a fault was explained without an error") from error


class Connections:
    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._old: list[object] = []

    @contextlib.contextmanager
    def open(self, generation: Generation) -> Iterator[Connection]:
        runner = Runner()

        def make() -> Groups:
            store = open_store(generation, _CONNECT_S)
            return Groups.connect(store, generation.rank, generation.world_size, torch.device("cpu"), local=True)

        try:
            groups = runner.call(make, self._membership.check)
        except RuntimeError as error:
            self._membership.fault(str(error).splitlines()[0])
            raise
        connection = Connection(self._membership, runner, groups)
        self._old.append(connection)
        try:
            yield connection
        finally:
            connection._over = True
            runner.end(0.0)
