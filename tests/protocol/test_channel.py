from __future__ import annotations

import socket
import threading

from harness.waiting import WAIT_S
from sgl_kvfetch.protocol.messages import Channel, Near, Ping, Pong, Stage, Staged, encode


def test_a_peer_that_takes_its_time_is_not_silent() -> None:
    """It takes commands piece by piece, and sends its answer in two pieces."""
    (ours, theirs), (our_staged, their_staged) = socket.socketpair(), socket.socketpair()
    channel = Channel(ours, our_staged)
    command = Stage(1, bytes(4 << 20))  # more than the socket takes at once
    channel.send(command)
    channel.send(Ping())
    received = b""

    def read_and_answer() -> None:
        nonlocal received
        while not received.endswith(encode(Ping())):
            received += theirs.recv(1 << 16)
        answer = encode(Pong())
        theirs.sendall(answer[:1])
        theirs.sendall(answer[1:])

    peer = threading.Thread(target=read_and_answer, daemon=True)
    peer.start()
    assert channel.receive(WAIT_S) == [Pong()]
    peer.join(WAIT_S)
    assert received == encode(command) + encode(Ping())
    assert channel.receive(0.01) == []
    theirs.close()
    assert channel.receive(WAIT_S) is None
    their_staged.close()
    channel.close()


def test_what_the_scheduler_looks_for_is_not_for_the_thread_that_waits() -> None:
    (ours, theirs), (our_staged, their_staged) = socket.socketpair(), socket.socketpair()
    channel = Channel(ours, our_staged)
    their_staged.sendall(encode(Staged(1)) + encode(Staged(2))[:3])
    assert channel.receive(0.01) == []
    assert channel.receive_staged() == [Staged(1)]
    assert channel.receive_staged(0.01) == []
    their_staged.sendall(encode(Staged(2))[3:] + encode(Near(3)))
    assert channel.receive_staged(WAIT_S) == [Staged(2), Near(3)]
    their_staged.close()
    assert channel.receive_staged() == []
    theirs.close()
    channel.close()
    assert channel.receive_staged() == []
