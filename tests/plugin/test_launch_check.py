from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvfetch.errors import ConfigError, SeamError, UnsupportedError
from sgl_kvfetch.plane.access import check_access
from sgl_kvfetch.plugin import hooks, launch_check, register as registration
from sgl_kvfetch.plugin.hooks import gate_command_line, gate_launch
from sgl_kvfetch.plugin.launch_check import check_launch, use_linker
from sgl_kvfetch.plugin.register import register, selects_backend
from sgl_kvfetch.user_files import TOKEN_ENV
from tests.codec.quant.profiles import make_profile

pytestmark = pytest.mark.filterwarnings("ignore")

STORE = {"store": "http://127.0.0.1:1"}


def _args(extra: Any = STORE, **flags: Any) -> SimpleNamespace:
    defaults = {
        "hicache_storage_backend": "kvfetch",
        "hicache_storage_backend_extra_config": extra if isinstance(extra, str | None) else json.dumps(extra),
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": "page_first_direct",
        "hicache_host_memory_mode": "cache",
        "pp_size": 1,
        "enable_pdmux": False,
        "disaggregation_decode_enable_offload_kvcache": False,
        "disable_radix_cache": False,
        "radix_cache_backend": None,
        "enable_lmcache": False,
        "enable_flexkv": False,
        "enable_unified_cache_external_linker": False,
        "unified_cache_external_linker_config": None,
        "enable_streaming_session": False,
        "disaggregation_mode": "null",
        "enable_dp_attention": False,
        "attn_dp_size": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
    }
    return SimpleNamespace(**(defaults | flags))


@pytest.fixture(autouse=True)
def _access_is_checked_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process for each check."""
    if "process" not in request.keywords:
        monkeypatch.setattr(launch_check, "_check_access", check_access)


def test_a_launch_without_the_codecs_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "find_spec", lambda name: None if name == "av" else name)
    what = r"av not installed here: pip install '\.\[codec\]' in a checkout"
    monkeypatch.setattr(sys, "argv", ["sglang", "--hicache-storage-backend", "kvfetch"])
    with pytest.raises(SystemExit, match=f"^sgl_kvfetch: {what}$"):
        register()
    with pytest.raises(SystemExit, match=f"^sgl_kvfetch: {what}$"):
        gate_command_line(_args(), [])  # selected in a config file
    with pytest.raises(UnsupportedError, match=what):
        gate_launch(_args())  # selected in Python


BUCKET = {"store": "s3://bucket/prefix", "index": "redis://index", "s3": {"region": "eu-central-1"}}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (BUCKET | {"s3": {"regoin": "eu-central-1"}}, "'regoin' is not valid"),
        (BUCKET | {"index": "http://index"}, "the index's URL"),
        ({"store": "http://kv:99999"}, "'http://kv:99999' is malformed: Port out of range"),
        ({"store": "http://me:secret@kv:8700"}, "must not contain a user or a password"),
        (STORE | {"codec": "gif"}, "codec = 'gif': .*hevc"),
        ("{not JSON", "{not JSON.*expected a JSON object|expected a JSON object.*{not JSON"),
        ("[1]", r"\[1\].*JSON object|JSON object.*\[1\]"),
        ("@/no/such/file.json", "/no/such/file.json"),
        (None, "store"),
    ],
)
def test_the_config_is_checked_before_a_model_is_loaded(extra: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_launch(_args(extra))


def test_the_token_is_checked_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "two\nlines")
    with pytest.raises(ConfigError, match="the token is not allowed: expected printable ASCII"):
        check_launch(_args(STORE))


def test_a_profile_is_read_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    extra = STORE | {"profile": str(path)}
    with pytest.raises(ConfigError, match=f"profile {path} cannot be read"):
        check_launch(_args(extra))
    make_profile().save(path)
    check_launch(_args(extra))  # at its default
    check_launch(_args(extra | {"target_kl": 1e-4}))
    with pytest.raises(ConfigError, match=r"target_kl = 5 is outside this profile's range, 1e-05 to 0\.01"):
        check_launch(_args(extra | {"target_kl": 5}))


@pytest.mark.parametrize("key", ["key_file", "tls.ca_file", "tls.cert_file"])
def test_key_files_are_read_before_a_model_is_loaded(key: str, tmp_path: Path) -> None:
    group, _, name = key.rpartition(".")
    for content in (None, "nonsense"):
        path = tmp_path / "file"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=str(path)):
            check_launch(_args(STORE | ({group: {name: str(path)}} if group else {name: str(path)})))


@pytest.mark.process
def test_a_process_checks_the_access_to_the_store(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match=f"^key file {path} cannot be read: No such file or directory$"):
        check_launch(_args(STORE | {"key_file": str(path)}))
    path.write_text("0" * 64)
    path.chmod(0o644)
    check_launch(_args(STORE | {"key_file": str(path)}))
    assert f"all users of this machine may read the secret in {path}" in capfd.readouterr().err


@pytest.mark.process
def test_the_process_that_checks_access_imports_no_torch() -> None:
    """Each launch waits for it."""
    code = "import sys, sgl_kvfetch.plane.access; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


@pytest.mark.process
def test_nothing_is_counted_before_sglang_serves() -> None:
    """prometheus_client decides at import whether several processes share metrics; SGLang sets that up later."""
    code = (
        "import sys, sgl_kvfetch.plugin.register, sgl_kvfetch.plugin.launch_check, sgl_kvfetch.plugin.hooks\n"
        "import sgl_kvfetch.plugin.device.waiting_queue\n"
        "sys.exit('sgl_kvfetch.metrics' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def test_a_good_launch_passes() -> None:
    check_launch(_args(BUCKET))
    check_launch(_args(STORE | {"prefetch_threshold": 16, "prefetch_timeout_base": 1.5}))  # SGLang's own keys


def test_nothing_is_checked_for_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_check, "check_seams", lambda: pytest.fail("looked at SGLang"))
    others = [
        _args("no JSON", hicache_storage_backend=name, enable_hierarchical_cache=False) for name in ("file", None)
    ]
    for other in (*others, SimpleNamespace()):
        before = vars(other).copy()
        gate_command_line(other, [])
        gate_launch(other)
        assert vars(other) == before


def test_a_mismatch_of_sglang_stops_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_check, "check_seams", lambda: ["found sglang 9, expected 8", "a.b not found"])
    with pytest.raises(SeamError, match=r"^found sglang 9, expected 8; a\.b not found$"):
        check_launch(_args("no JSON"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hicache_mem_layout": "page_first_kv_split"}, "page_first_kv_split: use page_first_direct"),
        ({"disaggregation_decode_enable_offload_kvcache": True}, "decode-enable-offload"),
        ({"hicache_host_memory_mode": "buffer_only", "pp_size": 2}, "buffer_only and --pp-size 2"),
    ],
)
def test_unsupported_flags_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_launch(_args(**flags))


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"radix_cache_backend": "other"}, "--radix-cache-backend"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_dp_attention": True}, "--attn-dp-size"),
        ({"attn_dp_size": 2}, "--attn-dp-size"),
        ({"attn_cp_size": 2}, "--attention-context-parallel-size"),
        ({"dcp_size": 2}, "--decode-context-parallel-size"),
    ],
)
def test_flags_unsupported_in_device_mode_are_refused(flags: dict[str, Any], flag: str) -> None:
    check_launch(_args(**flags))
    with pytest.raises(UnsupportedError, match=rf"device mode.*work with {flag}: .*add --enable-hierarchical-cache"):
        check_launch(_args(enable_hierarchical_cache=False, **flags))
    check_launch(_args(enable_hierarchical_cache=False))


@pytest.mark.parametrize(
    ("name", "value", "device_mode", "host_mode"),
    [
        ("SGLANG_VIT_ENABLE_CUDA_GRAPH", "1", "refused: add --enable-hierarchical-cache", "KVFETCH_GPU=0"),
        ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "true", "--mem-fraction-static", ""),
    ],
)
def test_switches_of_sglang_that_do_not_go_with_us(
    name: str,
    value: str,
    device_mode: str,
    host_mode: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Graphs of vision encoders, which SGLang captures while it serves, in a mode in which no thread may ask about an
    event; and a pool that takes all memory."""

    def warnings(**flags: Any) -> str:
        caplog.clear()
        check_launch(_args(**flags))
        return caplog.text

    assert not warnings(enable_hierarchical_cache=False)
    monkeypatch.setenv(name, value)
    if device_mode.startswith("refused: "):
        with pytest.raises(UnsupportedError, match=rf"{name}.*{device_mode.removeprefix('refused: ')}"):
            check_launch(_args(enable_hierarchical_cache=False))
    else:
        said = warnings(enable_hierarchical_cache=False)
        assert name in said
        assert device_mode in said
    said = warnings()
    assert (name in said) == bool(host_mode)
    assert host_mode in said
    monkeypatch.setenv("KVFETCH_GPU", "0")
    assert not warnings()


def test_the_config_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kvfetch.toml"
    file.write_text('store = "http://127.0.0.1:1"\nprefetch_threshold = 64\n')
    check_launch(_args(f"@{file}"))
    file.write_text('store = "ftp://127.0.0.1:1"\n')
    with pytest.raises(ConfigError, match="ftp://127"):
        check_launch(_args(f"@{file}"))


@pytest.mark.parametrize(
    ("argv", "selected"),
    [
        (["--hicache-storage-backend", "kvfetch"], True),
        (["--hicache-storage-backend=kvfetch", "--tp", "2"], True),
        (["--hicache-storage-backend", "file", "kvfetch"], False),
        (["--hicache-storage-backend"], False),
        ([], False),
    ],
)
def test_selection_on_a_command_line(argv: list[str], selected: bool) -> None:
    assert selects_backend(argv) is selected


def test_traces_that_cannot_be_exported_stop_a_launch_in_device_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    check_launch(_args())
    with pytest.raises(ConfigError, match="kvfetch exports traces only as http/protobuf"):
        check_launch(_args(enable_hierarchical_cache=False))


def test_flags_without_a_host_tier_become_those_of_the_linker() -> None:
    args = _args(enable_hierarchical_cache=False)
    with_host_tier = _args()
    use_linker(with_host_tier)
    assert not with_host_tier.enable_unified_cache_external_linker
    use_linker(args)
    assert args.enable_unified_cache_external_linker
    assert args.hicache_storage_backend is None
    assert args.unified_cache_external_linker_backend == "dynamic"
    assert args.unified_cache_external_linker_config["linker_extra_config"] == {"config": json.dumps(STORE)}


def test_device_mode_needs_an_sglang_with_linkers() -> None:
    args = _args(enable_hierarchical_cache=False)
    del args.unified_cache_external_linker_config  # as in 0.5.22
    with pytest.raises(UnsupportedError, match=r"needs sglang 0\.5\.23, found .*: add --enable-hierarchical-cache"):
        check_launch(args)


@pytest.mark.parametrize(
    ("asked", "huge_page", "expected"), [("kvfetch", "", "shm"), ("kvfetch", "2MB", "kvfetch"), ("file", "", "file")]
)
def test_the_host_pool_can_be_mapped_unless_the_user_wants_other_memory(
    monkeypatch: pytest.MonkeyPatch, asked: str, huge_page: str, expected: str
) -> None:
    monkeypatch.setenv("SGLANG_HUGEPAGE_SIZE", huge_page)
    assert hooks.share_host_pool(asked) == expected
