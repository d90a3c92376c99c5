"""`Plan`: layers, devices and order of a training step. A value: printable, comparable, JSON in and out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from mmcompile.errors import PlanError, StalePlanError
from mmcompile.files import write_atomic
from mmcompile.planner.plan.plan_record import PLAN_VERSION, Fingerprint, PlanRecord
from mmcompile.planner.plan.table import format_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(PlanRecord):
    """Assignment of every layer to devices, with predictions of time and memory, as a value.

    `str(plan)` is a table of at most forty lines; `to_json` and `from_json` round-trip the plan.
    """

    def __str__(self) -> str:
        return format_plan(self)

    def to_json(self) -> str:
        """Return the plan as indented JSON; `from_json` reads it back to an equal value."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "plan") -> Plan:
        """Return the plan that JSON text describes.

        Args:
            text: JSON as from `to_json`.
            where: source of the text for error messages, for example a file.

        Raises:
            PlanError: the text is not JSON (with the position), has another version, has a missing, unknown or ill-typed field
                (with its path), has recomputation modes for more or fewer layers than a stage has, or has templates that do not
                run the plan's layers.
        """
        try:
            raw = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PlanError(f"{where} is no plan: {error}; {_REMAKE}") from None
        version = raw.get("version") if isinstance(raw, dict) else None
        if version != PLAN_VERSION:
            raise PlanError(f"{where} has plan version {version!r}, this mmcompile reads {PLAN_VERSION}; {_REMAKE}")
        try:
            plan = msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise PlanError(f"{where} is no plan: {error}; {_REMAKE}") from None
        for path in _unknown(raw, msgspec.to_builtins(plan), "$"):
            raise PlanError(
                f"{where} has an unknown field {path}; remove it, or read it with the mmcompile that wrote it"
            )
        if not plan.stages:
            raise PlanError(f"{where} is no plan: it has no stages; {_REMAKE}")
        try:
            _check_modes(plan)
            _check_templates(plan)
        except PlanError as error:
            raise PlanError(f"{where} is no plan: {error}; {_REMAKE}") from None
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file atomically. If writing fails, it raises OutputError and leaves an existing file unchanged."""
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan of a file. Raises PlanError if the file cannot be read, or as `from_json` does."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise PlanError(f"cannot read plan {os.fspath(path)}: {error.strerror}") from error
        return cls.from_json(text, where=os.fspath(path))


_REMAKE = "make it anew with `mmcompile plan`"


def check_fingerprint(plan: Plan, fingerprint: Fingerprint) -> None:
    """Raise StalePlanError, which names the first field that differs, if a plan was made for another model or other versions."""
    for item in fields(Fingerprint):
        got, wanted = getattr(plan.fingerprint, item.name), getattr(fingerprint, item.name)
        if got != wanted:
            raise StalePlanError(
                f"the plan does not belong to this model: its {item.name} is {got}, the model at hand has {wanted}; "
                f"{_REMAKE}"
            )


def _check_modes(plan: Plan) -> None:
    for stage in plan.stages:
        if stage.recompute and len(stage.recompute) != len(stage.layer_names):
            raise PlanError(
                f"stage {stage.name} says for {len(stage.recompute)} layers what they compute again, and has "
                f"{len(stage.layer_names)}"
            )


def _check_templates(plan: Plan) -> None:
    if plan.resilience is None:
        return
    layers = {chain.name: sum(len(stage.layer_names) for stage in chain.stages) for chain in plan.chains}
    known = {name: len(sizes) for name, sizes in plan.resilience.layer_bytes.items()}
    if known != layers:
        raise PlanError(f"its templates are for chains of {known} layers, and the plan has {layers}")
    _ = plan.resilience.job, plan.resilience.cover  # they check what they are made of


def _unknown(raw: object, known: object, path: str) -> Iterator[str]:
    """Yield the paths, below `path`, of fields of the JSON data `raw` that are absent from `known`, the value read from it."""
    if isinstance(raw, Mapping) and isinstance(known, Mapping):
        for key, value in raw.items():
            if key in known:
                yield from _unknown(value, known[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(raw, list) and isinstance(known, list | tuple):
        for index, (value, own) in enumerate(zip(raw, known, strict=True)):
            yield from _unknown(value, own, f"{path}[{index}]")
