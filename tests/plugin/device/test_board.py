from __future__ import annotations

import random
import threading

import torch

from sgl_kvfetch.plugin.device.parking import Board, Ticket
from tests.plugin.device.rig import Ranks


def test_a_report_on_a_closed_ticket_does_not_reach_its_successor() -> None:
    heard: list[int] = []
    board = Board(None)
    old = board.open_ticket(heard.append)
    board.close_ticket(old)
    new = board.open_ticket(heard.append)
    assert new.column == old.column
    board.report(old, 3)
    board.step()
    assert not heard
    board.report(new, 4)
    board.step()
    assert heard == [4]


def test_the_board_grows() -> None:
    heard: list[int] = []
    board = Board(lambda least: None)
    for number, ticket in enumerate([board.open_ticket(heard.append) for _ in range(1000)]):
        board.report(ticket, number)
    board.step()
    assert heard == [number for number in range(1000)]


def test_a_ticket_opened_by_a_callback_waits_for_the_next_step() -> None:
    heard: list[int] = []
    board = Board(None)

    def go_on(count: int) -> None:
        heard.append(count)
        board.report(board.open_ticket(heard.append), count + 1)

    board.report(board.open_ticket(go_on), 1)
    board.step()
    assert heard == [1]
    board.step()
    assert heard == [1, 2]


def test_cleared_tickets_call_nobody() -> None:
    heard: list[int] = []
    board = Board(None)
    tickets = [board.open_ticket(heard.append) for _ in range(3)]
    board.report(tickets[0], 1)
    board.clear()
    board.report(tickets[1], 1)
    assert board.num_open == 0
    board.step()
    new = board.open_ticket(heard.append)
    board.report(new, 5)
    board.step()
    assert heard == [5]


def test_no_collective_while_nothing_is_open() -> None:
    calls: list[torch.Tensor] = []
    heard: list[int] = []
    board = Board(calls.append)
    board.step()
    assert not calls
    ticket = board.open_ticket(heard.append)
    board.step()
    assert len(calls) == 1
    board.report(ticket, 1)
    board.step()
    assert heard == [1]
    board.step()
    assert len(calls) == 2


def test_all_ranks_get_the_minimum_in_the_same_step() -> None:
    """In 2,000 steps, each rank reports at random times."""
    ranks = Ranks(2)
    heard: list[list[tuple[int, Ticket, int]]] = [[], []]
    reports: list[dict[Ticket, int]] = [{}, {}]

    def run(rank: int) -> None:
        board = Board(ranks.agree(rank))
        same, own = random.Random(0), random.Random(1 + rank)
        unreported: list[Ticket] = []
        num_steps = 0

        def open_one() -> Ticket:
            ticket: Ticket = board.open_ticket(lambda found: heard[rank].append((num_steps, ticket, found)))
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
    for _, ticket, found in heard[0]:
        assert found == min(reports[0][ticket], reports[1][ticket])
