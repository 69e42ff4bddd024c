"""Files that users write: an editor may put a byte order mark before them, or characters that nobody sees into them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane.access import store_token
from sgl_kvfetch.prompts import read_prompts, read_texts
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.tokens import Role, TokenFile
from sgl_kvfetch.stores.redis_index import PASSWORD_ENV
from sgl_kvfetch.stores.remote import TlsFiles
from sgl_kvfetch.tools.estimate import values_per_token
from sgl_kvfetch.tools.terminal import StoreAccess
from sgl_kvfetch.user_files import TOKEN_ENV, environment_secret

KEY = "0f" * 32
TOKEN = "s3cret-Zq7"
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
MARK = "\ufeff"


READERS: dict[str, tuple[str, Callable[[Path], object], object]] = {
    "one token": (TOKEN, lambda path: TokenFile(path).role_of(f"Bearer {TOKEN}"), Role.ADMIN),
    "tokens": (f"read {TOKEN}\n", lambda path: TokenFile(path).role_of(f"Bearer {TOKEN}"), Role.READ),
    "a client's token": (f"{TOKEN}\r\n", lambda path: StoreAccess(token_file=path).secret, TOKEN),
    "keys": (f"{KEY}\r\n", lambda path: StoreKeys.read(path).ids, StoreKeys(bytes.fromhex(KEY)).ids),
    "a text": ("hello", read_texts, ["hello"]),
    "prompts": ('{"prompt": [1, 2]}\n', read_prompts, [[1, 2]]),
    "a model": (json.dumps(MODEL), lambda path: values_per_token(str(path)), 2 * 2 * 4 * 64),
}


@pytest.mark.parametrize("what", READERS)
def test_a_byte_order_mark_is_not_part_of_the_content_and_other_encodings_are_named(what: str, tmp_path: Path) -> None:
    """PowerShell's ``>`` writes UTF-16."""
    text, read, expected = READERS[what]
    file = tmp_path / "file.jsonl" if what == "prompts" else tmp_path / "file"
    file.write_bytes((MARK + text).encode())
    assert read(file) == expected
    file.write_text(text, encoding="utf-16")
    with pytest.raises(ConfigError, match="UTF-8") as caught:
        read(file)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("what", ["one token", "tokens", "a client's token", "keys"])
@pytest.mark.parametrize("bad", ["\u200b", "\x07"], ids=ascii)
def test_secrets_are_printable_ascii(what: str, bad: str, tmp_path: Path) -> None:
    """The error says where, and quotes nothing of the secret."""
    text, read, _ = READERS[what]
    file = tmp_path / "file"
    words = text.split()
    file.write_text("\n" + " ".join([*words[:-1], words[-1][:3] + bad + words[-1][3:]]), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{file}.*line 2.*printable ASCII") as caught:
        read(file)
    assert words[-1][3:] not in str(caught.value)
    with pytest.raises(ConfigError, match="printable ASCII"):
        ServerConfig(Path("/store"), token="s3cret" + bad)


def test_comments_may_have_other_characters(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{MARK}# f\u00fcr Leser\nread s3cret\n", encoding="utf-8")
    assert TokenFile(file).role_of("Bearer s3cret") == Role.READ


def test_secrets_of_the_environment_are_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes passes on the line's end of ``echo secret | base64``."""
    for name in (TOKEN_ENV, PASSWORD_ENV):
        monkeypatch.setenv(name, " s3cret\r\n")
        assert environment_secret(name) == "s3cret"
        monkeypatch.setenv(name, "\n")
        assert environment_secret(name) is None
    monkeypatch.setenv(TOKEN_ENV, "s3cret\n")
    assert store_token(parse_config({"store": "http://store:8700"})) == "s3cret"
    assert StoreAccess().secret == "s3cret"


def test_a_ca_file_with_a_byte_order_mark_is_an_error(tmp_path: Path) -> None:
    """OpenSSL finds no certificate in it."""
    file = tmp_path / "ca.pem"
    file.write_text(f"{MARK}-----BEGIN CERTIFICATE-----\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="TLS file"):
        TlsFiles(str(file)).context()
