"""An oracle that knows the link's future and finds the best plan, to judge policies by.

It runs a beam search that scores each state by its best fixed continuation, then a local search from the result, then
branch and bound with a limited number of nodes. A lower bound limits the distance from the optimum. Often the answer
meets it, and is then proven optimal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.adaptive.simulator import Scenario
from sgl_kvfetch.plane.adapt.pipeline import Pipeline, PoolState

_BEAM = 4
_LAMBDAS = tuple(i / 8 for i in range(9))
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Plan:
    """``bound_s``: no plan ends sooner. After an exhaustive search it equals ``finish_s``, up to rounding."""

    variants: tuple[int, ...]
    finish_s: float
    bound_s: float

    @property
    def is_optimal(self) -> bool:
        return self.finish_s <= self.bound_s * (1 + 2 * _EQUAL)


@dataclass(frozen=True, slots=True)
class _State:
    variants: tuple[int, ...]
    link_free_s: float
    pipeline: Pipeline


def best_plan(scenario: Scenario, known: Sequence[tuple[int, ...]] = (), *, max_nodes: int = 300) -> Plan:
    """Return the best plan found: the variants with which a scenario's last chunk is restored soonest.

    ``known``: plans to start from, such as those of the judged policies. ``max_nodes`` bounds the exhaustive part of
    the search.
    """
    search = _Search(scenario)
    root = _State((), 0.0, Pipeline(scenario.profile, scenario.num_sessions))
    bound_s = search.bound_s(root)
    search.beam(root)
    for variants in known:
        search.try_plan(variants)
    search.improve()
    if search.best_s > bound_s * (1 + _EQUAL) and search.exhaust(root, max_nodes):
        bound_s = search.best_s
    bound_s = min(bound_s, search.best_s)
    return Plan(search.best, search.best_s, bound_s)


class _Search:
    def __init__(self, scenario: Scenario) -> None:
        profile, trace, num_chunks = scenario.profile, scenario.bandwidth_bps, scenario.num_chunks
        self._scenario = scenario
        self._variants = range(len(profile.variants))
        # Indexed by chunk, then by variant.
        self._transmit_s = [
            [v.size_bytes * 8 / trace[i % len(trace)] for v in profile.variants] for i in range(num_chunks)
        ]
        # The link is never idle while any fetch has a chunk to send, so it does not matter here which fetch that is.
        self._release_s = [arrival_s for arrival_s, count in sorted(scenario.fetches) for _ in range(count)]
        # For each variant the least pool time per chunk, over all measured concurrencies.
        self._share_s = [min(t / k for k, t in enumerate(v.decode_s, 1)) for v in profile.variants]
        self._alone_s = [min(v.decode_s) for v in profile.variants]
        self._rest = self._weighted_rest(self._transmit_s)
        self.best: tuple[int, ...] = ()
        self.best_s = math.inf
        self._nodes = 0

    def _weighted_rest(self, transmit_s: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return, by lambda and then by chunk, the least that this and all later chunks add to the weighted bound,
        without the last chunk's decoding."""
        rest = []
        for weight in _LAMBDAS:
            sums = [0.0]
            for chunk in reversed(transmit_s):
                least = min(weight * chunk[v] + (1 - weight) * self._share_s[v] for v in self._variants)
                sums.append(sums[-1] + least)
            rest.append(sums[::-1])
        return rest

    def _share_left_s(self, pool: PoolState) -> float:
        """Return the remaining decode work, in seconds of the whole pool."""
        active = sum(s.chunks_left * self._share_s[s.configured] for s in pool.sessions if s.configured is not None)
        return active + sum(self._share_s[variant] for variant in pool.waiting)

    def bound_s(self, state: _State) -> float:
        """Return a lower bound on the end of every plan that continues ``state``. One bound is the last chunk's arrival
        plus its decoding; another is the pool's total decode work. Any weighted mean of both is a bound too, and a
        tighter one, because a variant that is good for one is bad for the other."""
        done, num_chunks = len(state.variants), len(self._transmit_s)
        pool = state.pipeline.state()
        pool_s = state.pipeline.now_s + self._share_left_s(pool)
        if done == num_chunks:
            return pool_s
        idle = not pool.num_busy
        bound_s = 0.0
        for weight, rest in zip(_LAMBDAS, self._rest, strict=True):
            value = weight * state.link_free_s + (1 - weight) * pool_s
            last, first = self._transmit_s[-1], self._transmit_s[done]
            # At best, the last chunk decodes alone. An idle pool waits for the first chunk to arrive.
            if num_chunks - done == 1:
                value += min(
                    weight * (last[v] + self._alone_s[v])
                    + (1 - weight) * (self._share_s[v] + (first[v] if idle else 0.0))
                    for v in self._variants
                )
            else:
                value += rest[done + 1] - rest[num_chunks - 1]
                value += min(
                    weight * first[v] + (1 - weight) * (self._share_s[v] + (first[v] if idle else 0.0))
                    for v in self._variants
                )
                value += min(
                    weight * (last[v] + self._alone_s[v]) + (1 - weight) * self._share_s[v] for v in self._variants
                )
            bound_s = max(bound_s, value)
        return bound_s

    def beam(self, root: _State) -> None:
        states = [root]
        for _ in self._transmit_s:
            children = [self._child(state, v) for state in states for v in self._variants]
            scored = sorted(((self._rollout_s(c), c.link_free_s, c.variants), c) for c in children)
            states = [child for _, child in scored[:_BEAM]]

    def exhaust(self, root: _State, max_nodes: int) -> bool:
        """Search by branch and bound. Return whether all plans were tried or shown to be no better."""
        self._nodes = max_nodes
        return self._exhaust(root)

    def _exhaust(self, state: _State) -> bool:
        if len(state.variants) == len(self._transmit_s):
            return True  # its rollout has already tried this plan
        children = [self._child(state, v) for v in self._variants]
        scored = sorted(((self._rollout_s(c), i) for i, c in enumerate(children)))
        for _, i in scored:
            if self.bound_s(children[i]) >= self.best_s * (1 - _EQUAL):
                continue
            self._nodes -= 1
            if self._nodes < 0 or not self._exhaust(children[i]):
                return False
        return True

    def try_plan(self, variants: tuple[int, ...]) -> float:
        """Return the plan's end, and remember the plan if it is the best so far."""
        scenario = self._scenario
        return self._end_s(_State((), 0.0, Pipeline(scenario.profile, scenario.num_sessions)), variants)

    def improve(self) -> None:
        """Change one chunk of the best plan at a time, until no change helps."""
        before_s = math.inf
        while self.best_s < before_s * (1 - _EQUAL):
            before_s = self.best_s
            for i, v in itertools.product(range(len(self._transmit_s)), self._variants):
                if self.best[i] != v:
                    self.try_plan((*self.best[:i], v, *self.best[i + 1 :]))

    def _arrival_s(self, chunk: int, variant: int, link_free_s: float) -> float:
        return max(link_free_s, self._release_s[chunk]) + self._transmit_s[chunk][variant]

    def _child(self, state: _State, variant: int) -> _State:
        at_s = self._arrival_s(len(state.variants), variant, state.link_free_s)
        pipeline = state.pipeline.copy()
        pipeline.deliver_at(at_s, variant)
        return _State((*state.variants, variant), at_s, pipeline)

    def _rollout_s(self, state: _State) -> float:
        """Return the end if all remaining chunks have the same variant, for the best such variant."""
        following = len(self._transmit_s) - len(state.variants)
        return min(self._end_s(state, (v,) * following) for v in (self._variants if following else (0,)))

    def _end_s(self, state: _State, following: tuple[int, ...]) -> float:
        pipeline, at_s = state.pipeline.copy(), state.link_free_s
        for chunk, variant in enumerate(following, len(state.variants)):
            at_s = self._arrival_s(chunk, variant, at_s)
            pipeline.deliver_at(at_s, variant)
        end_s = pipeline.drained_s()
        if end_s < self.best_s:
            self.best_s, self.best = end_s, (*state.variants, *following)
        return end_s
