import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane.access import store_token
from sgl_kvfetch.protocol.config import GROUPS, KVFetchConfig, parse_config
from sgl_kvfetch.user_files import TOKEN_ENV

STORE = {"store": "http://store:8700"}
S3 = {"store": "s3://bucket/prefix"}


def test_sglangs_own_keys_are_left_to_it() -> None:
    assert parse_config(STORE | {"prefetch_threshold": 16}) == parse_config(STORE)


def test_a_profile_makes_klt_the_default_and_auto_takes_what_klt_takes() -> None:
    assert parse_config(STORE | {"profile": "p"}).quantiser_name == "klt"
    from_store, auto = (
        parse_config(STORE | {"quantiser": name, "target_kl": 1e-3, "levels": {}}) for name in ("klt", "auto")
    )
    assert (from_store.quantiser_name, from_store.profile, auto.quantiser_name) == ("klt", None, "klt")
    assert (auto.with_profile("p").quantiser_name, auto.with_profile("p").target_kl) == ("klt", 1e-3)
    assert auto.as_exact == parse_config(STORE | {"quantiser": "exact"})


def test_the_token_comes_from_the_environment_if_the_store_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    assert store_token(parse_config(STORE)) is None
    monkeypatch.setenv(TOKEN_ENV, "secret\n")
    assert store_token(parse_config(STORE)) == "secret"
    assert "secret" not in repr(parse_config(STORE))
    assert store_token(parse_config(S3)) is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"quantizer": "uint8"}, r"unknown key 'quantizer' \(= 'uint8'\); did you mean 'quantiser'"),
        ({"zzz": 1}, r"unknown key 'zzz' \(= 1\); known keys are store, token_file"),
        ({"codec": "h264"}, "codec = 'h264': .*ans, hevc, hevc420, zstd, deflate, raw"),
        ({"quantiser": "int4"}, "quantiser = 'int4': .*exact, uint8, cachegen, klt, auto"),
        ({"fetch_timeout_s": 0}, "fetch_timeout_s = 0: .*greater than 0"),
        (
            {"quantiser": "cachegen(k=300;v=16)"},
            r"quantiser = 'cachegen\(k=300;v=16\)': .*k_bins = \[300\]: .* 4 to 256",
        ),
        ({"quantiser": "exact", "profile": "p"}, "profile and target_kl need quantiser = 'klt', not 'exact'"),
        ({"quantiser": "auto", "profile": "p"}, "'auto' takes its profile from the store: leave out profile"),
        ({"store": 5}, "store = 5: expected one URL"),
        ({"store": "http://\udcff"}, r"store = 'http://\\udcff': expected valid Unicode, found a lone surrogate"),
        (
            {"store": "file:///kv"},
            "store = 'file:///kv': a directory belongs to one process, .*kvfetch serve /kv --port",
        ),
        ({"token": "secret"}, "unknown key 'token'; did you mean 'token_file'"),
        (S3 | {"s3": {"region": "\ud800"}}, r"s3 = \(hidden\): expected valid Unicode"),
        ({"index": "redis://x"}, "index is for s3:// stores"),
        ({"ttl_s": "1 day"}, "ttl_s = '1 day': invalid duration .*such as 90s, 45m, 12h or 30d"),
        ({"tls": {"key_file": "k"}}, "tls = .*: key_file needs a cert_file"),
        ({"quantiser": "klt", "levels": {}, "codec": "hevc"}, "which only ans codes"),
        ({"levels.count": 2}, r'unknown key .levels.count.; write it as {"levels": {"count": \.\.\.}}'),
        ({"device": {"poolshare": 1}}, r"unknown key 'device.poolshare' \(= 1\); did you mean 'pool_share'"),
        ({"device": 0.5}, "device = 0.5: it has keys of its own; .*known keys are pool_share"),
        ({"store": "kv:8700"}, "store = 'kv:8700': expected one URL: .*; is it http://kv:8700?"),
    ],
)
def test_faults_name_key_value_and_what_is_allowed(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(STORE | extra)


@pytest.mark.parametrize(
    "extra",
    [
        {"token": ["31337"]},
        {"tokn": "31337"},
        {"token_file": 31337},
        S3 | {"s3": {"secret_access_key": 31337.5}},
        S3 | {"indexx": "31337"},
        S3 | {"index": {"url": "31337"}},
    ],
)
def test_faults_do_not_show_a_token(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(STORE | extra)
    assert "31337" not in "".join(traceback.format_exception(caught.value))


def test_a_store_may_be_a_bucket_with_an_index() -> None:
    config = parse_config(S3 | {"s3": {"region": "r", "skip_signature": True}, "index": "redis://:pass@x/1"})
    assert (config.s3, config.index) == ({"region": "r", "skip_signature": True}, "redis://:pass@x/1")
    assert "pass" not in repr(config)


def test_times_and_sizes_may_have_a_unit() -> None:
    for ttl in ("1d", 86400):
        assert parse_config(STORE | {"ttl_s": ttl}).ttl_s == 86400.0
    config = parse_config(STORE | {"memory_cache": "16MB"})
    assert config.memory_cache == 16_000_000
    for each in (config, parse_config(STORE | {"memory_cache": 0})):
        sent = each.model_dump(mode="json", exclude_unset=True)  # to the data plane
        assert KVFetchConfig.model_validate(sent) == each
        assert each.as_exact.memory_cache == each.memory_cache


def test_a_missing_store_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'store' is required: .*http://HOST:PORT"):
        parse_config({})


def test_the_docs_have_every_key_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    text = text.partition("\n## SGLang's options\n")[0]  # whose table has names of SGLang's
    rows: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            keys, default = line.split(" | ")[:2]
            rows |= {key: default for key in re.findall("`([a-z0-9_.]+)`", keys)}
    known = {key: field for key, field in KVFetchConfig.model_fields.items() if key not in GROUPS}
    known |= {f"{group}.{key}": field for group, keys in GROUPS.items() for key, field in keys.model_fields.items()}
    assert set(rows) == set(known)
    for key, field in known.items():
        if not field.is_required() and field.default_factory is None and field.default is not None:
            assert rows[key].strip("`") == str(field.default), key
