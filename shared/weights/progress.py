"""The progress bar of model preparation, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], None]  # (what is being done, done so far, of how many)


@contextmanager
def progress_bar(show: bool) -> Iterator[Report]:
    """Yields a function to report progress with.  Nothing is drawn before its first call."""
    if not show:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    percentage = TextColumn("{task.percentage:>3.0f} %")
    columns = (TextColumn("{task.description}"), BarColumn(), percentage, TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if not tasks:
            progress.start()
        if what not in tasks:
            tasks[what] = progress.add_task(what)
        progress.update(tasks[what], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            progress.stop()
