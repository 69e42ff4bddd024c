"""Publish what a store has as KV events, in the form of SGLang's ``ZmqEventPublisher`` (docs/serving.md)."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from sgl_kvfetch.directory import Change, ChangeLog
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.log import LimitedLogger

try:
    import zmq
except ImportError as e:
    raise ConfigError(f"KV events need a package that is missing ({e}): pip install 'sgl_kvfetch[events]'") from e

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

MEDIUM = "EXTERNAL"  # SGLang's tag of a shared pool
REPLAY_END = (-1).to_bytes(8, "big", signed=True)
_ADDRESS = re.compile(r"(tcp://[^\s:]+):(\*|[0-9]{1,5})")
_POLL_MS = 100
_PAUSE_S = 1.0  # after an error
_MAX_WAITING_REPLAYS = 100_000  # messages to one client

Event = dict[str, object]
Send = Callable[[str, Sequence[Event]], object]


class KVEventPublisher:
    """Publishes a store's changes from a thread of its own. A subscriber that does not keep up loses messages.

    A message is topic, sequence number and payload. The topic is a folder of the store; its messages are counted from
    1. The replay socket answers any request with all that the store has: for each topic an ``AllBlocksCleared`` and its
    blocks, under the number of its last message.
    """

    def __init__(self, log: ChangeLog, address: str) -> None:
        """``address``: ``tcp://HOST:PORT``; replays are on the next port. With ``*`` as port, both are free ones.

        Raises ConfigError if the address is malformed or in use.
        """
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise ConfigError(f"the address of KV events is {address!r}; expected one such as tcp://*:5557")
        host, port = match.groups()
        self._log = log
        self._sequences: dict[str, int] = {}  # of each topic's last message
        self._stopped = threading.Event()
        self._context = zmq.Context()
        self._pub, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._replay.sndhwm = _MAX_WAITING_REPLAYS
        try:
            self._pub.bind(address)
            self._replay.bind(f"{host}:{port if port == '*' else int(port) + 1}")
        except zmq.ZMQError as e:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot publish KV events at {address} and replay them at the next port: {e}") from e
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        logger.info("publishing KV events at %s, replays at %s", self.endpoint, self.replay_endpoint)
        self._thread = threading.Thread(target=self._run, name="kvfetch-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        is_first = True
        while not self._stopped.is_set():
            try:
                changes = self._log.read()
                if changes is None:
                    self._log.restart()
                    if not is_first:
                        self._send_all(self._publish)
                is_first = False
                _send(self._publish, changes or ())
                if self._replay.poll(0 if changes else _POLL_MS):
                    self._answer(self._replay.recv_multipart()[0])
            except (StoreError, OSError, zmq.ZMQError) as e:
                _limited.warning("events", f"KV events are delayed: {e}")
                self._stopped.wait(_PAUSE_S)
        try:
            self._log.close()
        except (StoreError, OSError) as e:
            logger.warning("cannot end the log of changes: %s", e)

    def _publish(self, topic: str, events: Sequence[Event]) -> None:
        self._sequences[topic] = self._sequences.get(topic, 0) + 1
        self._pub.send_multipart(self._message(topic, events))

    def _message(self, topic: str, events: Sequence[Event]) -> list[bytes]:
        payload = msgspec.msgpack.encode((time.time(), events, None))  # when, what, of which data-parallel rank
        return [topic.encode(), self._sequences.get(topic, 0).to_bytes(8, "big"), payload]

    def _answer(self, client: bytes) -> None:
        head = [client, b""]
        self._send_all(lambda topic, events: self._replay.send_multipart(head + self._message(topic, events)))
        self._replay.send_multipart([*head, b"", REPLAY_END, b""])

    def _send_all(self, send: Send) -> None:
        for topic in sorted(self._log.folders() | self._sequences.keys()):
            send(topic, [{"type": "AllBlocksCleared"}])
        for changes in self._log.segments():
            _send(send, changes)
            if self._stopped.is_set():
                return


def _send(send: Send, changes: Iterable[Change]) -> None:
    events: dict[str, list[Event]] = {}
    for change in changes:
        if change.page_hashes:
            events.setdefault(change.folder, []).append(_event(change))
    for topic, of_topic in events.items():
        send(topic, of_topic)


def _event(change: Change) -> Event:
    """Return an event as SGLang's ``BlockStored`` or ``BlockRemoved`` is encoded."""
    hashes = [_block_hash(page_hash) for page_hash in change.page_hashes]
    if not change.is_added:
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM}
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if change.previous_hash is None else _block_hash(change.previous_hash),
        "token_ids": [],  # a store knows only hashes
        "block_size": change.page_size,
        "lora_id": None,
        "medium": MEDIUM,
    }


def _block_hash(page_hash: bytes) -> int:
    """Return the number that SGLang's events have for a page: the first 64 bits of its hash, signed."""
    return int.from_bytes(page_hash[:8], "big", signed=True)
