"""A small multimodal model with its stage programs written by hand, to test the runtime without capture.

    vision.0 -----+--------------> language_model.1 (added again there, as deepstack does)
                  |
    audio.0 ------+-> language_model.0 -> language_model.1 -> language_model.2 (loss)

One set of sources fits every batch size; a pattern is the set of modalities a microbatch has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmcompile.codegen.program import PatternPrograms, Port, PreparedMicrobatch, StageProgram
from mmcompile.data.collate import IGNORED_LABEL, Sample, Value
from mmcompile.ir.graph import ParameterSpec, dtype_name
from mmcompile.planner.plan.placement import PlacedStage, Placement

VOCABULARY = 17
WIDTH = 8
PIXELS = 6
LANGUAGE = ("language_model.0", "language_model.1", "language_model.2")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Encoder(nn.Module):
    def __init__(self, pixels: int, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(pixels, width)
        self.projector = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(functional.gelu(self.body(x))).mean(0)


class HandModel(nn.Module):
    """Returns (sum of token losses, number of valid tokens). `tied`: the head is the embedding."""

    scale: Tensor

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.vision = Encoder(PIXELS, WIDTH)
        self.audio = Encoder(PIXELS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.tensor([0.5]))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, batch: Mapping[str, Value]) -> tuple[Tensor, Tensor]:
        x = self.embed(_tensor(batch, "input_ids"))
        image = self.vision(_tensor(batch, "pixel_values")) if "pixel_values" in batch else None
        if image is not None:
            x = x + image
        if "audio_values" in batch:
            x = x + self.audio(_tensor(batch, "audio_values"))
        x = self.blocks[0](x)
        if image is not None:
            x = x + self.scale * image
        x = self.blocks[2](self.blocks[1](x))
        return token_loss(self.head(x), _tensor(batch, "labels"))


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return loss, (labels != IGNORED_LABEL).sum()


_HEAD = """
import torch
from torch.nn import functional
from mmcompile.codegen.stage_module import StageModule

aten = torch.ops.aten

def block(
    up_weight: "float64 [UP, WIDTH], trained",
    up_bias: "float64 [UP], trained",
    down_weight: "float64 [WIDTH, UP], trained",
    down_bias: "float64 [WIDTH], trained",
    x: "float64 [s0, s1, WIDTH], gradient",
):
    hidden = aten.gelu.default(aten.linear.default(x, up_weight, up_bias))
    return (x + aten.linear.default(hidden, down_weight, down_bias),)

class Stage(StageModule):
""".replace("UP", str(2 * WIDTH)).replace("WIDTH", str(WIDTH))

_ENCODER = """
    def forward(self, values):
        t = self.t
        hidden = functional.gelu(functional.linear(values, t["NAME.body.weight"], t["NAME.body.bias"]))
        return (functional.linear(hidden, t["NAME.projector.weight"], t["NAME.projector.bias"]).mean(0),)
"""

_BLOCK = """
        up, down = (t["blocks.N.up.weight"], t["blocks.N.up.bias"]), (t["blocks.N.down.weight"], t["blocks.N.down.bias"])
        (x,) = self.run(block, *up, *down, x)
"""

_LOSS = """
        logits = functional.linear(x, t["HEAD"]).flatten(0, 1)
        loss = functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        return loss, (labels != -100).sum()
"""


def hand_plan(num_microbatches: int = 4, **ranks: int) -> Placement:
    """Stages by rank: `hand_plan(vision=1, audio=2, lm0=0, lm1=1, lm2=2)`; a branch left out does not exist."""
    names = {"vision": ("vision.0", 3), "audio": ("audio.0", 3)}
    names |= {f"lm{i}": (name, 2 - i) for i, name in enumerate(LANGUAGE)}
    stages = (PlacedStage(name=names[key][0], ranks=(rank,), depth=names[key][1]) for key, rank in ranks.items())
    return Placement(stages=tuple(stages), num_microbatches=num_microbatches)


class HandSource:
    """`ProgramSource` of a HandModel.

    Args:
        fault: Python statements put at the start of language_model.1's forward.
    """

    def __init__(self, model: HandModel, fault: str = "pass") -> None:
        self._model = model
        self._fault = fault
        self._patterns: dict[str, PatternPrograms] = {}

    def parameters(self) -> Mapping[str, Tensor]:
        names = dict(self._model.named_parameters(remove_duplicate=False))
        return {**names, **dict(self._model.named_buffers())}

    def prepare(self, batch: Mapping[str, Value]) -> PreparedMicrobatch:
        branches = [name for name in ("vision", "audio") if _ROOTS[name] in batch]
        programs = self._programs(tuple(branches))
        batch_size, length = _tensor(batch, "input_ids").shape
        hidden = (batch_size, length, WIDTH)
        links = {"x0": hidden, "x1": hidden, **{f"{name}_out": (WIDTH,) for name in branches}}
        roots = {port.name for program in programs.programs.values() for port in program.inputs if port.kind == "root"}
        return PreparedMicrobatch(
            programs=programs,
            sizes={},
            values={name: _tensor(batch, name) for name in sorted(roots)},
            link_shapes=links,
            num_tokens=int((_tensor(batch, "labels") != IGNORED_LABEL).sum()),
        )

    def _programs(self, branches: tuple[str, ...]) -> PatternPrograms:
        pattern = "+".join(("text", *branches))
        if pattern not in self._patterns:
            programs = [*(self._encoder(name, pattern) for name in branches), *self._language(branches, pattern)]
            self._patterns[pattern] = PatternPrograms(
                pattern=pattern, programs={program.stage: program for program in programs}, per_token=True
            )
        return self._patterns[pattern]

    def _encoder(self, name: str, pattern: str) -> StageProgram:
        peers = LANGUAGE[:2] if name == "vision" else LANGUAGE[:1]
        specs = self._specs(f"{name}.")
        trains = any(spec.trainable for spec in specs)
        return StageProgram(
            stage=f"{name}.0",
            pattern=pattern,
            source=_HEAD + _ENCODER.replace("NAME", name),
            inputs=(self._port(_ROOTS[name], "root"),),
            outputs=(self._port(f"{name}_out", "link", trains, peers),),
            parameters=specs,
            buffers=(),
            has_backward=trains,
        )

    def _language(self, branches: Sequence[str], pattern: str) -> list[StageProgram]:
        features = [self._port(f"{name}_out", "link", self._trains(f"{name}."), (f"{name}.0",)) for name in branches]
        image = [port for port in features if port.name == "vision_out"]
        flows0 = self._trains("embed.", "blocks.0.") or any(port.gradient for port in features)
        flows1 = flows0 or self._trains("blocks.1.") or any(port.gradient for port in image)
        arguments = ", ".join(["self", "input_ids", *(port.name for port in features)])
        add = "".join(f" + {port.name}" for port in features)
        first = f"    def forward({arguments}):\n        t = self.t\n"
        first += (
            f"        x = functional.embedding(input_ids, t['embed.weight']){add}\n{_block(0)}        return (x,)\n"
        )
        middle = f"    def forward(self, x{''.join(f', {port.name}' for port in image)}):\n        t = self.t\n"
        middle += f"        {self._fault}\n"
        middle += "        x = x + t['scale'] * vision_out\n" if image else ""
        middle += f"{_block(1)}        return (x,)\n"
        head = "embed.weight" if self._model.head.weight is self._model.embed.weight else "head.weight"
        last = f"    def forward(self, x, labels):\n        t = self.t\n{_block(2)}{_LOSS.replace('HEAD', head)}"
        return [
            StageProgram(
                stage=LANGUAGE[0],
                pattern=pattern,
                source=_HEAD + first,
                inputs=(self._port("input_ids", "root"), *features),
                outputs=(self._port("x0", "link", flows0, LANGUAGE[1:2]),),
                parameters=self._specs("embed.", "blocks.0."),
                buffers=(),
                has_backward=flows0,
            ),
            StageProgram(
                stage=LANGUAGE[1],
                pattern=pattern,
                source=_HEAD + middle,
                inputs=(self._port("x0", "link", flows0, LANGUAGE[0:1]), *image),
                outputs=(self._port("x1", "link", flows1, LANGUAGE[2:3]),),
                parameters=self._specs("blocks.1."),
                buffers=("scale",) if image else (),
                has_backward=flows1,
            ),
            StageProgram(
                stage=LANGUAGE[2],
                pattern=pattern,
                source=_HEAD + last,
                inputs=(self._port("x1", "link", flows1, LANGUAGE[1:2]), self._port("labels", "root")),
                outputs=(self._port("loss_sum", "link"), self._port("num_tokens", "link")),
                parameters=self._specs("blocks.2.", head),
                buffers=(),
                is_loss=True,
                has_backward=flows1 or self._trains("blocks.2.", head),
            ),
        ]

    def _port(self, name: str, kind: str, gradient: bool = False, peers: tuple[str, ...] = ()) -> Port:
        dtype = "int64" if name in ("input_ids", "labels", "num_tokens") else dtype_name(self._model.embed.weight.dtype)
        return Port(name=name, kind=kind, shape=(), dtype=dtype, gradient=gradient, peers=peers)  # type: ignore[arg-type]

    def _specs(self, *prefixes: str) -> tuple[ParameterSpec, ...]:
        tied = self._model.head.weight is self._model.embed.weight
        return tuple(
            ParameterSpec(
                name=name,
                shape=tuple(parameter.shape),
                dtype=dtype_name(parameter.dtype),
                trainable=parameter.requires_grad,
                aliases=("head.weight",) if tied and name == "embed.weight" else (),
            )
            for name, parameter in self._model.named_parameters()
            if name.startswith(prefixes)
        )

    def _trains(self, *prefixes: str) -> bool:
        return any(spec.trainable for spec in self._specs(*prefixes))


_ROOTS = {"vision": "pixel_values", "audio": "audio_values"}


def hand_samples(count: int, *, images: Sequence[int] = (), sounds: Sequence[int] = (), seed: int = 0) -> list[Sample]:
    """Samples of unequal text; those at positions `images` and `sounds` have that modality."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for i in range(count):
        ids = torch.randint(1, VOCABULARY, (1, 3 + i % 3), generator=generator)
        labels = ids.clone()
        labels[:, 0] = IGNORED_LABEL
        sample: dict[str, Value] = {"input_ids": ids, "labels": labels}
        if i in images:
            sample["pixel_values"] = torch.randn(2 + i % 2, PIXELS, generator=generator, dtype=torch.float64)
        if i in sounds:
            sample["audio_values"] = torch.randn(1, PIXELS, generator=generator, dtype=torch.float64)
        samples.append(sample)
    return samples


def _block(index: int) -> str:
    return _BLOCK.replace(".N.", f".{index}.")


def _tensor(batch: Mapping[str, Value], name: str) -> Tensor:
    value = batch[name]
    assert isinstance(value, Tensor)
    return value
