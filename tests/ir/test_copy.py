"""`copied`: nodes of one's own, tensors shared."""

from __future__ import annotations

import torch
from support.graphs.hand_graph import small_graph

from mmcompile.ir.copy import copied
from mmcompile.ir.graph import annotate
from mmcompile.passes.text import graph_text
from mmcompile.passes.verify import Verify


def test_a_copy_is_equal_and_shares_tensors() -> None:
    graph = small_graph()
    copy = copied(graph)
    assert copy == graph
    assert graph_text(copy) == graph_text(graph)
    Verify().run(copy)
    own, theirs = dict(copy.module.named_parameters()), dict(graph.module.named_parameters())
    assert own.keys() == theirs.keys()
    assert all(own[name] is theirs[name] for name in own)
    assert dict(copy.module.named_buffers()).keys() == dict(graph.module.named_buffers()).keys()


def test_a_parameter_that_the_graph_does_not_read_is_kept() -> None:
    graph = small_graph()
    for node in graph.module.graph.nodes:
        if node.op == "get_attr" and not node.users:
            graph.module.graph.erase_node(node)
    spare = [name for name, _ in graph.module.named_parameters() if "spare" in name]
    read = {str(node.target) for node in graph.module.graph.nodes}
    assert spare and not read & set(spare)
    own, theirs = (dict(x.module.named_parameters()) for x in (copied(graph), graph))
    assert all(own[name] is theirs[name] for name in spare)


def test_changing_a_copy_leaves_the_graph() -> None:
    graph = small_graph()
    before = graph_text(graph)
    copy = copied(graph)
    for node in list(copy.module.graph.nodes):
        if node.op == "call_function":
            annotate(node, layer=0, module_path="elsewhere")
            node.meta["val"] = torch.empty(0)
        if node.op == "call_function" and not node.users:
            copy.module.graph.erase_node(node)
    assert graph_text(graph) == before
