"""Summarises a run's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.client import Answer, CachedTokens
from benchmarks.load import LoadResult

_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """All fields are None if nothing was measured. Percentiles are interpolated between the two nearest values."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes read from storage: on the wire, and in the pool's format. None if the server does not tell."""

    wire_bytes: int | None = 0
    raw_bytes: int | None = 0


@dataclass(frozen=True)
class TurnStats:
    turn: int
    requests: int
    prompt_tokens: int
    ttft_s: Distribution


@dataclass(frozen=True)
class RunStats:
    """Times, tokens and rates of the answered requests; ``errors`` counts the others by reason."""

    requests: int
    failures: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: CachedTokens
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    requests_per_s: float
    output_tokens_per_s: float
    by_turn: list[TurnStats] = field(default_factory=list)


def distribution(values: Sequence[float]) -> Distribution:
    if not values:
        return Distribution()
    return Distribution(float(np.mean(values)), *(float(p) for p in np.percentile(values, _PERCENTILES)))


def summarise(result: LoadResult) -> RunStats:
    answers = [record.answer for record in result.records if record.answer is not None]
    errors: dict[str, int] = {}
    for record in result.records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    output_tokens = sum(len(answer.output_ids) for answer in answers)
    return RunStats(
        requests=len(result.records),
        failures=sum(errors.values()),
        errors=errors,
        duration_s=result.duration_s,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        output_tokens=output_tokens,
        cached_tokens=CachedTokens(
            sum(answer.cached.device for answer in answers),
            sum(answer.cached.host for answer in answers),
            sum(answer.cached.storage for answer in answers),
        ),
        ttft_s=distribution([answer.ttft_s for answer in answers]),
        tpot_s=distribution([tpot for answer in answers if (tpot := answer.tpot_s) is not None]),
        itl_s=distribution([gap for answer in answers for gap in answer.itl_s]),
        e2e_s=distribution([answer.e2e_s for answer in answers]),
        requests_per_s=len(answers) / result.duration_s,
        output_tokens_per_s=output_tokens / result.duration_s,
        by_turn=_by_turn(result),
    )


def same_answers(result: LoadResult, first: LoadResult) -> int:
    """Return how many requests got the same tokens in both runs."""
    expected = {(r.conversation, r.turn): r.answer.output_ids for r in first.records if r.answer is not None}
    return sum(
        record.answer is not None and record.answer.output_ids == expected.get((record.conversation, record.turn))
        for record in result.records
    )


def _by_turn(result: LoadResult) -> list[TurnStats]:
    turns: dict[int, list[Answer]] = {}
    for record in result.records:
        if record.answer is not None:
            turns.setdefault(record.turn, []).append(record.answer)
    return [
        TurnStats(
            turn + 1,
            len(answers),
            round(sum(answer.prompt_tokens for answer in answers) / len(answers)),
            distribution([answer.ttft_s for answer in answers]),
        )
        for turn, answers in sorted(turns.items())
    ]
