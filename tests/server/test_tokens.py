from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes
from sgl_kvfetch import user_files
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.plane.access import store_token
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.server import tokens
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, running_server
from sgl_kvfetch.server.tokens import Role, TokenFile, parse_tokens
from sgl_kvfetch.stores import object_digest, wire
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.user_files import TOKEN_ENV
from tests.stores.conformance import failing

TOKENS = """
# Readers
read  r1
read  r2

write w
admin a
"""


def test_tokens_by_role() -> None:
    assert parse_tokens("s3cret\n") == {"s3cret": Role.ADMIN}
    assert parse_tokens(TOKENS) == {"r1": Role.READ, "r2": Role.READ, "w": Role.WRITE, "a": Role.ADMIN}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing", "is empty"),
        ("read", "line 1: expected one of read, write, admin, and a token"),  # a role without its token
        ("read a\nreader s3cret", "line 2: expected"),
        ("read s3cret more", "line 1: expected"),
        ("read s3cret\nadmin s3cret", "line 2: this token is listed twice"),
    ],
)
def test_malformed_token_files(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_tokens(text)
    assert "s3cret" not in str(caught.value)


def test_a_file_that_breaks_keeps_its_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    path.write_text("read r")
    tokens = TokenFile(path)
    for text, role in (("s3cret and more", Role.READ), (None, Role.READ), ("write r", Role.WRITE)):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        tokens.files.reload(if_changed=True)
        assert tokens.role_of("Bearer r") == role
    for header in ("", "r", "Bearer", "Basic r", "bearer \udcff"):
        assert tokens.role_of(header) is None
    assert "keeping the old tokens" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    async with running_server(ServerConfig(tmp_path / "store", port=0, token_file=path)) as server:
        yield server


@pytest.mark.process
async def test_refused_clients_are_logged_once_a_minute_without_their_tokens(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, said in (("s3cret", "an unknown token"), (None, "no token"), ("r1", "the role read, not write")):
        monkeypatch.setattr(tokens, "_limited", LimitedLogger(tokens.logger))
        caplog.clear()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(server.url, headers=headers) as session:
            for _ in range(3):
                async with session.put(f"{wire.Route.OBJECTS}/%1b[31m%e2%80%ae", data=b"") as response:
                    assert response.status in (401, 403)
        (line,) = [record.getMessage() for record in caplog.records if record.name == tokens.__name__]
        assert line.startswith("refused PUT /v1/objects/")
        assert line.endswith(f"from 127.0.0.1: it has {said}" if token != "r1" else said)
        assert line.isprintable()
        assert "s3cret" not in line


@pytest.mark.process
async def test_only_admins_replace_what_they_have_not_read_and_delete_what_is_not_named(server: RunningServer) -> None:
    old, new = (make_segment(page_hashes(4), 0, 4, codec=codec) for codec in ("zstd", "deflate"))
    name = old.manifest.key.manifest_name
    before, after = old.manifest.encode(), new.manifest.encode()
    writer, admin = HttpStore(server.url, token="w"), HttpStore(server.url, token="a")
    for segment in (old, new):
        await writer.put(segment.data_name, segment.data)

    async def put(token: str, content: bytes, name: str = name, **headers: str) -> int:
        condition = {key.replace("_", "-"): value for key, value in headers.items()}
        async with (
            aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {token}"} | condition) as session,
            session.put(f"{wire.Route.OBJECTS}/{name}", data=content) as response,
        ):
            return response.status

    assert await put("w", old.data, old.data_name, If_None_Match="*") == 412  # it is there
    assert await put("w", before) == 201
    assert await put("w", before) == 201  # a retry
    assert await put("w", after) == 412
    assert await admin.get(name) == before
    assert await put("w", after, If_Match=wire.entity_tag(object_digest(before))) == 201
    assert await put("a", before, If_None_Match="*") == 412
    assert await put("a", before, If_None_Match='"x"') == 400
    assert await admin.get(name) == after
    assert await put("a", before) == 201
    assert await admin.get(name) == before
    # The client does what a server demands.
    await writer.put(name, after)
    assert await admin.get(name) == after
    for prefix in ("", FOLDER):  # which may be that of another namespace, too
        with failing("unauthorised"):
            await writer.delete_prefix(prefix)
    await writer.close()
    await admin.close()


@pytest.mark.process
async def test_a_clients_token_file_is_read_again(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small and large, by aiohttp and by sockets of our own."""
    monkeypatch.setattr(user_files, "LOOK_EVERY_S", 0.0)
    path = tmp_path / "mine"
    path.write_text("revoked")
    path.chmod(0o600)
    monkeypatch.setenv(TOKEN_ENV, "a")
    config = parse_config({"store": server.url, "token_file": str(path)})
    store = HttpStore(server.url, token=store_token(config))
    content = bytes(range(256)) * (3 << 12)
    asks: list[Callable[[], Awaitable[object]]] = [
        partial(store.put, data_object(content), content),
        partial(store.get, data_object(content)),
        partial(store.get, data_object(content), 12345, 2 << 20),
    ]
    for text, is_known in (("revoked", False), ("# ours\nw\n", True), ("two words", True), ("revoked", False)):
        path.write_text(text)
        got = []
        for ask in asks:
            with nullcontext() if is_known else pytest.raises(StoreError, match="does not know this token"):
                got.append(await ask())
        assert got[1:] == ([content, content[12345 : 12345 + (2 << 20)]] if is_known else [])
    await store.close()
