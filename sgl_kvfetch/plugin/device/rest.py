"""A rest for the scheduler's loop, which spins while anything is pending, and takes a core from those who fetch."""

from __future__ import annotations

from typing import Any

import zmq

REST_MS = 1


def rest_until_asked(scheduler: Any) -> None:
    """Wait for a moment, or until a request arrives. On the rank that requests arrive at; the others wait for that one
    anyway, in SGLang's own collective."""
    channels = scheduler.ipc_channels
    sockets = (channels.recv_from_tokenizer, channels.recv_from_rpc)
    # Where they arrive in another way, we could not be woken.
    if all(isinstance(socket, zmq.Socket) for socket in sockets) and scheduler.recv_from_tokenizer is sockets[0]:
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(REST_MS)
