"""``docs/openapi.yaml`` says what the server does: its routes, the roles that they need, and the fields of bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from sgl_kvfetch.server import metrics, web as pages
from sgl_kvfetch.server.app import create_app
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.server.tokens import Role
from sgl_kvfetch.stores import ObjectInfo, Pin, ProfileRow, wire

DOCUMENT = yaml.safe_load((Path(__file__).parents[2] / "docs" / "openapi.yaml").read_text())
OPERATIONS: dict[tuple[str, str], Any] = {
    (method.upper(), path): operation
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
    if method != "parameters"
}


def test_the_document_has_the_routes_of_the_server(tmp_path: Path) -> None:
    routes = create_app(ServerConfig(tmp_path)).router.routes()
    assert {(route.method, route.resource.canonical) for route in routes if route.resource} == set(OPERATIONS)


@pytest.mark.parametrize(
    "struct",
    [
        *(ObjectInfo, wire.Deleted, wire.Checked, wire.Folders, wire.Notes, Pin),
        *(pages.Summary, metrics.Failure, metrics.AnswerTimes, pages.FolderRow, ProfileRow, pages.LoadSample),
    ],
)
def test_bodies_have_the_fields_that_the_document_names(struct: type[msgspec.Struct]) -> None:
    schema = DOCUMENT["components"]["schemas"][struct.__name__]
    assert list(schema["properties"]) == schema["required"] == list(struct.__struct_fields__)


@pytest.mark.process
async def test_each_operation_needs_the_role_that_the_document_names(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{role.name.lower()} token-of-{role.name.lower()}\n" for role in Role))
    tokens.chmod(0o600)
    config = ServerConfig(tmp_path / "store", port=0, token_file=tokens, grace_s=1)
    values = {"kind": "profiles", "name": "0" * 64, "digest": "0" * 32, "folder": f"{'0' * 32}.0-1"}
    async with running_server(config) as server, aiohttp.ClientSession(server.url) as session:
        for (method, path), operation in OPERATIONS.items():
            security = operation.get("security", DOCUMENT["security"])
            needed = Role[security[0]["token"][0].upper()] if security else None
            for role in (None, *Role):
                headers = {} if role is None else {"Authorization": f"Bearer token-of-{role.name.lower()}"}
                # A prefix within a namespace: shorter ones need the role admin, as the description says.
                query = {"prefix": "0/"} if method == "DELETE" and path == wire.Route.OBJECTS else {}
                async with session.request(method, path.format(**values), headers=headers, params=query) as response:
                    allowed = response.status not in (401, 403)
                    if response.status == 401 and needed is not None and method != "HEAD":
                        assert f"with the role {needed.name.lower()}" in await response.text()
                assert allowed == (needed is None or (role is not None and role >= needed)), (method, path, role)
