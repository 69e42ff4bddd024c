"""Bearer tokens, and which requests they permit."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.server.bodies import error_answer
from sgl_kvfetch.stores import PINS
from sgl_kvfetch.stores.wire import PAGE_PATHS, Route
from sgl_kvfetch.user_files import FreshFiles, read_text, require_secret, warn_if_all_may_read

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)
# They tell nothing: the page asks for a token, and reads with it.
PUBLIC_PATHS = frozenset({Route.HEALTH, *PAGE_PATHS})


class Role(IntEnum):
    """Each role permits what those before it permit."""

    READ = 1  # look up, read, list, report damage, metrics
    WRITE = 2  # put objects, replace a manifest that it knows, delete within a namespace
    ADMIN = 3  # replace any manifest, delete from all namespaces, pin


ROLE = web.RequestKey("role", Role)  # of the request's token
_NEEDED = {hdrs.METH_PUT: Role.WRITE, hdrs.METH_DELETE: Role.WRITE}  # for all other methods, READ
_ROLES = {role.name.lower(): role for role in Role}


class Tokens:
    """Says which role a request has. Without tokens, every request has all rights."""

    def __init__(self, roles: Mapping[str, Role] | None) -> None:
        # Looked up by digest: how long that takes says nothing about a token.
        self._roles = None if roles is None else {_digest(f"Bearer {token}"): role for token, role in roles.items()}

    def role_of(self, authorization: str) -> Role | None:
        """Return the role of a request with this ``Authorization`` header; None without a valid token."""
        return Role.ADMIN if self._roles is None else self._roles.get(_digest(authorization))


class TokenFile(Tokens):
    """Tokens from a file, which may be changed at any time."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if it cannot be read or is malformed."""
        self.files = FreshFiles("tokens", (path,), lambda: Tokens(_roles_in(path)))

    def role_of(self, authorization: str) -> Role | None:
        return self.files.value.role_of(authorization)


def _roles_in(path: Path) -> dict[str, Role]:
    """Return the tokens of a file. Raises ConfigError, which quotes none."""
    warn_if_all_may_read(path)
    try:
        text = read_text(path, "--token-file")
    except ConfigError as e:
        if isinstance(e.__cause__, FileNotFoundError):
            raise ConfigError(f"{e}: openssl rand -hex 32 >{path} makes a token") from e
        raise
    try:
        return parse_tokens(text)
    except ConfigError as e:
        raise ConfigError(f"--token-file {path}: {e}") from e


def parse_tokens(text: str) -> dict[str, Role]:
    """Parse lines ``ROLE TOKEN``, or a single line ``TOKEN``, which is an admin's. ``#`` begins a comment line.

    Raises ConfigError, which quotes no token.
    """
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, words) for number, words in lines if words and not words[0].startswith("#")]
    if not lines:
        raise ConfigError("is empty")
    for number, words in lines:
        require_secret(words[-1], f"line {number}")
    if len(lines) == 1 and len(lines[0][1]) == 1 and lines[0][1][0] not in _ROLES:
        return {lines[0][1][0]: Role.ADMIN}
    roles = {}
    for number, words in lines:
        if len(words) != 2 or words[0] not in _ROLES:
            raise ConfigError(f"line {number}: expected one of {', '.join(_ROLES)}, and a token")
        if words[1] in roles:
            raise ConfigError(f"line {number}: this token is listed twice")
        roles[words[1]] = _ROLES[words[0]]
    return roles


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def authorised(tokens: Tokens) -> Middleware:
    """Make the middleware that answers 401 or 403 to requests that their token does not permit."""

    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in PUBLIC_PATHS:
            return await handler(request)
        changes_pins = request.method in _NEEDED and request.path.startswith(f"{Route.NOTES}/{PINS.name}/")
        needed = Role.ADMIN if changes_pins else _NEEDED.get(request.method, Role.READ)
        role = tokens.role_of(request.headers.get("Authorization", ""))
        if role is None:
            _log_refusal(request, "an unknown token" if "Authorization" in request.headers else "no token")
            wanted = f"expected a valid bearer token in Authorization, with the role {needed.name.lower()}"
            answer = error_answer(401, "unauthorised", wanted)
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        request[ROLE] = role
        require_role(request, needed)
        return await handler(request)

    return authorise


def require_role(request: web.Request, needed: Role) -> None:
    """Raise HTTPForbidden if the request's token lacks the role ``needed``."""
    if request[ROLE] < needed:
        _log_refusal(request, f"a token with the role {request[ROLE].name.lower()}, not {needed.name.lower()}")
        raise web.HTTPForbidden(text=f"this needs a token with the role {needed.name.lower()}")


def _log_refusal(request: web.Request, what: str) -> None:
    """Log that a client was refused, and why: a line a client a minute, which quotes no token."""
    client = request.remote or "a client"
    _limited.warning(f"refused {client}", f"refused {request.method} {request.path[:200]} from {client}: it has {what}")
