"""A search over the format of every unit that makes a model as small or as fast as an accuracy budget allows.

A unit is what is multiplied together. What a choice costs in accuracy is taken to add up over units, which
holds while losses are small; so for any price of a nat the best choice of each unit is its own, and raising
the price from nothing walks along one line of configurations from the most accurate to the cheapest: the
lower convex hulls of all units, merged by slope (Everett 1963, generalised Lagrange multipliers; as used for
bits by Shoham & Gersho 1988). Sums are only trusted for the order: what a configuration really loses is
measured, by bisection along the line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One format that a unit could have."""

    format: str  # the name of a scheme, or "float"
    loss: float  # KL divergence when this unit alone has it, nats
    cost: float = 0.0  # what a search makes least: one of the two below
    num_bytes: float = 0.0
    microseconds: float | None = None  # of one decoded token, where this machine was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitOptions:
    """What is multiplied together, and the formats that it could have."""

    name: str
    layers: tuple[str, ...]
    options: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What a whole model lost, measured in the runtime."""

    ppl_increase: float
    kl_divergence: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration that was exported and measured."""

    label: str
    choices: tuple[tuple[str, str], ...]  # unit, format
    cost: float
    num_bytes: float
    microseconds: float | None
    predicted_kl: float
    loss: Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """A search for the cheapest model that holds a budget, whole."""

    max_ppl_increase: float | None
    max_kl: float | None
    prefer: str
    units: tuple[UnitOptions, ...]  # the table of losses and costs
    candidates: tuple[Candidate, ...]  # all that were exported and measured
    chosen: Candidate
    verdicts: tuple[Loss, ...]  # on text that the search never saw; the last is of the artifact
    holds: bool


Choices = Mapping[str, str]  # unit -> format name
Evaluate = Callable[[Choices], Loss]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What may be lost; None where that is not limited."""

    max_ppl_increase: float | None = None
    max_kl: float | None = None

    def holds(self, loss: Loss, *, tightened: float = 1.0) -> bool:
        """Whether a loss is within the budget, or within a part of it."""
        return self.share(loss) <= tightened

    def share(self, loss: Loss) -> float:
        """How much of the budget a loss takes; more than 1 is too much."""
        shares = [0.0]
        if self.max_ppl_increase is not None:
            shares.append(loss.ppl_increase / self.max_ppl_increase)
        if self.max_kl is not None:
            shares.append(loss.kl_divergence / self.max_kl)
        return max(shares)


def hull_of(options: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices worth making at some price, from the most accurate to the cheapest."""
    ordered = sorted(options, key=lambda each: (each.loss, each.cost))
    kept: list[Choice] = []
    for each in ordered:
        if kept and each.cost >= kept[-1].cost:
            continue  # no cheaper, and no more accurate
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= _slope(kept[-1], each):
            kept.pop()
        kept.append(each)
    return tuple(kept)


def _slope(before: Choice, after: Choice) -> float:
    """Cost saved for each nat lost."""
    lost = after.loss - before.loss
    return (before.cost - after.cost) / lost if lost > 0 else float("inf")


def line_of(units: Sequence[UnitOptions]) -> tuple[dict[str, str], ...]:
    """Configurations from the most accurate to the cheapest, each one step from the one before."""
    hulls = {unit.name: hull_of(unit.options) for unit in units}
    steps = [
        (_slope(before, after), -number, name, after)
        for name, hull in hulls.items()
        for number, (before, after) in enumerate(itertools.pairwise(hull))
    ]
    steps.sort(key=lambda step: step[:3], reverse=True)
    chosen = {name: hull[0].format for name, hull in hulls.items()}
    line = [dict(chosen)]
    for _, _, name, after in steps:
        chosen[name] = after.format
        line.append(dict(chosen))
    return tuple(line)


def cost_of(units: Sequence[UnitOptions], choices: Choices) -> float:
    """What a configuration costs."""
    return sum(each.cost for each in _chosen(units, choices))


def predicted_loss(units: Sequence[UnitOptions], choices: Choices) -> float:
    """What a configuration loses if losses add up."""
    return sum(each.loss for each in _chosen(units, choices))


def _chosen(units: Sequence[UnitOptions], choices: Choices) -> list[Choice]:
    return [option for unit in units for option in unit.options if option.format == choices[unit.name]]


def _total(times: Sequence[float | None]) -> float | None:
    known = [each for each in times if each is not None]
    return sum(known) if len(known) == len(times) else None


@dataclass(kw_only=True, slots=True)
class Search:
    """The configurations that were measured so far."""

    units: Sequence[UnitOptions]
    evaluate: Evaluate
    budget: Budget
    limit: int  # of evaluations
    tried: dict[tuple[tuple[str, str], ...], Candidate]

    def measure(self, choices: Choices, label: str) -> Candidate | None:
        """The candidate, measured once; None when no more may be measured."""
        key = tuple(sorted(choices.items()))
        if key not in self.tried:
            if len(self.tried) >= self.limit:
                return None
            self.tried[key] = Candidate(
                label=label,
                choices=key,
                cost=cost_of(self.units, choices),
                num_bytes=sum(each.num_bytes for each in _chosen(self.units, choices)),
                microseconds=_total([each.microseconds for each in _chosen(self.units, choices)]),
                predicted_kl=predicted_loss(self.units, choices),
                loss=self.evaluate(choices),
            )
        return self.tried[key]

    def bisect(self, *, tightened: float = 1.0) -> None:
        """Measure along the line until neighbours disagree about the budget."""
        line = line_of(self.units)
        low, high = -1, len(line)  # the last that holds, the first that does not
        while high - low > 1:
            middle = (low + high) // 2
            found = self.measure(line[middle], f"step {middle} of {len(line) - 1}")
            if found is None:
                return
            if self.budget.holds(found.loss, tightened=tightened):
                low = middle
            else:
                high = middle

    def best(self, *, tightened: float = 1.0) -> Candidate | None:
        """The cheapest that was measured to hold the budget."""
        held = [each for each in self.tried.values() if self.budget.holds(each.loss, tightened=tightened)]
        return min(held, key=lambda each: (each.cost, each.loss.kl_divergence), default=None)

    def most_accurate(self) -> Candidate:
        """The one that takes least of the budget, for when none holds it."""
        return min(self.tried.values(), key=lambda each: self.budget.share(each.loss))


def uniform(units: Sequence[UnitOptions], name: str) -> dict[str, str] | None:
    """Every unit in one format, or None where one of them cannot be in it."""
    if all(any(option.format == name for option in unit.options) for unit in units):
        return {unit.name: name for unit in units}
    return None
