"""Find the components and layers of a captured graph from its structure, independently of the model's code.

A value's *sources* are the data inputs its floats come from: float inputs, and integer inputs looked up in a trained
table. A *branch* (encoder or projector) is a module whose values come from fewer sources than the loss does; it holds layers, or
reads a module that does. All else, with everything behind the merge of branches, is the language model.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from mmcompile.ir.compat import is_mutating_op
from mmcompile.ir.graph import META_KEY, Component, ComponentKind, Layer, NodeInfo, component_of, info
from mmcompile.ir.host_shapes import attribute

_MAIN = "language_model"
INPUTS, OUTPUTS = "inputs", "outputs"
Sources = frozenset[str]


_Edges = tuple[tuple[str, str, tuple[str, ...]], ...]
"""(producer, consumer, names of the tensors that flow) of each edge between components."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Branch:
    name: str
    module: str
    sources: Sources


def find_structure(
    module: fx.GraphModule, reference: Sequence[Component] | None = None
) -> tuple[tuple[Component, ...], _Edges]:
    """Annotate every call node with its component and layer, and return the components and their edges.

    Args:
        module: a captured graph; nodes carry `module_path`. Annotations are written.
        reference: components of an earlier capture of the same model, which are kept with their layer order, so that one plan
            places the layers of every capture.
    """
    sources = _sources(module)
    if reference is None:
        branches = _branches(module.graph, sources)
    else:
        branches = [
            _Branch(name=c.name, module=path, sources=frozenset(c.sources)) for c in reference for path in c.modules
        ]
    owner, branches = _assign_until_pure(module.graph, sources, branches)
    wrappers = _wrappers(branches)
    index, names = _layers(module.graph, owner, wrappers, {c.name: c for c in reference or ()})
    for node in module.graph.nodes:
        if node.op == "call_function":
            component = owner.get(node)
            layer = index[node] if component is not None else 0
            node.meta[META_KEY] = NodeInfo(component=component, layer=layer, module_path=node.meta["module_path"])
    components = reference or _components(module.graph, branches, sources, owner, index, names)
    present = set(owner.values())  # a batch without images has no image encoder
    return tuple(c for c in components if c.name in present), _edges(module.graph)


def _sources(module: fx.GraphModule) -> dict[fx.Node, Sources | None]:
    """Return node -> names of the media inputs (such as pixels) that it depends on; the set may be empty.

    The value is None for a shared node, which no parameter, float input or random number reaches.
    """
    result: dict[fx.Node, Sources | None] = {}
    roots: dict[fx.Node, Sources] = {}
    for node in module.graph.nodes:
        before = node.all_input_nodes
        roots[node] = frozenset().union(*(roots[source] for source in before))
        if node.op == "placeholder":
            # A size is of no input: where inputs have one in common, any of them may have been asked for it.
            is_size = isinstance(node.meta["val"], torch.SymInt | int)
            roots[node] = frozenset() if is_size else node.meta.get("roots", frozenset((str(node.target),)))
            result[node] = roots[node] if _is_data(node) else None
        elif node.op == "get_attr":
            result[node] = frozenset() if isinstance(attribute(module, str(node.target)), nn.Parameter) else None
        elif node.op == "call_function":
            floats = [reached for source in before if (reached := result[source]) is not None]
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            # A counter is changed once, by the stage that has the module.
            if not floats and not random and not is_mutating_op(node.target):
                result[node] = None
            elif node.target is torch.ops.aten.embedding.default and result[before[0]] is not None:
                result[node] = frozenset().union(*floats, roots[before[-1]])
            else:
                result[node] = frozenset().union(*floats)
    return result


def _is_data(placeholder: fx.Node) -> bool:
    """Return True if a placeholder is data (images, audio clips), not floats computed from integers (interpolation weights)."""
    value = placeholder.meta["val"]
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and not placeholder.meta.get("from_integers", False)
    )


class _Tree:
    """Tree of the modules that own call nodes, by path, with the data inputs whose values reach each module's nodes."""

    def __init__(self, graph: fx.Graph, sources: Mapping[fx.Node, Sources | None]) -> None:
        self.sources: dict[str, Sources] = defaultdict(frozenset)
        self.children: dict[str, set[str]] = defaultdict(set)
        self.with_parameters: set[str] = set()
        for node in graph.nodes:
            found = sources.get(node)
            if node.op != "call_function" or found is None:
                continue
            path = node.meta["module_path"]
            reads = _reads_parameter(node, sources)
            for prefix in _prefixes(path):
                self.sources[prefix] |= found
                if reads:
                    self.with_parameters.add(prefix)
            for parent, child in zip(_prefixes(path), _prefixes(path)[1:], strict=False):
                self.children[parent].add(child)

    def has_blocks(self, path: str) -> bool:
        return any(_is_block(child) or self.has_blocks(child) for child in self.children[path])


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def _is_block(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _branches(graph: fx.Graph, sources: Mapping[fx.Node, Sources | None]) -> list[_Branch]:
    tree = _Tree(graph, sources)
    everything = tree.sources[""]
    data = frozenset().union(*(sources[node] or () for node in graph.nodes if node.op == "placeholder"))
    found: list[tuple[str, Sources]] = []

    def descend(path: str) -> None:
        for child in sorted(tree.children[path]):
            if _is_block(child) or child not in tree.with_parameters or not tree.sources[child]:
                continue
            if tree.sources[child] != everything and not _splits(tree, child, data):
                found.append((child, tree.sources[child]))
            else:
                descend(child)

    descend("")
    # A table of word embeddings has no blocks and no float source: it stays with what reads it.
    kept = [(path, reached) for path, reached in found if tree.has_blocks(path) or reached & data]
    names = _short_names([path for path, _ in kept])
    return [_Branch(name=names[path], module=path, sources=reached) for path, reached in kept]


def _splits(tree: _Tree, path: str, data: Sources) -> bool:
    """Return True if the children of the module at `path` read disjoint inputs: the module holds several components."""
    children = [c for c in tree.children[path] if c in tree.with_parameters and not _is_block(c)]
    parts = [tree.sources[child] & data for child in children]
    return any(not (a & b) for i, a in enumerate(parts) for b in parts[i + 1 :] if a and b)


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return dotted path -> its shortest tail that is no tail of another path, such as `b.c` for `a.b.c`."""
    names: dict[str, str] = {}
    for path in paths:
        tails = [".".join(path.split(".")[-length:]) for length in range(1, path.count(".") + 2)]
        names[path] = next(t for t in tails if t != _MAIN and sum(p == t or p.endswith("." + t) for p in paths) == 1)
    return names


def _wrappers(branches: Sequence[_Branch]) -> set[str]:
    """Return the paths of all modules that contain a branch (an encoder or projector) but are not part of one."""
    return {prefix for branch in branches for prefix in _prefixes(branch.module)[:-1]}


def _assign_until_pure(
    graph: fx.Graph, sources: Mapping[fx.Node, Sources | None], branches: Sequence[_Branch]
) -> tuple[dict[fx.Node, str], list[_Branch]]:
    """Return (node -> component, kept branches): branches whose parameters are read after modalities merge are dropped."""
    kept = list(branches)
    while True:
        owner = _assign(graph, sources, kept, _wrappers(kept))
        mixed = {
            branch.name
            for branch in kept
            if any(
                _inside(node.meta["module_path"], branch.module) and name == _MAIN and _reads_parameter(node, sources)
                for node, name in owner.items()
            )
        }
        if not mixed:
            return owner, kept
        kept = [branch for branch in kept if branch.name not in mixed]


def _reads_parameter(node: fx.Node, sources: Mapping[fx.Node, Sources | None]) -> bool:
    return any(source.op == "get_attr" and sources[source] is not None for source in node.all_input_nodes)


def _assign(
    graph: fx.Graph, sources: Mapping[fx.Node, Sources | None], branches: Sequence[_Branch], wrappers: set[str]
) -> dict[fx.Node, str]:
    """Return the component of every node that is not shared.

    Nodes of a branch's modules belong to that branch. Nodes of wrappers (the forward of a module that holds branches) belong to
    the component of the values they read. All other nodes belong to the language model.
    """
    owner: dict[fx.Node, str] = {}
    upstream: dict[str, set[str]] = defaultdict(set)
    undecided: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or sources[node] is None:
            continue
        before = {owner[source] for source in node.all_input_nodes if source in owner}
        if node.target is operator.getitem and before:
            (owner[node],) = before  # a tuple never crosses a link
            continue
        named = next((b.name for b in branches if _inside(node.meta["module_path"], b.module)), None)
        if _MAIN in before:
            owner[node] = _MAIN
        elif named is not None:
            owner[node] = named
        elif node.meta["module_path"] not in wrappers:
            owner[node] = _MAIN
        elif not before:
            undecided.append(node)
            continue
        else:
            last = [name for name in before if before - {name} <= upstream[name]]
            owner[node] = last[0] if last and not _merges(node, sources, branches) else _MAIN
        for name in before - {owner[node]}:
            upstream[owner[node]] |= {name} | upstream[name]
    for node in reversed(undecided):  # nothing of a component comes before: it belongs to the first that reads it
        readers = [owner[user] for user in node.users if user in owner]
        earliest = [name for name in readers if not upstream[name] & set(readers)]
        owner[node] = (earliest or [_MAIN])[0]
    return _settle(graph, owner)


def _merges(node: fx.Node, sources: Mapping[fx.Node, Sources | None], branches: Sequence[_Branch]) -> bool:
    reach = sources[node]
    assert reach is not None
    return not any(reach <= branch.sources for branch in branches)


def _settle(graph: fx.Graph, owner: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """Change `owner` (node -> component): all nodes that depend on a node of the language model get the language model."""
    for node in graph.nodes:
        if node in owner and any(owner.get(source) == _MAIN for source in node.all_input_nodes):
            owner[node] = _MAIN
    return owner


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")


def _layers(
    graph: fx.Graph, owner: Mapping[fx.Node, str], wrappers: set[str], reference: Mapping[str, Component]
) -> tuple[Mapping[fx.Node, int], Mapping[str, Sequence[str]]]:
    """Number the layers of each component so that no edge goes from a later layer to an earlier one.

    Returns:
        (node -> index of its layer in the component, component -> names of its layers in order).
    """
    index: dict[fx.Node, int] = {}
    names: dict[str, list[str]] = {name: [layer.name for layer in c.layers] for name, c in reference.items()}
    blocks = _blocks(graph, owner)
    for node in graph.nodes:
        component = owner.get(node)
        if component is None:
            continue
        floor = max((index[source] for source in node.all_input_nodes if owner.get(source) == component), default=0)
        block = blocks[component].get(node) if node.target is not operator.getitem else None
        known = names.setdefault(component, [])
        if component not in reference and (block is not None and block not in known or not known):
            known.append(block or INPUTS)
        index[node] = max(floor, known.index(block)) if block in known else floor
    for component in set(owner.values()):
        _split_tail(graph, owner, component, names[component], index, fixed=component in reference)
    for component in set(owner.values()) - set(reference):
        names[component] = _labels(graph, owner, wrappers, component, names[component], index)
    return index, names


def _blocks(graph: fx.Graph, owner: Mapping[fx.Node, str]) -> dict[str, dict[fx.Node, str]]:
    """Return component -> node -> path of the block it is in: "model.layers.3.mlp" -> "model.layers.3".

    Blocks are numbered modules with modules inside; where a component has none, numbered leaves (`nn.Sequential` of linears).
    """
    composite: dict[str, dict[fx.Node, str]] = defaultdict(dict)
    leaves: dict[str, dict[fx.Node, str]] = defaultdict(dict)
    numbered = {node: _numbered(node.meta["module_path"]) for node in owner}
    has_inside = {path for node, path in numbered.items() if path and path != node.meta["module_path"]}
    for node, path in numbered.items():
        if path is not None:
            (composite if path in has_inside else leaves)[owner[node]][node] = path
    return {component: composite[component] or leaves[component] for component in set(owner.values())}


def _numbered(path: str) -> str | None:
    return next((prefix for prefix in _prefixes(path)[1:] if _is_block(prefix)), None)


def _split_tail(
    graph: fx.Graph,
    owner: Mapping[fx.Node, str],
    component: str,
    names: list[str],
    index: dict[fx.Node, int],
    *,
    fixed: bool,
) -> None:
    """Make the nodes of `component` after its last block (final norm, head, loss) a layer of their own.

    Changes `index` (node -> layer index) and, unless `fixed`, appends to the layer `names`.
    """
    blocks = _blocks(graph, owner)[component]
    has_tail = len(names) > 1 and not _is_block(names[-1])
    if not blocks or fixed and not has_tail:
        return
    last = max(index[node] for node in blocks)
    inside = set(blocks)  # blocks, and what runs before one: a block may run twice
    for node in reversed(graph.nodes):
        if owner.get(node) == component and any(user in inside for user in node.users):
            inside.add(node)
    tail = [n for n in graph.nodes if owner.get(n) == component and index[n] >= last and n not in inside]
    if tail and not fixed:
        names.append(OUTPUTS)
    for node in tail:
        index[node] = len(names) - 1


def _labels(
    graph: fx.Graph,
    owner: Mapping[fx.Node, str],
    wrappers: set[str],
    component: str,
    names: list[str],
    index: Mapping[fx.Node, int],
) -> list[str]:
    """Return the layer names of a component, with "inputs" and "outputs" replaced by the path of a module of that layer."""
    labels = list(names)
    for position, name in enumerate(names):
        if name in (INPUTS, OUTPUTS):
            paths = [n.meta["module_path"] for n in graph.nodes if owner.get(n) == component and index[n] == position]
            labels[position] = next((path for path in paths if path not in wrappers and path not in labels), name)
    return labels


def _components(
    graph: fx.Graph,
    branches: Iterable[_Branch],
    sources: Mapping[fx.Node, Sources | None],
    owner: Mapping[fx.Node, str],
    index: Mapping[fx.Node, int],
    names: Mapping[str, Sequence[str]],
) -> list[Component]:
    parameters: dict[tuple[str, int], set[str]] = defaultdict(set)
    reached: dict[str, Sources] = defaultdict(frozenset)
    for node, name in owner.items():
        reached[name] |= sources[node] or frozenset()
        for source in node.all_input_nodes:
            if source.op == "get_attr" and sources[source] is not None:
                parameters[name, index[node]].add(str(source.target))
    order = list(dict.fromkeys(owner[node] for node in graph.nodes if node in owner))
    module_of = {branch.name: branch.module for branch in branches}
    behind = {owner[n] for n in owner for source in n.all_input_nodes if source in owner and owner[source] != owner[n]}
    kinds = {name: ComponentKind.PROJECTOR if name in behind else ComponentKind.ENCODER for name in order}
    kinds[_MAIN] = ComponentKind.LANGUAGE_MODEL
    return [
        Component(
            name=name,
            kind=kinds[name],
            sources=tuple(sorted(reached[name])),
            modules=(module_of[name],) if name in module_of else (),
            layers=tuple(
                Layer(index=i, name=layer, parameters=tuple(sorted(parameters[name, i])))
                for i, layer in enumerate(names[name])
            ),
        )
        for name in sorted(order, key=lambda name: (name == _MAIN, order.index(name)))
    ]


def _edges(graph: fx.Graph) -> _Edges:
    tensors: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for source in node.all_input_nodes:
            if source.op == "call_function" and not info(source).shared and not info(node).shared:
                pair = (component_of(source), component_of(node))
                if pair[0] != pair[1] and source.name not in tensors[pair]:
                    tensors[pair].append(source.name)
    return tuple((source, target, tuple(names)) for (source, target), names in tensors.items())
