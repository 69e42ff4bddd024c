"""The nginx configuration in docs/stores.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from harness.engine import free_port
from harness.small_segments import data_object
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores import Store, wire
from sgl_kvfetch.stores.http import HttpStore
from tests.stores.conformance import AdminStoreConformance

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [pytest.mark.process, pytest.mark.skipif(NGINX is None, reason="needs nginx, as in Debian's nginx-light")]


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    text = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
    (config,) = re.findall("```nginx\n(.*?)```", text, re.DOTALL)
    tokens = tmp_path / "tokens"
    tokens.write_text("read READ_TOKEN\nwrite WRITE_TOKEN\nadmin ADMIN_TOKEN\n")
    root, port = tmp_path / "store", free_port()
    root.mkdir()
    async with running_server(ServerConfig(root, port=0, token_file=tokens)) as server:
        for old, new in (
            ("127.0.0.1:8700", f"127.0.0.1:{server.port}"),
            ("listen 8701", f"listen 127.0.0.1:{port}"),
            ("DIRECTORY", str(root)),
            ('"Bearer WRITE_TOKEN" 1;', '"Bearer WRITE_TOKEN" 1; "Bearer ADMIN_TOKEN" 1;'),
        ):
            assert old in config
            config = config.replace(old, new)
        user = "user root;" if os.geteuid() == 0 else ""
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; {user} pid {tmp_path}/pid; error_log stderr;\n"
            f"events {{}}\nhttp {{\naccess_log off; client_body_temp_path {tmp_path}/b; proxy_temp_path {tmp_path}/p; "
            f"fastcgi_temp_path {tmp_path}/f; uwsgi_temp_path {tmp_path}/u; scgi_temp_path {tmp_path}/s;\n{config}}}\n"
        )
        assert NGINX is not None
        command = [NGINX, "-e", "stderr", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
        nginx = subprocess.Popen(command)  # noqa: ASYNC220 - it takes no time
        try:
            store = HttpStore(f"http://127.0.0.1:{port}", token="READ_TOKEN")
            while nginx.poll() is None:
                try:
                    await store.get(data_object(b"x"))
                    break
                except StoreError:
                    continue
            await store.close()
            assert nginx.poll() is None
            yield f"http://127.0.0.1:{port}"
        finally:
            nginx.terminate()
            nginx.wait()


class TestThroughNginx(AdminStoreConformance):
    @pytest.fixture
    async def store(self, url: str) -> AsyncIterator[Store]:
        store = HttpStore(url, token="ADMIN_TOKEN")
        yield store
        await store.close()


async def test_nginx_itself_sends_data_and_checks_tokens(url: str, tmp_path: Path) -> None:
    content = bytes(range(200))
    path = f"{wire.Route.OBJECTS}/{data_object(content)}"
    async with aiohttp.ClientSession(url) as session:

        async def ask(method: str, token: str, data: bytes | None = None) -> aiohttp.ClientResponse:
            return await session.request(method, path, data=data, headers={"Authorization": f"Bearer {token}"})

        assert (await ask("PUT", "READ_TOKEN", content)).status == 403
        assert (await ask("PUT", "WRITE_TOKEN", content)).status == 201
        answer = await ask("GET", "READ_TOKEN")
        assert answer.headers["Server"].startswith("nginx")
        assert "Python" not in answer.headers["Server"]
        assert await answer.read() == content
        assert (await ask("HEAD", "READ_TOKEN")).status == 200
        assert (await ask("GET", "")).status == 401
        assert (await ask("DELETE", "WRITE_TOKEN")).status == 204
        assert (await ask("GET", "READ_TOKEN")).status == 404
