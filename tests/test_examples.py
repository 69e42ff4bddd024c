"""The examples, each as far as a machine without a GPU, a cluster or a registry goes.

tests/test_quick_start.py runs examples/openai_client.py, on the server that it has.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.engine import other_models
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.stores.redis_index import PASSWORD_ENV
from tests.conftest import ROOT
from tests.test_helm import helm, rendered, require_accepted

EXAMPLES = ROOT / "examples"


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a program of the examples; return what it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **environment}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_the_second_server_fetches_what_the_first_computed(tiny_llama: Path, tmp_path: Path) -> None:
    environment = {"SGLANG_DISABLED_MODEL_ARCHS": other_models(str(tiny_llama))}  # saves seconds of imports
    output = run(sys.executable, EXAMPLES / "two_servers.py", tiny_llama, cwd=tmp_path, **environment)
    found = re.findall(r"^(\w+) server: cached_tokens (\d+), first token after ([\d.]+) s$", output, re.MULTILINE)
    assert [each[:2] for each in found] == [("first", "0"), ("second", "576")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_what_a_store_would_do_for_a_log(tiny_llama: Path, tmp_path: Path) -> None:
    """Of three prompts of 400, 464 and 100 tokens, the second begins with the first one's 384 whole pages. The third is
    the beginning of the first, but too short to be looked up."""
    log, plot, words = tmp_path / "log.jsonl", tmp_path / "traffic.png", [f"w{number}" for number in range(3, 467)]
    prompts = [" ".join(words[:400]), list(range(3, 467)), list(range(3, 103))]
    log.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = ("--model", tiny_llama, "--link", "10Gbps", "--prefill-tps", "1000", "--plot", plot)
    output = run(sys.executable, EXAMPLES / "traffic.py", log, *options, cwd=tmp_path)
    assert "3 requests, 964 tokens: 40% came from earlier requests" in output
    computed, with_a_store = map(float, re.findall(r"([\d.]+) s computed, ([\d.]+) s with a store", output)[0])
    assert computed == pytest.approx(0.964 / 3, rel=0.01)
    assert with_a_store == pytest.approx((0.964 - 0.384 + 0.05) / 3, rel=0.02)  # and one batch
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_servers_find_the_profile_that_was_calibrated(tmp_path: Path) -> None:
    shape = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "head_dim": 32}
    model = make_tiny_llama(tmp_path / "model", **shape, num_layers=1, num_heads=1, num_kv_heads=1)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": " ".join(f"w{3 + place * place % 101}" for place in range(2000))}) + "\n")
    few = ("--windows", "4", "--context", "64", "--continuation", "32")
    with StoreProcess(tmp_path / "store") as store:
        environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        output = run(EXAMPLES / "calibrate.sh", model, prompts, store.url, *few, cwd=tmp_path, **environment)
        (stored,) = json.loads(run("kvfetch", "profile", "list", store.url, "--json", cwd=tmp_path))
        profile = tmp_path / "profile"
        run("kvfetch", "profile", "get", store.url, stored["digest"], "--out", profile, cwd=tmp_path)
    assert stored["is_newest"]
    assert output.count(stored["digest"]) >= 2  # of calibrating, and in the list
    text, plot = tmp_path / "text", tmp_path / "plot.png"
    text.write_text(" ".join(f"w{3 + place * place % 89}" for place in range(200)))
    options = ("--model", model, "--profile", profile, "--text", text, "--tokens", 100, "--continuation", 32)
    table = run(sys.executable, EXAMPLES / "compress.py", *options, "--plot", plot, cwd=tmp_path)
    finest, *_, coarsest = ([*map(float, line.rstrip("%").split())] for line in table.splitlines()[2:])
    assert finest[0] < coarsest[0]
    assert finest[2] > coarsest[2]
    assert plot.stat().st_size > 1000


def config_in(args: Sequence[str]) -> dict[str, Any]:
    """Return our config of a command line of SGLang, whose other flags tests of the quick start or the README use."""
    page = (ROOT / "docs" / "index.md").read_text()
    known = {*re.findall(r"--[a-z-]+", page), "--host", "--port", "--enable-cache-report"}
    flags = dict(arg.partition("=")[::2] for arg in args if arg.startswith("--"))
    assert flags.keys() <= known
    config: dict[str, Any] = json.loads(flags["--hicache-storage-backend-extra-config"])
    parse_config(config)
    return config


@pytest.mark.process
@pytest.mark.skipif(helm is None, reason="needs helm, as in the extra `dev`")
def test_the_servers_find_the_store_of_the_chart() -> None:
    text = (EXAMPLES / "kubernetes" / "sglang.yaml").read_text()
    deployment, service = resources = [*yaml.safe_load_all(text)]
    require_accepted(*resources)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (secret,) = {each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"]}
    chart = rendered(image="REGISTRY/kvfetch:VERSION", tokenSecret=secret)["Service"]
    (port,) = chart["spec"]["ports"]
    assert config_in(container["args"])["store"] == f"http://{chart['metadata']['name']}:{port['port']}"
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert f"tokenSecret={secret}" in text


def test_the_bucket_and_the_index_of_the_compose_file() -> None:
    services = yaml.safe_load((EXAMPLES / "s3" / "compose.yaml").read_text())["services"]
    build = services["sglang"]["build"]
    assert (EXAMPLES / "s3" / build["context"] / build["dockerfile"]).is_file()
    config = config_in(services["sglang"]["command"])
    assert services["bucket"]["command"][-1] == f"{config['s3']['endpoint']}/{config['store'].split('/')[2]}"
    index = services["index"]["command"]
    assert services["sglang"]["environment"][PASSWORD_ENV] == index[index.index("--requirepass") + 1]
