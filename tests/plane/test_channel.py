from __future__ import annotations

import socket
import threading

from harness.waiting import WAIT_S
from sgl_kvfetch.plane.channel import Channel
from sgl_kvfetch.plane.messages import LookUp, Pong, encode


def test_a_peer_that_takes_its_time_is_not_silent() -> None:
    """It takes commands piece by piece, and sends its answer in two pieces."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    command = LookUp(1, bytes(4 << 20))  # more than the socket takes at once
    channel.send(command)

    def read_and_answer() -> None:
        left = len(encode(command))
        while left:
            left -= len(theirs.recv(1 << 16))
        answer = encode(Pong())
        theirs.sendall(answer[:1])
        theirs.sendall(answer[1:])

    peer = threading.Thread(target=read_and_answer, daemon=True)
    peer.start()
    assert channel.receive(WAIT_S) == [Pong()]
    peer.join(WAIT_S)
    assert channel.receive(0.01) == []
    theirs.close()
    assert channel.receive(WAIT_S) is None
    channel.close()
