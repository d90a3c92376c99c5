"""`Engine`: trains a model over several processes, one call a step."""

# `_led` decorates methods of Engine and uses its private ones.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import time
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, Self, TypeAlias, TypeVar, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from mmcompile import errors
from mmcompile.batching.accumulation import NOTHING, AccumulatedStep
from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.correction import Corrector
from mmcompile.batching.step_planner import Collate, Costs, PlannedStep, StepPlanner
from mmcompile.codegen.program import LearningSource, OnWarmUp, ProgramSource
from mmcompile.config import Reduction
from mmcompile.data.collate import Sample
from mmcompile.errors import CheckpointError, ConfigError, EngineError
from mmcompile.planner.plan.placement import Placement
from mmcompile.planner.schedule.simulate import Event
from mmcompile.runtime.checkpoint.checkpoint_folder import make_fresh, resolved, unwritable
from mmcompile.runtime.checkpoint.export import export
from mmcompile.runtime.checkpoint.saving import SaveOrder, Saving
from mmcompile.runtime.checkpoint.trainer_state import Resumed, Stored, TrainerState, encoded
from mmcompile.runtime.commands import CloseEngine, Command, Done, Refuse, Setup, Step
from mmcompile.runtime.controller import Controller
from mmcompile.runtime.executor.totals import metrics_of
from mmcompile.runtime.launch.background_balancer import BackgroundBalancer
from mmcompile.runtime.launch.background_replays import BackgroundReplays
from mmcompile.runtime.launch.session import ProcessGroupSession, open_session
from mmcompile.runtime.monitoring.metrics import StepMetrics, StepTotals
from mmcompile.runtime.optim.optimizer import MASTER, OptimizerSpec, RankOptimizer, SchedulerFactory, scheduler_after
from mmcompile.runtime.optim.param_groups import ParameterGroup
from mmcompile.runtime.user_model import UserModel
from mmcompile.runtime.worker import Worker

_Batch: TypeAlias = tuple[Sequence[Sample], object]
"""A batch: its samples, and the state of the data loader after reading them (None if the loader has no state)."""

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)


def _led(
    followed: Callable[[Engine], T],
) -> Callable[[Callable[Concatenate[Engine, P], T]], Callable[Concatenate[Engine, P], T]]:
    """Decorate a method of the engine so that rank 0 alone runs it, while the other ranks execute the commands it sends.

    On the other ranks the method returns `followed(engine)`. If it fails on rank 0, all ranks raise the same error.
    """

    def decorate(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
        @functools.wraps(method)
        def call(self: Engine, *args: P.args, **kwargs: P.kwargs) -> T:
            if self._controller is None:
                self._follow(method.__name__)
                return followed(self)
            with self._refusing():
                result = method(self, *args, **kwargs)
            self._tell(Done(call=method.__name__))
            return result

        return call

    return decorate


class Engine:
    """Trains a model whose stages run on several ranks.

    In a plain script, this process is rank 0 and starts the others on this machine. Under torchrun (or any launcher that
    sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) every process makes the engine and makes the same calls; rank 0's
    arguments count, those of other ranks are ignored.

    After an EngineError the engine cannot be used: all ranks were stopped. A BatchError, ConfigError or CheckpointError leaves
    it as it was.

    Random numbers in a stage (dropout) depend on the seed given to `torch.manual_seed` before, the step, the first sample of the
    microbatch and the stage, not on the rank or replica.

    Args:
        placement: stages of a plan by rank (rank 0 is this process), and the number of microbatches of a step.
        source: makes the stage programs; used on rank 0 only.
        model: the user's module, for `save` and `state_dict`; None if there is only a source.
        pad: padding value by key of a sample (`{"input_ids": tokenizer.pad_token_id}`).
        collate: function that joins samples to a microbatch, instead of `pad`.
        balancer: assigns samples to replicas and microbatches; arrival order by default. A `BackgroundBalancer` does so in a
            process of its own during `train`.
        costs: costs of samples for the balancer; required if encoders form balance groups of their own.
        corrector: adjusts the costs to measured times. Steps then depend on the machine, not on their samples alone.
        check_rows: send the sample's number with every row between balance groups, and check it: slower, for debugging.
        optimizer: a class of torch.optim, or any importable subclass of torch.optim.Optimizer; or a functools.partial of one with
            keyword arguments. It updates each parameter as a whole; one that requires a closure, or reads all parameters, does
            not work.
        groups: parameters with settings of their own, chosen by patterns over names; a parameter is in the first group that
            matches. The optimizer passed to a scheduler has these groups in this order, then one of all other parameters.
        scheduler: makes a learning-rate scheduler for an optimizer; stepped after each update.
        clip_norm: largest gradient norm over all parameters of all ranks; None does not clip.
        accumulate: calls of `step` (batches of `train`) to an update. Gradients are those of one step on all their samples: means
            over all valid tokens of the calls, not means of the calls' means, as Hugging Face's Trainer does with
            `gradient_accumulation_steps`. Ranks exchange their sums only in the call that updates.
        master_weights: update bfloat16 and float16 parameters in float32: the optimizer keeps a float32 master of each, gradients
            of microbatches and replicas are added up in float32, and parameters are masters rounded after every update. A mapping
            gives initial float32 values by name, those of the model before `model.to(torch.bfloat16)`; others start from the
            parameters. 4 bytes an element, 4 more while gradients are added up, and optimizer state in float32. Losses are
            not scaled, so that small float16 gradients are lost.
        shard_optimizer: keep optimizer state (and masters) of a parameter that several ranks hold on one of them, balanced by
            bytes; it alone updates the parameter, and sends the new value to the others while they continue (ZeRO stage 1).
            Results have the same bits if the optimizer's update of a parameter depends on that parameter alone.
        reduction: how gradients of microbatches are added up. "fast" as torch does, in the parameter's dtype. "fp64" in float64,
            rounded once; 8 bytes of memory an element while a step runs. "fixed" in whole numbers, rounded once; 16 bytes. With
            "fixed", losses, gradients and parameters have the same bits however the same microbatches are spread over replicas;
            gradients of 2^23 or more, infinite ones and NaN are an EngineError. Precision: `mmcompile.runtime.optim.arithmetic`.
            Only "fast" goes with replicas that share parameters (fsdp): the sum over replicas of one microbatch's gradients is
            rounded to the parameter's dtype there before microbatches are added up.
        compile: compile stages by torch.compile(backend="inductor").
        device: "cpu" or "cuda"; None chooses cuda if there is one for every rank.

    Raises:
        ConfigError: the launcher's processes do not fit the plan, an optimizer cannot be sent to workers, a group matches no
            trainable parameter or has settings unknown to the optimizer, or an option would have no effect.
        EngineError: a worker could not start.
    """

    def __init__(
        self,
        placement: Placement,
        source: ProgramSource,
        *,
        model: nn.Module | None = None,
        pad: Mapping[str, int | float] | None = None,
        collate: Collate | None = None,
        balancer: Balancer | None = None,
        costs: Costs | None = None,
        corrector: Corrector | None = None,
        check_rows: bool = False,
        optimizer: Callable[..., torch.optim.Optimizer] = DEFAULT_OPTIMIZER,
        groups: Sequence[ParameterGroup] = (),
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        master_weights: bool | Mapping[str, Tensor] = False,
        shard_optimizer: bool = False,
        reduction: Reduction = "fast",
        compile: bool = False,
        device: str | None = None,
    ) -> None:
        if reduction not in get_args(Reduction):
            raise ConfigError(f"reduction is {reduction!r}; wanted one of {', '.join(get_args(Reduction))}")
        sharing = [stage.program_name for stage in placement.stages if stage.sharing]
        if sharing and reduction != "fast":
            raise ConfigError(
                f"reduction={reduction!r} rounds sums over replicas once, and replicas of {sharing[0]} share its parameters "
                "(fsdp), whose gradients are added up in each backward: use reduction='fast', or plan without fsdp"
            )
        if accumulate < 1:
            raise ConfigError(f"accumulate is {accumulate}; wanted the number of calls to an update, 1 or more")
        spec = OptimizerSpec.of(optimizer, groups, master_weights=master_weights is not False)
        self._source = source
        self._user = UserModel(module=model, source=source)
        masters = self._user.masters_for(spec, master_weights)
        if shard_optimizer and len({rank for stage in placement.stages for rank in stage.ranks}) == 1:
            raise ConfigError(
                "shard_optimizer has no effect on one rank, which holds every parameter alone: leave it out"
            )
        setup = Setup(
            stages=placement.stages,
            optimizer=spec,
            clip_norm=clip_norm,
            compiled=compile,
            check_rows=check_rows,
            reduction=reduction,
            shard_optimizer=shard_optimizer,
        )
        if collate is not None and pad is not None:
            raise ConfigError("pad has no effect together with collate, which joins samples: leave one of them out")
        self._balancer = balancer or Arrival()
        self._planner = StepPlanner(
            placement, source, collate=collate, balancer=self._balancer, pad=pad, costs=costs, corrector=corrector
        )
        self._replays: BackgroundReplays | None = None
        """Process that replays the model's Python for `train`; None until a capture was learned."""
        self._setup = setup
        self._scheduler_factory = scheduler
        self._accumulate = accumulate
        self._num_steps = 0
        self._num_samples = 0
        self._data: object = None
        """State of the data after the batch of the last step; None if it has none."""
        self._before = NOTHING
        """Calls since the last update, whose gradients are accumulated; used on rank 0 only."""
        self._seed = torch.initial_seed()
        self._events: list[Event] = []
        self._session = open_session(placement.stages, device)
        atexit.register(_close, weakref.ref(self), os.getpid())
        try:
            self._controller, self._worker = self._session.call(_start, self._session, setup)
            if self._controller is not None:
                self._controller.await_holders({f"{MASTER}/{name}": tensor for name, tensor in masters.items()})
            self._initial_hyper = self._optimizer.hyper
            self._scheduler = self._make_scheduler()
        except BaseException:
            self._session.close(None)
            raise
        atexit.register(_close, weakref.ref(self), os.getpid())

    @property
    def rank(self) -> int:
        """Rank of this process; 0 in a plain script."""
        return self._session.rank

    @property
    def num_steps(self) -> int:
        """Number of steps done, which is the number of updates; with `accumulate`, a step has several calls."""
        return self._num_steps

    @property
    def num_samples(self) -> int:
        """Number of samples trained on since the first step, including those before the checkpoint that was loaded."""
        return self._num_samples

    @property
    def saving(self) -> Saving | None:
        """The last save that was begun; None before the first."""
        return self._worker.checkpoints.saving

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step (on ranks other than 0, of the last), for parameters in none of the `groups`."""
        return self.learning_rates[-1]

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.learning_rates = (*self.learning_rates[:-1], value)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Learning rates of the next step (on ranks above 0: of the last), by group of `groups`, then of other parameters."""
        return tuple(float(group["lr"]) for group in self._optimizer.hyper)

    @learning_rates.setter
    def learning_rates(self, values: Sequence[float]) -> None:
        hyper = self._optimizer.hyper
        if len(values) != len(hyper):
            raise ConfigError(f"got {len(values)} learning rates; wanted one for each of the {len(hyper)} groups")
        self._optimizer.hyper = [{**g, "lr": value} for g, value in zip(hyper, values, strict=True)]

    def step(self, samples: Sequence[Sample], *, update: bool | None = None, trace: bool = False) -> StepMetrics:
        """Train on samples: forward, backward, gradient clipping, one optimizer update.

        Args:
            samples: one dict a conversation, as a processor returns it.
            update: False adds gradients to those of the calls since the last update, and changes no parameter; True updates with
                all of them. None updates after every `accumulate` calls.
            trace: measure every action, for `trace()`.

        Raises:
            BatchError: the samples do not fit the model; the call had no effect.
            EngineError: a rank failed; the engine cannot be used any more.
        """
        start = time.perf_counter()
        if self._controller is None:
            self._follow("step")
            return self._followed(start)
        with self._refusing():
            self._raise_failed_save()
            update = self._updates(self._before, update)
            planned = self._planner.plan(self._num_steps + 1, samples, update=update, before=self._before)
        return self._run(planned, start, waited_s=planned.seconds, trace=trace)

    def train(self, batches: Iterable[Sequence[Sample]], *, trace: Container[int] = ()) -> Iterator[StepMetrics]:
        """Yield the metrics of a `step` on each batch. While a step runs, a thread reads and plans the next batch.

        With `accumulate`, the last batch updates, however many there were since the last update; to find the last one, the thread
        reads one batch further.

        Args:
            batches: samples of each call, as for `step` (ranks other than 0: ignored). If they have a `state_dict()`, as
                torchdata's StatefulDataLoader has, `save` saves it as it was after the last step, though more were read.
            trace: numbers of the steps in which to measure every action, for `trace()`.

        Raises:
            BatchError: the samples of a step do not fit the model; the steps before it are done.
            EngineError: a rank failed; the engine cannot be used any more.
        """
        if self._controller is None:
            start = time.perf_counter()
            while self._follow("step", "train") != "train":
                yield self._followed(start)
                start = time.perf_counter()
            return
        read = _with_states(batches)
        marked = _with_last(read) if self._accumulate > 1 else ((batch, False) for batch in read)
        if isinstance(self._balancer, BackgroundBalancer):
            self._balancer.start()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-planner") as ahead:
            upcoming = ahead.submit(self._plan_next, marked, self._num_steps + 1, self._before)
            while True:
                start = time.perf_counter()
                with self._refusing():
                    self._raise_failed_save()
                    found = upcoming.result()
                if found is None:
                    break
                planned, state = found
                waited_s = time.perf_counter() - start
                following = planned.plan.step + planned.plan.update
                upcoming = ahead.submit(self._plan_next, marked, following, planned.after)
                metrics = self._run(planned, start, waited_s=waited_s, trace=planned.plan.step in trace)
                self._data = state
                yield metrics
        self._tell(Done(call="train"))

    @_led(lambda engine: tuple[str, ...]())
    def warm_up(self, batches: Iterable[Sequence[Sample]], *, on_capture: OnWarmUp | None = None) -> tuple[str, ...]:
        """Capture what steps on `batches` need, and send the programs to their ranks, so that the first steps do neither.

        Nothing is trained. Of batches that differ in sizes and media, what holds for all of them is learned at once: give the
        first few, as different as the data are.

        Args:
            batches: samples of some of the coming steps, each as for `step` (ranks other than 0: ignored).
            on_capture: called before each capture with its number, about how many there will be, and its reason.

        Returns:
            The reason for each capture, with the line of Python that decided; empty on ranks other than 0.

        Raises:
            BatchError: samples do not fit the model.
        """
        steps, source = [list(samples) for samples in batches], self._source
        if not isinstance(source, LearningSource):
            return ()
        known = len(source.reasons)
        source.warm_up([batch for samples in steps for batch in self._planner.microbatches(samples)], on_capture)
        for samples in steps:
            planned = self._planner.plan(self._num_steps + 1, samples)
            self._session.call(self._rank_0.install_for, planned, source.parameters())
        return tuple(source.reasons[known:])

    def trace(self) -> list[Event]:
        """Return the measured actions of all ranks in the last traced step, on one clock; an empty list on ranks other than 0."""
        return self._events

    @_led(lambda engine: {})
    def state_dict(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by original name, tied names too, on the CPU (empty on ranks other than 0)."""
        return self._user.complete(self._session.call(self._rank_0.weights), self._rank_0.aliases)

    @_led(lambda engine: None)
    def pull(self) -> None:
        """Copy the trained weights into the user's model of rank 0; all ranks must call this."""
        self._user.put(self._session.call(self._rank_0.weights))

    @_led(lambda engine: engine._last_saving())
    def save(self, folder: str | os.PathLike[str], *, data: object = None, wait: bool = True) -> Saving:
        """Write a checkpoint with all that `load` needs. Every rank writes its part; all must see the folder.

        It is in the format of torch.distributed.checkpoint, so other tools can read it. `export` writes a model for
        `from_pretrained`. An earlier checkpoint in the folder stays intact until the new one is complete.

        Args:
            data: state of the data: plain values and tensors, which `load` returns. By default the `state_dict()` of what
                `train` was given, if it has one, as it was after the batch of the last step.
            wait: block until the checkpoint is on the disk. Otherwise this returns once each rank has a copy of its part in
                memory, and training may continue; the next save, load or close waits for the save.

        Raises:
            CheckpointError: the disk is full or the folder not writable; the checkpoint there before is untouched. With `wait`
                False, the next call of the engine raises it, or `Saving.wait`.
        """
        self._finish_saving()
        if self._before.num_parts:
            raise CheckpointError(
                f"cannot save in the middle of a step: gradients of {self._before.num_parts} calls wait for an update, and "
                "checkpoints hold none; save after a call that updates (step(update=True))"
            )
        order = self._save_order(Path(folder), self._data if data is None else data, copies=not wait)
        trainable = self._user.trainable(self._source.parameters())
        saving = self._session.call(self._rank_0.save, order, trainable)
        if wait:
            saving.wait()
        return saving

    @_led(lambda engine: None)
    def export(self, folder: str | os.PathLike[str]) -> None:
        """Write the current model, gathered on rank 0, without the state of training.

        Models of transformers and composed models are written by their `save_pretrained` (of a model of peft the adapters
        alone), any other as model.safetensors with all names.

        Raises:
            CheckpointError: the disk is full or the folder not writable; earlier contents are untouched.
        """
        self._raise_failed_save()
        weights = self._session.call(self._rank_0.weights)
        export(Path(folder), self._user.module, self._user.complete(weights, self._rank_0.aliases))

    @_led(lambda engine: engine._followed_load())
    def load(self, folder: str | os.PathLike[str]) -> Resumed:
        """Resume from a checkpoint: weights (also of the user's model), optimizer, step count, learning rate.

        Any plan and number of ranks may have saved it: every rank reads the parts that it holds. The model must be the one that
        was trained, with the same frozen weights, which are not saved but compared by a sample of each.

        Returns:
            The position of training, from which the data can resume.

        Raises:
            CheckpointError: the folder has no checkpoint, or one that is damaged or of another model or optimizer. Model and
                engine are unchanged.
        """
        self._finish_saving()
        stored = Stored.find(resolved(Path(folder)))
        self._user.check(stored, self._setup.optimizer, folder)
        self._user.check_weights(stored)
        if failure := self._session.call(self._rank_0.read, stored):
            raise CheckpointError(failure)
        self._user.read(stored)
        self._session.call(self._rank_0.apply, stored)
        resumed = self._resume(stored.trainer)
        self._optimizer.hyper = self._initial_hyper
        self._scheduler = self._make_scheduler()
        self._optimizer.hyper = stored.trainer.hyper
        return resumed

    def close(self) -> None:
        """End all ranks, once a save in progress is on the disk. Safe to call twice; also called at exit.

        Raises:
            CheckpointError: the save failed. All ranks have ended.
        """
        try:
            if not self._session.is_over:
                self._finish_saving()
        finally:
            if isinstance(self._balancer, BackgroundBalancer):
                self._balancer.close()
            if self._replays is not None:
                self._replays.close()
            farewell = None if self._controller is None else functools.partial(self._controller.tell, CloseEngine())
            self._session.close(farewell)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan_next(
        self, batches: Iterator[tuple[_Batch, bool]], step: int, before: AccumulatedStep
    ) -> tuple[PlannedStep, object] | None:
        """Plan the next batch of step `step`, after the batches `before`; return (plan, state of the data loader), or None."""
        if (found := next(batches, None)) is None:
            return None
        if self._replays is None and isinstance(self._source, LearningSource) and self._source.learns:
            self._replays = BackgroundReplays(self._source.model)
            self._replays.start()
            self._source.replay_elsewhere(self._replays.fill)
        (samples, state), is_last = found
        update = is_last or self._updates(before, None)
        return self._planner.plan(step, samples, update=update, before=before), state

    def _run(self, planned: PlannedStep, start: float, *, waited_s: float, trace: bool) -> StepMetrics:
        plan = planned.plan
        totals = self._session.call(self._run_on_ranks, planned, trace)
        self._before = planned.after
        self._num_samples += plan.num_samples
        if plan.update:
            self._num_steps += 1
            if self._scheduler is not None:
                self._scheduler.step()
        metrics = metrics_of(plan, totals, start)
        self._planner.observe(planned, np.array(totals.microbatch_s))
        return replace(metrics, balance=planned.balance, planning_s=planned.seconds, waited_s=waited_s)

    def _run_on_ranks(self, planned: PlannedStep, trace: bool) -> StepTotals:
        hyper = self._optimizer.hyper
        totals = self._rank_0.step(planned, self._source.parameters(), hyper=hyper, seed=self._seed, trace=trace)
        if trace:
            self._events = self._rank_0.events()
            self._rank_0.tell(Done(call="step"))
        return totals

    def _followed(self, start: float) -> StepMetrics:
        assert self._worker.last is not None, "a step was followed, but left no totals"
        plan, totals = self._worker.last
        self._num_steps = plan.step if plan.update else plan.step - 1
        self._num_samples += plan.num_samples
        return metrics_of(plan, totals, start)

    def _updates(self, before: AccumulatedStep, update: bool | None) -> bool:
        """Return whether a call of `step` updates parameters: `update` if given, else true once enough batches were added up."""
        return before.num_parts + 1 >= self._accumulate if update is None else update

    def _follow(self, *calls: str) -> str:
        """On a rank above 0, execute rank 0's commands until one of the methods `calls` is complete there; return its name."""
        while True:
            command = self._session.call(self._worker.follow)
            match command:
                case Refuse():
                    raise getattr(errors, command.error)(command.message)
                case CloseEngine():
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
    def _refusing(self) -> Generator[None]:
        """Return a context that sends rank 0's error in a call to the other ranks, so that they raise the same error."""
        try:
            yield
        except Exception as error:
            if not self._session.is_over:
                name = type(error).__name__ if hasattr(errors, type(error).__name__) else EngineError.__name__
                self._tell(Refuse(error=name, message=str(error)))
            raise

    def _tell(self, command: Command) -> None:
        self._session.call(self._rank_0.tell, command)

    @property
    def _rank_0(self) -> Controller:
        assert self._controller is not None, "only rank 0 leads"
        return self._controller

    @property
    def _optimizer(self) -> RankOptimizer:
        return self._worker.state.optimizer

    def _save_order(self, folder: Path, data: object, *, copies: bool) -> SaveOrder:
        trainer = TrainerState(
            step=self._num_steps,
            optimizer=self._setup.optimizer,
            hyper=self._optimizer.hyper,
            seed=self._seed,
            num_samples=self._num_samples,
            frozen=self._user.frozen(),
        )
        state = None if data is None else encoded(data)
        target = resolved(folder)
        try:
            fresh = make_fresh(target)
        except OSError as error:
            raise unwritable(folder, error) from error
        return SaveOrder(folder=target, fresh=fresh, trainer=trainer, tied=self._user.tied(), data=state, copies=copies)

    def _resume(self, trainer: TrainerState) -> Resumed:
        self._num_steps, self._num_samples = trainer.step, trainer.num_samples
        self._seed, self._before = trainer.seed, NOTHING
        self._data = self._worker.checkpoints.data
        return Resumed(num_steps=self._num_steps, num_samples=self._num_samples, data=self._data)

    def _finish_saving(self) -> None:
        if self.saving is not None:
            self.saving.wait()

    def _raise_failed_save(self) -> None:
        if self.saving is not None and self.saving.done:
            self.saving.wait()

    def _last_saving(self) -> Saving:
        assert self.saving is not None, "a save was followed, but none was begun"
        return self.saving

    def _followed_load(self) -> Resumed:
        trainer = self._worker.checkpoints.trainer
        assert trainer is not None, "a load was followed, but nothing was read"
        return self._resume(trainer)

    def _make_scheduler(self) -> LRScheduler | None:
        if self._scheduler_factory is None or self._controller is None:
            return None
        return scheduler_after(self._num_steps, self._scheduler_factory, self._optimizer.optimizer)


@runtime_checkable
class _Stateful(Protocol):
    """Data loader whose position can be saved and restored, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> object: ...


def _with_states(batches: Iterable[Sequence[Sample]]) -> Iterator[_Batch]:
    # A copy: batches are read ahead, which must not change a state yielded before.
    for samples in batches:
        yield samples, copy.deepcopy(batches.state_dict()) if isinstance(batches, _Stateful) else None


def _with_last(batches: Iterator[_Batch]) -> Iterator[tuple[_Batch, bool]]:
    """Yield each batch with a flag that is true for the last batch. One batch is read ahead."""
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch, following is None
        batch = following


def _start(session: ProcessGroupSession, setup: Setup) -> tuple[Controller | None, Worker]:
    if session.rank:
        return None, Worker.join(session.groups, session.board, session.check)
    controller = Controller(session.groups, setup, session.board, session.check)
    return controller, controller.worker


def _close(engine: weakref.ref[Engine], process: int) -> None:
    """Close an engine at interpreter exit, but not in forked children of the process (id `process`) that made the engine."""
    if (alive := engine()) is not None and os.getpid() == process:
        alive.close()
