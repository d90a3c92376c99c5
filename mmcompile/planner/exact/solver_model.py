"""The splitting problem in Z3: Boolean order literals for boundaries, clauses for everything else.

For each chain, `x[k][i]` means that the k-th boundary from the end is at most i: the k-th stage from the end begins at or before
layer i. Boundaries fall strictly until they reach 0; from there on stages are empty, so that the number of stages is free. Stages
that are too slow or too big are excluded by clauses of two to four literals over neighbouring boundaries. Most have the form "if
this stage ends at j or later it begins at f or later". Without other demands, unit propagation alone decides them.

Every demand has a literal that its clauses depend on. Solving assumes these literals, so that Z3 can give an unsatisfiable core.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Literal, cast

import z3

from mmcompile.planner.exact.literals import Bit, ChainLiterals, negated
from mmcompile.planner.exact.rules import Cap, Count, Cuts, Devices, InStage, Rule, Unsatisfiable
from mmcompile.planner.exact.seed import least_tails
from mmcompile.planner.exact.split_problem import ExactProblem, Splits, covers, sharing


class Model:
    """Z3 solver for a splitting problem: given a time limit, it finds a split with no slower stage or proves that none exists."""

    def __init__(self, problem: ExactProblem, deadline: float) -> None:
        """Make the solver with the clauses of the problem.

        Raises:
            TimeoutError: the deadline, on the clock of `time.monotonic`, passes while the clauses are made.
        """
        self._problem = problem
        self._deadline = deadline
        # Sums over stages that share ranks need arithmetic; all else is propositional.
        self._groups = sharing(problem)
        self._solver = z3.SolverFor("QF_LRA") if self._groups else z3.SolverFor("QF_FD")
        self._chains = [ChainLiterals.of(self.add, index, chain) for index, chain in enumerate(problem.chains)]
        self._tails = self._tail_literals()
        self._measures: dict[str, z3.ArithRef] = {}
        self._asked = [z3.Bool(f"demand{index}") for index in range(len(problem.demands))]
        for literal, demand in zip(self._asked, problem.demands, strict=True):
            self._demand(literal, demand.rule)
        self._busy = [_sum([self._measured(c, s, "picoseconds") for c, s in group]) for group in self._groups]

    def add(self, *literals: Bit) -> None:
        """Add a clause, the disjunction of literals; constants are folded. Raises TimeoutError after the deadline."""
        self._left_s()
        if any(literal is True for literal in literals):
            return
        kept = [literal for literal in literals if literal is not False]
        self._solver.add(z3.Or(kept) if kept else z3.BoolVal(False))

    def within(self, limits: Sequence[int]) -> Splits | None:
        """Return a split that meets every demand, no stage slower than its chain's limit in ps; None if there is no such split.

        Stages that share ranks take at most the largest limit together.

        Raises:
            TimeoutError: the deadline passed first.
        """
        self._solver.push()
        try:
            for chain, limit_ps in zip(self._chains, limits, strict=True):
                for k in range(1, chain.most + 1):
                    chain.forbid(k, self._problem.chains[chain.index].tables.times > limit_ps, ())
            for busy in self._busy:
                self._solver.add(busy <= max(limits))
            if self._check(self._asked) != z3.sat:
                return None
            solution = self._solver.model()
            return tuple(chain.read(solution) for chain in self._chains)
        finally:
            self._solver.pop()

    def core(self) -> tuple[int, ...] | None:
        """Return the indices of a minimal set of demands that cannot all be met; None if all can be met.

        Raises:
            TimeoutError: the deadline passed first.
        """
        if self._check(self._asked) == z3.sat:
            return None
        core = list(range(len(self._asked)))
        # Do without what the layout and the devices impose first, and without the stage counts before the memory: a core of
        # what was asked says more.
        demands = self._problem.demands
        for index in sorted(
            core, key=lambda index: (demands[index].asked, isinstance(demands[index].rule, Cap), index)
        ):
            rest = [other for other in core if other != index]
            if self._check([self._asked[other] for other in rest]) == z3.unsat:
                core = rest
        return tuple(core)

    def _check(self, assumed: Sequence[z3.BoolRef]) -> z3.CheckSatResult:
        self._solver.set("timeout", max(1, int(self._left_s() * 1000)))
        result = self._solver.check(*assumed)
        if result == z3.unknown:
            raise TimeoutError
        return result

    def _left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _tail_literals(self) -> list[list[Bit]]:
        """Return for each chain literals of the solver; the d-th is true if at least d stages lie between chain and loss."""
        least = least_tails(self._problem)
        found: list[list[Bit]] = [[] for _ in self._chains]
        for index in reversed(range(len(found))):
            feeds = self._problem.chains[index].feeds
            most = max((len(found[feed.target]) - 1 + self._chains[feed.target].most for feed in feeds), default=0)
            own: list[Bit] = [d <= least[index] or z3.Bool(f"tail{index}_{d}") for d in range(most + 1)]
            for feed in feeds:
                target, above = self._chains[feed.target], found[feed.target]
                # The entry layer is in the q-th stage from the end, or further off, unless boundary q-1 is before it.
                for q in range(1, target.most + 1):
                    for d, literal in enumerate(above):
                        self.add(own[d + q], negated(literal), target.at_most(q - 1, feed.target_layer))
            found[index] = own
        return found

    def _demand(self, asked: z3.BoolRef, rule: Rule) -> None:
        off = negated(asked)
        match rule:
            case Cuts(some=True):
                chain = self._chains[rule.chain]
                self.add(off, *(chain.between(k, rule.first, rule.last) for k in range(1, chain.most)))
            case Cuts():
                chain = self._chains[rule.chain]
                for k in range(1, chain.most):
                    self.add(off, chain.at_most(k, rule.first), negated(chain.at_most(k, rule.last)))
            case InStage():
                self._in_stage(off, rule)
            case Cap():
                self._cap(off, rule)
            case Count():
                chain = self._chains[rule.chain]
                self.add(off, negated(chain.fewer_than(rule.low)))
                self.add(off, chain.fewer_than(rule.high + 1))
            case Devices():
                self._devices(off, rule)
            case Unsatisfiable():
                self.add(off)

    def _in_stage(self, off: Bit, rule: InStage) -> None:
        chain = self._chains[rule.chain]
        for count in range(1, chain.most + 1):
            other = negated(chain.is_count(count))
            k = count - rule.stage
            if k < 1:
                self.add(off, other)
                continue
            self.add(off, other, chain.at_most(k, rule.first))
            self.add(off, other, negated(chain.at_most(k - 1, rule.last - 1)))

    def _cap(self, off: Bit, rule: Cap) -> None:
        for chain in self._chains:
            if rule.chain not in (None, chain.index):
                continue
            for k in range(1, chain.most + 1):
                counts: Iterable[Bit] = [True]
                if rule.stage is not None:
                    counts = [chain.is_count(rule.stage + k)] if rule.stage + k <= chain.most else []
                for count in counts:
                    self._cap_stage(chain, k, rule.num_bytes, (off, negated(count)))
        for group in self._groups:
            if any(covers(rule, chain, stage) for chain, stage in group):
                total = _sum([self._measured(chain, stage, "bytes") for chain, stage in group])
                self._solver.add(z3.Or(off, total <= rule.num_bytes))

    def _cap_stage(self, chain: ChainLiterals, k: int, num_bytes: int, guards: tuple[Bit, ...]) -> None:
        held = -1
        for tail, literal in enumerate(self._tails[chain.index]):
            in_flight = self._problem.in_flight(tail + k - 1)
            longer = self._tails[chain.index][tail + 1 : tail + 2]
            # A longer tail holds no less: of two that hold the same the shorter is enough, and where the longer is
            # sure the shorter is no matter.
            if in_flight != held and not any(bit is True for bit in longer):
                needs = self._problem.chains[chain.index].tables.needs(in_flight)
                chain.forbid(k, needs > num_bytes, (*guards, negated(literal)))
                held = in_flight

    def _devices(self, off: Bit, rule: Devices) -> None:
        terms: list[tuple[z3.BoolRef, int]] = []
        for chain in self._chains:
            for k in range(1, chain.most + 1):
                used = z3.Bool(f"used{chain.index}_{k}")
                self.add(used, chain.fewer_than(k))
                terms.append((used, self._problem.chains[chain.index].devices))
        self._solver.add(z3.Or(off, z3.PbLe(terms, rule.most)))

    def _measured(self, chain: int, stage: int, what: Literal["picoseconds", "bytes"]) -> z3.ArithRef:
        """Return the solver's number for the ps or bytes of a stage, constrained to be at least the true value."""
        key = f"{what}{chain}_{stage}"
        if key not in self._measures:
            total = self._measures[key] = z3.Real(key)
            literals, own = self._chains[chain], self._problem.chains[chain].tables
            k = literals.most - stage
            if what == "picoseconds":
                self._solver.add(total >= literals.value(k - 1, own.ends) - literals.value(k, own.begins))
                return total
            working = literals.largest(k, own.working_bytes)
            for tail, longer in enumerate(self._tails[chain]):
                in_flight = self._problem.in_flight(tail + k - 1)
                held, before = own.held(in_flight), own.held_before(in_flight)
                needed = literals.value(k - 1, held) - literals.value(k, before) + working
                self._solver.add(z3.Implies(longer, total >= needed))
        return self._measures[key]


def _sum(terms: Sequence[z3.ArithRef]) -> z3.ArithRef:
    return cast(z3.ArithRef, z3.Sum(terms))
