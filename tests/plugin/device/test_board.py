from __future__ import annotations

import random
import threading

import torch

from sgl_kvfetch.plugin.device.board import Board, Ticket
from tests.plugin.device.rig import Ranks


def test_what_is_reported_is_told_once() -> None:
    board = Board(None)
    first, second = board.open(), board.open()
    assert board.step() == []
    board.report(second, 7)
    board.report(first, 0)
    assert board.step() == [(first, 0), (second, 7)]
    assert board.step() == []
    assert board.num_open == 0


def test_a_report_on_a_closed_ticket_is_not_taken_for_its_successor() -> None:
    board = Board(None)
    old = board.open()
    board.close(old)
    new = board.open()
    assert new.row == old.row
    board.report(old, 3)
    assert board.step() == []
    board.report(new, 4)
    assert board.step() == [(new, 4)]


def test_it_grows() -> None:
    board = Board(lambda least: None)
    tickets = [board.open() for _ in range(1000)]
    for number, ticket in enumerate(tickets):
        board.report(ticket, number)
    assert board.step() == [(ticket, number) for number, ticket in enumerate(tickets)]


def test_no_collective_while_nothing_is_open() -> None:
    calls: list[torch.Tensor] = []
    board = Board(calls.append)
    board.step()
    assert not calls
    ticket = board.open()
    board.step()
    assert len(calls) == 1
    board.report(ticket, 1)
    assert board.step() == [(ticket, 1)]
    board.step()
    assert len(calls) == 2


def test_ranks_hear_of_the_least_and_at_the_same_step() -> None:
    """2,000 steps, in which each rank reports when it likes."""
    ranks = Ranks(2)
    heard: list[list[tuple[int, Ticket, int]]] = [[], []]
    reports: list[dict[Ticket, int]] = [{}, {}]

    def run(rank: int) -> None:
        board = Board(ranks.agree(rank))
        same, own = random.Random(0), random.Random(1 + rank)
        unreported: list[Ticket] = []
        for step in range(2000):
            if same.random() < 0.3:
                unreported.append(board.open())
            while unreported and own.random() < 0.4:
                ticket = unreported.pop(own.randrange(len(unreported)))
                reports[rank][ticket] = own.randrange(10)
                board.report(ticket, reports[rank][ticket])
            heard[rank] += [(step, ticket, value) for ticket, value in board.step()]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard[0] == heard[1]
    assert len(heard[0]) > 500
    for _, ticket, value in heard[0]:
        assert value == min(reports[0][ticket], reports[1][ticket])
