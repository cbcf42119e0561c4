"""Health, information and control: everything that is not a generation."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from shared.frontend.errors import ApiError, invalid
from shared.frontend.http import json_response, read_json, respond
from shared.frontend.openai_common import check_model
from shared.frontend.protocol import AbortRequest, parse
from shared.frontend.tokenizer_manager import TokenizerManager
from shared.messages import SamplingParams, TokenizedGenerateReqInput

PROBE_TIMEOUT_S = 5.0

ProcessTree = Callable[[], Any]


class Admin:
    """`process_tree` gives the processes of the server as JSON can write them."""

    def __init__(self, manager: TokenizerManager, process_tree: ProcessTree) -> None:
        self._manager = manager
        self._args = manager.server_args
        self._process_tree = process_tree
        self._started_s = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while all processes of the server live, however busy they are."""
        if self._manager.failure is not None:
            raise ApiError(503, self._manager.failure, code="engine_lost")
        return json_response({"status": "ok"})

    async def health_generate(self, request: Request) -> Response:
        """Generates one token.  A server that has other work and no time for it is busy, not dead."""
        return await respond(request, self._probe())

    async def _probe(self) -> Response:
        manager = self._manager
        busy = json_response({"status": "busy"})
        if manager.has_probe() and manager.has_work():
            return busy
        probe = TokenizedGenerateReqInput(
            rid=f"health-{uuid.uuid4().hex}",
            input_ids=np.zeros(1, dtype=np.int64),
            sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        )
        try:
            group = manager.open([probe], is_probe=True)
        except ApiError as error:
            if error.code == "queue_full":
                return busy
            raise
        with group:
            try:
                await asyncio.wait_for(group.results(), PROBE_TIMEOUT_S)
            except asyncio.TimeoutError:
                if manager.has_work():
                    return busy
                raise ApiError(503, f"no token within {PROBE_TIMEOUT_S:g} s, and no other work") from None
        return json_response({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._args.model_name)
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._args.model_name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "process-eras",
            "max_model_len": self._manager.limits.context_length,
        }

    async def get_model_info(self, request: Request) -> Response:
        limits = self._manager.limits
        return json_response(
            {
                "model_path": self._args.model_path,
                "tokenizer_path": self._args.model_path,
                "served_model_name": self._args.model_name,
                "is_generation": True,
                "context_length": limits.context_length,
                "vocab_size": limits.vocab_size,
            }
        )

    async def get_server_info(self, request: Request) -> Response:
        """Flags, processes, capacity, queues.  A replica too busy to answer is shown as it last reported."""
        return await respond(request, self._server_info())

    async def _server_info(self) -> Response:
        manager = self._manager
        try:
            stats = await manager.internal_state()
        except ApiError:
            stats = manager.last_stats()
        flags = dataclasses.asdict(self._args)
        if flags["api_key"] is not None:
            flags["api_key"] = "***"
        return json_response(
            {
                **flags,
                "process_tree": self._process_tree(),
                **dataclasses.asdict(manager.limits),
                "live_requests": manager.live_requests,
                "running_requests": sum(one.running for one in stats),
                "waiting_requests": sum(one.waiting for one in stats),
                "internal_states": [dataclasses.asdict(one) for one in stats],
            }
        )

    async def flush_cache(self, request: Request) -> Response:
        """Empties the prefix cache of every replica; a 400 while requests run."""
        return await respond(request, self._flush())

    async def _flush(self) -> Response:
        if self._manager.has_work():
            raise ApiError(400, f"the cache is in use: {self._manager.live_requests} requests are running")
        for reply in await self._manager.flush_cache():
            if not reply.success:
                raise ApiError(400, reply.message)
        return json_response({"success": True, "message": "the cache is empty"})

    async def abort_request(self, request: Request) -> Response:
        """`{"rid": id}` or `{"abort_all": true}`.  An id that is not live, or no longer, is no error."""
        body = parse(AbortRequest, await read_json(request))
        if body.abort_all:
            self._manager.abort(None)
        elif body.rid is not None:
            self._manager.abort(body.rid)
        else:
            raise invalid("rid", "give a request's id, or abort_all: true")
        return json_response({"success": True})

    async def metrics(self, request: Request) -> Response:
        return Response(self._manager.metrics.text(), media_type="text/plain; version=0.0.4")
