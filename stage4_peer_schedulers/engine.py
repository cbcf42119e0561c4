"""The way to start stage 4, and the offline engine: generation from Python, without HTTP.

    with Engine(model_path="tiny-random", tp_size=2) as engine:
        print(engine.generate("Once upon a time", {"max_new_tokens": 16})["text"])

Both stand on `_launch_subprocesses`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from shared.frontend.errors import ApiError
from shared.frontend.native import Answer, Generate
from shared.frontend.protocol import GenerateRequest, parse
from shared.frontend.tokenizer_manager import TokenizerManager
from shared.launch.stage import BadFlag, LaunchedProcesses, launch_processes, resolve_model, start_trace
from shared.launch.supervisor import ChildFailed, Supervisor
from shared.messages import PortArgs
from shared.server_args import ServerArgs, check_server_args
from shared.weights.tokenizer import import_transformers
from stage4_peer_schedulers.data_parallel_controller import run_data_parallel_controller_process
from stage4_peer_schedulers.scheduler import start_schedulers
from stage4_peer_schedulers.server import CONTROLLER_TITLE, STAGE

T = TypeVar("T")


def _launch_subprocesses(server_args: ServerArgs, port_args: PortArgs, supervisor: Supervisor) -> None:
    """Starts the schedulers: all of one replica, or through the data parallel controller those of several.

    A node other than 0 has no requests to dispatch, and so no controller.
    """
    if server_args.dp_size == 1:
        start_schedulers(server_args, port_args, None, supervisor)
    elif server_args.node_rank == 0:
        args = (server_args, port_args)
        supervisor.start("controller", CONTROLLER_TITLE, run_data_parallel_controller_process, args)
    else:
        for dp_rank in range(server_args.dp_size):
            start_schedulers(server_args, port_args, dp_rank, supervisor)


class Engine:
    """A running stage 4 inside this process; keyword arguments are the fields of `ServerArgs`.

    It owns a thread, which starts the processes and then runs the TokenizerManager's event loop.  All methods
    may be called from any thread.  Answers are those of `POST /generate`; they raise ValueError for what HTTP
    would call a bad request, and RuntimeError for an engine that is full, lost or shut down.  When one of its
    processes dies, what runs gets its error, and then this process ends too, with status 1.

    The processes are spawned: a script must guard what makes an engine by `if __name__ == "__main__"`.
    """

    def __init__(self, **settings: Any) -> None:
        server_args = ServerArgs(**settings)
        check_server_args(server_args)
        if server_args.node_rank > 0:
            raise ValueError("an Engine is for node 0; start the others by stage4_peer_schedulers.server")
        self._loop = uvloop.new_event_loop()
        self._lock = threading.Lock()
        self._is_over = False
        ready: Future[Generate] = Future()
        self._thread = threading.Thread(target=self._run, args=(server_args, ready), daemon=True)
        self._thread.start()
        try:
            self._generate = ready.result()
        except BadFlag as problem:
            raise ValueError(str(problem)) from None

    def _run(self, server_args: ServerArgs, ready: Future[Generate]) -> None:
        try:
            start_trace(STAGE, server_args)
            server_args = resolve_model(server_args)
            processes = launch_processes(STAGE, server_args, meanwhile=import_transformers)
        except BaseException as error:
            self._loop.close()
            ready.set_exception(error)
            return
        try:
            self._loop.run_until_complete(self._serve(server_args, processes, ready))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            processes.stop()
            self._loop.close()

    async def _serve(self, server_args: ServerArgs, processes: LaunchedProcesses, ready: Future[Generate]) -> None:
        manager = TokenizerManager(server_args, processes.port_args, processes.limits)
        await manager.start()
        self._stop = asyncio.Event()

        def lose_child(failure: ChildFailed) -> None:
            message = f"a process of the engine died: {failure.title}"
            self._loop.call_soon_threadsafe(manager.fail_all, message)

        processes.supervisor.on_death(lose_child)
        ready.set_result(Generate(manager))
        await self._stop.wait()
        await manager.close()
        with self._lock:
            self._is_over = True
        await asyncio.sleep(0)  # what was submitted before now becomes a task, and fails
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """The answer to a prompt, or a list of them for a list of prompts.

        With `stream`, an iterator over the answer so far; for a list of prompts each item has its `index`.
        `options` are further fields of `POST /generate`: rid, return_logprob, top_logprobs_num.
        """
        body = _body(prompt, sampling_params, input_ids, stream, options)
        return self._stream(body) if stream else self._submit(self._generate.answer(body)).result()

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """As `generate`, for an event loop of the caller's; with `stream` it gives an async iterator."""
        body = _body(prompt, sampling_params, input_ids, stream, options)
        if stream:
            return self._async_stream(body)
        return await asyncio.wrap_future(self._submit(self._generate.answer(body)))

    def _stream(self, body: GenerateRequest) -> Iterator[Answer]:
        answers, close = self._submit(self._generate.open_stream(body)).result()
        try:
            while (answer := self._submit(_next(answers)).result()) is not None:
                yield answer
        finally:
            self._close_stream(close)

    async def _async_stream(self, body: GenerateRequest) -> AsyncIterator[Answer]:
        answers, close = await asyncio.wrap_future(self._submit(self._generate.open_stream(body)))
        try:
            while (answer := await asyncio.wrap_future(self._submit(_next(answers)))) is not None:
                yield answer
        finally:
            self._close_stream(close)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work` in the engine's thread."""
        with self._lock:
            if not self._is_over:
                return asyncio.run_coroutine_threadsafe(_with_plain_errors(work), self._loop)
        work.close()
        raise RuntimeError("the engine is shut down")

    def _close_stream(self, close: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_over:
                self._loop.call_soon_threadsafe(close)

    def shutdown(self) -> None:
        """Fails what still runs and ends all processes; returns when they are gone.  May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _body(
    prompt: str | list[str] | None,
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
    input_ids: list[int] | list[list[int]] | None,
    stream: bool,
    options: dict[str, Any],
) -> GenerateRequest:
    fields = {"text": prompt, "input_ids": input_ids, "sampling_params": sampling_params, "stream": stream}
    try:
        return parse(GenerateRequest, {**fields, **options})
    except ApiError as error:
        raise _plain(error) from None


async def _with_plain_errors(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except ApiError as error:
        raise _plain(error) from None


async def _next(answers: AsyncIterator[Answer]) -> Answer | None:
    return await anext(answers, None)


def _plain(error: ApiError) -> ValueError | RuntimeError:
    return (ValueError if error.status < 500 else RuntimeError)(str(error))
