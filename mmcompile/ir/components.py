"""Find the components and layers of a captured graph from its structure, independently of the model's code.

A value's *sources* are the data inputs its floats come from: float inputs, and integer inputs looked up in a trained
table. A *branch* (encoder or projector) is a module whose values come from fewer sources than those of the last parameters do.
A branch may be inside another one: the image encoder of a text encoder. A branch without blocks joins the branch that alone reads
it, and a lone norm the one in front of it. All else, with everything behind the merge of branches, is the language model.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx, nn

from mmcompile.ir.compat import is_mutating_op, is_random_op
from mmcompile.ir.functional import changed_buffers
from mmcompile.ir.graph import META_KEY, Component, ComponentKind, Layer, NodeInfo, component_of, info
from mmcompile.ir.host_shapes import attribute

_MAIN = "language_model"
INPUTS, OUTPUTS = "inputs", "outputs"
Sources = frozenset[str]
_Edges = tuple[tuple[str, str, tuple[str, ...]], ...]
"""(producer, consumer, names of the tensors that flow) of each edge between components."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Branch:
    """Module of an encoder or projector; several branches of one name are one component."""

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
    tree = _Tree(module.graph, sources)
    if reference is None:
        branches = _joined(module, tree, _candidates(tree))
    else:
        branches = [
            _Branch(name=c.name, module=path, sources=frozenset(c.sources)) for c in reference for path in c.modules
        ]
    owner, branches = _assign_until_pure(module.graph, tree, branches)
    _copy_what_inputs_alone_decide(module, sources, owner)
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
            # A counter is changed once, by the stage that has the module.
            if not floats and not is_random_op(node.target) and not is_mutating_op(node.target):
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

    def __init__(self, graph: fx.Graph, values: Mapping[fx.Node, Sources | None]) -> None:
        self.values = values
        """Node -> its sources, as `_sources` returns them."""
        self.sources: dict[str, Sources] = defaultdict(frozenset)
        self.children: dict[str, set[str]] = defaultdict(set)
        self.read: dict[str, set[Sources]] = defaultdict(set)
        """Path of a module that reads parameters -> the sources of each node of the module that reads one."""
        self.numbered: set[str] = set()
        """Paths of modules with numbered modules inside that read parameters other than tables of embeddings."""
        self.stacked: set[str] = set()
        """Paths in `numbered` whose numbered modules have modules inside, as the layers of a transformer do."""
        for node in graph.nodes:
            found = values.get(node)
            if node.op != "call_function" or found is None:
                continue
            prefixes = _prefixes(node.meta["module_path"])
            for prefix in prefixes:
                self.sources[prefix] |= found
            for parent, child in pairwise(prefixes):
                self.children[parent].add(child)
            if _reads_parameter(node, values):
                blocks = [place for place, prefix in enumerate(prefixes) if _is_block(prefix)]
                stacks = [place for place in blocks if place < len(prefixes) - 1]
                table = node.target is torch.ops.aten.embedding.default
                for place, prefix in enumerate(prefixes):
                    self.read[prefix].add(found)
                    if not table and blocks and place < blocks[-1]:
                        self.numbered.add(prefix)
                    if not table and stacks and place < stacks[-1]:
                        self.stacked.add(prefix)
        self.everything = frozenset[str]().union(*self.read[""])
        """Sources of all nodes that read parameters; an input that the loss alone reads is not among them."""

    def owner(self, path: str) -> str:
        """Return the innermost module that reads parameters, among the module at `path` and those it is in."""
        return next((prefix for prefix in reversed(_prefixes(path)) if prefix in self.read), "")

    def towers(self, path: str) -> bool:
        """Return True if the module at `path` has a module of blocks inside that reads fewer inputs, and something beside it.

        That is a parameter read with other inputs alone, such as a table of word embeddings beside an image encoder.
        """
        return any(
            inner in self.numbered and not all(reached & self.sources[inner] for reached in self.read[path] if reached)
            for inner in self._inside(path)
        )

    def merges(self, path: str) -> bool:
        """Return True if a block inside the module at `path` reads parameters with all inputs of the module."""
        return any(
            self.sources[path] in self.read[child]
            for inner in (path, *self._inside(path))
            for child in self.children[inner]
            if _is_block(child)
        )

    def _inside(self, path: str) -> Iterator[str]:
        for child in sorted(self.children[path]):
            if not _is_block(child):
                yield child
                yield from self._inside(child)


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def _is_block(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _candidates(tree: _Tree) -> list[_Branch]:
    """Return every module that may be a branch, or a part of one: its values come from fewer sources than those around it."""
    found: list[str] = []

    def descend(path: str, outer: Sources) -> None:
        for child in sorted(tree.children[path]):
            own = tree.sources[child]
            if _is_block(child) or child not in tree.read or not own:
                continue
            holds_towers = own != outer and tree.towers(child)
            if own == outer or holds_towers and not tree.merges(child):
                descend(child, outer)
                continue
            found.append(child)
            if holds_towers:
                descend(child, own)

    descend("", tree.everything)
    names = _short_names(found)
    return [_Branch(name=names[path], module=path, sources=tree.sources[path]) for path in found]


def _joined(module: fx.GraphModule, tree: _Tree, candidates: Sequence[_Branch]) -> list[_Branch]:
    """Return the branches that are left of `candidates` after those without blocks have joined their neighbours.

    One without blocks, or with plain numbered layers, joins the branch that alone reads it (unless that has other inputs too), or
    the only one that it reads if that has no blocks either. One with vectors alone (a norm) joins the branch it reads, if that
    is one, else the language model, which also gets tables of word embeddings that no single branch reads.
    """
    owner, kept = _assign_until_pure(module.graph, tree, candidates)
    readers: dict[str, set[str]] = defaultdict(set)
    read: dict[str, set[str]] = defaultdict(set)
    matrices: set[str] = set()
    tables: set[str] = set()
    data = frozenset[str]().union(*(tree.values[node] or () for node in module.graph.nodes if node.op == "placeholder"))
    for node, name in owner.items():
        for source in node.all_input_nodes:
            before = owner.get(source, name)
            if before != name:
                readers[before].add(name)
                read[name].add(before)
            parameter = source.op == "get_attr" and tree.values[source] is not None
            if parameter and attribute(module, str(source.target)).dim() > 1:
                matrices.add(name)
                reached = tree.values[node] or frozenset()
                if node.target is torch.ops.aten.embedding.default and reached and not reached & data:
                    tables.add(name)
    into, known = {branch.name: branch.name for branch in kept}, {branch.name: branch for branch in kept}
    for branch in reversed(_in_order(owner, kept)):
        name, after = branch.name, {into.get(reader, _MAIN) for reader in readers[branch.name]}
        if branch.module in tree.stacked:
            continue
        reader = known.get(after.pop()) if len(after) == 1 else None
        whole = reader is None or reader.module not in tree.stacked or reader.sources <= branch.sources
        if reader is not None and (whole or not read[name]) and (reader.name != name or name not in tables):
            into[name] = reader.name
        elif len(read[name]) == 1 and known[next(iter(read[name]))].module not in tree.stacked:
            into[name] = next(iter(read[name]))
        elif name not in matrices:
            into[name] = next(iter(read[name])) if len(read[name]) == 1 else _MAIN
        elif branch.module not in tree.numbered and not (
            branch.sources & data if not read[name] else name not in tables
        ):
            into[name] = _MAIN
    for name in into:
        while into.get(into[name], _MAIN) != into[name]:  # a norm joined a branch that joined another
            into[name] = into.get(into[name], _MAIN)
    leads = {branch.name: branch.module for branch in kept if into[branch.name] == branch.name}
    names = _short_names(list(leads.values()))
    return [replace(branch, name=names[leads[into[branch.name]]]) for branch in kept if into[branch.name] in leads]


def _in_order(owner: Mapping[fx.Node, str], branches: Sequence[_Branch]) -> list[_Branch]:
    """Return the branches in the order of their last nodes in the graph: each before all that read it."""
    last = {owner[node]: place for place, node in enumerate(sorted(owner))}
    return sorted((branch for branch in branches if branch.name in last), key=lambda branch: last[branch.name])


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return dotted path -> its shortest tail that is no tail of another path, such as `b.c` for `a.b.c`."""
    names: dict[str, str] = {}
    for path in paths:
        tails = [".".join(path.split(".")[-length:]) for length in range(1, path.count(".") + 2)]
        names[path] = next(t for t in tails if t != _MAIN and sum(p == t or p.endswith("." + t) for p in paths) == 1)
    return names


def _wrappers(branches: Sequence[_Branch]) -> set[str]:
    """Return the paths of all modules that contain a branch (an encoder or projector) and are not that branch."""
    return {prefix for branch in branches for prefix in _prefixes(branch.module)[:-1]}


def _enclosing(path: str, branches: Sequence[_Branch]) -> list[str]:
    """Return the names of the components around a module, outermost first: the language model, then branches it is inside."""
    around = [branch for branch in branches if _inside(path, branch.module)]
    return [_MAIN, *(branch.name for branch in sorted(around, key=lambda branch: len(branch.module)))]


def _assign_until_pure(
    graph: fx.Graph, tree: _Tree, branches: Sequence[_Branch]
) -> tuple[dict[fx.Node, str], list[_Branch]]:
    """Return (node -> component, kept branches): branches whose parameters are read after modalities merge are dropped."""
    kept = list(branches)
    while True:
        owner = _assign(graph, tree, kept)
        mixed: set[str] = set()
        for node, name in owner.items():
            *outer, own = _enclosing(node.meta["module_path"], kept)
            if name in outer and name != own and _reads_parameter(node, tree.values):
                mixed.add(own)
        if not mixed:
            return owner, kept
        kept = [branch for branch in kept if branch.name not in mixed]


def _reads_parameter(node: fx.Node, sources: Mapping[fx.Node, Sources | None]) -> bool:
    return any(source.op == "get_attr" and sources[source] is not None for source in node.all_input_nodes)


def _assign(graph: fx.Graph, tree: _Tree, branches: Sequence[_Branch]) -> dict[fx.Node, str]:
    """Return the component of every node that is not shared.

    Nodes of a branch's modules belong to that branch, unless they read a component around it. Nodes of wrappers (the forward of
    a module that holds branches), and of modules without parameters in them, belong to the component of the values they read,
    but terms of the loss to the language model.
    All other nodes belong to the language model.
    """
    owner: dict[fx.Node, str] = {}
    upstream: dict[str, set[str]] = defaultdict(set)
    undecided: list[tuple[fx.Node, str]] = []
    wrappers = _wrappers(branches)
    enclosing = functools.cache(lambda path: _enclosing(path, branches))
    for node in graph.nodes:
        if node.op != "call_function" or tree.values[node] is None:
            continue
        before = {owner[source] for source in node.all_input_nodes if source in owner}
        if node.target is operator.getitem and before:
            (owner[node],) = before  # a tuple never crosses a link
            continue
        path = tree.owner(node.meta["module_path"])
        around = enclosing(path)
        read = next((name for name in around if name in before), None)
        if read is not None or path not in wrappers:
            owner[node] = read or around[-1]
        elif not before:
            undecided.append((node, around[-1]))
            continue
        else:
            last = [name for name in before if before - {name} <= upstream[name]]
            scalar = not getattr(node.meta["val"], "shape", True)  # a term of the loss, which has no rows to send
            apart = last and not scalar and not _merges(node, tree, branches)
            owner[node] = last[0] if apart else around[-1]
        for name in before - {owner[node]}:
            upstream[owner[node]] |= {name} | upstream[name]
    for node, otherwise in reversed(
        undecided
    ):  # nothing of a component comes before: it belongs to the first that reads it
        readers = [owner[user] for user in node.users if user in owner]
        earliest = [name for name in readers if not upstream[name] & set(readers)]
        owner[node] = (earliest or [otherwise])[0]
    return _settle(graph, owner)


def _merges(node: fx.Node, tree: _Tree, branches: Sequence[_Branch]) -> bool:
    return not any((tree.values[node] or frozenset()) <= branch.sources for branch in branches)


def _settle(graph: fx.Graph, owner: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """Change `owner` (node -> component): all nodes that depend on a node of the language model get the language model."""
    for node in graph.nodes:
        if node in owner and any(owner.get(source) == _MAIN for source in node.all_input_nodes):
            owner[node] = _MAIN
    return owner


def _copy_what_inputs_alone_decide(
    module: fx.GraphModule, sources: dict[fx.Node, Sources | None], owner: dict[fx.Node, str]
) -> None:
    """Copy what one encoder computes for another from inputs of the model alone (a cast, a slice): neither waits for the other.

    Changes the graph, `sources` and `owner` (node -> component). Where one reads other values of the other, nothing is copied,
    and never what draws random numbers or changes a buffer.
    """
    alone, count = set[fx.Node](), len(owner)
    for node in sorted(owner):
        repeatable = not is_random_op(node.target) and not changed_buffers([node])
        before = node.all_input_nodes
        if repeatable and all(s.op == "placeholder" or s in alone or sources[s] is None for s in before):
            alone.add(node)
    links = [(source, user) for source in owner for user in source.users if owner.get(user, _MAIN) != owner[source]]
    needed = {(owner[source], owner.get(user, _MAIN)) for source, user in links if source not in alone}
    for node in sorted(alone, reverse=True):
        readers = {owner.get(user, _MAIN) for user in node.users} - {owner[node], _MAIN}
        for name in sorted(reader for reader in readers if (owner[node], reader) not in needed):
            with module.graph.inserting_after(node):
                copy = module.graph.node_copy(node)
            owner[copy], sources[copy] = name, sources[node]
            for user in [user for user in node.users if owner.get(user) == name]:
                user.replace_input_with(node, copy)
    if len(owner) > count:
        module.recompile()


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
    modules: dict[str, list[str]] = defaultdict(list)
    for branch in branches:
        modules[branch.name].append(branch.module)
    behind = {owner[n] for n in owner for source in n.all_input_nodes if source in owner and owner[source] != owner[n]}
    kinds = {name: ComponentKind.PROJECTOR if name in behind else ComponentKind.ENCODER for name in order}
    kinds[_MAIN] = ComponentKind.LANGUAGE_MODEL
    return [
        Component(
            name=name,
            kind=kinds[name],
            sources=tuple(sorted(reached[name])),
            modules=tuple(modules[name]),
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
