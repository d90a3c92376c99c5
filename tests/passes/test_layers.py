"""`Layers` as text."""

from __future__ import annotations

from support.graphs.hand_graph import small_graph

from mmcompile.passes.layers import Layers


def test_table_as_text() -> None:
    table = Layers().run(small_graph())
    assert [line.rstrip() for line in str(table).splitlines()] == [
        "                  module             nodes      parameters       trainable",
        "vision.0          vision.patches         3             784             784",
        "vision.1          vision.blocks.0       21           2,176           2,176",
        "vision.2          vision.blocks.1       21           2,176           2,176",
        "audio.0           audio                  3             208             208",
        "projector.0       projector              1             272             272",
        "language_model.0  embed                  5             176             176",
        "language_model.1  layers.0              24           2,240           2,240",
        "language_model.2  layers.1              21           2,176           2,176",
        "language_model.3  head                   4             210             210",
        "shared                                   5",
    ]


def test_the_same_graph_gives_the_same_table() -> None:
    assert Layers().run(small_graph()) == Layers().run(small_graph())


def test_rows_of_one_component() -> None:
    table = Layers().run(small_graph())
    assert [row.name for row in table.of("audio")] == ["audio"]
    assert table.of("video") == ()
