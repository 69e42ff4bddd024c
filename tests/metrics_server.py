"""Serves ``/metrics`` as SGLang's server does, of one process with two data planes and SGLang's own metrics.

``python -m tests.metrics_server STORE_URL DIRECTORY`` prints its port. For each line on stdin it does some work, and
prints a line when it is done: it writes and fetches pages, looks up others that are not stored, asks a store that does
not answer, and has SGLang count a request. ``DIRECTORY`` is for the metrics of all processes.
"""

from __future__ import annotations

import os
import sys
import time
from wsgiref.simple_server import WSGIRequestHandler, make_server

os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[2]  # before prometheus_client is imported

import threading

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.multiprocess import MultiProcessCollector
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_tokenizer

from harness.engine import free_port
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.engine.process import DataPlaneProcess, Peer, Setup
from sgl_kvfetch.protocol.arena import SharedPool, StridedPages
from sgl_kvfetch.protocol.messages import FetchPages, Found, LookUp, Start
from tests.segments import SMALL, make_heads, make_values, page_hashes

NUM_PAGES = 8
POOL = SharedPool.create(SMALL, NUM_PAGES)  # pages are fetched to it


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def open_plane(url: str) -> DataPlane:
    heads = make_heads(SMALL, make_quantiser("exact"))
    settings = {"store": url, "codec": "zstd", "lookup_timeout_s": 60, "fetch_timeout_s": 60, "recompute": "never"}
    settings["audit_share"] = 0  # which hits they cut is drawn
    start = Start(settings, heads.namespace, 0, SMALL.num_heads, 0, None, pool=POOL.places)
    return DataPlane(start, Peer(Setup(DataPlaneProcess, SMALL, pool_files=POOL.files)))


def look_up(plane: DataPlane, hashes: list[bytes]) -> Found:
    return plane.look_up(LookUp(0, b"".join(hashes))).result(WAIT_S)


def write_and_fetch(plane: DataPlane, hashes: list[bytes]) -> None:
    tensors = make_values(SMALL, len(hashes)).items()
    pages = StridedPages([x.view(len(hashes), SMALL.page_size, *x.shape[1:]) for _, x in tensors])
    plane.write(0, None, hashes, range(len(hashes)), pages.read_into)
    wait_until(lambda: look_up(plane, hashes).num_pages == len(hashes), poll_s=0.1)
    places = tuple(range(len(hashes)))
    over = plane.fetch(FetchPages(0, b"".join(hashes), places, time.monotonic() + WAIT_S)).over
    assert over.result(WAIT_S).num_pages == len(hashes)


def count_a_request(collector: TokenizerMetricsCollector) -> None:
    collector.observe_time_to_first_token(collector.labels, 0.3, stream=True)
    tiers = {"device": 100, "host": 50, "storage": 300}
    collector.observe_one_finished_request(collector.labels, 500, 20, 450, 1.0, False, tiers)


def main() -> None:
    set_global_server_args_for_tokenizer(ServerArgs(model_path="dummy"))
    collector = TokenizerMetricsCollector(labels={"model_name": "m", "engine_type": "unified"})
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    server = make_server("127.0.0.1", free_port(), make_wsgi_app(registry), handler_class=_QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    plane, lost = open_plane(sys.argv[1]), open_plane(f"http://127.0.0.1:{free_port()}")
    print(server.server_port, flush=True)
    for number, _ in enumerate(sys.stdin):
        write_and_fetch(plane, page_hashes(NUM_PAGES, str(number)))
        look_up(plane, page_hashes(NUM_PAGES, f"never stored {number}"))
        look_up(lost, page_hashes(NUM_PAGES))
        count_a_request(collector)
        print("done", flush=True)
    plane.close()
    lost.close()


if __name__ == "__main__":
    main()
