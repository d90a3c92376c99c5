"""Two machines, played by network namespaces; and what launchers must say."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from support.paths import ROOT

from mmcompile.errors import ConfigError
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.comm.local_address import address_towards, listen_at
from mmcompile.runtime.engine import Engine

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
ADDRESSES = ("10.213.0.1", "10.213.0.2")
NUM_STEPS = 3

SCRIPT = """
import functools, os, sys
import torch
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from mmcompile.runtime.engine import Engine

torch.manual_seed(0)
model = HandModel(tied=True)
plan = hand_plan(4, vision=3, lm0=0, lm1=1, lm2=2)
optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
with Engine(plan, HandSource(model), model=model, optimizer=optimizer, clip_norm=1.0) as engine:
    for step in range(3):
        loss = engine.step(hand_samples(4, images=(1,), seed=step)).loss
        sys.stdout.write(f"{engine.rank} of {os.environ['LOCAL_WORLD_SIZE']} here: {loss!r}\\n")
        sys.stdout.flush()
    engine.save(sys.argv[1])
"""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable. Neither can reach anything else."""
    names = (f"mmc{os.getpid()}a", f"mmc{os.getpid()}b")
    cables = tuple(f"{name}e" for name in names)
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
                ip("link", "set", cable, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, FileNotFoundError) as error:
            pytest.skip(f"no network namespaces here (root and iproute2 are needed): {error}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        subprocess.run(["ip", "link", "delete", cables[0]], capture_output=True)


@pytest.mark.slow
def test_two_machines_train_as_one_process_does(machines: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", ADDRESSES[0], "--master-port", "29511"]
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *torchrun, "--node-rank", str(node), "script.py", tmp_path / "saved"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, name in enumerate(machines)
    ]
    try:
        said = [process.communicate(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said[0][1] + said[1][1]
    torch.manual_seed(0)
    model = HandModel(tied=True)
    one = hand_plan(4, vision=0, lm0=0, lm1=0, lm2=0)
    with Engine(one, HandSource(model), model=model, optimizer=ADAMW, clip_norm=1.0) as engine:
        losses = [engine.step(hand_samples(4, images=(1,), seed=step)).loss for step in range(NUM_STEPS)]
        trained = engine.state_dict()
    for node, (out, _) in enumerate(said):
        for rank in (2 * node, 2 * node + 1):
            mine = [float(line.partition(": ")[2]) for line in out.splitlines() if line.startswith(f"{rank} of 2 here")]
            assert mine == pytest.approx(losses, rel=1e-12), out
    saved = checkpoint.read(tmp_path / "saved")
    assert saved.trainer.num_samples == 4 * NUM_STEPS
    for name, tensor in saved.weights.items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-12)


def test_ranks_listen_where_others_reach_them() -> None:
    assert listen_at({}) is None
    assert listen_at({"GLOO_SOCKET_IFNAME": "eth1", "MASTER_ADDR": "10.0.0.1"}) == ("interface", "eth1")
    one_machine = {"MASTER_ADDR": "127.0.0.1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert listen_at(one_machine) == ("hostname", "127.0.0.1")
    with pytest.raises(ConfigError, match=r"rank 1 would listen at 127.0.0.1, which other machines cannot reach"):
        listen_at({**one_machine, "WORLD_SIZE": "4"})
    assert address_towards("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is 'no.such.machine.invalid', which this machine finds no way"):
        address_towards("no.such.machine.invalid")


def test_what_ray_gives_each_rank() -> None:
    spec = importlib.util.spec_from_file_location("ray_train", ROOT / "examples" / "ray_train.py")
    assert spec is not None and spec.loader is not None
    ray_train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ray_train)
    placed = ["10.0.0.7", "10.0.0.5", "10.0.0.7", "10.0.0.6", "10.0.0.5"]
    order = ray_train.rank_order(placed)
    assert order == [0, 2, 1, 4, 3]
    given = ray_train.environments([placed[actor] for actor in order], 4711)
    assert [(e["RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"]) for e in given] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
        ("2", "0", "2"),
        ("3", "1", "2"),
        ("4", "0", "1"),
    ]
    shared = {(e["WORLD_SIZE"], e["MASTER_ADDR"], e["MASTER_PORT"]) for e in given}
    assert shared == {("5", "10.0.0.7", "4711")}
    with pytest.raises(ValueError, match="rank 2 is on a, apart from other ranks there"):
        ray_train.environments(["a", "b", "a"], 1)


SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""
SRUN = """#!/bin/bash
# Two machines with one task each; the first call asks where the first machine is.
if [[ " $* " == *" hostname -I "* ]]; then echo "10.0.0.1 192.168.0.1"; exit; fi
while [[ "$1" == --* ]]; do shift; done
for node in 0 1; do SLURM_NNODES=2 SLURM_NODEID=$node SLURM_GPUS_ON_NODE=8 "$@"; done
"""
SAY = """#!/bin/bash
echo "${0##*/} $* [$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT]"
"""


def test_slurm_scripts_say_what_torchrun_and_the_engine_need(tmp_path: Path) -> None:
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "torchrun": SAY, "mmcompile": SAY}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "20007", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [ROOT / "examples" / "slurm.sbatch", "train", "a model", "--steps", "3"]
    done = subprocess.run(["bash", *command], env=job, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"torchrun --nnodes=2 --node-rank={node} --nproc-per-node=8 --master-addr=10.0.0.1 --master-port=20007 "
        "--no-python mmcompile train a model --steps 3 [     ]"
        for node in (0, 1)
    ]
    task = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
    srun = ROOT / "examples" / "srun.sh"
    done = subprocess.run([srun, "train", "a model"], env=job | task, capture_output=True, text=True, check=True)
    assert done.stdout == "mmcompile train a model [5 1 8 4 node1 20007]\n"
