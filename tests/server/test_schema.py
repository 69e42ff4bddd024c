"""Requests that schemathesis makes of ``docs/openapi.yaml``, by clients of every role: the server answers as the
document says, and never with an error of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from harness.store_process import StoreProcess
from sgl_kvfetch.server.tokens import Role
from sgl_kvfetch.stores import wire
from tests.odd_segments import odd_segments
from tests.tools.conftest import put

pytest_plugins = "schemathesis.pytest.plugin"
schema = schemathesis.openapi.from_path(Path(__file__).parents[2] / "docs" / "openapi.yaml")
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


@schemathesis.serializer("application/msgpack")
def packed(context: object, value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value, enc_hook=str)
    except OverflowError:  # MessagePack has no such integers
        return msgspec.msgpack.encode(str(value))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    folder = tmp_path_factory.mktemp("schema")
    tokens = folder / "tokens"
    tokens.write_text("".join(f"{role.name.lower()} token-of-{role.name.lower()}\n" for role in Role))
    tokens.chmod(0o600)
    for segment in odd_segments():
        put(folder / "store", segment)
    with StoreProcess(folder / "store", extra_args=("--token-file", str(tokens))) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("role", [None, *Role], ids=lambda role: role.name.lower() if role else "nobody")
@schema.parametrize()
@hypothesis.settings(
    max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_answers_are_as_the_document_says(case: schemathesis.Case[Any], role: Role | None, store: StoreProcess) -> None:
    headers = {} if role is None else {"Authorization": f"Bearer token-of-{role.name.lower()}"}
    response = case.call(base_url=store.url, headers=headers)
    if response.status_code not in (503, 507):
        case.validate_response(response, checks=CHECKS)


@pytest.mark.slow
def test_answers_about_odd_segments_are_as_the_document_says(store: StoreProcess) -> None:
    headers = {"Authorization": "Bearer token-of-read"}
    for segment in odd_segments():
        put(store.directory, segment)  # again: admins have deleted some
        name = segment.manifest.key.manifest_name
        shown = schema[f"{wire.Route.SEGMENTS}/{{name}}"]["GET"].Case(path_parameters={"name": name})
        assert shown.call_and_validate(base_url=store.url, headers=headers, checks=CHECKS).status_code == 200
        listed = schema[wire.Route.SEGMENTS]["GET"].Case(query={"folder": segment.manifest.heads.folder})
        listed.call_and_validate(base_url=store.url, headers=headers, checks=CHECKS)
    summary = schema[wire.Route.SUMMARY]["GET"].Case()
    summary.call_and_validate(base_url=store.url, headers=headers, checks=CHECKS)
