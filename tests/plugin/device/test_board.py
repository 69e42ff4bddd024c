from __future__ import annotations

import random
import threading

import torch

from sgl_kvfetch.plugin.device.backend import Finding
from sgl_kvfetch.plugin.device.board import Board, Done, PageCount, Ticket
from tests.plugin.device.rig import Ranks


def test_each_report_is_delivered_once() -> None:
    heard: list[object] = []
    board = Board(None)
    first: Ticket[Finding] = board.open_ticket(heard.append)
    second: Ticket[PageCount] = board.open_ticket(heard.append)
    board.step()
    assert not heard
    board.report(second, PageCount(7))
    board.report(first, Finding(3, 1))
    board.step()
    assert heard == [Finding(3, 1), PageCount(7)]
    board.step()
    assert len(heard) == 2
    assert board.num_open == 0


def test_a_report_on_a_closed_ticket_does_not_reach_its_successor() -> None:
    heard: list[PageCount] = []
    board = Board(None)
    old = board.open_ticket(heard.append)
    board.close_ticket(old)
    new = board.open_ticket(heard.append)
    assert new.column == old.column
    board.report(old, PageCount(3))
    board.step()
    assert not heard
    board.report(new, PageCount(4))
    board.step()
    assert heard == [PageCount(4)]


def test_the_board_grows() -> None:
    heard: list[PageCount] = []
    board = Board(lambda least: None)
    for number, ticket in enumerate([board.open_ticket(heard.append) for _ in range(1000)]):
        board.report(ticket, PageCount(number))
    board.step()
    assert heard == [PageCount(number) for number in range(1000)]


def test_a_ticket_opened_by_a_callback_waits_for_the_next_step() -> None:
    heard: list[PageCount] = []
    board = Board(None)

    def go_on(count: PageCount) -> None:
        heard.append(count)
        board.report(board.open_ticket(heard.append), PageCount(count.num_pages + 1))

    board.report(board.open_ticket(go_on), PageCount(1))
    board.step()
    assert heard == [PageCount(1)]
    board.step()
    assert heard == [PageCount(1), PageCount(2)]


def test_cleared_tickets_call_nobody() -> None:
    heard: list[PageCount] = []
    board = Board(None)
    tickets = [board.open_ticket(heard.append) for _ in range(3)]
    board.report(tickets[0], PageCount(1))
    board.clear()
    board.report(tickets[1], PageCount(1))
    assert board.num_open == 0
    board.step()
    new = board.open_ticket(heard.append)
    board.report(new, PageCount(5))
    board.step()
    assert heard == [PageCount(5)]


def test_no_collective_while_nothing_is_open() -> None:
    calls: list[torch.Tensor] = []
    heard: list[Done] = []
    board = Board(calls.append)
    board.step()
    assert not calls
    ticket = board.open_ticket(heard.append)
    board.step()
    assert len(calls) == 1
    board.report(ticket, Done())
    board.step()
    assert heard == [Done()]
    board.step()
    assert len(calls) == 2


def test_each_field_is_agreed_on_by_itself() -> None:
    """One rank finds ten pages and wants to fetch; the other finds eleven and wants to compute: no rank fetches."""
    ranks = Ranks(2)
    heard: list[list[Finding]] = [[], []]

    def run(rank: int) -> None:
        board = Board(ranks.agree(rank))
        board.report(board.open_ticket(heard[rank].append), (Finding(10, 1), Finding(11, 0))[rank])
        board.step()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard == [[Finding(10, 0)], [Finding(10, 0)]]


def test_all_ranks_get_the_minimum_in_the_same_step() -> None:
    """In 2,000 steps, each rank reports at random times."""
    ranks = Ranks(2)
    heard: list[list[tuple[int, Ticket[Finding], Finding]]] = [[], []]
    reports: list[dict[Ticket[Finding], Finding]] = [{}, {}]

    def run(rank: int) -> None:
        board = Board(ranks.agree(rank))
        same, own = random.Random(0), random.Random(1 + rank)
        unreported: list[Ticket[Finding]] = []
        num_steps = 0

        def open_one() -> Ticket[Finding]:
            ticket: Ticket[Finding] = board.open_ticket(lambda found: heard[rank].append((num_steps, ticket, found)))
            return ticket

        for _ in range(2000):
            if same.random() < 0.3:
                unreported.append(open_one())
            while unreported and own.random() < 0.4:
                ticket = unreported.pop(own.randrange(len(unreported)))
                reports[rank][ticket] = Finding(own.randrange(10), own.randrange(2))
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
        of_both = zip(reports[0][ticket], reports[1][ticket], strict=True)
        assert found == Finding(*map(min, of_both))
