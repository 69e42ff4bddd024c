"""Load clients with plain blocking connections, which take less CPU time than the store's real client."""

from __future__ import annotations

import http.client
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import msgspec

from benchmarks.store.small import SEGMENTS_A_PROMPT, prompt_hashes, prompt_segments
from harness.small_segments import FOLDER
from sgl_kvfetch.stores import SegmentHit, wire

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Lookups:
    """``latencies_s`` count from the moment at which a lookup was due, so that a stall delays all lookups within it."""

    latencies_s: list[float]
    pages_asked: int
    pages_found: int
    client_cores: float


@dataclass(frozen=True)
class Writes:
    segments: int
    errors: Counter[str]
    seconds: float
    client_cores: float


def count_found(connection: http.client.HTTPConnection, page_hashes: Sequence[bytes]) -> int:
    """Look up one prompt. Return how many of its pages are stored. Raises OSError, http.client.HTTPException."""
    body = msgspec.msgpack.encode(wire.LookupRequest(FOLDER, b"".join(page_hashes)))
    connection.request("POST", wire.Route.LOOKUP, body, {"Content-Type": wire.MSGPACK_TYPE})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise http.client.HTTPException(f"lookup: status {response.status}: {answer[:200]!r}")
    return sum(row.num_pages for row in msgspec.msgpack.decode(answer, type=list[SegmentHit]))


def look_up(port: int, num_prompts: int, rate: float, seconds: float, seed: int) -> Lookups:
    """Look up random prompts of the first ``num_prompts``, on one connection, at ``rate`` a second."""
    rng = random.Random(seed)
    connection = connect(port)
    latencies, found = [], 0
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for number in range(int(rate * seconds)):
        due_s = began_s + number / rate
        time.sleep(max(0.0, due_s - time.perf_counter()))
        found += count_found(connection, prompt_hashes(rng.randrange(num_prompts)))
        latencies.append(time.perf_counter() - due_s)
    connection.close()
    cores = (time.process_time() - began_cpu_s) / (time.perf_counter() - began_s)
    return Lookups(latencies, len(latencies) * SEGMENTS_A_PROMPT, found, cores)


def write(port: int, first_prompt: int, clients: int, seconds: float) -> Writes:
    """Write new segments for ``seconds``, each client one at a time: the data, then the manifest."""
    prompts = count(first_prompt)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(clients) as threads:
        calls = [threads.submit(_write_until, port, prompts, began_s + seconds) for _ in range(clients)]
        written = [call.result() for call in calls]
    took_s = time.perf_counter() - began_s
    return Writes(
        sum(segments for segments, _ in written),
        sum((errors for _, errors in written), Counter()),
        took_s,
        (time.process_time() - began_cpu_s) / took_s,
    )


def _write_until(port: int, prompts: Iterator[int], until_s: float) -> tuple[int, Counter[str]]:
    """Return how many segments were written, and how many were not, by error."""
    segments, errors = 0, Counter[str]()
    connection = connect(port)
    for prompt in prompts:  # several threads may take from one count
        for segment in prompt_segments(prompt):
            if time.perf_counter() > until_s:
                connection.close()
                return segments, errors
            try:
                _put(connection, segment.data_name, segment.data)
                _put(connection, segment.manifest_name, segment.manifest)
                segments += 1
            except (OSError, http.client.HTTPException) as e:
                errors[str(e) or repr(e)] += 1
                connection.close()  # the next request connects again
    raise AssertionError("prompts do not end")


def _put(connection: http.client.HTTPConnection, name: str, content: bytes) -> None:
    connection.request("PUT", f"{wire.Route.OBJECTS}/{name}", content, {"Content-Type": wire.BYTES_TYPE})
    response = connection.getresponse()
    response.read()
    if response.status != 201:
        raise http.client.HTTPException(f"status {response.status}")


def connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
