"""Attaches a store to a running SGLang server, as an operator does at run time."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from harness.engine import ServerError, SGLangServer, extra_config
from harness.waiting import wait_until

ATTACH = "/hicache/storage-backend"


def attach(
    server: SGLangServer, store_url: str, *, policy: str | None = None, write_policy: str | None = None, **config: Any
) -> str:
    """Attach a store once the server is idle, and return what SGLang says. Without policies, SGLang keeps those that
    it has. Raises ServerError."""
    body = {
        "hicache_storage_backend": "kvfetch",
        "hicache_storage_backend_extra_config_json": json.dumps(extra_config(store_url, **config)),
        "hicache_storage_prefetch_policy": policy,
        "hicache_write_policy": write_policy,
    }
    return _once_idle(partial(server.request, "PUT", ATTACH, body))


def detach(server: SGLangServer) -> str:
    """Detach the store once the server is idle, and return what SGLang says. Raises ServerError."""
    return _once_idle(partial(server.request, "DELETE", ATTACH))


def _once_idle(call: Callable[[], str]) -> str:
    """Attach or detach. SGLang refuses it while it is busy, as it may be for a moment after a request."""
    answers: list[str] = []

    def is_done() -> bool:
        try:
            answers.append(call())
        except ServerError as e:
            if "idle" not in str(e):
                raise
        return bool(answers)

    wait_until(is_done, poll_s=0.1)
    return answers[0]
