"""What each command refuses: in one line, which says what was expected."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.tools.conftest import Stored, kvfetch
from tests.tools.test_estimate import SMOLLM

NOBODY = "http://127.0.0.1:1"
COMPARE, BENCH, WHY = (f"{command} --server {NOBODY}" for command in ("compare", "bench", "why ."))
ESTIMATE, SERVE = "estimate --link 1Gbps --prefill-tps 1000", "serve new --port 0"
GC, S3 = "gc . --capacity 1GiB", "s3://bucket"

REFUSED = [
    (f"{COMPARE} --lengths x", "--lengths 'x': expected numbers of tokens"),
    (COMPARE, f"--server {NOBODY}"),
    (BENCH, "--flush empties its caches, also of its other users' prompts; --reader URL measures on a second server"),
    (f"{BENCH} --reader {NOBODY}/", "--flush"),  # it is the same server
    (f"{BENCH} --flush --lengths 1024,x", "--lengths '1024,x': expected numbers of tokens"),
    (f"{BENCH} --flush", "no SGLang server answers there"),
    ("doctor --store-only", "kvfetch doctor STORE --store-only"),
    ("encode file:///no/such/directory", "is not a directory"),
    ("encode ftp://somewhere", "not supported"),
    (f"encode {NOBODY} --codec h264", "codec 'h264' is unknown; known are ans, hevc"),
    (f"encode {NOBODY} --resolutions 240p,240p", "each once"),
    (f"encode {NOBODY}", "127.0.0.1"),
    (f"{ESTIMATE} --model empty", "num_hidden_layers is None; expected a number"),
    (f"{ESTIMATE} --model broken", "is not a model's config.json"),
    (f"{ESTIMATE} --model .", "expected a config.json, or a folder with one"),
    ("estimate --prefill-tps 1000 --model model --link 10", "expected a form such as 10Gbps"),
    (
        f"{ESTIMATE} --model Qwen/Qwen3-8B",
        "type hf download Qwen/Qwen3-8B config.json --local-dir Qwen3-8B, and give that folder",
    ),
    (f"gc {NOBODY} --capacity 1GiB", "kvfetch serve --capacity"),
    ("gc /no/such/directory --capacity 1GiB", "is not a directory"),
    (f"gc {S3} --capacity 10G", "invalid size"),
    (f"{GC} --index redis://127.0.0.1:1", "has its own"),
    (f"gc {S3} --capacity 1GiB --index {NOBODY}", "the index's URL"),
    (f"reindex {NOBODY} --index redis://127.0.0.1:1", "is not an s3:// store"),
    (f"reindex {S3} --index {NOBODY}", "the index's URL"),
    ("pin . --prompt '[1, 2]'", "needs --page-size"),
    ("pin . --prompt 'a text' --page-size 1", "texts need --model"),
    ("pin . --prompt '[1, 2]' --page-size 16", "2 tokens, which are 0 pages"),
    ("pin . --prompt '[1]' --file x --page-size 1", "either --prompt or --file"),
    ("pin . --index redis://127.0.0.1:1", "has its own"),
    ("pin 127.0.0.1:8700", "type http://127.0.0.1:8700"),
    ("pin . --remove nonsense", "not the name of a pin"),
    ("pin . --remove x --prompt '[1]' --page-size 1", "give either --remove"),
    (WHY, "expected --prompt or --file"),
    ("why --prompt '[1]'", "give either STORE"),
    ("why . --log no.log", "give either STORE and what to look for, or --log"),
    ("why --log no.log --prompt '[1]'", "or --log, which takes --model alone"),
    ("why --log no.log", "--log no.log cannot be read: No such file or directory"),
    ("why . --server cache:30000 --prompt '[1]'", "type http://cache:30000"),
    (f"{WHY} --prompt '[1]'", "no SGLang server answers there: start it, or correct the host and port"),
    ("profile list . x", "kvfetch profile list expects nothing after the store"),
    ("profile put .", "kvfetch profile put expects a FILE after the store"),
    ("profile rm .", "kvfetch profile rm expects a DIGEST after the store"),
    ("profile get . x", "--out FILE belongs to kvfetch profile get, which needs it"),
    ("profile list . --out x", "--out FILE belongs to kvfetch profile get, which needs it"),
    (f"{SERVE} --capacity 10G", "invalid size '10G'"),
    (
        f"{SERVE} --host 0.0.0.0",
        "reach --host 0.0.0.0, and there is no token: give --token-file FILE (openssl rand -hex 32 makes a token), or "
        "--insecure",
    ),
    (f"{SERVE} --token-file no-token", "openssl rand -hex 32 >no-token"),
    (f"{SERVE} --host 192.0.2.1 --insecure", "this machine has no such address; --host takes one that it has"),
    (f"{SERVE} --host nosuch.invalid --insecure", "--host takes an address of this machine"),
    ("serve pyproject.toml/store", "cannot make"),
    ("why .", "expected --prompt or --file"),
    ("why . --request x", "--request needs --server"),
    (f"why . --request x --prompt '[1]' --server {NOBODY}", "--request needs --server"),
    ("why . --prompt 'a text'", "texts need --model"),
    (f"why . --prompt '[1]' --server {NOBODY}", "no SGLang server answers there"),
    *(
        (f"{command} {target}", said)
        for command in ("inspect", "verify")
        for target, said in (
            ("nowhere", "nowhere is not a directory"),
            ("ftp://host", "not supported"),
            ("file:///no/such/directory", "not a directory"),
            (NOBODY, "start it with kvfetch serve DIRECTORY"),
            ("localhost:8700", "type http://localhost:8700"),
            ("[::1]:8700", "type http://[::1]:8700"),
            ("pyproject.toml", "pyproject.toml is not a directory"),
            (".#ffff", "nothing is stored"),
            (". --key-file missing", "cannot be read"),
        )
    ),
]


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_makes_no_sense_is_refused_in_one_line(
    line: str, said: str, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stored.root / "pyproject.toml").touch()
    for name, content in {"model": json.dumps(SMOLLM), "empty": "{}", "broken": "["}.items():
        (stored.root / name).mkdir()
        (stored.root / name / "config.json").write_text(content)
    monkeypatch.chdir(stored.root)
    result = kvfetch(*shlex.split(line))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("kvfetch: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert said in result.stderr
