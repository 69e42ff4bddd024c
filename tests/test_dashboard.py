"""The Grafana dashboard and the alert rules, with a real Prometheus that scrapes a real store and a real data plane."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.engine import free_port
from harness.store_process import StoreProcess
from harness.waiting import polls, wait_until

ROOT = Path(__file__).parent.parent
DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
# What Grafana replaces: an interval of several scrapes, and "All" of each variable.
GRAFANA = {"$__rate_interval": "1m", "$server": ".+", "$store": ".+"}
WITHOUT_DATA = {
    "sgl_kvfetch_device_requests_total": "device mode has it, and needs SGLang's scheduler",
    "kvfetch_server_failures_total": "this store does not fail",
}

PROMETHEUS = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: all
    static_configs: [{{targets: ["127.0.0.1:{store}", "127.0.0.1:{server}"]}}]
"""


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of Prometheus's API."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
            return json.load(answer)["data"]

    def has_data(self, query: str) -> bool:
        for name, value in GRAFANA.items():
            query = query.replace(name, value)
        return any(not math.isnan(float(sample["value"][1])) for sample in self.get("query", query=query)["result"])


@contextmanager
def prometheus_of(folder: Path, store_port: int, server_port: int) -> Iterator[Prometheus]:
    config = folder / "prometheus.yml"
    rules = ROOT / "deploy" / "alerts.yml"
    config.write_text(PROMETHEUS.format(rules=rules, store=store_port, server=server_port))
    address = f"127.0.0.1:{free_port()}"
    log = folder / "log"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as output:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=output, stderr=output)
    try:
        for _ in polls(poll_s=0.2):
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/-/ready").close()
                break
        yield Prometheus(f"http://{address}")
    finally:
        process.kill()
        process.wait()


@contextmanager
def metrics_server(store_url: str, folder: Path) -> Iterator[tuple[int, Callable[[], None]]]:
    """Run ``tests.metrics_server``. Yield its port, and a function that has it do some work."""
    command = [sys.executable, "-m", "tests.metrics_server", store_url, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def work() -> None:
            stdin.write("\n")
            stdin.flush()
            assert stdout.readline() == "done\n"

        try:
            yield int(stdout.readline()), work
            stdin.close()
            assert process.wait() == 0
        finally:
            process.kill()


def alerts(prometheus: Prometheus) -> set[str]:
    """Return the names of the alerts that fire, or will fire if their condition lasts."""
    return {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian's package prometheus)")
def test_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    for name in ("store", "metrics", "prometheus"):
        (tmp_path / name).mkdir()
    with (
        StoreProcess(tmp_path / "store", extra_args=["--capacity", "600KiB"]) as store,
        metrics_server(store.url, tmp_path / "metrics") as (server_port, work),
        prometheus_of(tmp_path / "prometheus", store.port, server_port) as prometheus,
    ):
        left = [query for query in QUERIES if not any(name in query for name in WITHOUT_DATA)]
        assert len(left) > 20

        def all_have_data() -> bool:
            work()
            with pytest.raises(urllib.error.HTTPError, match="Bad Request"):
                urllib.request.urlopen(f"{store.url}/v1/objects/bad-name")
            left[:] = [query for query in left if not prometheus.has_data(query)]
            return not left

        wait_until(all_have_data, poll_s=0.5, found=lambda: "no data:\n" + "\n".join(left))

        wait_until(lambda: alerts(prometheus) == {"KVFetchStoreDown"}, found=lambda: alerts(prometheus))
        for variable in DASHBOARD["templating"]["list"][1:]:
            metric = variable["query"]["query"].removeprefix("label_values(").removesuffix(", instance)")
            assert len(prometheus.get("label/instance/values", **{"match[]": metric})) == 1


def test_the_dashboard_has_no_overlapping_panels() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24, panel["title"]
        cells |= own
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
