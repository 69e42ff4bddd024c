"""``kvfetch why`` on real stores: each reason, made on purpose, has its name. What needs SGLang is in tests/e2e."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from harness.small_segments import NAMESPACE, expiring
from sgl_kvfetch.codec.container.manifest import coarsened
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.keys import FORMAT_MAJOR, HeadSlice, Namespace, label_of_request
from sgl_kvfetch.prompts import page_hashes
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.status import Decided, ServerStatus
from tests.codec.container.test_levels import KLT, SPEC as KLT_SPEC
from tests.codec.quant.profiles import values_of
from tests.reasons import assert_why
from tests.segments import put_all
from tests.tools.conftest import KEYS, kvfetch, kvfetch_json

TOKENS = list(range(3, 19))


def coded(
    namespace: Namespace = NAMESPACE,
    pages: range = range(8),
    *,
    heads: range = range(1),
    salt: str | None = None,
    tokens: Sequence[int] = TOKENS,
) -> CodedSegment:
    """A segment with some of the prompt's pages."""
    quantiser = make_quantiser("exact" if namespace.quantiser == "exact" else "uint8")
    spec = SegmentSpec(HeadSlice(namespace, heads), quantiser, "zstd", "240p", 8)
    shape = len(pages) * namespace.page_size, 1, len(heads), 48
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    hashes = page_hashes(tokens, namespace.page_size, salt)
    previous = hashes[pages.start - 1] if pages.start else None
    return encode_segment(spec, {"k": values, "v": values}, pages.start, previous, hashes[pages.start : pages.stop])


@contextmanager
def told_by_a_server(status: ServerStatus | None, metrics: str = "") -> Iterator[str]:
    """The URL of a server that tells this of itself. What SGLang's servers tell is in tests/e2e/test_why.py."""
    state = {} if status is None else {"kvfetch": status}
    answers = {
        "/server_info": msgspec.json.encode({"page_size": 1, "internal_states": [state]}),
        "/metrics": metrics.encode(),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[self.path])

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=partial(server.serve_forever, poll_interval=0.01)).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def status_of(namespace: Namespace = NAMESPACE, **changes: Any) -> ServerStatus:
    about: dict[str, Any] = {"mode": "device", "reads": True, "writes": True, "threshold_tokens": 1, "first_head": 0}
    return ServerStatus(namespace=namespace, **(about | {"end_head": namespace.num_heads} | changes))


def told(
    root: Path,
    namespace: Namespace = NAMESPACE,
    metrics: str = "",
    prompt: Sequence[int] = TOKENS[:8],
    exit_code: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """What `kvfetch why` says for a server."""
    with told_by_a_server(status_of(namespace, **changes), metrics) as url:
        return why(root, "--server", url, prompt=prompt, exit_code=exit_code)


def store(root: Path, *segments: CodedSegment) -> None:
    put_all(LocalStore(root), *segments)


def delete(root: Path, segment: CodedSegment) -> None:
    assert kvfetch("clear", f"{root}#{segment.manifest.key.stem}", "--yes").exit_code == 0


def why(root: Path, *args: str, prompt: Sequence[int] = TOKENS[:8], exit_code: int = 1) -> dict[str, Any]:
    (found,) = kvfetch_json("why", str(root), "--prompt", str(list(prompt)), *args, exit_code=exit_code)
    return dict(found)


def only_reason(found: dict[str, Any]) -> tuple[str, int, int]:
    """For servers that are made up; `assert_why` is for what real servers and stores give."""
    (finding,) = found["findings"]
    return finding["reason"], finding["first_page"], finding["end_page"]


def test_a_prompt_that_is_stored(tmp_path: Path) -> None:
    store(tmp_path, coded())
    found = why(tmp_path, exit_code=0)
    assert (found["stored_pages"], found["findings"], found["namespace"]) == (8, [], NAMESPACE.digest())
    assert "nothing is in the way" in kvfetch("why", str(tmp_path), "--prompt", str(TOKENS[:8])).output


def test_pages_that_were_never_written(tmp_path: Path) -> None:
    store(tmp_path, coded(pages=range(4)))
    found = why(tmp_path)
    assert_why(found, Reason.NEVER_WRITTEN, pages=range(4, 8))
    assert found["stored_pages"] == 4
    assert_why(why(tmp_path, prompt=[7, 7, 7]), Reason.NEVER_WRITTEN)
    text = kvfetch("why", str(tmp_path), "--prompt", str(TOKENS[:8])).output
    assert "never_written: pages 4 to 7: the store has no trace of them" in text


def test_a_prompt_that_no_namespace_begins_with(tmp_path: Path) -> None:
    """Without a server, the store's page size counts, if it has one."""
    (found,) = kvfetch_json("why", str(tmp_path), "--prompt", "[7, 7]", exit_code=1)
    assert_why(found, Reason.NEVER_WRITTEN)
    wide = replace(NAMESPACE, page_size=4)
    store(tmp_path, coded(wide, range(2)))
    found = why(tmp_path, prompt=[7] * 9)
    assert (found["num_pages"], found["page_size"]) == (2, 4)
    assert_why(found, Reason.NEVER_WRITTEN, pages=range(2))
    assert_why(why(tmp_path, prompt=[7] * 4), Reason.SHORT, pages=range(1))
    store(tmp_path, coded())
    text = kvfetch("why", str(tmp_path), "--prompt", "[7, 7, 7]").output
    assert "3 tokens, pages of a size that --server would show" in text


def test_pages_that_were_not_written_or_evicted(tmp_path: Path) -> None:
    """They were there if later ones are."""
    first, second, last = coded(pages=range(4)), coded(pages=range(4, 6)), coded(pages=range(6, 8))
    store(tmp_path, first, second)
    (tmp_path / second.manifest.key.manifest_name).unlink()
    found = why(tmp_path)
    assert_why(found, Reason.NEVER_WRITTEN, pages=range(4, 8))
    assert "1 data objects have no manifest" in found["findings"][0]["detail"]
    store(tmp_path, last)
    assert_why(why(tmp_path), Reason.EVICTED, pages=range(4, 8))


def later_version(manifest: bytes) -> bytes:
    content = bytearray(manifest[:-16])
    content[4:6] = (FORMAT_MAJOR + 1).to_bytes(2, "little")
    return bytes(content) + xxhash.xxh3_128_digest(content)


def damaged(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("suffix", "change", "reason"),
    [
        ("kvd", damaged, Reason.CORRUPT),
        ("kvd", None, Reason.MISSING),
        ("kvm", damaged, Reason.CORRUPT),
        ("kvm", later_version, Reason.FORMAT),
        ("", None, Reason.EXPIRED),
    ],
)
def test_the_rest_of_a_prompt_cannot_be_read(
    tmp_path: Path, suffix: str, change: Callable[[bytes], bytes] | None, reason: Reason
) -> None:
    rest = coded(pages=range(4, 8))
    store(tmp_path, coded(pages=range(4)), rest if suffix else expiring(rest, time.time() - 100))
    path = tmp_path / (rest.data_name if suffix == "kvd" else rest.manifest.key.manifest_name)
    if change is not None:
        path.write_bytes(change(path.read_bytes()))
    elif suffix:
        path.unlink()
    found = why(tmp_path)
    assert_why(found, reason, pages=range(4, 8))
    assert ("UTC" in found["findings"][0]["detail"]) == (reason == Reason.EXPIRED)


def test_keys(tmp_path: Path, key_file: Path) -> None:
    plain, locked = tmp_path / "plain", tmp_path / "locked"
    store(plain, coded())
    assert_why(why(plain, "--key-file", str(key_file)), Reason.ENCRYPTED, pages=range(8))
    secured = secure_segment(coded(), KEYS)
    store(locked, secured)
    assert why(locked, exit_code=0)["findings"] == []
    other_key = tmp_path / "keys"
    other_key.write_text("62" * 32)
    found = why(locked, "--key-file", str(other_key))
    assert_why(found, Reason.ENCRYPTED, pages=range(8))
    assert f"is encrypted with {KEYS.ids[0]}; the file has" in found["findings"][0]["detail"]


def test_levels_that_were_dropped(tmp_path: Path) -> None:
    hashes = page_hashes(TOKENS, KLT_SPEC.heads.namespace.page_size)
    k, v = (x[: len(TOKENS)].bfloat16() for x in values_of(KLT.profile, 64))
    segment = encode_segment(KLT_SPEC, {"k": k, "v": v}, 0, None, hashes)
    store(tmp_path, segment)
    assert why(tmp_path, prompt=TOKENS, exit_code=0)["stored_pages"] == 2
    path = tmp_path / segment.manifest.key.manifest_name
    dropped = coarsened(segment.manifest, path.read_bytes())
    assert dropped is not None
    path.write_bytes(dropped[0])
    found = why(tmp_path, prompt=TOKENS)
    assert_why(found, Reason.COARSE, pages=range(2))
    assert "has lost 1 levels; 0 may be left out" in found["findings"][0]["detail"]
    assert told(tmp_path, KLT_SPEC.heads.namespace, coarseness=1, prompt=TOKENS, exit_code=0)["stored_pages"] == 2


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (Reason.OTHER_WEIGHTS, {"model": "another"}),
        (Reason.OTHER_PAGE_SIZE, {"page_size": 2}),
        (Reason.OTHER_QUANTISER, {"quantiser": make_quantiser("uint8").identity}),
        (Reason.OTHER_FLAGS, {"model_dtype": "dtype=half"}),
        (Reason.OTHER_CACHE, {"attention": "mha with sink"}),
    ],
)
def test_another_namespace_has_it(tmp_path: Path, reason: Reason, changes: dict[str, Any]) -> None:
    ours, other = replace(NAMESPACE, model="server's"), replace(NAMESPACE, **({"model": "server's"} | changes))
    num_pages = 8 // other.page_size
    store(tmp_path, coded(other, range(num_pages)), coded(replace(ours, model="far", kv_dtype="float16"), range(8)))
    found = told(tmp_path, ours)
    assert_why(found, reason, pages=range(8))
    detail = found["findings"][0]["detail"]
    assert other.digest() in detail
    for name, value in changes.items():
        assert f"whose {name} is {value!r}, the server's {getattr(ours, name)!r}" in detail


def test_heads_that_are_missing_and_cells_with_more_of_them_than_the_rank(tmp_path: Path) -> None:
    both = replace(NAMESPACE, num_heads=2)
    some, whole = tmp_path / "some", tmp_path / "whole"
    store(some, coded(both, heads=range(1)), coded(both, range(4), heads=range(1, 2)))
    found = why(some)
    assert_why(found, Reason.OTHER_HEADS, pages=range(4, 8))
    assert found["findings"][0]["detail"] == "heads 0 of 2 are stored, others are missing"

    store(whole, coded(both, heads=range(2)))
    found = told(whole, both, end_head=1)
    assert_why(found, Reason.UNSUPPORTED, pages=range(8))
    assert "cells of 2 heads" in found["findings"][0]["detail"]
    store(whole, coded(both, heads=range(1)), coded(both, heads=range(1, 2)))  # as it does with what it computes
    assert told(whole, both, end_head=1, exit_code=0)["stored_pages"] == 8


def test_a_prompt_that_is_stored_without_its_salt(tmp_path: Path) -> None:
    store(tmp_path, coded(pages=range(4), salt="tenant"), coded())
    assert_why(why(tmp_path, "--cache-salt", "tenant"), Reason.OTHER_SALT, pages=range(4, 8))


def test_what_is_in_the_way_of_a_server(tmp_path: Path) -> None:
    store(tmp_path, coded())
    assert only_reason(told(tmp_path, threshold_tokens=8)) == (Reason.SHORT, 0, 8)
    down = 'sgl_kvfetch_store_down{pid="7"} 1.0\n'
    assert only_reason(told(tmp_path, metrics=f"# HELP x\n{down}other 1.0\n", threshold_tokens=7))[0] == Reason.SKIPPED
    told(tmp_path, metrics=down.replace("1.0", "0.0"), threshold_tokens=7, exit_code=0)


def test_why_a_server_has_not_written_pages(tmp_path: Path) -> None:
    store(tmp_path, coded(pages=range(4)))

    def detail(*samples: str, **changes: Any) -> str:
        found = told(tmp_path, metrics="".join(f"sgl_kvfetch_{sample}\n" for sample in samples), **changes)
        assert only_reason(found) == (Reason.NEVER_WRITTEN, 4, 8)
        return str(found["findings"][0]["detail"])

    assert "it does not write: its mode is read_only" in detail(writes=False)
    assert detail(unstored=["no room", "no time"]).endswith("the server reports: no room; no time")
    said = detail(
        'queued_bytes{queue="write"} 7',
        'written_pages_total{result="dropped_full"} 5',
        'misses_total{stage="write",reason="full"} 2',
        'misses_total{stage="fetch",reason="late"} 3',
    )
    assert "the server reports: 7 B of pages wait in its write queue; it has dropped 5 pages since its start: " in said
    assert said.endswith("; 2 writes have failed: full (a larger --capacity)")

    delete(tmp_path, coded(pages=range(4)))
    store(tmp_path, coded(pages=range(4, 8)))
    found = told(tmp_path, metrics='sgl_kvfetch_misses_total{stage="write",reason="full"} 2\n')
    assert only_reason(found) == (Reason.EVICTED, 0, 8)
    assert "could not be written. Of its writes, the server reports: 2 writes" in found["findings"][0]["detail"]


def decided(request_id: str, reason: str, num_found: int, num_served: int, first_page: int = 0) -> Decided:
    return Decided(
        request_id=request_id,
        at_s=1e9,
        first_hash=page_hashes(TOKENS, 1)[first_page].hex(),
        found_hash=page_hashes(TOKENS, 1)[first_page + num_found - 1].hex() if num_found else "",
        num_pages=8 - first_page,
        num_found=num_found,
        num_served=num_served,
        reason=reason,
    )


def test_what_a_server_did_with_a_prompt(tmp_path: Path) -> None:
    store(tmp_path, coded())
    served, sooner = decided("first", "", 6, 6, first_page=2), decided("last", Reason.SOONER, 6, 0, first_page=2)
    stranger = msgspec.structs.replace(sooner, first_hash="00" * 32)
    found = told(tmp_path, recent=[served, sooner, stranger])
    assert [each["request_id"] for each in found["decided"]] == ["first", "last"]
    assert only_reason(found) == (Reason.SOONER, 2, 8)
    assert found["stored_pages"] == 8
    delete(tmp_path, coded())
    found = told(tmp_path, recent=[served])
    assert only_reason(found) == (Reason.EVICTED, 0, 8)
    assert "2001-09-09" in found["findings"][0]["detail"]
    # Of a prompt that begins alike, other pages were found.
    store(tmp_path, coded(pages=range(4)))
    found = told(tmp_path, recent=[msgspec.structs.replace(served, found_hash="00" * 32)])
    assert only_reason(found) == (Reason.NEVER_WRITTEN, 4, 8)


@pytest.mark.parametrize("changes", [{"recent": [decided("a", "later", 8, 3)]}, {"end_head": 1 << 40}])
def test_a_server_that_tells_what_we_do_not_know_has_another_version(tmp_path: Path, changes: dict[str, Any]) -> None:
    with told_by_a_server(status_of(**changes)) as url:
        result = kvfetch("why", str(tmp_path), "--server", url, "--request", "a")
    assert (result.exit_code, "has another version of kvfetch: " in result.stderr) == (2, True)


def test_a_request(tmp_path: Path) -> None:
    store(tmp_path, coded())
    recent = [decided("a", Reason.TIMEOUT, 8, 3), decided("b", "", 8, 8), decided("c", "", 5, 5)]
    recent.append(decided(label_of_request("long" * 1000), Reason.TIMEOUT, 8, 3))
    with told_by_a_server(status_of(recent=recent)) as url:

        def explained(request_id: str, exit_code: int) -> Any:
            return kvfetch_json("why", str(tmp_path), "--server", url, "--request", request_id, exit_code=exit_code)[0]

        for timed_out in ("a", "long" * 1000, label_of_request("long" * 1000)):
            assert only_reason(explained(timed_out, 1)) == (Reason.TIMEOUT, 3, 8)
        assert explained("b", 0)["findings"] == []
        assert only_reason(explained("c", 1)) == (Reason.NEVER_WRITTEN, 5, 8)
        result = kvfetch("why", str(tmp_path), "--server", url, "--request", "d")
        assert result.exit_code == 2
        assert "the server remembers no request 'd'. It remembers the last 4" in result.output
