"""Runs of the tests that kill nodes: one process does them all, since it takes a while to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.processes.elastic_checks import Chaos
from support.processes.spawn_ranks import JobProcess


@pytest.fixture(scope="session")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    with JobProcess() as runs:
        yield Chaos(runs=runs, folder=tmp_path_factory.mktemp("reference"))
