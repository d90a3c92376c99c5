"""Fits, files, refusals and the text of calibrations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.costmodel import calibration
from mmcompile.costmodel.calibration import (
    Calibration,
    HostCosts,
    KindCosts,
    Measurement,
    RuntimeCosts,
    describe_costs,
    fit_polynomial,
)
from mmcompile.costmodel.cluster import Interconnect
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.costmodel.load import Load, Polynomial
from mmcompile.errors import ConfigError

LOADS = [Load(tokens=float(n * t), squares=float(n * t * t)) for t in (64, 256, 1024) for n in (1, 4)]
BLOCK = Polynomial(fixed=2e-4, per_token=3e-6, per_square=5e-10)


def costs(kind: str = "language_model.layers-00000001", factor: float = 1.0) -> KindCosts:
    points = [
        Measurement(
            load=load,
            times=LayerTimes(
                forward_s=BLOCK.at(load) * factor,
                input_grad_s=BLOCK.at(load) * factor * 1.2,
                weight_grad_s=BLOCK.at(load) * factor * 0.8,
            ),
        )
        for load in LOADS
    ]
    return KindCosts.fitted(kind, "model.layers.0", points)


RUNTIME = RuntimeCosts(
    forward_s=5e-5,
    backward_s=8e-5,
    message_s=3e-5,
    message_s_per_byte=5e-10,
    step_s=3e-3,
    optimizer_s_per_byte=6e-10,
    optimizer_s_per_tensor=2e-5,
    optimizer="AdamW",
    link=Interconnect(bytes_per_s=1e9, latency_s=2e-4, source="test"),
)
CALIBRATION = Calibration(
    device="cpu",
    processor="Xeon",
    dtype="float32",
    torch="2.13.0",
    mmcompile="0.1.0",
    kinds=(costs(), costs("encoder.blocks-00000002", 2.0)),
    hosts=(HostCosts(model="Llava", seconds=Polynomial(fixed=1e-3)),),
    runtime=RUNTIME,
)


@settings(max_examples=50)
@given(*(st.floats(1e-9, 1e-3),) * 3)
def test_a_fit_finds_the_polynomial_the_points_lie_on(fixed: float, per_token: float, per_square: float) -> None:
    made = Polynomial(fixed=fixed, per_token=per_token, per_square=per_square * 1e-3)
    found = fit_polynomial(LOADS, [made.at(load) for load in LOADS])
    for load in [*LOADS, Load(tokens=4096.0, squares=4096.0**2)]:
        assert found.at(load) == pytest.approx(made.at(load), rel=1e-6)


def test_a_fit_has_no_negative_coefficient_and_minds_relative_errors() -> None:
    falling = fit_polynomial(LOADS, [1e-3 / load.tokens for load in LOADS])
    assert min(falling.fixed, falling.per_token, falling.per_square) >= 0
    # Noise of 10% at the small end must not vanish beside the large end.
    seconds = [BLOCK.at(load) * (1.1 if index % 2 else 0.9) for index, load in enumerate(LOADS)]
    found = fit_polynomial(LOADS, seconds)
    assert all(
        found.at(load) / value - 1 == pytest.approx(0, abs=0.25) for load, value in zip(LOADS, seconds, strict=True)
    )


def test_sequences_of_one_length_leave_squares_out() -> None:
    loads = [Load(tokens=100.0 * images, squares=10_000.0 * images) for images in (1, 2, 4)]
    found = fit_polynomial(loads, [1e-3 + 2e-5 * load.tokens for load in loads])
    assert found.per_square == 0
    assert found.per_token == pytest.approx(2e-5)


def test_nothing_measured_costs_nothing() -> None:
    assert fit_polynomial(LOADS, [0.0] * len(LOADS)) == Polynomial()


def test_times_are_those_of_the_polynomials_and_none_for_what_was_not_measured() -> None:
    load = Load(tokens=500.0, squares=500.0**2)
    times = CALIBRATION.times("encoder.blocks-00000002", load)
    assert times is not None
    assert times.forward_s == pytest.approx(2 * BLOCK.at(load))
    assert times.backward_s == pytest.approx(4 * BLOCK.at(load))
    assert CALIBRATION.times("encoder.blocks-00000002", load, tp=2) is None
    assert CALIBRATION.times("projector.linear-00000003", load) is None


def test_the_fit_error_is_reported() -> None:
    exact = costs()
    assert exact.max_error < 1e-6
    slower = replace(exact.measurements[0].times, forward_s=exact.measurements[0].times.forward_s * 2)
    points = [replace(exact.measurements[0], times=slower), *exact.measurements[1:]]
    bent = KindCosts.fitted("k", "l", points)
    assert bent.max_error > 0.05
    assert bent.median_error <= bent.max_error


def test_json_and_files_round_trip(tmp_path: Path) -> None:
    assert Calibration.from_json(CALIBRATION.to_json()) == CALIBRATION
    CALIBRATION.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == CALIBRATION
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


def _changed(**fields: object) -> str:
    return json.dumps({**json.loads(CALIBRATION.to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "file is no calibration: .*; measure again with `mmcompile profile`"),
        ("[]", "file has calibration version None, this mmcompile reads 1"),
        (_changed(version=99), "file has calibration version 99, this mmcompile reads 1"),
        (_changed(dtype=5), r"file is no calibration: Expected `str`, got `int` - at `\$.dtype`"),
        (_changed(kinds=[{}]), r"missing required field `kind` - at `\$.kinds\[0\]`"),
    ],
)
def test_what_is_no_calibration_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Calibration.from_json(text, where="file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read calibration .*none\.json: No such file"):
        Calibration.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "H100"), ("dtype", "bfloat16"), ("torch", "2.12.0"), ("mmcompile", "0.2.0"), ("processor", "EPYC")],
)
def test_it_is_refused_where_it_does_not_hold(monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> None:
    here = {"device": "cpu", "dtype": "float32"}
    versions = {"torch": "2.13.0", "mmcompile": "0.1.0"}
    monkeypatch.setattr(calibration, "installed", versions.get)
    CALIBRATION.check(**here)
    CALIBRATION.check(**here, processor="Xeon")
    if field in versions:
        versions[field] = value
    else:
        here[field] = value
    with pytest.raises(ConfigError, match=f"measured with {field} .*, wanted is {value}; measure again"):
        CALIBRATION.check(**here)


def test_a_plan_says_what_was_measured() -> None:
    kinds = {"vision": ("encoder.blocks-00000002",) * 4, "language_model": ("language_model.layers-00000001",)}
    assert describe_costs(None, kinds) == "analytic"
    assert describe_costs(CALIBRATION, kinds) == (
        "measured on cpu (Xeon), float32, torch 2.13.0: 2 of 2 layer kinds, fit error median 0.0%, max 0.0%"
    )
    more = {**kinds, "projector": ("projector.linear-00000003",)}
    assert describe_costs(CALIBRATION, more).endswith("max 0.0%; analytic: projector.linear-00000003")
    assert describe_costs(CALIBRATION, {"projector": ("projector.linear-00000003",)}) == (
        "analytic: the calibration for cpu float32 knows none of the 1 layer kinds"
    )


def test_it_prints_as_a_table() -> None:
    lines = str(CALIBRATION).splitlines()
    assert lines[0] == "measured on cpu (Xeon), float32, torch 2.13.0, mmcompile 0.1.0"
    assert lines[3].split() == [
        "language_model.layers-00000001", "64..4096", "14.585", "17.502", "11.668", "6", "0.0%", "0.0%",
    ]  # fmt: skip
    assert lines[-1] == "optimizer   AdamW: 0.60 ns a byte, 20 us a tensor"
