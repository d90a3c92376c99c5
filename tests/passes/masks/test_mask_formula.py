"""Masks as plain modules spell them: what words can say stays the same, what they cannot is left with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.oracles.eager import difference, graph_outcome
from torch import Tensor, nn

from mmcompile.ir.capture import Capture, capture
from mmcompile.kernels.bitfield_attention.masks.words import PADDING, visible
from mmcompile.passes.capture_pipeline import run_on_capture
from mmcompile.passes.masks.bitfield_attention import BitfieldAttention
from mmcompile.passes.values import op_name

SAMPLES, TOKENS, HEADS, KEY_HEADS, DIM = 2, 12, 4, 2, 8
MIN = torch.finfo(torch.float64).min
Mask = Callable[[Tensor, Tensor], Tensor | None]
"""(valid [B, T] int, ids [B, T] int) -> a mask that broadcasts to [B, H, T, T]."""
Options = Mapping[str, Any]


class Little(nn.Module):
    """Embedding, one attention, head."""

    def __init__(self, mask: Mask, repeat: str = "gqa", **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, HEADS * DIM)
        self.query = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.key = nn.Linear(HEADS * DIM, KEY_HEADS * DIM)
        self.value = nn.Linear(HEADS * DIM, KEY_HEADS * DIM)
        self.head = nn.Linear(HEADS * DIM, 20)
        self.bias = nn.Parameter(torch.zeros(TOKENS, TOKENS))
        self.mask, self.repeat, self.options = mask, repeat, options

    def forward(self, input_ids: Tensor, attention_mask: Tensor, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, DIM)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        options = dict(self.options)
        match self.repeat:
            case "gqa":
                options["enable_gqa"] = True
            case "expand":
                shape = (SAMPLES, KEY_HEADS, HEADS // KEY_HEADS, TOKENS, DIM)
                key, value = (x[:, :, None].expand(shape).reshape(SAMPLES, HEADS, TOKENS, DIM) for x in (key, value))
            case "interleave":
                key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
            case "read twice":
                key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
                hidden = hidden + key.sum(1).repeat(1, 1, HEADS)
        mask = self.bias[None, None] if self.mask is learned else self.mask(attention_mask, ids)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, **options)
        hidden = hidden + mixed.transpose(1, 2).flatten(2)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def batch() -> dict[str, Tensor]:
    """Two rows, the second with three tokens of padding; ids of segments, -1 for none."""
    torch.manual_seed(3)
    tokens = torch.randint(1, 20, (SAMPLES, TOKENS))
    valid = torch.ones_like(tokens)
    valid[1, 9:] = 0
    ids = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 1, -1, -1, 2, 2], [0, 0, 0, 0, -1, -1, 1, 1, 1, -1, -1, -1]])
    return {"input_ids": tokens, "attention_mask": valid, "ids": ids, "labels": tokens.masked_fill(valid == 0, -100)}


def places() -> tuple[Tensor, Tensor]:
    """Query places as a column, key places as a row."""
    place = torch.arange(TOKENS)
    return place[:, None], place[None, :]


def keys(x: Tensor) -> Tensor:
    return x[:, None, None, :]


def queries(x: Tensor) -> Tensor:
    return x[:, None, :, None]


def causal() -> Tensor:
    query, key = places()
    return key <= query


def in_documents(positions: Tensor) -> Tensor:
    """Pairs of one document; the next one begins wherever positions do not grow by one."""
    number = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return queries(number) == keys(number)


def learned(valid: Tensor, ids: Tensor) -> None:
    """Stands for the model's own trained bias."""


def additive(valid: Tensor, ids: Tensor) -> Tensor:
    ahead = torch.full((TOKENS, TOKENS), MIN, dtype=torch.float64).triu(1)[None, None]
    padding = 1.0 - keys(valid).to(torch.float64)
    return ahead + padding.masked_fill(padding.to(torch.bool), MIN)


SPELLINGS: dict[str, tuple[Mask, tuple[Any, ...]]] = {
    # name: mask, (reads valid, reads documents, reads islands, causal, window of the call)
    "tril": (lambda v, i: torch.ones(TOKENS, TOKENS).tril().bool(), (False, False, False, True, None)),
    "not triu": (lambda v, i: ~torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), (False, False, False, True, None)),
    "tril == 1": (lambda v, i: torch.ones(1, 1, TOKENS, TOKENS).tril() == 1, (False, False, False, True, None)),
    "offset": (lambda v, i: places()[1] < places()[0] + 1, (False, False, False, True, None)),
    "difference": (lambda v, i: places()[1] - places()[0] < 1, (False, False, False, True, None)),
    "-inf": (lambda v, i: torch.full((TOKENS, TOKENS), -torch.inf).triu(1).double(), (False, False, False, True, None)),
    "where": (
        lambda v, i: torch.where(causal() & keys(v != 0), 0.0, -torch.inf).double(),
        (True, False, False, True, None),
    ),
    "two biases": (additive, (True, False, False, True, None)),
    "padding": (lambda v, i: causal()[None, None] & keys(v > 0), (True, False, False, True, None)),
    "padding of both": (
        lambda v, i: causal()[None, None] & keys(v.bool()) & queries(v.bool()),
        (True, False, False, True, None),
    ),
    "window": (
        lambda v, i: causal()[None, None] & (places()[1] > places()[0] - 4) & keys(v.bool()),
        (True, False, False, True, 4),
    ),
    "band": (
        lambda v, i: (torch.ones(TOKENS, TOKENS).tril() * torch.ones(TOKENS, TOKENS).triu(-3)).bool(),
        (False, False, False, True, 4),
    ),
    "documents": (
        lambda v, i: causal()[None, None] & (queries(i) == keys(i)) & keys(v.bool()),
        (True, True, False, True, None),
    ),
    "real documents": (
        lambda v, i: (queries(i) == keys(i)) & queries(i != -1) & keys(v.bool()),
        (True, True, False, False, None),
    ),
    "positions": (
        lambda v, i: (keys(i) <= queries(i)) & in_documents(i) & keys(v.bool()),
        (True, True, False, True, None),
    ),
    "positions in windows": (
        lambda v, i: (keys(i) <= queries(i)) & (keys(i) > queries(i) - 2) & in_documents(i) & keys(v.bool()),
        (True, True, False, True, 2),
    ),
    "chunks": (
        lambda v, i: causal() & (places()[0] // 4 == places()[1] // 4) & keys(v.bool()),
        (True, True, False, True, None),
    ),
    "islands": (
        lambda v, i: (causal() | (queries(i) == keys(i)) & (queries(i) >= 0)) & keys(v.bool()),
        (True, False, True, True, None),
    ),
    "marked islands": (
        lambda v, i: (causal() | (queries(i + 1) == keys(i + 1)) & (keys(i + 1) != 0)) & keys(v.bool()),
        (True, False, True, True, None),
    ),
    "any equal ids": (
        lambda v, i: (causal() | (queries(i) == keys(i))) & keys(v.bool()),
        (True, False, True, True, None),
    ),
    "one island": (
        lambda v, i: (causal() | queries(i == 0) & keys(i == 0)) & keys(v.bool()),
        (True, False, True, True, None),
    ),
    "islands in windows": (
        lambda v, i: (
            (causal() | (queries(i) == keys(i)) & (keys(i) >= 0)) & (places()[0] - places()[1] < 5) & keys(v.bool())
        ),
        (True, False, True, True, 5),
    ),
    "late keys": (lambda v, i: causal() & ~(places()[1] < 2), (True, False, False, True, None)),
    "early keys": (
        lambda v, i: causal() & (places()[1] <= 8) & (places()[0] <= 8),
        (True, False, False, True, None),
    ),
    "padding alone": (lambda v, i: keys(v.bool()).expand(-1, 1, TOKENS, -1), (True, False, False, False, None)),
    "nothing": (lambda v, i: None, (False, False, False, False, None)),
}


def rewritten(found: Capture) -> Capture:
    return run_on_capture(found, (BitfieldAttention(impl="eager"),)).capture


def call_of(found: Capture) -> Any:
    (call,) = [n for n in found.graph.module.graph.nodes if n.op == "call_function" and "attention" in op_name(n)]
    return call


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_masks_that_words_can_say(name: str) -> None:
    mask, (reads_valid, reads_documents, reads_islands, is_causal, window) = SPELLINGS[name]
    model, values = Little(mask).double(), batch()
    found = capture(model, values)
    passed = BitfieldAttention(impl="eager").run(found.graph)
    (words,) = [node for node in passed.module.graph.nodes if "attention_words" in str(node.target)]
    valid, documents, islands, words_causal, island_window, *sizes = words.args
    assert (valid is not None, documents is not None, islands is not None) == (
        reads_valid,
        reads_documents,
        reads_islands,
    )
    assert (words_causal, sizes) == (is_causal, [SAMPLES, TOKENS])
    assert island_window == (5 if name == "islands in windows" else None)
    made = rewritten(found)
    assert call_of(made).args[8] == window

    got = made.host.run(values).values["attention_words"]
    place = torch.arange(TOKENS).expand_as(got)
    dense = mask(values["attention_mask"], values["ids"])
    dense = torch.ones(TOKENS, TOKENS, dtype=torch.bool) if dense is None else dense
    dense = (dense if dense.dtype == torch.bool else dense == 0).broadcast_to(SAMPLES, 1, TOKENS, TOKENS)[:, 0]
    real = got != PADDING
    assert torch.equal(real, dense.any(1)), "words are of the keys that any query sees"
    assert torch.equal(visible(got, place, got, place, window)[real], dense[real])
    agreement = difference(graph_outcome(model, made, values), graph_outcome(model, found, values))
    assert agreement.within(1e-11), agreement


def test_is_causal() -> None:
    model = Little(lambda v, i: None, is_causal=True, scale=0.7).double()
    found = capture(model, batch())
    made = rewritten(found)
    assert call_of(made).args[7] == 0.7
    assert difference(graph_outcome(model, made, batch()), graph_outcome(model, found, batch())).within(1e-11)


@pytest.mark.parametrize(("repeat", "heads"), [("gqa", 2), ("expand", 2), ("interleave", 2), ("read twice", 4)])
def test_repeated_heads_are_read_before_they_are_repeated(repeat: str, heads: int) -> None:
    """Unless something else reads the repeated ones, which are then in memory anyway."""
    model = Little(lambda v, i: causal(), repeat).double()
    found = capture(model, batch())
    made = rewritten(found)
    assert call_of(made).args[1].meta["val"].shape == (SAMPLES, heads, TOKENS, DIM)
    assert difference(graph_outcome(model, made, batch()), graph_outcome(model, found, batch())).within(1e-11)


REASONS: dict[str, tuple[Mask, Options, str]] = {
    "dropout": (lambda v, i: causal(), {"dropout_p": 0.1}, "it drops weights with probability 0.1"),
    "learned bias": (learned, {}, r"the bias .*bias \(a tensor of the model\) neither shows nor hides a key"),
    "slopes": (
        lambda v, i: -(places()[0] - places()[1]).double() * 0.1,
        {},
        r"the bias mul \(aten.mul\) neither shows nor hides a key",
    ),
    "small bias": (
        lambda v, i: torch.where(causal(), 0.0, -5.0).double(),
        {},
        "a bias of -5.0 neither shows nor hides a key",
    ),
    "strictly causal": (
        lambda v, i: (places()[1] < places()[0]) | (places()[0] == 0) & (places()[1] == 0),
        {},
        "it shows keys in two ways, of which none is causality",
    ),
    "window without causality": (
        lambda v, i: places()[0] - places()[1] < 4,
        {},
        "it bounds the distance of keys without causality: keys less than 4 before the query",
    ),
    "keys ahead": (
        lambda v, i: places()[1] <= places()[0] + 2,
        {},
        "it bounds the distance of keys without causality: keys at least -2 before the query",
    ),
    "by head": (
        lambda v, i: causal() & (torch.arange(HEADS)[:, None, None] < places()[0] + 1),
        {},
        r"lt \(aten.lt\) differs by head",
    ),
    "larger ids": (
        lambda v, i: queries(i) >= keys(i),
        {},
        r"ge \(aten.ge\) mixes queries and keys in a way that words cannot say",
    ),
    "positions of other documents": (
        lambda v, i: (keys(i) <= queries(i)) | in_documents(i),
        {},
        "it compares position_ids of tokens of different documents",
    ),
    "chunks of positions": (
        lambda v, i: (keys(i) // 2 == queries(i) // 2) & (keys(i) <= queries(i)) & in_documents(i),
        {},
        "it compares several ids of query and key",
    ),
    "other documents": (
        lambda v, i: queries(i) != keys(i),
        {},
        "it compares several ids of query and key, or wants different",
    ),
    "prefix of keys": (
        lambda v, i: causal() | keys(i == 0).expand(-1, 1, TOKENS, -1),
        {},
        "it shows keys after the query by a test of one side, ids",
    ),
    "hidden queries": (
        lambda v, i: causal() & queries(v.bool()),
        {},
        "it hides queries where attention_mask but shows their keys",
    ),
    "two kinds of islands": (
        lambda v, i: causal() | (queries(i) == keys(i)) | (queries(v) == keys(v)),
        {},
        "it shows a key in 3 ways, and words can say two",
    ),
    "nothing visible": (lambda v, i: causal() & (places()[1] > places()[0]), {}, "it hides every key"),
    "given whole": (
        lambda v, i: (v[:, :, None] * i[:, None, :]).cumsum(-1)[:, None] > 0,
        {},
        r"gt \(aten.gt\) mixes queries and keys",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_mask_that_words_cannot_say_is_left_alone(name: str) -> None:
    mask, options, reason = REASONS[name]
    found = capture(Little(mask, **options).double(), batch())
    made = rewritten(found)
    (line,) = made.graph.rewrites
    assert line.startswith("bitfield-attention: scaled_dot_product_attention left as it is: ")
    with pytest.raises(ValueError, match=reason):
        raise ValueError(line)
    assert op_name(call_of(made)) == "aten.scaled_dot_product_attention"
    assert [n.name for n in made.graph.module.graph.nodes] == [n.name for n in found.graph.module.graph.nodes]
    assert made.host is found.host
