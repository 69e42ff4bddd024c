"""The KV events of the store beside those of the SGLang server that writes to it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

from harness.engine import SGLangServer, free_port, hicache_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, ask, make_prompt

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGES = 640 // PAGE_SIZE


def stored_blocks(port: int) -> dict[int, tuple[int | None, int, str | None]]:
    """Ask a publisher for a replay. Return the parent, size in tokens and medium of each block."""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    blocks = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert socket.poll(240_000)
            _, _, sequence, payload = socket.recv_multipart()
            if sequence == ZmqEventPublisher.END_SEQ:
                return blocks
            for event in decoder.decode(payload).events:
                if isinstance(event, BlockStored):
                    parents = [event.parent_block_hash, *event.block_hashes]
                    blocks |= {
                        block: (parent, event.block_size, event.medium)
                        for block, parent in zip(event.block_hashes, parents, strict=False)
                        if event.medium in ("GPU", "EXTERNAL")
                    }


def test_a_stored_page_has_the_block_hash_of_sglangs_events(model: Path, tmp_path: Path) -> None:
    address, events, replays = (free_port() for _ in range(3))
    config = f'{{"publisher": "zmq", "endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://*:{replays}"}}'
    with StoreProcess(tmp_path / "store", extra_args=["--kv-events", f"tcp://127.0.0.1:{address}"]) as store:
        flags = [*hicache_args(store.url), "--kv-events-config", config]
        with SGLangServer(model, extra_args=flags) as server:
            ask(server, make_prompt(0))
            wait_until_written(server, PAGES)
            by_store, by_sglang = stored_blocks(address + 1), stored_blocks(replays)
            assert len(by_store) == PAGES
            assert {medium for *_, medium in by_store.values()} == {"EXTERNAL"}
            for block, (parent, block_size, _) in by_store.items():
                assert by_sglang[block] == (parent, block_size, "GPU")

            # SGLang stores a salted prompt under other hashes than those in its events.
            server.generate(input_ids=make_prompt(1), cache_salt="tenant")
            wait_until_written(server, 2 * PAGES)
            salted, by_sglang = stored_blocks(address + 1).keys() - by_store.keys(), stored_blocks(replays)
            assert len(salted) == PAGES
            assert not salted & by_sglang.keys()
