"""`Calibration`: seconds measured on one kind of device, used in place of the analytic ones."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from scipy.optimize import nnls

from mmcompile.costmodel.cluster import Interconnect
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.costmodel.load import Load, Polynomial
from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic

_CALIBRATION_VERSION = 1
_REMAKE = "measure again with `mmcompile profile`"


def installed(package: str) -> str:
    """Return the version of a package, without its build (`2.13.0` of `2.13.0+cpu`)."""
    return version(package).partition("+")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Median seconds of the forward, input gradient and weight gradient of one layer, for a microbatch of size `load`."""

    load: Load
    times: LayerTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class KindCosts:
    """Seconds of the layers of one kind as polynomials in the load (Entrain, section 4.4: a x^2 + b x + c).

    The x^2 of the paper is the sum of squared sequence lengths here, so that packed and padded microbatches are told apart.
    """

    kind: str
    """Layer kind, as named by `passes.layer_kinds`."""
    layer: str
    """Module path of the layer that was measured."""
    forward: Polynomial
    input_grad: Polynomial
    weight_grad: Polynomial
    measurements: tuple[Measurement, ...]
    median_error: float
    """Median over the measured points of the relative error of the fitted total seconds."""
    max_error: float
    tp: int = 1
    """Tensor-parallel degree of the measured layer."""

    @classmethod
    def fitted(cls, kind: str, layer: str, measurements: Sequence[Measurement], *, tp: int = 1) -> Self:
        """Return the costs of a kind fitted to measured points, at least one."""
        loads = [point.load for point in measurements]
        forward, input_grad, weight_grad = (
            fit_polynomial(loads, [getattr(point.times, name) for point in measurements])
            for name in ("forward_s", "input_grad_s", "weight_grad_s")
        )
        total = forward + input_grad + weight_grad
        errors = [abs(total.at(point.load) / point.times.total_s - 1) for point in measurements]
        return cls(
            kind=kind,
            layer=layer,
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            measurements=tuple(measurements),
            median_error=statistics.median(errors),
            max_error=max(errors),
            tp=tp,
        )

    def at(self, load: Load) -> LayerTimes:
        """Return the seconds of a layer of this kind at a load."""
        return LayerTimes(
            forward_s=self.forward.at(load),
            input_grad_s=self.input_grad.at(load),
            weight_grad_s=self.weight_grad.at(load),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCosts:
    """Seconds that rank 0 needs to prepare one microbatch of a model: collation, and values computed from integer inputs."""

    model: str
    """Class name of the model."""
    seconds: Polynomial
    """Seconds as a polynomial in the load of the component that ends in the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeCosts:
    """Costs of a step besides its layers, measured with pipelines of two processes that compute almost no layers."""

    forward_s: float
    """Seconds of a rank for each forward of a stage, besides its layers."""
    backward_s: float
    message_s: float
    """Seconds of a rank for each message sent or received."""
    message_s_per_byte: float
    """Seconds of a rank per byte copied into or out of a message; on a CPU the computing core copies."""
    step_s: float
    """Seconds of a step besides layers and messages: planning it, sending commands to ranks, summing their losses."""
    optimizer_s_per_byte: float
    """Seconds of the measured optimizer per byte of trainable parameters."""
    optimizer_s_per_tensor: float
    optimizer: str
    """Class name of the measured optimizer."""
    link: Interconnect
    """Link between two processes of this machine."""

    def __str__(self) -> str:
        return (
            f"runtime     forward {self.forward_s * 1e6:.0f} us, backward {self.backward_s * 1e6:.0f} us beyond the layers; "
            f"step {self.step_s * 1e3:.1f} ms\n"
            f"messages    {self.link.latency_s * 1e6:.0f} us and {self.link.bytes_per_s / 1e9:.2f} GB/s; a rank works "
            f"{self.message_s * 1e6:.0f} us and {self.message_s_per_byte * 1e9:.2f} ns a byte on each\n"
            f"optimizer   {self.optimizer}: {self.optimizer_s_per_byte * 1e9:.2f} ns a byte, "
            f"{self.optimizer_s_per_tensor * 1e6:.0f} us a tensor"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Measured seconds of layers, host work and runtime. `to_json` / `from_json` round-trip it."""

    device: str
    """Name of the device, as a cluster names it."""
    processor: str
    """Name of the machine's processor, as the system reports it."""
    dtype: str
    torch: str
    mmcompile: str
    kinds: tuple[KindCosts, ...]
    hosts: tuple[HostCosts, ...] = ()
    runtime: RuntimeCosts | None = None
    version: int = _CALIBRATION_VERSION

    def times(self, kind: str, load: Load, tp: int = 1) -> LayerTimes | None:
        """Return the seconds of a layer at a load; None for a kind that was not measured at this `tp`."""
        return next((costs.at(load) for costs in self.kinds if (costs.kind, costs.tp) == (kind, tp)), None)

    def check(self, *, device: str, dtype: str, processor: str | None = None) -> None:
        """Raise ConfigError unless this calibration holds for a device, a dtype and the installed versions.

        Args:
            device: name of the cluster's devices.
            dtype: dtype of most parameters.
            processor: processor name of this machine, if the plan is made for it; None accepts any.
        """
        wanted = {
            "device": (self.device, device),
            "processor": (self.processor, processor or self.processor),
            "dtype": (self.dtype, dtype),
            "torch": (self.torch, installed("torch")),
            "mmcompile": (self.mmcompile, installed("mmcompile")),
        }
        for name, (own, value) in wanted.items():
            if own != value:
                raise ConfigError(
                    f"the calibration does not hold here: it was measured with {name} {own}, wanted is {value}; {_REMAKE}"
                )

    def to_json(self) -> str:
        """Return the calibration as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "calibration") -> Calibration:
        """Read a calibration from JSON text.

        Raises:
            ConfigError: the text is not JSON, has another version, or a missing or ill-typed field; the message names `where`.
        """
        try:
            raw = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{where} is no calibration: {error}; {_REMAKE}") from None
        version = raw.get("version") if isinstance(raw, dict) else None
        if version != _CALIBRATION_VERSION:
            raise ConfigError(
                f"{where} has calibration version {version!r}, this mmcompile reads {_CALIBRATION_VERSION}; {_REMAKE}"
            )
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where} is no calibration: {error}; {_REMAKE}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a file atomically. Raises OutputError on failure; an old file is then unchanged."""
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration file. Raises ConfigError if it cannot be read, or has another form or version."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read calibration {os.fspath(path)}: {error.strerror}") from error
        return cls.from_json(text, where=os.fspath(path))

    def __str__(self) -> str:
        head = f"measured on {self.device} ({self.processor}), {self.dtype}, torch {self.torch}, mmcompile {self.mmcompile}"
        width = max([len("layer kind"), *(len(costs.kind) for costs in self.kinds)])
        lines = [head, "", f"{'layer kind':<{width}}  {_row(*_COLUMNS)}"]
        lines += [f"{costs.kind:<{width}}  {_row(*_cells(costs))}" for costs in self.kinds]
        return "\n".join([*lines, *([] if self.runtime is None else ["", str(self.runtime)])])


_COLUMNS = ("tokens", "fwd ms", "input-grad", "weight-grad", "points", "fit median", "max")


def _row(*cells: str) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, (16, 10, 12, 13, 8, 12, 8), strict=True))


def _cells(costs: KindCosts) -> tuple[str, ...]:
    tokens = [point.load.tokens for point in costs.measurements]
    times = costs.at(max(costs.measurements, key=lambda point: point.times.total_s).load)
    return (
        f"{min(tokens):.0f}..{max(tokens):.0f}",
        *(f"{seconds * 1e3:.3f}" for seconds in (times.forward_s, times.input_grad_s, times.weight_grad_s)),
        str(len(costs.measurements)),
        f"{costs.median_error:.1%}",
        f"{costs.max_error:.1%}",
    )


def describe_costs(calibration: Calibration | None, kinds: Mapping[str, Iterable[str]]) -> str:
    """Describe in one line which component times of a plan are analytic and which are measured (`Plan.costs`).

    Args:
        calibration: measured seconds of whole layers; None if all times are analytic.
        kinds: component -> kinds of its layers.
    """
    if calibration is None:
        return "analytic"
    wanted = {kind for own in kinds.values() for kind in own}
    found = [costs for costs in calibration.kinds if costs.tp == 1 and costs.kind in wanted]
    if not found:
        where = f"{calibration.device} {calibration.dtype}"
        return f"analytic: the calibration for {where} knows none of the {len(wanted)} layer kinds"
    missing = sorted(wanted - {costs.kind for costs in found})
    error = f"fit error median {statistics.median(c.median_error for c in found):.1%}, max {max(c.max_error for c in found):.1%}"
    text = (
        f"measured on {calibration.device} ({calibration.processor}), {calibration.dtype}, torch {calibration.torch}: "
        f"{len(found)} of {len(wanted)} layer kinds, {error}"
    )
    return f"{text}; analytic: {', '.join(missing)}" if missing else text


def fit_polynomial(loads: Sequence[Load], seconds: Sequence[float]) -> Polynomial:
    """Return the polynomial with coefficients >= 0 that has the least squared relative error at the measured points.

    minimise over a, b, c >= 0: sum_i ((a q_i + b t_i + c) / y_i - 1)^2, with tokens t, squared lengths q and seconds y of point
    i. Points of 0 s have no relative error and are left out; if all are, the polynomial is 0. Sequences of one length at all
    points (images of a fixed size) do not distinguish squares from tokens: then a = 0.
    """
    points = [(load, value) for load, value in zip(loads, seconds, strict=True) if value > 0]
    if not points:
        return Polynomial()
    values = np.array([value for _, value in points])
    columns = np.array([[1.0, load.tokens, load.squares] for load, _ in points])
    if len(points) > 1 and len({load.squares / load.tokens for load, _ in points if load.tokens}) < 2:
        columns[:, 2] = 0.0
    # Squares are a million times tokens: without a common scale the solver's tolerance drops the small column.
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    fixed, per_token, per_square = nnls(columns / scale / values[:, None], np.ones(len(points)))[0] / scale
    return Polynomial(fixed=float(fixed), per_token=float(per_token), per_square=float(per_square))
