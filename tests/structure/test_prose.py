"""Docstrings are understood without the code beside them, as far as a lint can see."""

from __future__ import annotations

import pytest
from structure import prose


def test_docstrings_of_the_product_have_no_problem() -> None:
    assert len(list(prose.product_files())) > 100, "the product was not found"
    problems = prose.found()
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What one rank has to say."""', ["module: begins with 'What'", "module: 'say'"]),
        ('def f():\n    """Of a step."""\n', ["f: begins with 'Of'"]),
        ('class A:\n    """A."""\n    x: int = 0\n    """By rank."""\n', ["A.x: begins with 'By'"]),
        (
            'class A:\n    def __init__(self):\n        self.x = 0\n        """If any."""\n',
            ["A.__init__.self.x: begins"],
        ),
        ('"""Zeros.\n\nSent to whoever waits."""', ["module: 'whoever'"]),
        ('"""Return what goes on here."""', ["module: 'goes on'"]),
        ('def f(wanted):\n    """Do it.\n\n    Args:\n        wanted: a name.\n    """\n', []),
        ('"""Name of `want`, and what "nobody" means; tells apart bytes [B, T]."""', []),
        ('x = "what"\n"""Bytes of a stage."""\n', []),
        ('"""Offset of a row."""', []),
    ],
)
def test_planted_docstrings(source: str, expected: list[str]) -> None:
    found = [text for _, text in prose.problems(source)]
    assert len(found) == len(expected), found
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True)), found
