"""docs/operations.md names every metric with its labels, and the alert rules and the dashboard use no other ones."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from sgl_kvfetch import metrics
from sgl_kvfetch.server.metrics import ServerMetrics
from tests.test_docs import anchors

ROOT = Path(__file__).parent.parent
ALERTS = ROOT / "deploy" / "alerts.yml"
PANELS = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
QUERIES = [target["expr"].replace("$__rate_interval", "1m") for panel in PANELS for target in panel.get("targets", ())]
SUFFIXES = {"counter": "_total", "gauge": "", "histogram": ""}


def labels_of(metric: MetricWrapperBase) -> tuple[str, set[str]]:
    assert metric._type is not None
    return metric._name + SUFFIXES[metric._type], set(metric._labelnames)


def in_code() -> dict[str, set[str]]:
    ours = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    registry: CollectorRegistry = ServerMetrics().registry
    served = [each for each in registry._collector_to_names if isinstance(each, MetricWrapperBase)]
    return dict(map(labels_of, [*ours, *served]))


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "operations.md").read_text().splitlines()
    return [line.strip("|").split("|") for line in lines if re.match(r"\| `(sgl_)?kvfetch_", line)]


def test_the_docs_have_every_metric_with_its_labels() -> None:
    found = {name.strip(" `"): set(re.findall(r"(?:^|; )`(\w+)`", labels.strip())) for name, labels, _ in rows()}
    assert found == in_code()
    (row,) = (row for row in rows() if "device_requests" in row[0])
    assert set(re.findall("`(\\w+)`", row[1])) == {"end", *metrics.ENDS}


def test_alerts_and_questions_use_documented_metrics() -> None:
    page = (ROOT / "docs" / "operations.md").read_text().partition("## SGLang's server")[0]
    used = re.findall(r"\b(?:sgl_)?kvfetch_[a-z_]+\b(?=[{\[)])", " ".join([*QUERIES, ALERTS.read_text(), page]))
    assert {name.removesuffix("_bucket") for name in used} <= in_code().keys()


def test_each_alert_links_to_what_to_do() -> None:
    links = re.findall(r'runbook_url: "RUNBOOKS/(\w+)/#([\w-]+)"', ALERTS.read_text())
    assert len(links) == ALERTS.read_text().count("alert:") > 0
    assert [(page, anchor) for page, anchor in links if anchor not in anchors(ROOT / "docs" / f"{page}.md")] == []


@pytest.mark.process
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's prometheus")
def test_promtool_accepts_the_alerts_and_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(QUERIES)]
    panels = tmp_path / "panels.yml"
    panels.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS), str(panels)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_asks_for_labels_and_values_that_there_are(fresh: list[str]) -> None:
    known = in_code()
    labels = {"instance", "le", "cache_source"}.union(*known.values())
    for query in QUERIES:
        for name, matchers in re.findall(r"\b((?:sgl_)?kvfetch_\w+){([^}]*)}", query):
            own, series = known[name.removesuffix("_bucket")], [line for line in fresh if line.startswith(f"{name}{{")]
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
                assert label in own | {"instance"}, query
                if label != "instance" and name not in OF_REQUESTS:
                    for each in value.split("|"):
                        assert any(f'{label}="{each}"' in line for line in series), query
        assert {label for names in re.findall(r"by \(([^)]*)\)", query) for label in names.split(", ")} <= labels


@pytest.fixture(scope="module")
def fresh() -> list[str]:
    """The samples of a data plane and of a server before anything has happened."""
    code = (
        "from prometheus_client import REGISTRY, generate_latest; import sgl_kvfetch.metrics; "
        "from sgl_kvfetch.server.metrics import ServerMetrics; "
        "print((generate_latest(REGISTRY) + generate_latest(ServerMetrics().registry)).decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("#")]


OF_REQUESTS = "kvfetch_server_requests_total", "kvfetch_server_request_seconds", "kvfetch_server_failures_total"


def test_every_sample_is_there_before_its_first_event(fresh: list[str]) -> None:
    """`increase` does not see the first event of a sample that begins with it. So each value of a label that the page
    names is there, as 0, before anything has happened."""
    # Texts of others, and a time.
    later = ("misses_total", "certificate_end_timestamp_seconds", "kvfetch_server_build_info")
    for name, labels, _ in rows():
        name, labels = name.strip(" `"), re.sub(r"\(\[`\w+`\]\([^)]*\)\)", "", labels)  # a link's word is no value
        if name in OF_REQUESTS or name.endswith(later):
            continue
        mine = [line for line in fresh if re.match(rf"{name}(_count|_bucket)?[{{ ]", line)]
        assert mine, name
        for label, values in re.findall(r"(?:^|; )`(\w+)`(?:: |[^`]*?, )((?:`[\w ]+`[^`;]*)*)", labels.strip()):
            for value in re.findall(r"`([\w ]+)`", values):
                assert any(f'{label}="{value}"' in line for line in mine), (name, label, value)
    for stage in ("lookup", "fetch", "write"):
        assert f'sgl_kvfetch_misses_total{{reason="refused",stage="{stage}"}} 0.0' in fresh
