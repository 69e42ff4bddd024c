"""A forward proxy, as companies have between their machines and the Internet. It leads all names to one server."""

from __future__ import annotations

import asyncio

from harness.streams import StreamServer, relay


class ForwardProxy(StreamServer):
    """``requests`` lists what it was asked for: a method, and a URL, or HOST:PORT for CONNECT. ``authorizations`` lists
    the ``Proxy-Authorization`` of those that had one. Each connection carries one request."""

    def __init__(self, server_host: str, server_port: int) -> None:
        super().__init__()
        self._address = (server_host, server_port)
        self.requests: list[tuple[str, str]] = []
        self.authorizations: list[str] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        method, target, _ = request.split(" ", 2)
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        self.requests.append((method, target))
        self.authorizations += [value for name, value in headers if name == "proxy-authorization"]
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            await relay(*self._address, reader, writer)
            return
        # A server may check the name in the Host header.
        changed = {"host": "{}:{}".format(*self._address), "connection": "close"}
        kept = [(name, value) for name, value in headers if name not in ("proxy-authorization", *changed)]
        sent = [f"{method} /{target.split('/', 3)[3]} HTTP/1.1"]
        sent += [f"{name}: {value}" for name, value in (*changed.items(), *kept)]
        await relay(*self._address, reader, writer, "\r\n".join((*sent, "", "")).encode("latin-1"))
