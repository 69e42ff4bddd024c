"""Decide which requests are permitted."""

from __future__ import annotations

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from sgl_kvfetch.server.answers import error_answer
from sgl_kvfetch.server.tokens import Role, Tokens
from sgl_kvfetch.stores import HEALTH_PATH, PAGE_PATHS

# They tell nothing: the page asks for a token, and reads with it.
PUBLIC_PATHS = frozenset({HEALTH_PATH, *PAGE_PATHS})

ROLE = web.RequestKey("role", Role)  # of the request's token

_NEEDED = {hdrs.METH_PUT: Role.WRITE, hdrs.METH_DELETE: Role.WRITE}  # for all other methods, READ


def authorised(tokens: Tokens) -> Middleware:
    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in PUBLIC_PATHS:
            return await handler(request)
        role = tokens.role_of(request.headers.get("Authorization", ""))
        if role is None:
            answer = error_answer(401, "unauthorised", "expected a valid bearer token in Authorization")
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        request[ROLE] = role
        require_role(request, _NEEDED.get(request.method, Role.READ))
        return await handler(request)

    return authorise


def require_role(request: web.Request, needed: Role) -> None:
    """Raise HTTPForbidden if the request's token does not permit what needs the role ``needed``."""
    if request[ROLE] < needed:
        raise web.HTTPForbidden(text=f"this needs a token with the role {needed.name.lower()}")
