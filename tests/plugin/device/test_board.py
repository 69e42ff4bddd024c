from __future__ import annotations

import random
import threading

import torch

from sgl_kvfetch.plugin.device.board import Board, Ticket
from tests.plugin.device.rig import Ranks


def test_what_is_reported_is_told_once() -> None:
    heard: list[tuple[str, int]] = []
    board = Board(None)
    first, second = (board.open(lambda value, name=name: heard.append((name, value))) for name in ("first", "second"))
    board.step()
    assert not heard
    board.report(second, 7)
    board.report(first, 0)
    board.step()
    assert heard == [("first", 0), ("second", 7)]
    board.step()
    assert len(heard) == 2
    assert board.num_open == 0


def test_a_report_on_a_closed_ticket_is_not_taken_for_its_successor() -> None:
    heard: list[int] = []
    board = Board(None)
    old = board.open(heard.append)
    board.close(old)
    new = board.open(heard.append)
    assert new.row == old.row
    board.report(old, 3)
    board.step()
    assert not heard
    board.report(new, 4)
    board.step()
    assert heard == [4]


def test_it_grows() -> None:
    heard: list[int] = []
    board = Board(lambda least: None)
    for number, ticket in enumerate([board.open(heard.append) for _ in range(1000)]):
        board.report(ticket, number)
    board.step()
    assert heard == list(range(1000))


def test_what_is_opened_by_what_ends_is_for_the_next_step() -> None:
    heard: list[int] = []
    board = Board(None)

    def go_on(value: int) -> None:
        heard.append(value)
        board.report(board.open(heard.append), value + 1)

    board.report(board.open(go_on), 1)
    board.step()
    assert heard == [1]
    board.step()
    assert heard == [1, 2]


def test_nobody_hears_of_what_was_cleared() -> None:
    heard: list[int] = []
    board = Board(None)
    tickets = [board.open(heard.append) for _ in range(3)]
    board.report(tickets[0], 1)
    board.clear()
    board.report(tickets[1], 1)
    assert board.num_open == 0
    board.step()
    new = board.open(heard.append)
    board.report(new, 5)
    board.step()
    assert heard == [5]


def test_no_collective_while_nothing_is_open() -> None:
    calls: list[torch.Tensor] = []
    heard: list[int] = []
    board = Board(calls.append)
    board.step()
    assert not calls
    ticket = board.open(heard.append)
    board.step()
    assert len(calls) == 1
    board.report(ticket, 1)
    board.step()
    assert heard == [1]
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
        num_steps = 0

        def open_one() -> Ticket:
            ticket = board.open(lambda value: heard[rank].append((num_steps, ticket, value)))
            return ticket

        for _ in range(2000):
            if same.random() < 0.3:
                unreported.append(open_one())
            while unreported and own.random() < 0.4:
                ticket = unreported.pop(own.randrange(len(unreported)))
                reports[rank][ticket] = own.randrange(10)
                board.report(ticket, reports[rank][ticket])
            board.step()
            num_steps += 1

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard[0] == heard[1]
    assert len(heard[0]) > 500
    for _, ticket, value in heard[0]:
        assert value == min(reports[0][ticket], reports[1][ticket])
