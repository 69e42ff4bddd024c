import re
from pathlib import Path

import pytest

from sgl_kvfetch.config import TOKEN_ENV, KVFetchConfig, parse_config
from sgl_kvfetch.errors import ConfigError

STORE = {"store": "http://store:8700"}


def test_defaults_and_sglangs_own_keys() -> None:
    config = parse_config(STORE | {"prefetch_threshold": 16, "hicache_storage_pass_prefix_keys": True}, {})
    assert config.quantiser_name == "exact"
    assert config.codec == "hevc"
    assert config.token is None
    assert config.reads
    assert config.writes


def test_a_profile_makes_klt_the_default() -> None:
    config = parse_config(STORE | {"profile": "p"}, {})
    assert config.quantiser_name == "klt"


def test_the_token_comes_from_the_environment_and_is_not_shown() -> None:
    config = parse_config(STORE, {TOKEN_ENV: "secret"})
    assert config.token == "secret"
    assert "secret" not in repr(config)
    assert parse_config(STORE | {"token": "mine"}, {TOKEN_ENV: "secret"}).token == "mine"
    assert parse_config({"store": "file:///kv"}, {TOKEN_ENV: "secret"}).token is None
    assert parse_config({"store": ["file:///kv", "http://store"]}, {TOKEN_ENV: "secret"}).token == "secret"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"quantizer": "uint8"}, r"unknown key 'quantizer' \(= 'uint8'\); did you mean 'quantiser'"),
        ({"zzz": 1}, r"unknown key 'zzz' \(= 1\); known keys are store, token"),
        ({"codec": "h264"}, "codec = 'h264': .*'hevc', 'hevc420', 'zstd', 'deflate' or 'raw'"),
        ({"quantiser": "int4"}, "quantiser = 'int4': .*'exact', 'uint8', 'cachegen' or 'klt'"),
        ({"fetch_timeout_s": 0}, "fetch_timeout_s = 0: .*greater than 0"),
        ({"max_connections": "many"}, "max_connections = 'many': .*integer"),
        ({"quantiser": "cachegen", "cachegen_k_bins": [300]}, "cachegen_k_bins.0 = 300: .*256"),
        ({"cachegen_k_bins": [16]}, "need quantiser = 'cachegen', not 'exact'"),
        ({"quantiser": "klt"}, "'klt' needs a profile: run kvfetch calibrate"),
        ({"quantiser": "exact", "profile": "p"}, "profile and target_kl need quantiser = 'klt', not 'exact'"),
        ({"target_kl": 1e-3}, "profile and target_kl need quantiser = 'klt', not 'exact'"),
        ({"profile": "p", "target_kl": 0}, "target_kl = 0: .*greater than 0"),
        ({"store": "ftp://x"}, "store = 'ftp://x': expected http://"),
        ({"store": ["http://x", "ftp://x"]}, r"store = \['http://x', 'ftp://x'\]: expected http://"),
        ({"store": ["http://x", "http://x"]}, "store = .*: a replica is listed twice"),
        ({"store": []}, r"store = \(?.*: .*at least 1 item"),
        ({"store": 5}, "store = 5: .*tuple"),
        ({"token": 5}, r"token = \(hidden\)"),
    ],
)
def test_faults_name_key_value_and_what_is_allowed(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(STORE | extra, {})


def test_a_store_may_have_replicas() -> None:
    assert parse_config(STORE, {}).store == ("http://store:8700",)
    assert parse_config({"store": ["http://near", "file:///far"]}, {}).store == ("http://near", "file:///far")


def test_a_missing_store_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'store' is required: .*http://HOST:PORT"):
        parse_config({}, {})


def test_the_docs_have_every_key_with_its_default() -> None:
    text = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    rows = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            keys, default = line.split(" | ")[:2]
            rows |= {key: default for key in re.findall("`([a-z0-9_]+)`", keys)}
    assert set(rows) == set(KVFetchConfig.model_fields)
    for key, field in KVFetchConfig.model_fields.items():
        if not field.is_required() and field.default_factory is None and field.default is not None:
            assert rows[key].strip("`") == str(field.default), key
