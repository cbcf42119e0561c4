"""`--stage` picks whose tests run, here and in `bench/`; tests of what all stages share always run."""

from __future__ import annotations

import signal

import pytest

from tests.conftest import ALL_STAGES, existing_stages


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stage",
        action="append",
        metavar="N",
        help="run the tests of stage N (1 to 4) and the shared ones; repeatable; default: all stages",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job; its children would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    selected_stages(config)


def selected_stages(config: pytest.Config) -> list[int]:
    """The stages to test, in order.  Raises `pytest.UsageError` for one that there is not."""
    named = config.getoption("--stage")
    if named is None:
        return existing_stages()
    for name in named:
        if name not in map(str, ALL_STAGES):
            raise pytest.UsageError(f"--stage {name}: there is no such stage; the stages are 1, 2, 3 and 4")
    return [stage for stage in existing_stages() if str(stage) in named]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `stage` runs once for each stage, or for those of its `stages` mark."""
    if "stage" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("stages")
        stages = [stage for stage in existing_stages() if mark is None or stage in mark.args]
        metafunc.parametrize("stage", stages, ids=[f"stage{stage}" for stage in stages], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of other stages only."""
    selected = selected_stages(config)
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        stages = _stages_of(item)
        wanted = stages is None or any(stage in selected for stage in stages)
        (kept if wanted else deselected).append(item)
    items[:] = kept
    if deselected:
        config.hook.pytest_deselected(items=deselected)


def _stages_of(item: pytest.Item) -> tuple[object, ...] | None:
    """The stages that a test is for; None where it tests what all share."""
    if isinstance(item, pytest.Function) and "stage" in item.fixturenames:
        return (item.callspec.params["stage"],)
    mark = item.get_closest_marker("stages")
    return None if mark is None else mark.args
