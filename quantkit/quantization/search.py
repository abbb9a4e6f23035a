"""Lagrangian search over formats: the cheapest model within a loss, or the most accurate within a size.

Losses of packs are taken to add up, which holds while they are small. For a given lambda (cost saved for each
nat lost) each pack then picks its format independently, and raising lambda from nothing gives one line of
configurations from the most accurate to the cheapest: the lower convex hulls of all packs, merged by slope
(Everett 1963, generalised Lagrange multipliers; used for bits by Shoham & Gersho 1988). Sums only order the
configurations; the loss of a configuration is measured, by bisection along the line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One format of a pack, with its loss and costs."""

    format: str  # the name of a scheme, or "float"
    loss: float  # KL divergence with this pack alone in the format, nats
    cost: float = 0.0  # the objective of the search: one of the two below
    num_bytes: float = 0.0
    microseconds: float | None = None  # of one decoded token, where this machine was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """A pack and the formats that it may have."""

    name: str
    layers: tuple[str, ...]
    options: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss of a whole model, measured in the runtime."""

    ppl_increase: float
    kl_divergence: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration that was exported and measured."""

    label: str
    choices: tuple[tuple[str, str], ...]  # pack, format
    cost: float
    num_bytes: float
    microseconds: float | None = None
    predicted_kl: float
    loss: Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """A finished search, as reports hold it."""

    max_ppl_increase: float | None = None
    max_kl: float | None = None
    max_bytes: int | None = None  # of graph, weights and companions
    prefer: str
    units: tuple[PackOptions, ...]  # the table of losses and costs, under this key in report.json
    candidates: tuple[Candidate, ...]  # all configurations that were exported and measured
    chosen: Candidate
    verdicts: tuple[Loss, ...]  # on text that the search does not use; the last is of the artifact
    holds: bool


Choices = Mapping[str, str]  # pack -> format name


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits of loss and size; None where there is no limit."""

    max_ppl_increase: float | None = None
    max_kl: float | None = None
    max_bytes: int | None = None

    @property
    def limits_loss(self) -> bool:
        return self.max_ppl_increase is not None or self.max_kl is not None

    def holds(self, loss: Loss, *, tightened: float = 1.0) -> bool:
        """Whether a loss is within this part of the budget."""
        return self.share(loss) <= tightened

    def share(self, loss: Loss) -> float:
        """The loss over the budget; more than 1 is too much."""
        shares = [0.0]
        if self.max_ppl_increase is not None:
            shares.append(loss.ppl_increase / self.max_ppl_increase)
        if self.max_kl is not None:
            shares.append(loss.kl_divergence / self.max_kl)
        return max(shares)


def hull_of(options: Sequence[Choice]) -> tuple[Choice, ...]:
    """The lower convex hull: choices that are best at some lambda, from the most accurate to the cheapest."""
    hull: list[Choice] = []
    for choice in sorted(options, key=lambda option: (option.loss, option.cost)):
        if hull and choice.cost >= hull[-1].cost:
            continue  # no cheaper, and no more accurate
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return tuple(hull)


def _slope(before: Choice, after: Choice) -> float:
    """Cost saved for each nat lost."""
    lost = after.loss - before.loss
    return (before.cost - after.cost) / lost if lost > 0 else float("inf")


def line_of(packs: Sequence[PackOptions]) -> tuple[dict[str, str], ...]:
    """Configurations from the most accurate to the cheapest; neighbours differ in one pack."""
    hulls = {pack.name: hull_of(pack.options) for pack in packs}
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


def most_accurate_within(packs: Sequence[PackOptions], max_bytes: float) -> dict[str, str] | None:
    """The first configuration of the line that fits, with the bytes that its last step left over spent again.

    One step of the line may save far more than was needed, such as that of lm_head. Packs that still fit in a
    more accurate format get it, those first that gain most for each byte.
    """
    fitting = (choices for choices in line_of(packs) if bytes_of(packs, choices) <= max_bytes)
    chosen = next(fitting, None)
    while chosen is not None:
        now = {pack.name: choice for pack, choice in zip(packs, _chosen(packs, chosen), strict=True)}
        room = max_bytes - bytes_of(packs, chosen)
        gains = [
            (
                (now[pack.name].loss - option.loss) / max(option.num_bytes - now[pack.name].num_bytes, 1.0),
                pack,
                option,
            )
            for pack in packs
            for option in pack.options
            if option.loss < now[pack.name].loss and option.num_bytes - now[pack.name].num_bytes <= room
        ]
        if not gains:
            break
        _, pack, option = max(gains, key=lambda gain: gain[0])
        chosen[pack.name] = option.format
    return chosen


def bytes_of(packs: Sequence[PackOptions], choices: Choices) -> float:
    return sum(choice.num_bytes for choice in _chosen(packs, choices))


def cost_of(packs: Sequence[PackOptions], choices: Choices) -> float:
    return sum(choice.cost for choice in _chosen(packs, choices))


def predicted_loss(packs: Sequence[PackOptions], choices: Choices) -> float:
    """The loss of a configuration if losses add up."""
    return sum(choice.loss for choice in _chosen(packs, choices))


def _chosen(packs: Sequence[PackOptions], choices: Choices) -> list[Choice]:
    return [option for pack in packs for option in pack.options if option.format == choices[pack.name]]


@dataclass(kw_only=True, slots=True)
class Search:
    """A search under way, with all configurations that were measured so far."""

    packs: Sequence[PackOptions]
    evaluate: Callable[[Choices], Loss]
    budget: Budget
    limit: int  # of evaluations
    tried: dict[tuple[tuple[str, str], ...], Candidate]

    def measure(self, choices: Choices, label: str) -> Candidate | None:
        """The candidate, measured once; None when no more may be measured."""
        key = tuple(sorted(choices.items()))
        if key not in self.tried:
            if len(self.tried) >= self.limit:
                return None
            chosen = _chosen(self.packs, choices)
            times = [choice.microseconds for choice in chosen if choice.microseconds is not None]
            self.tried[key] = Candidate(
                label=label,
                choices=key,
                cost=cost_of(self.packs, choices),
                num_bytes=bytes_of(self.packs, choices),
                microseconds=sum(times) if len(times) == len(chosen) else None,
                predicted_kl=predicted_loss(self.packs, choices),
                loss=self.evaluate(choices),
            )
        return self.tried[key]

    def bisect(self, *, tightened: float = 1.0) -> None:
        """Measure along the line until one of two neighbours holds the budget and the other does not."""
        line = line_of(self.packs)
        low, high = -1, len(line)  # the last that holds, the first that does not
        while high - low > 1:
            middle = (low + high) // 2
            candidate = self.measure(line[middle], f"step {middle} of {len(line) - 1}")
            if candidate is None:
                return
            if self.budget.holds(candidate.loss, tightened=tightened):
                low = middle
            else:
                high = middle

    def best(self, *, tightened: float = 1.0) -> Candidate | None:
        """The cheapest measured configuration that holds the budget."""
        held = [tried for tried in self.tried.values() if self.budget.holds(tried.loss, tightened=tightened)]
        return min(held, key=lambda tried: (tried.cost, tried.loss.kl_divergence), default=None)

    def most_accurate(self) -> Candidate:
        """The measured configuration with the least share of the budget."""
        return min(self.tried.values(), key=lambda tried: self.budget.share(tried.loss))


def uniform(packs: Sequence[PackOptions], name: str) -> dict[str, str] | None:
    """Every pack in one format, or None where a pack cannot have it."""
    if all(any(option.format == name for option in pack.options) for pack in packs):
        return {pack.name: name for pack in packs}
    return None
