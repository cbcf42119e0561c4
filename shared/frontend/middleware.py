"""ASGI layers around the app: the API key, and the largest body."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.frontend.errors import ApiError
from shared.frontend.http import error_response

MAX_BODY_BYTES = 32 * 2**20


class ApiKeyMiddleware:
    """Every path but exactly `/health` needs `Authorization: Bearer <key>`, whether it exists or not."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        message = "missing or wrong API key: send Authorization: Bearer <key>"
        error = ApiError(401, message, code="invalid_api_key")
        response = error_response(error)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1:
            return False
        scheme, _, key = sent[0].partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(key.strip(), self._api_key)


class BodyLimitMiddleware:
    """A body of more than `MAX_BODY_BYTES` is a 413, noticed before more than that is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > MAX_BODY_BYTES:
                await error_response(_too_large())(scope, receive, send)
                return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise _too_large()
            return message

        await self._app(scope, counted, send)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
