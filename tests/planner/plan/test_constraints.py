"""Texts of constraints and names of layers."""

from __future__ import annotations

import pytest
from support.plans.exact_cases import chain, equal_layers

from mmcompile.errors import ConfigError
from mmcompile.planner.exact.demands import demands
from mmcompile.planner.exact.rules import Cap, Count, Cuts, Demand, InStage, Unsatisfiable
from mmcompile.planner.exact.split_problem import ExactChain
from mmcompile.planner.plan.constraints import EqualTp, MemoryCap, On, SameStage, StageRange, parse_constraint

TEXTS = [
    ("together:a.0,b", SameStage(layers=("a.0", "b"), same=True), "a.0 and b share a stage"),
    ("together:a,b,c", SameStage(layers=("a", "b", "c"), same=True), "a, b and c share a stage"),
    ("apart:a.0,b.-1", SameStage(layers=("a.0", "b.-1"), same=False), "a.0 and b.-1 are in different stages"),
    ("on:vision_tower=0", On(layer="vision_tower", stage=0), "vision_tower is on stage 0"),
    ("on:*.layers.3=rank12", On(layer="*.layers.3", rank=12), "*.layers.3 is on rank 12"),
    ("memory:40GiB", MemoryCap(num_bytes=40 * 2**30), "memory <= 40 GiB"),
    ("memory:1536MiB@lm.1", MemoryCap(num_bytes=3 * 2**29, where="lm.1"), "memory <= 1536 MiB on lm.1"),
    ("memory:80GB@rank3", MemoryCap(num_bytes=80 * 10**9, where="rank3"), "memory <= 80 GB on rank3"),
    ("stages:lm=3", StageRange(chain="lm", low=3, high=3), "lm has 3 stages"),
    ("stages:lm=1", StageRange(chain="lm", low=1, high=1), "lm has 1 stage"),
    ("stages:lm=2..4", StageRange(chain="lm", low=2, high=4), "lm has 2 to 4 stages"),
    ("stages:lm=2..", StageRange(chain="lm", low=2), "lm has at least 2 stages"),
    ("stages:lm=..4", StageRange(chain="lm", high=4), "lm has 1 to 4 stages"),
    ("equal-tp", EqualTp(), "all chains have equal tp"),
    ("equal-tp:a,b", EqualTp(components=("a", "b")), "a and b have equal tp"),
]


@pytest.mark.parametrize(("text", "value", "words"), TEXTS, ids=[text for text, _, _ in TEXTS])
def test_prints_what_it_reads(text: str, value: object, words: str) -> None:
    read = parse_constraint(text)
    assert (read, str(read), read.words) == (value, text, words)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" together: a , b ", SameStage(layers=("a", "b"), same=True)),
        ("memory: 1.5 GiB", MemoryCap(num_bytes=3 * 2**29)),
        ("on:a = rank 3", On(layer="a", rank=3)),
        ("stages: lm = 2 .. 4", StageRange(chain="lm", low=2, high=4)),
    ],
)
def test_spaces_do_not_matter(text: str, value: object) -> None:
    assert parse_constraint(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("near:a,b", "its forms are together:A,B"),
        ("together:a", "2 or more different names"),
        ("together:a,a", "2 or more different names"),
        ("apart:a,b,c", "it takes two"),
        ("on:a", "write on:A=0"),
        ("on:a=first", "write on:A=0"),
        ("memory:40", "write memory:40GiB"),
        ("memory:40XiB", "write memory:40GiB"),
        ("memory:0GiB", "at least one byte"),
        ("stages:lm", "write stages:CHAIN=3"),
        ("stages:lm=4..2", "4 to 2 stages is empty"),
        ("stages:lm=0", "a chain has at least 1"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_form(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"constraint '{text}' cannot be read: .*{message}"):
        parse_constraint(text)


CHAINS = [
    chain("vision", equal_layers(3), low=1, high=1, ranks=((0,),)),
    chain("lm", equal_layers(6), tp=2, low=2, high=2, ranks=((1,), (2,))),
]


def rules(*texts: str, chains: list[ExactChain] = CHAINS, memory_bytes: int | None = None) -> list[object]:
    return [demand.rule for demand in demanded(*texts, chains=chains, memory_bytes=memory_bytes)]


def demanded(*texts: str, chains: list[ExactChain] = CHAINS, memory_bytes: int | None = None) -> tuple[Demand, ...]:
    return demands([parse_constraint(text) for text in texts], chains, memory_bytes=memory_bytes)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("together:lm.1,lm.4", Cuts(chain=1, first=1, last=4, some=False)),
        ("together:lm.-1,model.lm.layers.0", Cuts(chain=1, first=0, last=5, some=False)),
        ("together:lm,lm.2", Cuts(chain=1, first=0, last=5, some=False)),
        ("apart:lm.4,*lm*.1", Cuts(chain=1, first=1, last=4, some=True)),
        ("on:vision=0", InStage(chain=0, first=0, last=3, stage=0)),
        ("on:lm.5=rank2", InStage(chain=1, first=5, last=6, stage=1)),
        ("memory:7B", Cap(num_bytes=7)),
        ("memory:7B@lm", Cap(num_bytes=7, chain=1)),
        ("memory:7B@lm.1", Cap(num_bytes=7, chain=1, stage=1)),
        ("memory:7B@rank0", Cap(num_bytes=7, chain=0, stage=0)),
        ("stages:lm=2..", Count(chain=1, low=2, high=6)),
    ],
)
def test_names_become_places(text: str, rule: object) -> None:
    assert rules(text) == [rule]


def test_what_always_holds_demands_nothing() -> None:
    assert rules("apart:vision.0,lm.0", "equal-tp:lm,lm.1") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("together:vision.0,lm.0", "vision.0 is in chain vision, lm.0 in lm, and a stage holds layers of one chain"),
        ("apart:lm,lm.2", "lm and lm.2 have a layer in common"),
        ("on:lm.0=rank0", "rank 0 runs vision.0, and lm.0 is in lm"),
        ("equal-tp", "vision has tp 1, lm has tp 2"),
        ("equal-tp:lm,vision", "vision has tp 1, lm has tp 2"),
    ],
)
def test_what_never_holds_says_why(text: str, why: str) -> None:
    assert rules(text) == [Unsatisfiable(why=why)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("together:lm.0,lm.7", r"together:lm.0,lm.7: lm has 6 layers, lm.0 to lm.5; got 'lm.7'"),
        ("together:lm.0,*.layers.1", r"matches 2 layers, name one: model.vision.layers.1, model.lm.layers.1"),
        ("on:visoin.1=0", r"names no layer or component; did you mean vision.1, .*components are vision \(layers"),
        ("on:zzz*=0", r"'zzz\*' names no layer or component; components are vision"),
        ("stages:head=2", "there is no chain 'head'; chains are vision, lm"),
        ("memory:7B@lm.2", "lm has stages lm.0 to lm.1; got lm.2"),
        ("memory:7B@rank9", "no stage runs on rank 9; the plan has ranks 0 to 2"),
    ],
)
def test_unknown_names_are_refused_with_the_known(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        demanded(text)


def test_ranks_need_a_decided_number_of_stages() -> None:
    with pytest.raises(ConfigError, match="ranks are known once the number of stages is"):
        demanded("on:lm.0=rank0", chains=[chain("lm", equal_layers(4))])


def test_a_limit_above_the_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory:9B has no effect: a device has 8 B"):
        demanded("memory:9B", memory_bytes=8)


def test_a_limit_of_the_user_stands_for_that_of_the_device() -> None:
    assert rules("memory:7B", memory_bytes=8) == [Cap(num_bytes=7)]
    assert rules("memory:7B@lm", memory_bytes=8) == [Cap(num_bytes=7, chain=1), Cap(num_bytes=8)]
    assert [demand.asked for demand in demanded("memory:7B@lm", memory_bytes=8)] == [True, False]
