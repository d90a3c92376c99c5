"""What a job refuses, and which node runs which layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.plans.template_jobs import even_job, even_template, two_chain_job

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.membership import layer_ranges
from mmcompile.planner.resilience.template import Template, TemplateStage


def test_layers_of_each_node() -> None:
    """Two devices a node: the encoder and the first seven layers of the language model share the first node."""
    job = two_chain_job((2,))
    first, second = job.needs(2)
    assert (
        ", ".join(layer_ranges(job.layers[index] for index in np.flatnonzero(first)))
        == "encoder[0:5], language_model[0:7]"
    )
    assert ", ".join(layer_ranges(job.layers[index] for index in np.flatnonzero(second))) == "language_model[7:20]"
    assert job.bytes_of.sum() == 70 + 2800


def broken(**changes: object) -> Template:
    stage = TemplateStage(chain="language_model", first=0, last=12, devices=(0,), seconds=1.0)
    return Template(num_nodes=1, stages=(replace(stage, **changes),), fill_s=0.0, slowest_s=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"templates": ()}, r"templates are for \[\] nodes"),
        ({"templates": (even_template(3, 12), even_template(2, 12))}, r"templates are for \[3, 2\] nodes"),
        ({"fault_tolerance": -1}, "fault tolerance -1 with 1 devices a node"),
        (
            {"fault_tolerance": 2, "num_microbatches": 2},
            "2 microbatches cannot feed the 3 pipelines.*nearest that can is 3",
        ),
        ({"templates": (broken(devices=(1,)),)}, "for 1 nodes puts a stage of language_model on devices"),
        (
            {"templates": (broken(chain="audio"),)},
            r"a stage of layers 0 to 12 of audio; the job knows language_model \(12",
        ),
        ({"templates": (broken(last=13),)}, "a stage of layers 0 to 13"),
        ({"templates": (broken(last=11),)}, r"runs layer language_model\[11\] in 0 stages; wanted 1"),
        ({"templates": (replace(broken(), slowest_s=0.0),)}, "takes 0.0 s a microbatch"),
    ],
)
def test_messages(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(even_job((1,)), **changes)
