"""A core of `make coverage`: every check of families of unlike kinds, and the message of each refusal."""

from __future__ import annotations

import pytest

from zoo import ALL, FAMILIES
from zoo.checks import check_family
from zoo.expected import PATHS
from zoo.refused import REFUSED

CORE = ("siglip", "whisper", "lxmert")
"""Two towers with a loss over pairs; an encoder and a decoder; nested labels and towers inside another module."""
QUICKLY_REFUSED = "vilt"


@pytest.mark.parametrize("name", CORE)
def test_family_is_right_in_every_column(name: str) -> None:
    row = check_family(ALL[name])
    assert row.passed, row.wrong


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICKLY_REFUSED else pytest.mark.slow) for name in REFUSED]
)
def test_family_is_refused_with_the_line_that_decides(name: str) -> None:
    row = check_family(ALL[name])
    assert row.refused, row.wrong


def test_every_family_has_its_components_or_its_refusal_written_down() -> None:
    assert FAMILIES.keys() == PATHS.keys() | REFUSED.keys()
