from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import ConfigError, FormatError, KVFetchError, StoreError
from sgl_kvfetch.protocol import messages as m
from sgl_kvfetch.status import Audits
from tests.segments import SMALL, make_heads

NAMESPACE = make_heads(SMALL, make_quantiser("exact")).namespace
_NEEDS = m.ProfileNeeds(SMALL, (0, 1), 0, 1, 2, 1e-3)
COMMANDS: list[m.Command] = [
    m.Start({"store": "http://kv"}, NAMESPACE, 0, 2, 1, None, pool=(m.Place(0, 64, (2, 4), (4, 1)),)),
    m.TakeProfile({"store": "http://kv"}, m.Watch("0" * 32, "/model", "model", _NEEDS), "d" * 32),
    m.LookUp(1, b"h" * 64, is_idle=True, trailing={"swa": 4, "indexer": 0}),
    m.FetchPages(2, b"h" * 32, (7,), 1.5, is_last=True),
    m.FetchSide(5, "swa", b"h" * 32, 1.5),
    m.Stage(6, b"h" * 32, ((1, -0.5), (4, 2.0)), "r", "00-1-2-01"),
    m.Unstage(6),
    m.Flush(),
    m.Write(3, 0, None, b"h" * 32, 64, (("swa", 0),)),
    m.Write(3, 4, b"p" * 32, b"h" * 32, 64, (), ((700, 0), (690, 3072)), 4096),
    m.Clear(4),
    m.ShowPrompts(((b"1234", b"5678"), (b"",))),
    m.PauseCalibration(True),
    m.Ping(),
    m.Close(),
]
EVENTS: list[m.Event] = [
    m.ProfileTaken(m.TakenProfile("/copy", "d" * 32, "the newest")),
    m.Ready(),
    m.Refused("ConfigError", "no such store"),
    m.Found(1, 2, 3, "", (1, 2), {"kv": 3, "swa": 2}),
    m.Fetched(2, 1, "late", m.SidePages(0, (("swa", 0),))),
    m.Staged(6, 3, 4, "late", 4096, m.CodedCells(8192, 900, 6), m.SidePages(12288, (("swa", 2),))),
    m.Near(7),
    m.Settled(3),
    m.Taken(3, is_lost=True),
    m.ClearOver(4, ""),
    m.ProfileFound("d" * 32),
    m.AuditsTold(Audits(model="m", quantiser="klt 1e-3", num_audits=3, typical=0.5, by_length={"to 1024": 0.5})),
    m.Pong(),
]


def test_a_refusal_is_the_error_that_it_was_made_of() -> None:
    for error in (ConfigError("no such key"), StoreError("refused", "the store is down"), KVFetchError("else")):
        again = m.Refused.of(error).error
        assert (type(again), str(again)) == (type(error), str(error))
        assert getattr(again, "reason", None) == getattr(error, "reason", None)


def test_every_message_type_is_covered() -> None:
    for kind, messages in ((m.Command, COMMANDS), (m.Event, EVENTS)):
        assert {type(message) for message in messages} == set(kind.__args__)


@pytest.mark.parametrize(("kind", "messages"), [(m.Command, COMMANDS), (m.Event, EVENTS)])
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 2000)))
def test_messages_are_decoded_wherever_their_bytes_were_split(kind: Any, messages: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(m.encode, messages))
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    reader: m.MessageReader[Any] = m.MessageReader(kind)
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        found += list(reader.feed(data[start:end]))
    assert found == messages


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff\xff\xff", "a message of 4294967295 bytes; at most"),
        (b"\x01\x00\x00\x00\xc1", "cannot be decoded"),
        (m.encode(m.Ready()), "cannot be decoded"),  # an event is no command
    ],
)
def test_invalid_bytes_are_refused(data: bytes, message: str) -> None:
    reader: m.MessageReader[m.Command] = m.MessageReader(m.Command)
    with pytest.raises(FormatError, match=message):
        list(reader.feed(data))


def test_a_message_that_is_too_large_is_refused_where_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "_MOST_BYTES", 1024)
    (found,) = m.MessageReader[m.Command](m.Command).feed(m.encode(m.Stage(1, bytes(1000))))
    assert found == m.Stage(1, bytes(1000))
    with pytest.raises(FormatError, match=r"a Stage of 10[0-9][0-9] bytes; messages have at most 1024"):
        m.encode(m.Stage(1, bytes(1024)))


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(FormatError, match=r"a FetchSide with the text 'of \\udcff folder': expected valid Unicode"):
        m.encode(m.FetchSide(1, "of \udcff folder", b"", 0.0))
