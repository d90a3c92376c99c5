"""The pass context-parallel: ranks with their own tokens together compute what one rank computes with all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.graphs.bitfield_graph import WORDS, causal_words, widened, with_words
from support.graphs.shard_jobs import job_of
from support.graphs.split import root_values
from support.models.tiny_language import TinyLanguage, tiny_batch
from support.oracles.token_policies import BlockPolicy, token_blocks
from support.processes.shard_ranks import Job, Ran, ran_by
from torch import fx
from zoo import ALL

from mmcompile.codegen.token_shards import local_tokens, shard_inputs, shard_values
from mmcompile.errors import BatchError, ConfigError, PlanError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import LossInfo, ModelGraph
from mmcompile.ir.inputs import completed
from mmcompile.passes.capture_pipeline import run_on_capture
from mmcompile.passes.context_parallel.context_parallel import ContextParallel
from mmcompile.passes.masks.bitfield_attention import BitfieldAttention
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.text import graph_text
from mmcompile.passes.values import op_name

RANKS, BLOCK, IMAGE = 2, 16, 990
STAGES = {"language_model": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, how it is captured and what runs."""

    name: str
    symbolic: bool = False
    """Captured with varying sizes; a batch with longer rows runs."""
    more_samples: bool = False
    """And more of them."""
    padding: int = 0
    """Tokens of padding in the last row."""
    own_mask: bool = False
    """Words come from the model's own masks, through the pass bitfield-attention, and one rank runs the model as captured;
    otherwise both attend under words of the test."""
    documents: int = 1
    islands: bool = False
    windows: Mapping[int, int] = field(default_factory=dict)
    frozen: str = ""
    """Parameters whose name starts so do not train."""
    policy: BlockPolicy = BlockPolicy.ZIGZAG


CASES = {
    "llava": Case(name="llava", padding=5, documents=2),
    "llava, language model frozen": Case(name="llava", frozen="model.language_model", policy=BlockPolicy.STRIPE),
    "qwen2_5_vl, longer than captured": Case(name="qwen2_5_vl", symbolic=True),
    "gemma3, windows and islands": Case(name="gemma3", own_mask=True, policy=BlockPolicy.RANDOM),
    "paligemma, made-up islands": Case(name="paligemma", islands=True, windows={1: 8, 2: 8}),
    "mllama, cross-attention": Case(name="mllama", symbolic=True, more_samples=True, policy=BlockPolicy.CONTIGUOUS),
    "llama4, experts and two kinds of words": Case(name="llama4", own_mask=True),
    "logits without the last token": Case(name="two_encoder_net", symbolic=True, more_samples=True),
}


@pytest.fixture(scope="module")
def ran() -> dict[str, Ran]:
    """Every case, in one set of processes."""
    return ran_by({name: _jobs(case) for name, case in CASES.items()}, RANKS)


def _jobs(case: Case) -> tuple[Job, Job]:
    """The case on several ranks, and on one."""
    family = ALL[case.name]
    model = family.build(torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (case.frozen and name.startswith(case.frozen)))
    samples = family.first.samples + case.more_samples
    longer = replace(family.first, samples=samples, length=family.first.length + 11)
    first, second = family.batch(torch.float64), family.draw(longer, seed=2, dtype=torch.float64)
    if case.padding:
        first = family.padded_batch("right", case.padding, torch.float64)
    found = capture(model, first, dynamic=second if case.symbolic else None)
    batch = completed(model, second if case.symbolic else first)
    whole, under, roots = _under_words(case, found, batch)
    words = {name: value for name, value in roots.items() if name.startswith(WORDS)}
    tokens = words[WORDS].shape[1]
    blocks = token_blocks([1] * -(-tokens // BLOCK), tokens=tokens, ranks=RANKS, block=BLOCK, policy=case.policy)
    pass_ = ContextParallel(component="language_model", num_ranks=RANKS, local_tokens=blocks.local_tokens)
    spread = replace(under, graph=Pipeline(passes=(pass_,)).run(under.graph).graph)
    inputs = {str(n.target): n.meta["words"] for n in spread.graph.module.graph.nodes if _is_own_words(n)}
    own = shard_values(words, blocks.order, inputs)
    return (
        job_of(spread, model, roots, own=own, stages=STAGES),
        job_of(whole, model, roots, stages=STAGES),
    )


def _under_words(case: Case, found: Capture, batch: Mapping[str, Any]) -> tuple[Capture, Capture, dict[str, Any]]:
    """What one rank runs, the same under words, and all inputs."""
    if case.own_mask:
        whole = replace(found, graph=widened(found.graph))
        under = run_on_capture(whole, (BitfieldAttention(),)).capture
        return whole, under, root_values(under, batch)
    words = causal_words(batch, documents=case.documents, image=IMAGE if case.islands else None)
    under = replace(found, graph=with_words(found.graph, case.windows))
    return under, under, {**root_values(found, batch), WORDS: words}


def _is_own_words(node: fx.Node) -> bool:
    return node.op == "placeholder" and "words" in node.meta and "shard" in node.meta


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_compute_the_loss_and_gradients_of_one(ran: dict[str, Ran], name: str) -> None:
    ran[name].assert_equal()


def _tiny(batch: dict[str, Any] | None = None) -> Capture:
    torch.manual_seed(0)
    return capture(TinyLanguage(lambda _, x: x.relu(), num_blocks=2), batch or tiny_batch())


def _spread(graph: ModelGraph, **options: Any) -> ModelGraph:
    return ContextParallel(**{"component": "language_model", "num_ranks": RANKS, "local_tokens": 32, **options}).run(
        graph
    )


def test_the_rewritten_graph_reads_well(golden: Callable[[str, str], None]) -> None:
    golden("context_parallel.txt", graph_text(_spread(with_words(_tiny().graph), head_stride=1)))


def test_the_graph_given_is_left_as_it_was() -> None:
    graph = with_words(_tiny().graph)
    before = graph_text(graph)
    assert graph_text(_spread(graph)) == graph_text(_spread(graph))
    assert graph_text(graph) == before


def test_new_inputs_say_what_they_are() -> None:
    graph = _spread(with_words(_tiny().graph))
    new = {n.target: n for n in graph.module.graph.nodes if n.op == "placeholder" and str(n.target).startswith("cp_")}
    assert [spec.name for spec in graph.inputs[-5:]] == list(new)
    assert {spec.name: (spec.shape, spec.dtype) for spec in graph.inputs[-5:]} == {
        "cp_index": (("local_tokens",), "int64"),
        "cp_positions": ((2, "local_tokens"), "int32"),
        "cp_kv_positions": ((2, "2*local_tokens"), "int32"),
        "cp_words": ((2, "local_tokens"), "int64"),
        "cp_kv_words": ((2, "2*local_tokens"), "int64"),
    }
    assert [name for name, node in new.items() if node.meta.get("shard")] == ["cp_index", "cp_positions", "cp_words"]
    assert all(node.meta["from_integers"] and node.meta["roots"] == {"input_ids"} for node in new.values())


def test_stages_send_a_ranks_rows() -> None:
    """Links between stages of the language model carry 32 rows, not the sequence of 40."""
    found = _tiny()
    found = replace(found, graph=_spread(with_words(found.graph)))
    job = job_of(
        found, TinyLanguage(lambda _, x: x.relu(), num_blocks=2), {}, own=({}, {}), stages={"language_model": 2}
    )
    (first, second) = (job.programs.programs[f"language_model.{index}@1"] for index in range(2))
    assert [(port.shape, port.peers) for port in second.inputs if port.kind == "link"] == [
        ((2, "local_tokens", 8), ("language_model.0@1",))
    ]
    assert "cp_index@1" in {port.name for port in first.inputs}


def test_one_rotary_table_is_spread_once_for_all_layers() -> None:
    family = ALL["llava"]
    graph = _spread(with_words(capture(family.build(), family.batch()).graph))
    spread = [node for node in graph.module.graph.nodes if op_name(node) == "mmcompile.shard_tokens"]
    assert len(spread) == 4  # embeddings, cosines, sines, labels


def test_words_of_ranks() -> None:
    words = torch.arange(10, 16).view(1, 6)
    index = torch.tensor([[0, 3, 4], [1, 2, 5]])
    first, second = shard_values({"attention_words": words}, index, {"cp_words": "attention_words"})
    assert first["cp_words"].tolist() == [[10, 13, 14]]
    assert second["cp_words"].tolist() == [[11, 12, 15]]
    assert second["cp_positions"].tolist() == [[1, 2, 5]]
    assert first["cp_kv_words"].tolist() == [[10, 13, 14, 11, 12, 15]]
    assert first["cp_kv_positions"].tolist() == [[0, 3, 4, 1, 2, 5]]
    assert first["cp_kv_words"] is second["cp_kv_words"]


def test_free_rows_have_word_0() -> None:
    index = torch.tensor([[0, 1, -1], [2, -1, -1]])
    words = torch.tensor([[7, 8, 9]])
    first, second = shard_values({"attention_words": words}, index, {"cp_words": "attention_words"})
    assert first["cp_words"].tolist() == [[7, 8, 0]]
    assert second["cp_words"].tolist() == [[9, 0, 0]]


@pytest.mark.parametrize("index", [[[0, 1], [2, 2]], [[0, 1], [-1, -1]], [[0, 1], [2, 3]]])
def test_tokens_that_are_lost_or_doubled_are_refused(index: list[list[int]]) -> None:
    with pytest.raises(BatchError, match="ranks must hold each of the 3 tokens of attention_words exactly once"):
        shard_values({"attention_words": torch.ones(1, 3, dtype=torch.int64)}, torch.tensor(index), {})


@pytest.mark.parametrize("tokens", [3, 40, 700])
def test_inputs_by_port_name(tokens: int) -> None:
    words = causal_words({"input_ids": torch.zeros(2, tokens, dtype=torch.int64)}, documents=2)
    values = shard_inputs({WORDS: words}, {"cp_words": WORDS}, 2)
    rows = local_tokens(tokens, 2)
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    assert shapes == {
        **{f"cp_index@{rank}": (rows,) for rank in range(2)},
        **{f"cp_{name}@{rank}": (2, rows) for name in ("words", "positions") for rank in range(2)},
        **{f"cp_kv_{name}": (2, 2 * rows) for name in ("words", "positions")},
    }


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_ranks": 1}, "context parallelism over 1 ranks has no effect; give 2 or more, or leave it out"),
        ({"local_tokens": 0}, "local_tokens must be at least 1, got 0"),
        ({"component": "vision"}, "no component 'vision' to spread over ranks; components are language_model"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        _spread(with_words(_tiny().graph), **options)


def test_only_the_component_of_the_loss_is_spread() -> None:
    family = ALL["two_encoder_net"]
    graph = capture(family.build(), family.batch()).graph
    other = graph.components[0].name
    with pytest.raises(
        ConfigError, match=f"only the component that ends in the loss, 'language_model', .* got '{other}'"
    ):
        _spread(with_words(graph), component=other)


def test_a_loss_that_is_not_per_token_is_refused() -> None:
    graph = with_words(_tiny().graph)
    with pytest.raises(PlanError, match="needs a loss that is a sum over tokens.*: weighted; plan this model without"):
        _spread(replace(graph, loss=LossInfo(per_token=False, reason="weighted")))


def test_attention_without_words_is_refused() -> None:
    with pytest.raises(PlanError, match="finds no bitfield attention in the layers of language_model: .* run the pass"):
        _spread(_tiny().graph)


def test_attention_to_other_keys_is_refused() -> None:
    graph = with_words(_tiny().graph)
    calls = [node for node in graph.module.graph.nodes if op_name(node) == "mmcompile.bitfield_attention"]
    calls[1].update_arg(5, calls[1].args[4])
    with pytest.raises(PlanError, match=r"needs attention to the queries' own tokens, .* in layers\.1 has words"):
        _spread(graph)
