"""JSON in, JSON and server-sent events out, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared import trace
from shared.frontend.errors import ApiError

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499


_LONG_BODY = 2**18
"""Larger bodies are read in a thread, so that the event loop goes on."""


def dumps(data: Any) -> str:
    """JSON in ASCII: many clients take the likes of U+2028 for the end of a line, and so of an event."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def json_response(
    data: Any, status: int = 200, headers: dict[str, str] | None = None, rids: Sequence[str] = ()
) -> Response:
    """`data` as the body; `rids` are the requests that it answers."""
    track = trace.track()
    start_ns = track.now()
    body = dumps(data)
    track.span("respond", start_ns, rids=rids, num_bytes=len(body))
    return Response(body, status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())


async def read_json(request: Request) -> dict[str, Any]:
    """The body, which must be a JSON object sent as JSON; anything else is a 400.

    A body without a content type counts as JSON; `text/plain` does not, because a browser would send that to
    this machine on behalf of any page.
    """
    content_type = request.headers.get("content-type")
    if content_type is not None:
        kind = content_type.partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(400, f"Content-Type: {ascii(kind)[:60]} is not application/json", param="Content-Type")
    body = await request.body()
    return await asyncio.to_thread(_object, body) if len(body) > _LONG_BODY else _object(body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    return data


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`; None, with `work` cancelled, once the client has gone away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def respond(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """What `work` answers.  It is cancelled when the client goes away."""
    return await _first_of(work, request.receive) or Response(status_code=CLIENT_CLOSED_REQUEST)


class EventStream(Response):
    """Server-sent events, one `data:` line for each string of `events`, which answer the requests `rids`.

    A slow reader holds up `events` through the socket's flow control.  `close` is called once at the end,
    however it comes, and even when `events` was never started.  An ApiError ends the stream as an error
    event, without a `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None], rids: Sequence[str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._rids = rids
        self._trace = trace.track()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _first_of(self._write(send), receive)
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        try:
            async for event in self._events:
                await self._send_event(send, event)
        except ApiError as error:
            await self._send_event(send, dumps(error.body()))
        start_ns = self._trace.now()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._trace.span("respond", start_ns, rids=self._rids)

    async def _send_event(self, send: Send, event: str) -> None:
        start_ns = self._trace.now()
        body = f"data: {event}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._trace.span("respond", start_ns, num_bytes=len(body))
