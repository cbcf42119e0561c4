"""The HTTP app: which route is answered by what, and what its errors look like."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp

from shared.frontend.admin import Admin, ProcessTree
from shared.frontend.chat import ChatCompletions
from shared.frontend.completions import Completions
from shared.frontend.errors import ApiError
from shared.frontend.http import CLIENT_CLOSED_REQUEST, error_response
from shared.frontend.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from shared.frontend.native import Generate
from shared.frontend.tokenizer_manager import TokenizerManager
from shared.server_args import ServerArgs

KEEP_ALIVE_S = 120
"""How long an idle connection stays open: longer than clients keep theirs in a pool."""


def create_app(manager: TokenizerManager, server_args: ServerArgs, process_tree: ProcessTree) -> FastAPI:
    """The app of every stage.  Its lifespan starts and closes `manager`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await manager.start()
        yield
        await manager.close()

    app = FastAPI(title="process-eras", lifespan=lifespan)
    admin = Admin(manager, process_tree)
    routes = {
        "/v1/completions": (Completions(manager).handle, ["POST"]),
        "/v1/chat/completions": (ChatCompletions(manager).handle, ["POST"]),
        "/v1/models": (admin.models, ["GET"]),
        "/v1/models/{name:path}": (admin.model, ["GET"]),
        "/generate": (Generate(manager).handle, ["POST", "PUT"]),
        "/health": (admin.health, ["GET", "HEAD"]),
        "/health_generate": (admin.health_generate, ["GET"]),
        "/get_model_info": (admin.get_model_info, ["GET"]),
        "/get_server_info": (admin.get_server_info, ["GET"]),
        "/flush_cache": (admin.flush_cache, ["GET", "POST"]),
        "/abort_request": (admin.abort_request, ["POST"]),
        "/metrics": (admin.metrics, ["GET"]),
    }
    for path, (endpoint, methods) in routes.items():
        app.add_api_route(path, endpoint, methods=methods, response_class=Response)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_fault)
    app.add_middleware(BodyLimitMiddleware)
    if server_args.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=server_args.api_key)
    return app


def serve_config(app: ASGIApp, server_args: ServerArgs) -> uvicorn.Config:
    """How uvicorn runs the app; the launcher passes the socket that it has bound to `Server.serve`."""
    return uvicorn.Config(
        app,
        host=server_args.host,
        port=server_args.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=3,
    )


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, message))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_fault(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "internal error; the server's log has the traceback"))
