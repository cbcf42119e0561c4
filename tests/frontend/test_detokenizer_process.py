"""The detokenizer's process entry, over its real sockets."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import zmq

from shared.detokenizer import run_detokenizer_process
from shared.messages import (
    BatchStrOut,
    BatchTokenIDOut,
    FinishReason,
    FlushCacheOut,
    PortArgs,
    SamplingParams,
)
from shared.server_args import ServerArgs


def test_texts_come_back_and_other_messages_pass_through(tokenizer_folder: Path, tmp_path: Path) -> None:
    ports = PortArgs(
        run_dir=str(tmp_path),
        tokenizer_ipc_name=f"ipc://{tmp_path}/tokenizer",
        scheduler_input_ipc_name=f"ipc://{tmp_path}/scheduler",
        detokenizer_ipc_name=f"ipc://{tmp_path}/detokenizer",
        secret=b"",
    )
    args = ServerArgs(model_path=str(tokenizer_folder))
    spawn = multiprocessing.get_context("spawn")
    reader, writer = spawn.Pipe(duplex=False)
    process = spawn.Process(target=run_detokenizer_process, args=(args, ports, writer), daemon=True)
    process.start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        inbox.bind(ports.tokenizer_ipc_name)
        inbox.setsockopt(zmq.RCVTIMEO, 20_000)
        outbox.connect(ports.detokenizer_ipc_name)
        assert reader.poll(60)
        assert reader.recv() == {"status": "ready"}
        outbox.send_pyobj(FlushCacheOut("id", 0, True, ""))
        ids = [[75, 72], [79]]
        batch = BatchTokenIDOut(
            ["a", "b"], ids, [None, FinishReason("length")], [1, 1], [2, 1], [0, 0], [SamplingParams()] * 2,
            [None, None],
        )  # fmt: skip
        outbox.send_pyobj(batch)
        assert inbox.recv_pyobj() == FlushCacheOut("id", 0, True, "")
        answer = inbox.recv_pyobj()
        assert isinstance(answer, BatchStrOut)
        assert (answer.rids, answer.texts, answer.new_ids) == (["a", "b"], ["he", "l"], ids)
        assert answer.completion_tokens == [2, 1]
    finally:
        process.kill()
        process.join()
        context.destroy(linger=0)
