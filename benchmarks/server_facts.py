"""Reads facts and metrics from a running SGLang."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from benchmarks.stats import Traffic
from harness.metrics import read_metric

_TIMEOUT_S = 30.0


class ServerUnreachable(RuntimeError):
    """Nothing answers at the URL, or it does not answer as SGLang does."""


@dataclass(frozen=True)
class ServerFacts:
    """``storage_backend`` is None without HiCache's storage. ``max_prompt_tokens`` reserves nothing for an answer."""

    version: str
    model_path: str
    tokenizer_path: str
    context_length: int | None
    max_prompt_tokens: int
    pool_tokens: int
    page_size: int
    storage_backend: str | None


class ServerClient:
    """Queries one server. Its methods raise ServerUnreachable."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def facts(self) -> ServerFacts:
        model = self._json("/model_info")
        info = self._json("/server_info")
        try:
            limits = [
                int(info[key])
                for key in ("context_length", "max_req_input_len", "max_total_num_tokens")
                if info.get(key) is not None
            ]
            return ServerFacts(
                version=str(info["version"]),
                model_path=str(model["model_path"]),
                tokenizer_path=str(model["tokenizer_path"]),
                context_length=info.get("context_length"),
                max_prompt_tokens=min(limits),
                pool_tokens=int(info["max_total_num_tokens"]),
                page_size=int(info["page_size"]),
                storage_backend=info.get("hicache_storage_backend"),
            )
        except (KeyError, TypeError, ValueError) as e:
            raise ServerUnreachable(f"{self._url}/server_info does not answer as SGLang 0.5.23 does: {e!r}") from e

    def metrics(self) -> str | None:
        """Return the text of ``/metrics``, or None if the server runs without ``--enable-metrics``."""
        try:
            return self._get("/metrics")
        except urllib.error.HTTPError as e:
            with e:
                return None

    def _json(self, path: str) -> dict[str, Any]:
        try:
            answer = json.loads(self._get(path))
        except urllib.error.HTTPError as e:
            with e:
                raise ServerUnreachable(f"{self._url}{path}: status {e.code} {e.reason}") from e
        except ValueError as e:
            raise ServerUnreachable(f"{self._url}{path} is not JSON: {e}") from e
        if not isinstance(answer, dict):
            raise ServerUnreachable(f"{self._url}{path} is not a JSON object")
        return answer

    def _get(self, path: str) -> str:
        request = urllib.request.Request(self._url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError:
            raise
        except (OSError, ValueError) as e:
            raise ServerUnreachable(f"no SGLang at {self._url}: {e}; start one, or use --launch") from e


def kvfetch_traffic(before: str, after: str, direction: str = "read") -> Traffic:
    """Return the bytes transferred between two texts of ``/metrics``."""

    def moved(name: str) -> int:
        return round(read_metric(after, name, direction=direction) - read_metric(before, name, direction=direction))

    return Traffic(moved("sgl_kvfetch_wire_bytes_total"), moved("sgl_kvfetch_raw_bytes_total"))
