"""KV events of a store, read by SGLang's decoder and its own subscriber over real sockets."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
    ZmqEventPublisher,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.utils import get_storage_hash_str, hash_str_to_int64

from harness.small_segments import FOLDER, expiring, head_slice, make_segment, page_hashes, put_segment
from harness.waiting import until
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.directory import changes
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.server import ServerConfig
from sgl_kvfetch.server.kv_events import KVEventPublisher
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores.http import HttpStore

CHAIN = page_hashes(8)
LEFT, RIGHT, WHOLE = make_segment(CHAIN, 0, 4), make_segment(CHAIN, 4, 4), make_segment(CHAIN, 0, 8)
Connect = Callable[..., "zmq.Socket[Any]"]
PROBE = "probe"  # the model of segments that say whether a subscriber is connected


def block_hashes(hashes: list[bytes]) -> list[int]:
    return [hash_str_to_int64(page_hash.hex()) for page_hash in hashes]


class Subscriber:
    """Decodes with SGLang's types, and keeps an index of the blocks of each topic as a router does."""

    def __init__(self, connect: Connect, publisher: KVEventPublisher, topic: str = "") -> None:
        self.events: list[tuple[str, Any]] = []
        self.sequences: list[int] = []  # of FOLDER
        self.blocks: dict[str, set[int]] = {}
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket = connect(zmq.SUB, publisher.endpoint)
        for name in (topic, head_slice(PROBE).folder):
            self._socket.setsockopt_string(zmq.SUBSCRIBE, name)

    async def connect(self, store: LocalStore) -> None:
        """Return when messages arrive. They are forgotten."""
        probe = head_slice(PROBE).folder
        count = 0

        async def arrives() -> bool:
            nonlocal count
            count += 1
            await put_segment(store, make_segment(page_hashes(1, f"probe {count}"), 0, 1, model=PROBE))
            return self.receive(100) and probe in self.blocks

        await until(arrives)
        (last,) = block_hashes(page_hashes(1, f"probe {count}"))

        def all_arrived() -> bool:
            self.receive()
            return last in self.blocks[probe]

        await until(all_arrived)
        self.events.clear()
        self.sequences.clear()
        self.blocks.clear()

    def receive(self, wait_ms: int = 0) -> bool:
        """Read what has arrived. Return whether there was anything."""
        any_arrived = False
        while self._socket.poll(0 if any_arrived else wait_ms):
            any_arrived = True
            self.apply(self._socket.recv_multipart())
        return any_arrived

    def apply(self, message: list[bytes]) -> None:
        topic, sequence, payload = message
        if topic.decode() == FOLDER:
            self.sequences.append(int.from_bytes(sequence, "big"))
        for event in self._decoder.decode(payload).events:
            self.events.append((topic.decode(), event))
            blocks = self.blocks.setdefault(topic.decode(), set())
            match event:
                case BlockStored():
                    blocks.update(event.block_hashes)
                case BlockRemoved():
                    blocks.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    blocks.clear()

    async def sees(self, *segments: CodedSegment) -> None:
        """Return when the index of FOLDER has just these segments' pages."""
        hashes = {page_hash for segment in segments for page_hash in segment.manifest.page_hashes}

        def same() -> bool:
            self.receive()
            return self.blocks.get(FOLDER, set()) == set(block_hashes([*hashes]))

        await until(same)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes sockets, and closes them after the test."""
    context: zmq.Context[Any] = zmq.Context()
    sockets = []

    def connect(kind: int, endpoint: str, **options: Any) -> zmq.Socket[Any]:
        socket = context.socket(kind)
        sockets.append(socket)
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(endpoint)
        return socket

    yield connect
    for socket in sockets:
        socket.close(linger=0)
    context.term()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(tmp_path / "root")
    yield store
    await store.close()


@pytest.fixture
def publisher(store: LocalStore) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(store.change_log(), "tcp://127.0.0.1:*")
    yield publisher
    publisher.close()


@pytest.fixture
async def subscriber(store: LocalStore, publisher: KVEventPublisher, connect: Connect) -> Subscriber:
    subscriber = Subscriber(connect, publisher)
    await subscriber.connect(store)
    return subscriber


def replay(connect: Connect, publisher: KVEventPublisher) -> list[list[bytes]]:
    """Ask for a replay as a client of SGLang's publisher does."""
    socket = connect(zmq.DEALER, publisher.replay_endpoint)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    messages = []
    while socket.poll(240_000):
        _, *message = socket.recv_multipart()
        if message[1] == ZmqEventPublisher.END_SEQ:
            return messages
        messages.append(message)
    raise TimeoutError("the replay does not end")


async def test_events_are_those_of_sglangs_recorder_but_for_the_tokens(
    store: LocalStore, subscriber: Subscriber
) -> None:
    root, parent, child = TreeNode(), TreeNode(), TreeNode()
    root.key, root.hash_value = RadixKey([]), []
    parent.parent, child.parent = root, parent
    parent.key, child.key = RadixKey([5, 6, 7, 8]), RadixKey([1, 2, 3, 4])
    recorder = KVCacheEventRecorder(enabled=True, page_size=1)
    recorder.record_store(parent, StorageMedium.EXTERNAL)
    parent_events = recorder.take()
    recorder.record_store(child, StorageMedium.EXTERNAL)
    recorder.record_remove(child, StorageMedium.EXTERNAL)
    expected = [*parent_events, *recorder.take()]

    hashes = get_storage_hash_str(parent.key, None, page_size=1)
    hashes += get_storage_hash_str(child.key, hashes[-1], page_size=1)
    chain = [bytes.fromhex(page_hash) for page_hash in hashes]
    for first_page in (0, 4):
        await put_segment(store, make_segment(chain, first_page, 4))
    await store.delete_prefix(make_segment(chain, 4, 4).manifest.key.stem)
    await until(lambda: subscriber.receive() and isinstance(subscriber.events[-1][1], BlockRemoved))
    assert [event for _, event in subscriber.events] == [
        msgspec.structs.replace(event, token_ids=[]) if isinstance(event, BlockStored) else event for event in expected
    ]
    assert {topic for topic, _ in subscriber.events} == {FOLDER}


async def test_sglangs_own_subscriber_reports_and_revokes_blocks(
    store: LocalStore, publisher: KVEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        """Takes what the subscriber reports, in the place of UMBP's client, which is not installed."""

        def __init__(self) -> None:
            self.blocks: set[str] = set()

        def report_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
            self.blocks |= {*hashes}
            return True

        def revoke_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
            self.blocks -= {*hashes}
            return True

    umbp = types.ModuleType("mori.umbp")
    umbp.UMBPTierType = types.SimpleNamespace(HBM="hbm", DRAM="dram")  # type: ignore[attr-defined]
    mori = types.ModuleType("mori")
    mori.umbp = umbp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mori", mori)
    monkeypatch.setitem(sys.modules, "mori.umbp", umbp)
    from sglang.srt.mem_cache.storage.umbp.umbp_store import KVEventsSubscriber

    client = Client()
    subscriber = KVEventsSubscriber(client, publisher.endpoint, topic=FOLDER)
    subscriber.start()
    expected = {str(block) for block in block_hashes(CHAIN[:4])}

    async def reported() -> bool:  # again and again: it may not have been connected before
        await store.delete_prefix("")
        await put_segment(store, LEFT)
        return client.blocks == expected

    try:
        await until(reported)
        await store.delete_prefix("")
        await until(lambda: not client.blocks)
    finally:
        subscriber.stop()


async def test_a_segment_follows_the_page_before_it(store: LocalStore, subscriber: Subscriber) -> None:
    await put_segment(store, RIGHT)
    await subscriber.sees(RIGHT)
    ((_, event),) = subscriber.events
    assert event.parent_block_hash == block_hashes(CHAIN)[3]
    assert (event.block_size, event.medium) == (1, "EXTERNAL")


async def test_pages_that_another_segment_has_are_not_removed(store: LocalStore, subscriber: Subscriber) -> None:
    await put_segment(store, LEFT)
    await put_segment(store, WHOLE)
    await store.delete_prefix(LEFT.manifest.key.stem)
    start, other = make_segment(CHAIN, 0, 2), make_segment(page_hashes(4, "other"), 0, 4)
    for segment in (start, other):
        await put_segment(store, segment)
    await subscriber.sees(WHOLE, other)
    await store.delete_prefix(WHOLE.manifest.key.stem)
    await subscriber.sees(start, other)
    removed = [event.block_hashes for _, event in subscriber.events if isinstance(event, BlockRemoved)]
    assert removed == [block_hashes(CHAIN[2:])]


async def test_a_manifest_that_is_replaced_is_no_event(store: LocalStore, subscriber: Subscriber) -> None:
    await put_segment(store, LEFT)
    await put_segment(store, make_segment(CHAIN, 0, 4, codec="raw"))
    await put_segment(store, RIGHT)
    await subscriber.sees(LEFT, RIGHT)
    assert len(subscriber.events) == 2


async def test_evicted_pages_are_removed(tmp_path: Path, connect: Connect) -> None:
    sizes = sum(LEFT.manifest.data_sizes.values()) + len(LEFT.manifest.encode())
    store = LocalStore(tmp_path, capacity_bytes=10 * sizes)
    publisher = KVEventPublisher(store.change_log(), "tcp://127.0.0.1:*")
    try:
        subscriber = Subscriber(connect, publisher)
        await subscriber.connect(store)
        segments = [make_segment(page_hashes(4, f"chain {i}"), 0, 4) for i in range(20)]
        for segment in segments:
            await put_segment(store, segment)
        held = {info.name for info in [info async for info in store.list()]}
        kept = [segment for segment in segments if segment.manifest.key.manifest_name in held]
        assert 0 < len(kept) < 20
        await subscriber.sees(*kept)
    finally:
        publisher.close()
        await store.close()


async def test_expired_pages_are_removed_by_the_next_write(
    store: LocalStore, subscriber: Subscriber, later: Callable[[float], None]
) -> None:
    await put_segment(store, expiring(LEFT, 1))
    await subscriber.sees(LEFT)
    later(100)
    await put_segment(store, make_segment(page_hashes(4, "other"), 0, 4))
    await subscriber.sees(make_segment(page_hashes(4, "other"), 0, 4))


async def test_other_processes_changes_are_published(store: LocalStore, subscriber: Subscriber) -> None:
    other = LocalStore(store.root)
    await put_segment(other, LEFT)
    await subscriber.sees(LEFT)
    await other.delete_prefix("")
    await subscriber.sees()
    await other.close()


async def test_models_are_topics_with_sequences_of_their_own(
    store: LocalStore, publisher: KVEventPublisher, connect: Connect
) -> None:
    subscriber = Subscriber(connect, publisher, topic=FOLDER)
    await subscriber.connect(store)
    for count in range(1, 4):
        segment = make_segment(page_hashes(4, f"chain {count}"), 0, 4)
        await put_segment(store, make_segment(page_hashes(4, f"chain {count}"), 0, 4, model="other"))
        await put_segment(store, segment)
        await until(lambda: subscriber.receive() and len(subscriber.sequences) == count)  # noqa: B023
    assert subscriber.sequences == [1, 2, 3]
    assert {topic for topic, _ in subscriber.events} == {FOLDER}


async def test_a_replay_is_all_that_the_store_has(
    store: LocalStore,
    publisher: KVEventPublisher,
    subscriber: Subscriber,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    later: Callable[[float], None],
) -> None:
    monkeypatch.setattr(changes, "_AT_ONCE", 10)
    singles = [make_segment(page_hashes(1, f"{count}"), 0, 1) for count in range(25)]
    await put_segment(store, LEFT)
    expired = expiring(make_segment(page_hashes(4, "expired"), 0, 4), time.time() + 100)
    await put_segment(store, expired)
    for segment in singles:
        await put_segment(store, segment)
    await put_segment(store, RIGHT)
    await store.delete_prefix(LEFT.manifest.key.stem)
    await subscriber.sees(RIGHT, expired, *singles)
    later(200)
    late = Subscriber(connect, publisher)
    late.blocks[FOLDER] = {42}  # what it has missed to remove
    for message in replay(connect, publisher):
        late.apply(message)
    await late.sees(RIGHT, *singles)
    assert late.blocks.keys() == {FOLDER, head_slice(PROBE).folder}
    stored = {event.block_hashes[0]: event for _, event in late.events if isinstance(event, BlockStored)}
    assert stored[block_hashes(CHAIN)[4]].parent_block_hash == block_hashes(CHAIN)[3]


async def test_a_replay_says_after_which_message_it_goes_on(
    store: LocalStore, publisher: KVEventPublisher, subscriber: Subscriber, connect: Connect
) -> None:
    await put_segment(store, LEFT)
    await subscriber.sees(LEFT)
    await put_segment(store, RIGHT)
    await subscriber.sees(LEFT, RIGHT)
    answer = replay(connect, publisher)
    assert {sequence for topic, sequence, _ in answer if topic.decode() == FOLDER} == {
        subscriber.sequences[-1].to_bytes(8, "big")
    }


async def test_a_catalog_that_is_made_anew_is_published_anew(store: LocalStore, subscriber: Subscriber) -> None:
    await put_segment(store, LEFT)
    await put_segment(store, RIGHT)
    await subscriber.sees(LEFT, RIGHT)
    (store.root / f"{RIGHT.manifest.key.manifest_name}").unlink()
    await store.rebuild()
    await until(lambda: subscriber.receive() and (FOLDER, AllBlocksCleared()) in subscriber.events)
    await subscriber.sees(LEFT)


async def test_a_subscriber_that_never_reads_holds_nothing_up(
    store: LocalStore, publisher: KVEventPublisher, subscriber: Subscriber, connect: Connect
) -> None:
    connect(zmq.SUB, publisher.endpoint, rcvhwm=1, rcvbuf=1024).setsockopt(zmq.SUBSCRIBE, b"")
    asker = connect(zmq.DEALER, publisher.replay_endpoint, rcvhwm=1)
    asker.send_multipart([b"", bytes(8)])
    asker.send_multipart([b"not", b"a", b"request", b"of", b"ours"])
    segments = [make_segment(page_hashes(4, f"chain {i}"), 0, 4) for i in range(50)]
    for segment in segments:
        await put_segment(store, segment)
    await subscriber.sees(*segments)


async def test_a_log_that_has_lost_changes_says_so(store: LocalStore) -> None:
    log = store.change_log()
    assert log.read() is None
    log.restart()
    assert log.read() == []
    await put_segment(store, LEFT)
    with store._catalog.writing() as db:
        for _ in range(5000):
            db.execute("INSERT INTO changes (is_added, name, page_size, hashes) VALUES (1, 'a/b', 1, x'')")
        assert db.execute("SELECT count(*) FROM changes").fetchone() == (4096,)
    assert log.read() is None
    log.restart()
    assert log.read() == []
    second = store.change_log()
    second.restart()
    second.close()
    assert log.read() is None


async def test_nothing_is_logged_without_a_publisher(store: LocalStore) -> None:
    await put_segment(store, LEFT)
    publisher = KVEventPublisher(store.change_log(), "tcp://127.0.0.1:*")
    publisher.close()
    await put_segment(store, RIGHT)
    await store.delete_prefix("")
    with store._catalog.reading() as db:
        assert db is not None
        assert db.execute("SELECT count(*) FROM changes").fetchone() == (0,)


async def test_a_server_publishes_what_clients_write(tmp_path: Path, connect: Connect, caplog: Any) -> None:
    caplog.set_level("INFO")
    config = ServerConfig(tmp_path, port=0, grace_s=1, kv_events="tcp://127.0.0.1:*")
    async with running_server(config) as server:
        (line,) = [record for record in caplog.records if "publishing KV events" in record.message]
        store = HttpStore(server.url)
        socket = connect(zmq.SUB, line.args[0])
        socket.setsockopt_string(zmq.SUBSCRIBE, FOLDER)

        async def arrives() -> bool:
            await store.delete_prefix(FOLDER)
            await put_segment(store, LEFT)
            return bool(socket.poll(100))

        await until(arrives)
        await store.close()
        with pytest.raises(ConfigError, match="in use"):
            async with running_server(replace(config, root=tmp_path / "2", kv_events=line.args[0])):
                pass


@pytest.mark.parametrize("address", ["5557", "tcp://*", "http://*:5557", "tcp://*:65535", "tcp://*:0x1"])
def test_an_address_that_cannot_be_used_is_an_error(store: LocalStore, address: str) -> None:
    with pytest.raises(ConfigError, match="KV events"):
        KVEventPublisher(store.change_log(), address)


async def test_without_pyzmq_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sgl_kvfetch.server.kv_events")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match="events]"):
        async with running_server(ServerConfig(tmp_path, port=0, kv_events="tcp://127.0.0.1:*")):
            pass
