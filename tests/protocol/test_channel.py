from __future__ import annotations

import socket
import threading

from harness.waiting import WAIT_S
from sgl_kvfetch.protocol.messages import Channel, Near, Outbox, Pong, Stage, Staged, encode


def test_a_peer_that_takes_its_time_is_not_silent() -> None:
    """It takes commands piece by piece, and sends its answer in two pieces."""
    (ours, theirs), (our_staged, their_staged) = socket.socketpair(), socket.socketpair()
    channel = Channel(ours, our_staged)
    command = Stage(1, bytes(4 << 20))  # more than the socket takes at once
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
    their_staged.close()
    channel.close()


def test_what_the_scheduler_looks_for_is_not_for_the_thread_that_waits() -> None:
    (ours, theirs), (our_staged, their_staged) = socket.socketpair(), socket.socketpair()
    channel = Channel(ours, our_staged)
    assert channel.receive_staged() == []
    their_staged.sendall(encode(Staged(1)) + encode(Staged(2))[:3])
    assert channel.receive(0.01) == []
    assert channel.receive_staged() == [Staged(1)]
    assert channel.receive_staged() == []
    their_staged.sendall(encode(Staged(2))[3:])
    assert channel.receive_staged() == [Staged(2)]
    their_staged.sendall(encode(Near(3)))
    assert channel.receive_staged(WAIT_S) == [Near(3)]
    assert channel.receive_staged(0.01) == []
    their_staged.close()
    assert channel.receive_staged() == []
    theirs.close()
    channel.close()
    assert channel.receive_staged() == []


def test_an_outbox_keeps_what_the_socket_does_not_take() -> None:
    ours, theirs = socket.socketpair()
    num_calls = 0

    def count() -> None:
        nonlocal num_calls
        num_calls += 1

    outbox, message = Outbox(ours, count), Stage(1, bytes(1 << 20))
    outbox.send(message)
    outbox.send(Pong())
    assert outbox.has_unsent
    assert num_calls == 1
    expected, data = encode(message) + encode(Pong()), b""
    while len(data) < len(expected):
        data += theirs.recv(1 << 16)
        outbox.flush()
    assert data == expected
    assert outbox.flush()
    assert not outbox.has_unsent
    outbox.close()
    outbox.send(Pong())
    assert theirs.recv(1) == b""
    theirs.close()
