from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.launch.run_dir import RunDir, sweep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty temporary directory with a short name, for sockets have short paths."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


def test_it_is_for_this_user_only(base: Path) -> None:
    run_dir = RunDir()
    assert run_dir.path.parent == base
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    run_dir.remove()


def test_its_addresses_lie_in_it_and_every_launch_has_a_secret_of_its_own(base: Path) -> None:
    first, second = RunDir(), RunDir()
    ports = first.port_args()
    addresses = [ports.tokenizer_ipc_name, ports.scheduler_input_ipc_name, ports.detokenizer_ipc_name]
    assert len(set(addresses)) == 3
    assert {os.path.dirname(address) for address in addresses} == {f"ipc://{first.path}"}
    assert len(ports.secret) == 32
    assert ports.secret != second.port_args().secret
    assert ports.secret.hex() not in repr(ports)
    assert repr(ports.secret) not in repr(ports)
    first.remove()
    second.remove()


def test_remove_leaves_nothing_and_may_be_repeated(base: Path) -> None:
    run_dir = RunDir()
    (run_dir.path / "tokenizer").touch()
    run_dir.remove()
    run_dir.remove()
    assert list(base.iterdir()) == []


def test_what_a_killed_server_left_is_swept_and_what_a_live_one_uses_is_not(base: Path) -> None:
    live = RunDir()
    code = (
        "import os; from shared.launch.run_dir import RunDir\n"
        "run_dir = RunDir(); print(run_dir.path, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "TMPDIR": str(base)}
    killed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    unlocked_stranger = base / "process-eras-not-ours"
    unlocked_stranger.mkdir()
    sweep(base)
    assert not left.exists()
    assert live.path.is_dir()
    assert unlocked_stranger.is_dir()
    live.remove()


def test_a_link_with_the_name_of_a_run_directory_is_not_followed(base: Path) -> None:
    target = base / "precious"
    target.mkdir()
    (target / "lock").touch()
    (base / "process-eras-link").symlink_to(target)
    sweep(base)
    assert (target / "lock").exists()


def test_a_long_temporary_directory_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = base / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    run_dir = RunDir()
    assert len(os.fsencode(run_dir.port_args().detokenizer_ipc_name.removeprefix("ipc://"))) <= 100
    run_dir.remove()
