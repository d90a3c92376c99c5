"""Towers written by hand, whose microbatches hold different samples: what crosses are rows, one sample's after the other's.

    vision.0 -+-> projector.0 ---> language_model.0 ---> language_model.1 (loss)
              +----------------------------------------> (added again there)
    audio.0 ---------------------> language_model.0

Values have other names where they are read than where they are made, as in programs of different patterns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from mmcompile.batching.schedule_units import flow_of
from mmcompile.batching.step_plan import MicrobatchPlan, Range, RowExchange, StepPlan, ValueShape
from mmcompile.codegen.program import PatternPrograms, Port, StageProgram
from mmcompile.ir.graph import ParameterSpec, dtype_name
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.planner.schedule.schedule import Flow

WIDTH = 6
PIXELS = 4
VOCABULARY = 11
IGNORED = -100
TOWERS = {
    "vision": ("vision.0", "projector.0"),
    "audio": ("audio.0",),
    "language_model": ("language_model.0", "language_model.1"),
}
DEPTH = {"vision.0": 3, "projector.0": 2, "audio.0": 2, "language_model.0": 1, "language_model.1": 0}
PARAMETERS = {
    "vision.weight": (WIDTH, PIXELS),
    "projector.weight": (WIDTH, WIDTH),
    "audio.weight": (WIDTH, PIXELS),
    "embed.weight": (VOCABULARY, WIDTH),
    "block.weight": (WIDTH, WIDTH),
    "head.weight": (VOCABULARY, WIDTH),
}

Place = tuple[int, int]
"""Replica and slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerSample:
    """Tokens, and rows of a picture or a sound, each added to the token at `*_at`. None: the encoder does not see it."""

    ids: Tensor
    labels: Tensor
    image: Tensor | None = None
    image_at: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    sound: Tensor | None = None
    sound_at: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


def tower_samples(
    images: Sequence[int | None], sounds: Sequence[int | None] | None = None, *, seed: int = 0
) -> list[TowerSample]:
    """Samples with so many rows of each modality; None where they do not take part."""
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int | None, tokens: int) -> tuple[Tensor | None, Tensor]:
        if count is None:
            return None, torch.zeros(0, dtype=torch.int64)
        values = torch.randn(count, PIXELS, generator=generator, dtype=torch.float64)
        return values, torch.randint(tokens, (count,), generator=generator)

    samples: list[TowerSample] = []
    for index, (image, sound) in enumerate(zip(images, sounds or [None] * len(images), strict=True)):
        tokens = 2 + index % 3
        ids = torch.randint(VOCABULARY, (tokens,), generator=generator)
        labels = ids.roll(1)
        labels[0] = IGNORED
        pixels, image_at = rows(image, tokens)
        waves, sound_at = rows(sound, tokens)
        samples.append(
            TowerSample(ids=ids, labels=labels, image=pixels, image_at=image_at, sound=waves, sound_at=sound_at)
        )
    return samples


def parameters() -> dict[str, Tensor]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in PARAMETERS.items()}


def reference(samples: Sequence[TowerSample]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process that computes one sample after the other."""
    t = {name: value.requires_grad_() for name, value in parameters().items()}
    tokens = sum(int((sample.labels != IGNORED).sum()) for sample in samples)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        x = functional.embedding(sample.ids, t["embed.weight"])
        hidden = None
        if sample.image is not None:
            hidden = functional.gelu(functional.linear(sample.image, t["vision.weight"]))
            x = x.index_add(0, sample.image_at, torch.tanh(functional.linear(hidden, t["projector.weight"])))
        if sample.sound is not None:
            x = x.index_add(0, sample.sound_at, torch.tanh(functional.linear(sample.sound, t["audio.weight"])))
        x = x + functional.gelu(functional.linear(x, t["block.weight"]))
        if hidden is not None:
            x = x.index_add(0, sample.image_at, hidden)
        logits = functional.linear(x, t["head.weight"])
        total = total + functional.cross_entropy(logits, sample.labels, ignore_index=IGNORED, reduction="sum")
    loss = total / tokens
    loss.backward()
    return float(loss.detach()), {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in t.items()
    }


def placed_stages(num_replicas: Mapping[str, int], num_ranks: int) -> tuple[PlacedStage, ...]:
    """All stages of all replicas, dealt to ranks one after the other, so that some edges stay inside a rank."""
    found: list[PlacedStage] = []
    for tower, stages in TOWERS.items():
        for replica in range(num_replicas[tower]):
            found += [
                PlacedStage(
                    name=f"{stage}#{replica}",
                    program=stage,
                    ranks=((len(found) + offset) % num_ranks,),
                    depth=DEPTH[stage],
                    tower=tower,
                    replica=replica,
                )
                for offset, stage in enumerate(stages)
            ]
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerStep:
    """A step plan, with what rank 0 needs to start it."""

    plan: StepPlan
    stages: tuple[PlacedStage, ...]
    values: tuple[dict[str, Tensor], ...]
    """Per microbatch, its batch inputs."""


def tower_step(
    samples: Sequence[TowerSample],
    places: Mapping[str, Sequence[Place | None]],
    stages: tuple[PlacedStage, ...],
    *,
    num_slots: int,
    step: int = 1,
) -> TowerStep:
    """Plan a step.

    Args:
        places: by tower, where each sample is computed; None where it takes no part.
        num_slots: microbatches of each replica.
    """
    language = places["language_model"]
    groups: dict[tuple[int, int, str, int], list[int]] = {}
    for tower, of_samples in places.items():
        for sample, place in enumerate(of_samples):
            if place is not None:
                home = language[sample]
                assert home is not None
                groups.setdefault((place[1], home[1] - place[1], tower, place[0]), []).append(sample)
    tokens = sum(int((sample.labels != IGNORED).sum()) for sample in samples)
    microbatches: list[MicrobatchPlan] = []
    values: list[dict[str, Tensor]] = []
    for index, ((slot, lag, tower, replica), members) in enumerate(sorted(groups.items())):
        if tower != "language_model" and slot % 2:
            members.reverse()
        pattern = _pattern([samples[i] for i in members])
        batch = _collate([samples[i] for i in members], tower)
        values.append(batch)
        valid = int((batch["labels"] != IGNORED).sum()) if tower == "language_model" else 0
        microbatches.append(
            MicrobatchPlan(
                index=index,
                samples=tuple(members),
                pattern=pattern,
                sizes={},
                flow=_flow(pattern, tower),
                readers=_readers(stages, pattern, tower, replica),
                inputs=tuple(
                    ValueShape(name=n, shape=tuple(v.shape), dtype=dtype_name(v.dtype)) for n, v in batch.items()
                ),
                links=_links(batch, pattern, tower),
                loss_weight=1 / tokens if valid else 0.0,
                tower=tower,
                replica=replica,
                slot=slot,
                lag=lag,
                number=slot + lag * num_slots,
            )
        )
    plan = StepPlan(
        step=step,
        num_samples=len(samples),
        microbatches=tuple(microbatches),
        exchanges=tuple(_exchanges(microbatches, samples)),
        num_tokens=tokens,
    )
    return TowerStep(plan=plan, stages=stages, values=tuple(values))


_HEAD = """
import torch
from torch.nn import functional
from mmcompile.codegen.stage_module import StageModule

class Stage(StageModule):
"""
_patterns: dict[str, PatternPrograms] = {}


def programs_of(pattern: str) -> PatternPrograms:
    """Programs of "text", "text+image", "text+sound" or "text+image+sound"."""
    if pattern not in _patterns:
        image, sound = "image" in pattern, "sound" in pattern
        found = [*(_vision(pattern) if image else ()), *(_audio(pattern) if sound else ()), *_language(pattern)]
        _patterns[pattern] = PatternPrograms(
            pattern=pattern, programs={program.stage: program for program in found}, per_token=True
        )
    return _patterns[pattern]


def _vision(pattern: str) -> list[StageProgram]:
    hidden = _port("hidden", "link", True, ("projector.0", "language_model.1"))
    first = 'return (functional.gelu(functional.linear(pixels, self.t["vision.weight"])),)'
    second = 'return (torch.tanh(functional.linear(hidden, self.t["projector.weight"])),)'
    return [
        _program("vision.0", pattern, first, [_port("pixels", "root")], [hidden]),
        _program(
            "projector.0",
            pattern,
            second,
            [_port("hidden", "link", True, ("vision.0",))],
            [_port("picture", "link", True, ("language_model.0",))],
        ),
    ]


def _audio(pattern: str) -> list[StageProgram]:
    body = 'return (torch.tanh(functional.linear(waves, self.t["audio.weight"])),)'
    made = _port("sound", "link", True, ("language_model.0",))
    return [_program("audio.0", pattern, body, [_port("waves", "root")], [made])]


def _language(pattern: str) -> list[StageProgram]:
    image, sound = "image" in pattern, "sound" in pattern
    first = [_port("ids", "root")]
    lines = ['x = functional.embedding(ids, self.t["embed.weight"])']
    if image:
        first += [_port("image_at", "root"), _port("picture_read", "link", True, ("projector.0",))]
        lines.append("x = x.index_add(0, image_at, picture_read)")
    if sound:
        first += [_port("sound_at", "root"), _port("sound_read", "link", True, ("audio.0",))]
        lines.append("x = x.index_add(0, sound_at, sound_read)")
    lines.append('return (x + functional.gelu(functional.linear(x, self.t["block.weight"])),)')
    last = [_port("x", "link", True, ("language_model.0",)), _port("labels", "root")]
    end = []
    if image:
        last += [_port("image_at", "root"), _port("hidden_read", "link", True, ("vision.0",))]
        end.append("x = x.index_add(0, image_at, hidden_read)")
    end.append('logits = functional.linear(x, self.t["head.weight"])')
    end.append('loss = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")')
    end.append("return loss, (labels != -100).sum()")
    ends = [_port("loss_sum", "link"), _port("num_tokens", "link")]
    return [
        _program("language_model.0", pattern, lines, first, [_port("x", "link", True, ("language_model.1",))]),
        _program("language_model.1", pattern, end, last, ends),
    ]


_USED = {
    "vision.0": ("vision.weight",),
    "projector.0": ("projector.weight",),
    "audio.0": ("audio.weight",),
    "language_model.0": ("embed.weight", "block.weight"),
    "language_model.1": ("head.weight",),
}
_INTEGERS = ("ids", "labels", "image_at", "sound_at", "num_tokens")


def _program(
    stage: str, pattern: str, body: str | Sequence[str], inputs: Sequence[Port], outputs: Sequence[Port]
) -> StageProgram:
    lines = [body] if isinstance(body, str) else body
    arguments = ", ".join(["self", *(port.name for port in inputs)])
    source = f"    def forward({arguments}):\n" + "".join(f"        {line}\n" for line in lines)
    return StageProgram(
        stage=stage,
        pattern=pattern,
        source=_HEAD + source,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        parameters=tuple(
            ParameterSpec(name=name, shape=PARAMETERS[name], dtype="float64", trainable=True) for name in _USED[stage]
        ),
        buffers=(),
        is_loss=stage == "language_model.1",
        has_backward=True,
    )


def _port(name: str, kind: str, gradient: bool = False, peers: tuple[str, ...] = ()) -> Port:
    dtype = "int64" if name in _INTEGERS else "float64"
    return Port(name=name, kind=kind, shape=(), dtype=dtype, gradient=gradient, peers=peers)  # type: ignore[arg-type]


def _pattern(samples: Sequence[TowerSample]) -> str:
    image = any(sample.image is not None for sample in samples)
    sound = any(sample.sound is not None for sample in samples)
    return "text" + "+image" * image + "+sound" * sound


def _collate(samples: Sequence[TowerSample], tower: str) -> dict[str, Tensor]:
    if tower == "vision":
        return {"pixels": torch.cat([sample.image for sample in samples if sample.image is not None])}
    if tower == "audio":
        return {"waves": torch.cat([sample.sound for sample in samples if sample.sound is not None])}
    starts = [0, *accumulate(len(sample.ids) for sample in samples)]
    return {
        "ids": torch.cat([sample.ids for sample in samples]),
        "labels": torch.cat([sample.labels for sample in samples]),
        "image_at": torch.cat([s.image_at + start for s, start in zip(samples, starts, strict=False)]),
        "sound_at": torch.cat([s.sound_at + start for s, start in zip(samples, starts, strict=False)]),
    }


def _readers(stages: Sequence[PlacedStage], pattern: str, tower: str, replica: int) -> dict[int, tuple[str, ...]]:
    """Batch inputs read, by rank."""
    names: dict[int, frozenset[str]] = {}
    for stage in stages:
        program = programs_of(pattern).programs.get(stage.program_name)
        if (stage.tower, stage.replica) == (tower, replica) and program is not None:
            names[stage.ranks[0]] = names.get(stage.ranks[0], frozenset()) | program.batch_inputs
    return {rank: tuple(sorted(read)) for rank, read in names.items()}


def _flow(pattern: str, tower: str) -> Flow:
    return flow_of(programs_of(pattern), TOWERS[tower])


def _links(batch: Mapping[str, Tensor], pattern: str, tower: str) -> tuple[ValueShape, ...]:
    rows = {
        "vision": {"hidden": "pixels", "picture": "pixels"},
        "audio": {"sound": "waves"},
        "language_model": {
            "x": "ids",
            **({"picture_read": "image_at", "hidden_read": "image_at"} if "image" in pattern else {}),
            **({"sound_read": "sound_at"} if "sound" in pattern else {}),
        },
    }[tower]
    return tuple(ValueShape(name=name, shape=(len(batch[root]), WIDTH), dtype="float64") for name, root in rows.items())


def _exchanges(microbatches: Sequence[MicrobatchPlan], samples: Sequence[TowerSample]) -> Iterable[RowExchange]:
    ways = {
        "vision": [
            ("vision.0", "language_model.1", "hidden", "hidden_read"),
            ("projector.0", "language_model.0", "picture", "picture_read"),
        ],
        "audio": [("audio.0", "language_model.0", "sound", "sound_read")],
    }
    for source in microbatches:
        for producer, consumer, name, target_name in ways.get(source.tower, ()):
            for target in microbatches:
                both = sorted(set(source.samples) & set(target.samples))
                if target.tower == "language_model" and both:
                    made, read = (_rows(side.samples, samples, source.tower) for side in (source, target))
                    yield RowExchange(
                        source=source.index,
                        target=target.index,
                        producer=producer,
                        consumer=consumer,
                        name=name,
                        target_name=target_name,
                        rows=tuple(made[sample] for sample in both),
                        into=tuple(read[sample] for sample in both),
                        samples=tuple(both),
                        gradient=True,
                    )


def _rows(members: Sequence[int], samples: Sequence[TowerSample], tower: str) -> dict[int, Range]:
    """Rows of each sample in what a tower makes for these samples."""
    counts = [len(samples[i].image_at if tower == "vision" else samples[i].sound_at) for i in members]
    ends = list(accumulate(counts))
    return dict(zip(members, zip([0, *ends[:-1]], ends, strict=True), strict=True))
