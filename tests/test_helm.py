"""The Helm chart: linted, and what it makes checked against Kubernetes' schemas and the store's own options."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.tools.conftest import kvfetch

CHART = Path(__file__).parent.parent / "deploy" / "helm" / "kvfetch"
ALERTS = CHART.parents[1] / "alerts.yml"
KUBERNETES = ("1.25", "1.33")
LEAST = {"image": "registry/kvfetch:1", "tokenSecret": "tokens"}
ALL = {
    "tlsSecret": "tls",
    "storageClassName": "fast",
    "options": "{--max-connections=8}",
    **{f"{part}.enabled": "true" for part in ("serviceMonitor", "prometheusRule", "dashboard", "networkPolicy")},
}
# What it sets itself, and what makes no sense in a pod.
OF_THE_CHART = {"host", "port", "capacity", "token-file", "tls-cert", "tls-key", "insecure", "help"}
OF_THE_OPERATOR = {"ServiceMonitor", "PrometheusRule"}

helm = shutil.which("helm")
pytestmark = [pytest.mark.process, pytest.mark.skipif(helm is None, reason="needs helm, as in the extra `dev`")]


def run(*args: str, **values: str) -> subprocess.CompletedProcess[str]:
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return subprocess.run([str(helm), *args, *settings], capture_output=True, text=True, check=False)


def rendered(**values: str) -> dict[str, dict[str, Any]]:
    """Return the chart's resources by kind."""
    found = run("template", "kv", str(CHART), **values)
    assert found.returncode == 0, found.stderr
    return {resource["kind"]: resource for resource in yaml.safe_load_all(found.stdout)}


def require_accepted(*resources: dict[str, Any]) -> None:
    """Let Kubernetes' schemas judge resources."""
    for version in KUBERNETES:
        for resource in resources:
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("values", [LEAST, LEAST | ALL])
def test_helm_kubernetes_and_the_store_find_nothing_wrong(values: dict[str, str]) -> None:
    found = run("lint", "--strict", str(CHART), **values)
    assert found.returncode == 0, found.stdout
    resources = rendered(**values)
    more = {*OF_THE_OPERATOR, "ConfigMap", "NetworkPolicy"} if "tlsSecret" in values else set()
    assert set(resources) == {"StatefulSet", "Service"} | more
    require_accepted(*(resource for kind, resource in resources.items() if kind not in OF_THE_OPERATOR))
    (container,) = resources["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert kvfetch(*container["args"], "--help").exit_code == 0
    assert kvfetch(*container["args"], "--unknown", "--help").exit_code == 2


def test_an_existing_claim_takes_the_place_of_a_new_one() -> None:
    new = rendered(**LEAST, volume="1Ti", capacity="970GiB")["StatefulSet"]
    existing = rendered(**LEAST, existingClaim="mine", capacity="2TiB")["StatefulSet"]
    data = {"name": "data", "persistentVolumeClaim": {"claimName": "mine"}}
    assert data in existing["spec"]["template"]["spec"]["volumes"]
    assert "volumeClaimTemplates" not in existing["spec"]
    (claim,) = new["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] not in {volume["name"] for volume in new["spec"]["template"]["spec"]["volumes"]}
    require_accepted(existing)


def test_the_alert_rules_and_the_dashboard_are_those_of_compose() -> None:
    """Without an address of the documentation, alerts have no links."""
    resources = rendered(**LEAST, **ALL, **{"prometheusRule.runbooks": "https://docs.example/kv/"})
    rules = yaml.safe_load(ALERTS.read_text().replace("RUNBOOKS", "https://docs.example/kv"))
    assert resources["PrometheusRule"]["spec"] == rules
    assert resources["ServiceMonitor"]["spec"]["jobLabel"] in resources["Service"]["metadata"]["labels"]
    assert resources["Service"]["metadata"]["labels"]["app.kubernetes.io/name"] == "kvfetch"  # the job in the rules
    (dashboard,) = resources["ConfigMap"]["data"].values()
    assert json.loads(dashboard) == json.loads((CHART.parents[1] / "grafana.json").read_text())
    unlinked = yaml.safe_dump(rendered(**LEAST, **ALL)["PrometheusRule"])
    assert "RUNBOOKS" not in unlinked
    assert "runbook_url" not in unlinked


def test_only_peers_that_are_named_reach_the_store_and_it_reaches_nobody() -> None:
    resources = rendered(**LEAST, **ALL, **{"networkPolicy.from[0].podSelector.matchLabels.app": "sglang"})
    policy = resources["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == resources["StatefulSet"]["spec"]["selector"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "sglang"}}}]
    (container,) = resources["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert rule["ports"][0]["port"] in {port["name"] for port in container["ports"]}
    nobody = run("template", "kv", str(CHART), **LEAST, **ALL, **{"networkPolicy.from": "null"})
    assert "name who may connect" in nobody.stderr


OF_CLIENTS = {
    "priorityClassName": "high",
    "podLabels.team": "kv",
    "extraEnv[0].name": "MALLOC_ARENA_MAX",
    "extraEnv[0].value": "two",
    "extraVolumes[0].name": "client-ca",
    "extraVolumes[0].configMap.name": "client-ca",
    "extraVolumeMounts[0].name": "client-ca",
    "extraVolumeMounts[0].mountPath": "/secrets/client-ca",
    "options": "{--tls-client-ca=/secrets/client-ca/ca.crt}",
}


def test_a_store_may_demand_certificates_of_its_clients() -> None:
    stateful = rendered(**LEAST, **ALL | OF_CLIENTS)["StatefulSet"]
    require_accepted(stateful)
    template = stateful["spec"]["template"]
    (container,) = template["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):  # the kubelet has no certificate
        assert container[probe]["tcpSocket"] == {"port": "store"}
        assert "httpGet" not in container[probe]
    said = json.dumps(template)
    for text in ("--tls-client-ca=/secrets/client-ca/ca.crt", "MALLOC_ARENA_MAX", '"team": "kv"', '"high"'):
        assert text in said
    assert said.count('"name": "client-ca"') == 3  # the volume, its config map, and where it is mounted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"capcity": "10GiB"}, "capcity"),
        ({"service.prot": "1"}, "prot"),
        ({"capacity": "10G"}, "capacity"),
        ({"volume": "10GiB"}, "volume"),
        *(({"options": f"{{{each}}}"}, "options") for each in ("max-connections", "--nonsense=1", "--max-connections")),
        ({"options": "{--capacity=1TiB}"}, "options"),  # the chart's own
        *(({"service.port": port}, "port") for port in ("0", "65536", "http")),
        ({"service.type": "clusterip"}, "type"),
        ({"serviceMonitor.interval": "15"}, "interval"),
        *(({key: "a: b"}, key) for key in ("storageClassName", "tokenSecret", "existingClaim", "priorityClassName")),
        ({"capacity": "511GB"}, "capacity: 511GB does not fit into 95% of a volume of 500Gi"),
        *(({key: "null"}, f"{key}: name") for key in LEAST),  # what is missing
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, str], message: str) -> None:
    found = run("template", "kv", str(CHART), **LEAST | values)
    assert found.returncode != 0
    assert message in found.stderr


def test_options_are_those_that_the_chart_leaves_to_users() -> None:
    options = json.loads((CHART / "values.schema.json").read_text())["properties"]["options"]
    known = set(re.findall(r"(?<=--)[a-z][a-z-]+", kvfetch("serve", "--help").output))
    named = set(re.findall(r"[a-z][a-z-]+(?=[|)=])", options["items"]["pattern"]))
    assert named <= known
    assert known - named == OF_THE_CHART
