"""The offline engine: four schedulers behind a controller, driven from Python."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.launch import ProcessNode
from shared.server_args import ServerArgs
from stage4_peer_schedulers.engine import Engine
from stage4_peer_schedulers.server import process_tree
from tests.stage4.scripted import request, run

pytestmark = pytest.mark.stages(4)

ROOT = Path(__file__).parent.parent.parent
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
PROMPTS = [[1, 70 + i, 80, 90, 100] for i in range(4)]


@pytest.fixture(scope="module")
def others() -> dict[int, str]:
    """What other tests have running."""
    return titles_by_pid()


@pytest.fixture(scope="module")
def engine(others: dict[int, str]) -> Iterator[Engine]:
    engine = Engine(
        model_path="tiny-random",
        device="sim",
        sim_decode_ms=2.0,
        tp_size=2,
        dp_size=2,
        load_balance_method="shortest_queue",
        sleep_on_idle=True,
        check_determinism=True,
    )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The same prompts in one scheduler of this process, without overlap."""
    params = {"max_new_tokens": 12, "ignore_eos": True}
    requests = [request(str(i), prompt, **params) for i, prompt in enumerate(PROMPTS)]
    answers = run({0: [*requests]}, overlap=False, device="sim", sim_decode_ms=0.0)
    return [answers[str(i)].ids for i in range(len(PROMPTS))]


def test_one_prompt_and_a_list_of_them(engine: Engine, expected: list[list[int]]) -> None:
    one = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert one["output_ids"] == expected[0]
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert one["meta_info"]["prompt_tokens"] == 5 and one["meta_info"]["completion_tokens"] == 12
    many = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert [answer["output_ids"] for answer in many] == expected
    assert engine.generate("hello", GREEDY)["meta_info"]["completion_tokens"] == 12


def test_a_stream_grows_to_the_same_answer(engine: Engine, expected: list[list[int]]) -> None:
    answers = list(engine.generate(input_ids=PROMPTS[1], sampling_params=GREEDY, stream=True))
    assert answers[-1]["output_ids"] == expected[1]
    for earlier, later in itertools.pairwise(answers):
        assert earlier["meta_info"]["finish_reason"] is None
        assert later["text"].startswith(earlier["text"])
        assert len(later["output_ids"]) > len(earlier["output_ids"])


def test_async_calls_run_together(engine: Engine, expected: list[list[int]]) -> None:
    async def ask_all() -> list[Any]:
        calls = [engine.async_generate(input_ids=prompt, sampling_params=GREEDY) for prompt in PROMPTS]
        return await asyncio.gather(*calls)

    assert [answer["output_ids"] for answer in asyncio.run(ask_all())] == expected


def test_an_async_stream(engine: Engine, expected: list[list[int]]) -> None:
    async def last_answer() -> Any:
        stream = await engine.async_generate(input_ids=PROMPTS[2], sampling_params=GREEDY, stream=True)
        return [answer async for answer in stream][-1]

    assert asyncio.run(last_answer())["output_ids"] == expected[2]


def test_a_stream_that_is_left_is_aborted_and_its_id_comes_free(engine: Engine) -> None:
    endless = {"temperature": 0.0, "max_new_tokens": 8000, "ignore_eos": True}
    stream = engine.generate(input_ids=PROMPTS[0], sampling_params=endless, stream=True, rid="left")
    next(stream)
    with pytest.raises(ValueError, match="left"):
        engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, rid="left")
    stream.close()
    for _ in range(100):
        try:
            engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, rid="left")
            return
        except ValueError:
            threading.Event().wait(0.05)
    raise AssertionError("the request still runs")


def test_a_bad_request_is_a_value_error_that_names_the_field(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"sampling_params.temperature"):
        engine.generate("hello", {"temperature": -1.0})
    with pytest.raises(ValueError, match=r"input_ids\[1\]"):
        engine.generate(input_ids=[1, 100_000])
    with pytest.raises(ValueError, match="no_such_option"):
        engine.generate("hello", no_such_option=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 5}, "tp-size 5"),
        ({"tp_size": 0}, "--tp-size: 0 is out of range"),
        ({"tp_size": "2"}, "--tp-size '2' is not an integer"),
        ({"tp_size": 2, "nnodes": 2}, "--dist-init-addr"),
        ({"device": "tpu"}, "--device"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size"),
        ({"node_rank": 1, "nnodes": 2, "tp_size": 2, "dist_init_addr": "127.0.0.1:1"}, "node 0"),
    ],
)
def test_bad_settings_are_a_value_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**{"model_path": "tiny-random", "device": "sim", **settings})


def titles_by_pid() -> dict[int, str]:
    """The processes of stage 4 below this one."""
    titles = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            titles[process.pid] = " ".join(process.cmdline()).strip()
    return {pid: title for pid, title in titles.items() if title.startswith("stage4:")}


def titles_below(node: ProcessNode) -> list[str]:
    return [title for child in node.children for title in (child.title, *titles_below(child))]


def test_shutdown_leaves_no_process(engine: Engine, others: dict[int, str]) -> None:
    """The last test of this engine."""
    running = {pid: title for pid, title in titles_by_pid().items() if pid not in others}
    tree = process_tree(ServerArgs(tp_size=2, dp_size=2))
    assert tree.count() == 7
    assert sorted(running.values()) == sorted(titles_below(tree))
    endless = {"max_new_tokens": 8000, "ignore_eos": True}
    stream = engine.generate("hello", endless, stream=True)
    next(stream)
    engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in running)
    with pytest.raises(RuntimeError):
        list(stream)
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("hello")
    engine.shutdown()


LOSES_ITS_SCHEDULER = """
import time

import psutil

from stage4_peer_schedulers.engine import Engine

if __name__ == "__main__":
    engine = Engine(model_path="tiny-random", device="sim", sleep_on_idle=True)
    stream = engine.generate("hello", {"max_new_tokens": 8000, "ignore_eos": True}, stream=True)
    next(stream)
    children = {" ".join(child.cmdline()).strip(): child for child in psutil.Process().children()}
    children["stage4: scheduler TP0"].kill()
    try:
        for _ in stream:
            pass
    except RuntimeError as error:
        print(error, flush=True)
    for child in children.values():
        child.wait()
    while True:
        time.sleep(1)
"""


def test_a_lost_scheduler_fails_what_runs_and_ends_the_process(tmp_path: Path) -> None:
    script = tmp_path / "loses.py"
    script.write_text(LOSES_ITS_SCHEDULER)
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert ended.stdout == "a process of the engine died: stage4: scheduler TP0\n"
    assert "killed by SIGKILL" in ended.stderr
