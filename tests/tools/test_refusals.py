"""What each command refuses, and what it says of a first mistake on real stores over real sockets: in one line, which
names what was wrong, and what would be right or what to type."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
import trustme

from harness.s3_server import BUCKET, running_s3_server
from harness.store_process import StoreProcess
from sgl_kvfetch.user_files import TOKEN_ENV
from tests.tools.conftest import Stored, kvfetch, unchanged
from tests.tools.test_estimate import SMOLLM

NOBODY = "http://127.0.0.1:1"
COMPARE, BENCH, WHY = (f"{command} --server {NOBODY}" for command in ("compare", "bench", "why ."))
ESTIMATE, SERVE = "estimate --link 1Gbps --prefill-tps 1000", "serve new --port 0"
GC = "gc . --capacity 1GiB"
UNKNOWN, READ, ADMIN = "9d7a", "3c1f", "e05d"  # tokens
ROLES = f"# role token\nread {READ}\nadmin {ADMIN}\n"
CUT = "Receive: obj=GenerateReqInput(text='abc' ... 'xyz', input_ids=[1, 2] ... [8, 9])\n{\"event\": \"started\"}\n"
S3_KEYS, BUCKET_SHOWN = "AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test", f"inspect s3://{BUCKET}"

REFUSED = [
    (f"{COMPARE} --lengths x", "--lengths 'x': expected numbers of tokens"),
    (BENCH, "--flush empties its caches, also of its other users' prompts; --reader URL measures on a second server"),
    (f"{BENCH} --reader {NOBODY}/", "--flush"),  # it is the same server
    ("doctor --store-only", "kvfetch doctor STORE --store-only"),
    (f"encode {NOBODY} --codec h264", "codec 'h264' is unknown; known are ans, hevc"),
    (f"encode {NOBODY} --resolutions 240p,240p", "each once"),
    (f"{ESTIMATE} --model empty", "num_hidden_layers is None; expected a number"),
    (f"{ESTIMATE} --model broken", "is not a model's config.json"),
    (f"{ESTIMATE} --model .", "expected a config.json, or a folder with one"),
    ("estimate --prefill-tps 1000 --model model --link 10", "expected a form such as 10Gbps"),
    (
        f"{ESTIMATE} --model Qwen/Qwen3-8B",
        "type hf download Qwen/Qwen3-8B config.json --local-dir Qwen3-8B, and give that folder",
    ),
    (f"gc {NOBODY} --capacity 1GiB", "kvfetch serve --capacity"),
    ("gc . --capacity 60 --yes", "60 what? say 60GiB or 60B"),
    (f"{GC} --index redis://127.0.0.1:1", "has its own"),
    (f"reindex {NOBODY} --index redis://127.0.0.1:1", "is not an s3:// store"),
    ("pin . --prompt '[1, 2]'", "needs --page-size"),
    ("pin . --prompt 'a text' --page-size 1", "texts need --model"),
    ("pin . --prompt 'a text' --page-size 1 --model nosuch/model", "no tokenizer of 'nosuch/model': it is no folder"),
    ("pin . --prompt '[1, 2]' --page-size 16", "2 tokens, which are 0 pages"),
    ("pin . --prompt '[1]' --file x --page-size 1", "either --prompt or --file"),
    ("pin . --remove x --prompt '[1]' --page-size 1", "give either --remove"),
    ("pin . --remove nonsense", "not the name of a pin"),
    (WHY, "expected --prompt or --file"),
    ("why --prompt '[1]'", "give either STORE"),
    ("why --log no-such-file", "--log no-such-file cannot be read: No such file or directory"),
    ("why --log cut.log", "has no prompts: expected JSONL with messages, prompt, text or input_ids, or what SGLang"),
    (f"{WHY} --prompt '[1]'", "no SGLang server answers there: start it, or correct the host and port"),
    ("profile put .", "kvfetch profile put expects a FILE after the store"),
    ("profile get . x", "--out FILE belongs to kvfetch profile get, which needs it"),
    (
        f"{SERVE} --host 0.0.0.0",
        "reach --host 0.0.0.0, and there is no token: give --token-file FILE (openssl rand -hex 32 makes a token), or "
        "--insecure",
    ),
    (f"{SERVE} --token-file no-token", "openssl rand -hex 32 >no-token"),
    (f"{SERVE} --host 192.0.2.1 --insecure", "this machine has no such address; --host takes one that it has"),
    ("serve pyproject.toml/store", "cannot make"),
    (f"{SERVE} --token-file a-folder", "cannot be read: Is a directory"),
    (f"{SERVE} --tls-cert no-such-file --tls-key key", "cannot read the certificates in"),
    (f"{SERVE} --upstream file:///kv", "is a directory of this machine"),
    ("serve new --upstream http://localhost:8700", "is this store itself"),
    (f"{SERVE} --upstream-token-file x", "--upstream-token-file is for the store that --upstream names"),
    ("inspect nowhere", "nowhere is not a directory"),
    (f"verify {NOBODY}", "start it with kvfetch serve DIRECTORY"),
    ("inspect [::1]:8700", "type http://[::1]:8700"),
    ("verify .#ffff", "nothing is stored"),
    ("clear '' --yes", "expected a URL or a directory, found an empty word"),  # it is this folder, a store
    ("clear '.#' --yes", "'.#' names no part"),
    ("profile show http://store", "kvfetch profile show expects a DIGEST after the store"),
    ("inspect . --key-file no-such-file", "cannot be read"),
]

# With the environment, as a shell has it, and with what is not said. Names in braces are addresses: of a store without
# TLS and tokens, one with TLS, and one with tokens, of another program, of one that closes each connection, and of S3.
MET: list[tuple[str, ...]] = [
    ("inspect https://{plain}", "{plain} does not speak TLS: write its URL with http://", "kvfetch serve"),
    ("inspect http://{tls}", "it speaks TLS: type https://{tls}\n"),
    ("inspect http://{closes}", "the connection broke", "TLS"),
    (
        "inspect https://{tls}",
        "no CA that this machine knows has signed the certificate of 127.0.0.1 ... SSL_CERT_FILE",
        "kvfetch serve",
    ),
    (
        "SSL_CERT_FILE={ca} inspect https://{elsewhere}",
        "the certificate of localhost: ... not valid for 'localhost'",
        "SSL_CERT_FILE",
    ),
    (
        "inspect http://{tokens}",
        "the store wants a token and got none ... give the store's token: --token-file FILE, or KVFETCH_TOKEN",
    ),
    (
        "inspect http://{tokens} --token-file unknown",
        "the store does not know this token ... "
        "the token came from --token-file unknown: give another one with --token-file FILE",
        "got none",
    ),
    (f"{TOKEN_ENV}={UNKNOWN} inspect http://{{tokens}}", f"the token came from {TOKEN_ENV} in the environment"),
    (
        f"{TOKEN_ENV}={READ} pin http://{{tokens}} --prompt [1] --page-size 1",
        f"this needs a token with the role admin ... the token came from {TOKEN_ENV} in the environment: give another",
    ),
    ("inspect http://{tokens} --token-file roles", "roles has more than one word ... lines ROLE TOKEN"),
    ("inspect http://{other}", "no kvfetch store has this address; a store's URL is the one that kvfetch"),
    ("clear http://{plain}/v1", "no kvfetch store has this address; a store's URL is the one that kvfetch"),
    ("why . --prompt [1] --server http://{plain}", "--server http://{plain} is no SGLang server: ... 30000"),
    ("why . --prompt [1] --server https://{plain}", "does not speak TLS"),
    ("serve new --port {port}", "Address already in use: another program listens there, perhaps a store; --port"),
    (
        f"AWS_METADATA_ENDPOINT={NOBODY} AWS_ENDPOINT_URL=http://{{s3}} {BUCKET_SHOWN}",
        "no credentials were given ... set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
        "token",
    ),
    (f"{S3_KEYS} AWS_ENDPOINT_URL={NOBODY} {BUCKET_SHOWN}", "AWS_ENDPOINT_URL", "kvfetch serve"),
    (f"{S3_KEYS} AWS_ENDPOINT_URL=https://{{tls}} {BUCKET_SHOWN}", "SSL_CERT_FILE"),
    (f"{S3_KEYS} AWS_ENDPOINT_URL=https://{{plain}} {BUCKET_SHOWN}", "does not speak TLS"),
]


@pytest.fixture
def folder(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a store, with files that commands are given."""
    files = {"pyproject.toml": "", "unknown": UNKNOWN, "roles": ROLES, "cut.log": CUT}
    for name, content in files.items():
        (stored.root / name).write_text(content)
    for name, content in {"model": json.dumps(SMOLLM), "empty": "{}", "broken": "["}.items():
        (stored.root / name).mkdir()
        (stored.root / name / "config.json").write_text(content)
    (stored.root / "a-folder").mkdir()
    monkeypatch.chdir(stored.root)
    return stored.root


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What stands in the places of names in braces in `MET`."""
    folder = tmp_path_factory.mktemp("stores")
    ca, pem, roles = (folder / name for name in ("ca.pem", "server.pem", "roles"))
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    authority.cert_pem.write_to_path(ca)
    certificate = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    certificate.private_key_and_cert_chain_pem.write_to_path(pem)
    roles.write_text(ROLES)
    for secret in (pem, roles):
        secret.chmod(0o600)
    tls = ("--tls-cert", str(pem), "--tls-key", str(pem))
    with (
        StoreProcess(folder / "plain") as plain,
        StoreProcess(folder / "tls", extra_args=tls, ca_file=ca) as over_tls,
        StoreProcess(folder / "tokens", extra_args=("--token-file", str(roles))) as with_tokens,
        ThreadingHTTPServer(("127.0.0.1", 0), _OtherServer) as other,
        ThreadingTCPServer(("127.0.0.1", 0), BaseRequestHandler) as closes,
        running_s3_server() as s3,
    ):
        for server in (other, closes):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        ports = {"plain": plain.port, "tls": over_tls.port, "tokens": with_tokens.port, "other": other.server_port}
        ports |= {"closes": closes.server_address[1], "s3": s3.port}
        found = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        yield found | {"elsewhere": f"localhost:{over_tls.port}", "port": str(plain.port), "ca": str(ca)}
        for server in (other, closes):
            server.shutdown()


class _OtherServer(BaseHTTPRequestHandler):
    """Answers 501, and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def refusal(folder: Path, line: str) -> str:
    """Run a command that fails, in one line, and changes nothing. Return that line."""
    with nullcontext() if line.startswith("serve") else unchanged(folder):  # it makes its directory
        result = kvfetch(*shlex.split(line))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("kvfetch: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert not any(secret in result.stderr for secret in (UNKNOWN, READ, ADMIN))
    for name in ("no-such-file", "a-folder"):
        assert result.stderr.count(name) == (name in line)
        assert name not in line or "Errno" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_makes_no_sense_is_refused_in_one_line(line: str, said: str, folder: Path) -> None:
    assert said in refusal(folder, line)


@pytest.mark.process
@pytest.mark.parametrize("row", MET, ids=" ".join)
def test_what_a_command_meets_is_told_with_what_to_type(
    row: tuple[str, ...], folder: Path, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, said, *unsaid = (text.format(**addresses) for text in row)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    while found := re.match(r"([A-Z_]+)=(\S+) ", line):
        monkeypatch.setenv(found[1], found[2])
        line = line[found.end() :]
    output = refusal(folder, line)
    assert all(part in output for part in said.split(" ... ")), output
    assert not any(text in output for text in unsaid)
