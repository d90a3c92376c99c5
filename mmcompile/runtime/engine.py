"""`Engine`: trains a model over several processes, one call a step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from mmcompile import errors
from mmcompile.errors import ConfigError, EngineError
from mmcompile.plan.placement import Placement
from mmcompile.plan.simulator.simulate import Event
from mmcompile.runtime import checkpoint
from mmcompile.runtime.balance_process import AsideBalancer
from mmcompile.runtime.checkpoint import Checkpoint, TrainerState
from mmcompile.runtime.commands import Close, Done, Reduction, Refuse, Setup, Step
from mmcompile.runtime.follower import Follower
from mmcompile.runtime.leader import Leader
from mmcompile.runtime.metrics import StepMetrics, StepTotals
from mmcompile.runtime.optimizer import OptimizerSpec, SchedulerFactory, scheduler_after
from mmcompile.runtime.session import Session, open_session
from mmcompile.runtime.source import PatternSource
from mmcompile.runtime.step_planner import Collate, Costs, PlannedStep, StepPlanner
from mmcompile.runtime.user_model import UserModel
from mmcompile.step.balance.balancer import Balancer
from mmcompile.step.balance.baselines import Arrival
from mmcompile.step.balance.correction import Corrector
from mmcompile.step.collate import Sample, Value, collate
from mmcompile.step.step_plan import StepPlan

DEFAULT_OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)


class Engine:
    """Trains a model whose stages run on several ranks.

    In a plain script, this process is rank 0 and starts the others on this machine. Under torchrun (or any launcher that
    sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) every process makes the engine and makes the same calls; rank 0's
    arguments count, those of other ranks are ignored.

    After an EngineError the engine is over: all ranks were stopped. A BatchError, ConfigError or CheckpointError leaves it
    as it was.

    Random numbers in a stage (dropout) depend on the seed given to `torch.manual_seed` before, the step, the first sample of the
    microbatch and the stage, not on the rank or replica.

    Args:
        placement: the stages of a plan by rank (rank 0 is this process), and the number of microbatches of a step.
        source: the stage programs (rank 0).
        model: the user's module, for `save` and `state_dict`; None if there is only a source.
        pad: padding value by key of a sample (`{"input_ids": tokenizer.pad_token_id}`).
        collate: joins samples to a microbatch in another way; `pad` has no effect then, and must be left out.
        balancer: decides which replica computes which sample, and in which microbatch; arrival order by default. An
            `AsideBalancer` does so in a process of its own during `train`.
        costs: of samples, for the balancer; needed where encoders are towers of their own.
        corrector: learns from measured times what samples cost. Steps then depend on the machine, not on their samples alone.
        check_rows: send with every row between towers the sample it is of, and check it: slower, for debugging.
        optimizer: a torch.optim class, or a functools.partial of one with keyword arguments.
        scheduler: makes a learning-rate scheduler for an optimizer; stepped after each step.
        clip_norm: largest global gradient norm, if clipped.
        reduction: how gradients of microbatches are added up. "fast" as torch does, in the parameter's dtype. "fp64" in float64,
            rounded once; 8 bytes of memory an element while a step runs. "fixed" in whole numbers, rounded once; 16 bytes. With
            "fixed", losses, gradients and parameters have the same bits however the same microbatches are spread over replicas;
            gradients of 2^23 or more, infinite ones and NaN are an EngineError. Precision: `mmcompile.runtime.arithmetic`.
        compile: run stages through torch.compile(backend="inductor").
        device: "cpu" or "cuda"; None takes cuda where every rank gets one.

    Raises:
        ConfigError: the launcher's processes do not fit the plan, or an optimizer cannot travel.
        EngineError: a worker could not start.
    """

    def __init__(
        self,
        placement: Placement,
        source: PatternSource,
        *,
        model: nn.Module | None = None,
        pad: Mapping[str, int | float] | None = None,
        collate: Collate | None = None,
        balancer: Balancer | None = None,
        costs: Costs | None = None,
        corrector: Corrector | None = None,
        check_rows: bool = False,
        optimizer: Callable[..., torch.optim.Optimizer] = DEFAULT_OPTIMIZER,
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        reduction: Reduction = "fast",
        compile: bool = False,
        device: str | None = None,
    ) -> None:
        if reduction not in get_args(Reduction):
            raise ConfigError(f"reduction is {reduction!r}; wanted one of {', '.join(get_args(Reduction))}")
        spec = OptimizerSpec.of(optimizer)
        setup = Setup(
            stages=placement.stages,
            schedule=placement.schedule,
            optimizer=spec,
            clip_norm=clip_norm,
            compiled=compile,
            check_rows=check_rows,
            reduction=reduction,
        )
        if collate is not None and pad is not None:
            raise ConfigError("pad has no effect together with collate, which joins samples: leave one of them out")
        self._source = source
        self._user = UserModel(module=model, source=source)
        self._balancer = balancer or Arrival()
        self._planner = StepPlanner(
            placement,
            source,
            collate=collate or functools.partial(_collate, pad),
            balancer=self._balancer,
            costs=costs,
            corrector=corrector,
        )
        self._setup = setup
        self._scheduler_factory = scheduler
        self._num_steps = 0
        self._seed = torch.initial_seed()
        self._events: list[Event] = []
        self._session = open_session(placement.stages, device)
        atexit.register(_close, weakref.ref(self), os.getpid())
        try:
            self._side = self._session.call(functools.partial(_take_side, self._session, setup))
            self._leader = self._side if isinstance(self._side, Leader) else None
            self._initial_hyper = self._side.rank.optimizer.hyper
            self._scheduler = self._make_scheduler(self._leader)
        except BaseException:
            self._session.close(None)
            raise
        atexit.register(_close, weakref.ref(self), os.getpid())

    @property
    def rank(self) -> int:
        """This process; 0 in a plain script."""
        return self._session.rank

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return self._num_steps

    @property
    def learning_rate(self) -> float:
        """Of the next step (on ranks other than 0, of the last)."""
        return float(self._side.rank.optimizer.hyper["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._side.rank.optimizer.hyper = {**self._side.rank.optimizer.hyper, "lr": value}

    def step(self, samples: Sequence[Sample], *, trace: bool = False) -> StepMetrics:
        """Train on samples: forward, backward, gradient clipping, one optimizer update.

        Args:
            samples: one dict a conversation, as a processor returns it.
            trace: measure every action, for `trace()`.

        Raises:
            BatchError: the samples do not fit the model; nothing happened.
            EngineError: a rank failed; the engine is over.
        """
        start = time.perf_counter()
        if self._leader is None:
            return self._follow_step(start)
        with self._refusing(self._leader):
            planned = self._plan(self._num_steps + 1, samples)
        return self._lead_step(self._leader, planned, start, waited_s=planned.seconds, trace=trace)

    def train(self, batches: Iterable[Sequence[Sample]], *, trace: Container[int] = ()) -> Iterator[StepMetrics]:
        """A step for each batch. While one runs, a thread reads the next batch and plans its step.

        Args:
            batches: samples of each step, as for `step` (ranks other than 0: ignored).
            trace: numbers of the steps in which to measure every action, for `trace()`.

        Raises:
            BatchError: the samples of a step do not fit the model; the steps before it are done.
            EngineError: a rank failed; the engine is over.
        """
        if self._leader is None:
            yield from self._follow_train()
            return
        leader = self._leader
        batches = iter(batches)
        if isinstance(self._balancer, AsideBalancer):
            self._balancer.start()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-planner") as ahead:
            upcoming = ahead.submit(self._plan_next, batches, self._num_steps + 1)
            while True:
                start = time.perf_counter()
                with self._refusing(leader):
                    planned = upcoming.result()
                if planned is None:
                    break
                waited_s = time.perf_counter() - start
                upcoming = ahead.submit(self._plan_next, batches, planned.plan.step + 1)
                yield self._lead_step(leader, planned, start, waited_s=waited_s, trace=planned.plan.step in trace)
        self._session.call(functools.partial(leader.tell, Done(call="train")))

    def trace(self) -> list[Event]:
        """Measured actions of all ranks in the last step that was traced, on one clock (rank 0 only)."""
        return self._events

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers by original name, tied names too, on the CPU (empty on ranks other than 0)."""
        if self._leader is None:
            self._take_part("state_dict")
            return {}
        weights = self._session.call(functools.partial(_weights, self._leader, "state_dict"))
        return self._user.complete(weights, self._leader.aliases)

    def pull(self) -> None:
        """Copy the trained weights into the user's model (rank 0)."""
        if self._leader is None:
            self._take_part("pull")
            return
        weights = self._session.call(functools.partial(_weights, self._leader, "pull"))
        self._user.put(weights)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint: the model, loadable with `from_pretrained`, and what `load` needs to go on.

        Raises:
            CheckpointError: the disk is full or the folder not writable; the checkpoint there before is untouched.
        """
        if self._leader is None:
            self._take_part("save")
            return
        leader = self._leader
        weights, state = self._session.call(functools.partial(_weights_and_state, leader))
        trainer = TrainerState(
            step=self._num_steps,
            optimizer=self._setup.optimizer,
            hyper=leader.rank.optimizer.hyper,
            seed=self._seed,
        )
        complete = self._user.complete(weights, leader.aliases)
        content = Checkpoint(trainer=trainer, weights=self._user.trainable(complete), optimizer=state)
        checkpoint.write(Path(folder), content, self._user.module, complete)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint: weights (the user's model gets them too), optimizer, step count, learning rate.

        The model must be the one that was trained, with the same frozen weights.

        Raises:
            CheckpointError: none there, damaged, or of another model or optimizer. Nothing was changed.
        """
        if self._leader is None:
            self._take_part("load")
            return
        leader = self._leader
        with self._refusing(leader):
            content = checkpoint.read(Path(folder))
            self._user.check(content, self._setup.optimizer, folder)
        self._user.put(content.weights)
        self._session.call(functools.partial(_load, leader, dict(self._source.parameters()), content.optimizer))
        self._num_steps = content.trainer.step
        self._seed = content.trainer.seed
        leader.rank.optimizer.hyper = self._initial_hyper
        self._scheduler = self._make_scheduler(leader)
        leader.rank.optimizer.hyper = content.trainer.hyper

    def close(self) -> None:
        """End all ranks. Safe to call twice; also called at exit."""
        if isinstance(self._balancer, AsideBalancer):
            self._balancer.close()
        farewell = None if self._leader is None else functools.partial(self._leader.tell, Close())
        self._session.close(farewell)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plan_next(self, batches: Iterator[Sequence[Sample]], step: int) -> PlannedStep | None:
        """Read a batch and plan its step; None after the last."""
        samples = next(batches, None)
        return None if samples is None else self._plan(step, samples)

    def _plan(self, step: int, samples: Sequence[Sample]) -> PlannedStep:
        """Plan a step and its schedule, before anything is sent."""
        assert self._leader is not None, "only rank 0 plans"
        planned = self._planner.plan(step, samples)
        self._leader.rank.schedule(planned.plan)
        return planned

    def _lead_step(
        self, leader: Leader, planned: PlannedStep, start: float, *, waited_s: float, trace: bool
    ) -> StepMetrics:
        """Run a step that is planned.

        Args:
            start: when the user asked for it, by time.perf_counter.
        """
        command = Step(plan=planned.plan, hyper=leader.rank.optimizer.hyper, seed=self._seed, trace=trace)
        totals = self._session.call(functools.partial(self._run, leader, command, planned))
        self._num_steps += 1
        if self._scheduler is not None:
            self._scheduler.step()
        metrics = self._metrics(totals, planned.plan, start)
        self._planner.observe(planned, np.array(totals.microbatch_s))
        return replace(metrics, balance=planned.balance, planning_s=planned.seconds, waited_s=waited_s)

    def _run(self, leader: Leader, command: Step, planned: PlannedStep) -> StepTotals:
        """Install new patterns, run the step, collect its events."""
        microbatches = list(zip(planned.plan.microbatches, planned.prepared, strict=True))
        for microbatch, prepared in microbatches:
            if not leader.knows(microbatch.pattern, microbatch.tower):
                leader.install(prepared.programs, microbatch.tower, self._source.parameters())
        values = [prepared.values for prepared in planned.prepared]
        reads = [leader.reads(m.pattern, m.tower, m.replica) for m in planned.plan.microbatches]
        totals = leader.step(command, (values, reads))
        if command.trace:
            self._events = leader.events()
            leader.tell(Done(call="step"))
        return totals

    def _follow_step(self, start: float) -> StepMetrics:
        """Other ranks: take part in rank 0's step."""
        self._take_part("step")
        return self._followed(start)

    def _follow_train(self) -> Iterator[StepMetrics]:
        """Other ranks: take part in rank 0's steps until it has no more batches."""
        while True:
            start = time.perf_counter()
            if self._take_part("step", "train") == "train":
                return
            yield self._followed(start)

    def _followed(self, start: float) -> StepMetrics:
        assert self._side.rank.last is not None, "a step was followed, but left no totals"
        plan, totals = self._side.rank.last
        self._num_steps = plan.step
        return self._metrics(totals, plan, start)

    def _metrics(self, totals: StepTotals, plan: StepPlan, start: float) -> StepMetrics:
        return StepMetrics(
            step=self._num_steps,
            loss=totals.loss,
            num_tokens=totals.num_tokens,
            num_samples=plan.num_samples,
            seconds=time.perf_counter() - start,
            grad_norm=None if totals.squared_norm is None else math.sqrt(totals.squared_norm),
            busy_s=totals.busy_s,
        )

    def _take_part(self, *calls: str) -> str:
        """Other ranks: follow rank 0 through one call of the user's, one of `calls`; which it was."""
        assert isinstance(self._side, Follower)
        while True:
            command = self._session.call(self._side.follow)
            match command:
                case Refuse():
                    raise getattr(errors, command.error)(command.message)
                case Close():
                    self.close()
                    raise EngineError(f"rank 0 closed the engine while rank {self.rank} was in {calls[-1]}()")
                case Done() | Step(trace=False):
                    done = command.call if isinstance(command, Done) else "step"
                    if done not in calls:
                        raise EngineError(
                            f"rank 0 called {done}() while rank {self.rank} called {calls[-1]}(): make the same calls on all "
                            "ranks"
                        )
                    return done
                case _:
                    pass

    @contextlib.contextmanager
    def _refusing(self, leader: Leader) -> Iterator[None]:
        """Tell ranks that wait in the same call if rank 0 refuses it, so that they raise the same error."""
        try:
            yield
        except Exception as error:
            name = type(error).__name__ if hasattr(errors, type(error).__name__) else EngineError.__name__
            self._session.call(functools.partial(leader.tell, Refuse(error=name, message=str(error))))
            raise

    def _make_scheduler(self, leader: Leader | None) -> LRScheduler | None:
        if self._scheduler_factory is None or leader is None:
            return None
        return scheduler_after(self._num_steps, self._scheduler_factory, leader.rank.optimizer.optimizer)


def _collate(
    pad: Mapping[str, int | float] | None, samples: Sequence[Sample], names: Sequence[int]
) -> dict[str, Value]:
    return collate(samples, pad, names)


def _take_side(session: Session, setup: Setup) -> Leader | Follower:
    if session.rank == 0:
        return Leader(session.groups, setup, session.board)
    return Follower(session.groups, session.board)


def _weights(leader: Leader, call: str) -> dict[str, Tensor]:
    weights = leader.weights()
    leader.tell(Done(call=call))
    return weights


def _weights_and_state(leader: Leader) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights, state = leader.weights(), leader.optimizer_state()
    leader.tell(Done(call="save"))
    return weights, state


def _load(leader: Leader, values: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    leader.load(values, state)
    leader.tell(Done(call="load"))


def _close(engine: weakref.ref[Engine], process: int) -> None:
    """At exit: do not leave workers to find out by themselves. A forked child has no say in it."""
    if (alive := engine()) is not None and os.getpid() == process:
        alive.close()
