from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.server_args import ServerArgs

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
    """Return SGLang's flags at their defaults, with those of our backend. 0.5.22 has none for linkers."""
    linker = {"enable_unified_cache_external_linker": False, "unified_cache_external_linker_config": None}
    defaults = linker | {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    ours = {
        "hicache_storage_backend": "kvfetch",
        "hicache_storage_backend_extra_config": extra if isinstance(extra, str | None) else json.dumps(extra),
        "enable_hierarchical_cache": True,
    }
    return SimpleNamespace(**(defaults | ours | flags))


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


def test_the_config_is_checked_before_a_model_is_loaded() -> None:
    cases: list[tuple[Any, str]] = [
        ({"store": "s3://bucket/prefix", "index": "redis://index", "s3": {"regoin": "x"}}, "'regoin' is not valid"),
        ({"store": "http://kv:99999"}, "'http://kv:99999' is malformed: Port out of range"),
        (STORE | {"codec": "gif"}, "codec = 'gif': .*hevc"),
        (STORE | {"key_file": "/no/such/keys"}, "/no/such/keys"),
        (STORE | {"tls": {"ca_file": "/no/such/ca"}}, "/no/such/ca"),
        (STORE | {"tls": {"cert_file": "/no/such/cert"}}, "/no/such/cert"),
        ("[1]", r"\[1\].*JSON object"),
        ("@/no/such/file.json", r"/no/such/file\.json.* cannot be read.*: expected a JSON object"),
        (None, "store"),
    ]
    for extra, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_launch(_args(extra))


@pytest.mark.process
def test_a_process_checks_the_access_to_the_store(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("0" * 64)
    path.chmod(0o644)
    check_launch(_args(STORE | {"key_file": str(path)}))
    assert f"all users of this machine may read the secret in {path}" in capfd.readouterr().err
    monkeypatch.setenv(TOKEN_ENV, "two\nlines")
    with pytest.raises(ConfigError, match="the token is not allowed: expected printable ASCII"):
        check_launch(_args(STORE))


@pytest.mark.process
def test_what_a_launch_imports() -> None:
    for imported, absent in (
        ("plane.access", "torch"),  # each launch waits for this process
        # prometheus_client decides at import whether several processes share metrics; SGLang sets that up later.
        ("plugin.register plugin.launch_check plugin.hooks plugin.device.waiting_queue", "sgl_kvfetch.metrics"),
    ):
        modules = ", ".join(f"sgl_kvfetch.{name}" for name in imported.split())
        code = f"import sys, {modules}; sys.exit({absent!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


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


def test_unsupported_flags_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"hicache_mem_layout": "page_first_kv_split"}, "page_first_kv_split: use page_first_direct"),
        ({"disaggregation_decode_enable_offload_kvcache": True}, "decode-enable-offload"),
        ({"hicache_host_memory_mode": "buffer_only", "pp_size": 2}, "buffer_only and --pp-size 2"),
        ({"dllm_algorithm": "x", "enable_hierarchical_cache": False}, "--dllm-algorithm: SGLang has no host tier"),
    ]
    for flags, message in cases:
        with pytest.raises(UnsupportedError, match=message):
            check_launch(_args(**flags))


def test_flags_unsupported_in_device_mode_are_refused() -> None:
    for name, value, flag in (
        ("disable_radix_cache", True, "--disable-radix-cache"),
        ("radix_cache_backend", "other", "--radix-cache-backend"),
        ("enable_lmcache", True, "--enable-lmcache"),
        ("enable_flexkv", True, "--enable-flexkv"),
        ("enable_unified_cache_external_linker", True, "--enable-unified-cache-external-linker"),
        ("enable_streaming_session", True, "--enable-streaming-session"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
        ("pp_size", 2, "--pp-size"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_dp_attention", True, "--attn-dp-size"),
        ("attn_dp_size", 2, "--attn-dp-size"),
        ("attn_cp_size", 2, "--attention-context-parallel-size"),
        ("dcp_size", 2, "--decode-context-parallel-size"),
    ):
        check_launch(_args(**{name: value}))
        with pytest.raises(
            UnsupportedError, match=rf"device mode.*work with {flag}: .*add --enable-hierarchical-cache"
        ):
            check_launch(_args(enable_hierarchical_cache=False, **{name: value}))
    check_launch(_args(enable_hierarchical_cache=False))


def test_switches_of_sglang_that_do_not_go_with_us(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device_mode, host_mode = _args(enable_hierarchical_cache=False), _args()
    with monkeypatch.context() as graphs:  # of vision encoders, which SGLang captures while it serves
        graphs.setenv(name := "SGLANG_VIT_ENABLE_CUDA_GRAPH", "1")
        with pytest.raises(UnsupportedError, match=rf"{name}.*add --enable-hierarchical-cache"):
            check_launch(device_mode)
        check_launch(host_mode)
        assert "KVFETCH_GPU=0, or unset it" in caplog.text
        caplog.clear()
        graphs.setenv("KVFETCH_GPU", "0")
        check_launch(host_mode)
        assert not caplog.text
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "true")  # a pool that takes all memory
    check_launch(host_mode)
    assert not caplog.text
    check_launch(device_mode)
    assert "--mem-fraction-static" in caplog.text


def test_selection_on_a_command_line() -> None:
    flag = "--hicache-storage-backend"
    assert selects_backend([flag, "kvfetch"])
    assert selects_backend([f"{flag}=kvfetch", "--tp", "2"])
    assert not selects_backend([flag, "file", "kvfetch"])
    assert not selects_backend([flag])


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


def test_the_host_pool_can_be_mapped_unless_the_user_wants_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, huge_page, expected in (("kvfetch", "", "shm"), ("kvfetch", "2MB", "kvfetch"), ("file", "", "file")):
        monkeypatch.setenv("SGLANG_HUGEPAGE_SIZE", huge_page)
        assert hooks.share_host_pool(asked) == expected
