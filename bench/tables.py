"""A measured table: on the terminal, and in a place of its own in a document, so that no figure is typed."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.this_machine import description


class NoPlace(Exception):
    """A document has no marks to put a text between; the message is one line that names them."""


def show(rows: list[list[str]], title: str, name: str, document: Path | None = None) -> None:
    """Prints `rows`, the first of which is the heading.

    With a `document` also writes them between its marks for `name`, as Markdown, under the machine and its versions.
    Raises `NoPlace`.
    """
    heading, *lines = rows
    table = Table(title=title)
    for number, text in enumerate(heading):
        table.add_column(text, justify="right" if number and number > 1 else "left")
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    if document is not None:
        text = document.read_text(encoding="utf-8")
        block = f"{title}. {description()}\n\n{markdown(rows)}"
        document.write_text(between(text, f"<!-- {name}: -->", f"<!-- :{name} -->", block), encoding="utf-8")


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table, the first row its heading and numbers on the right."""
    heading, *lines = rows
    rule = ["---" if not number else "--:" for number in range(len(heading))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [heading, rule, *lines])


def between(text: str, begin: str, end: str, block: str) -> str:
    """`text` with `block` between the two marks.  Raises `NoPlace` where they are missing."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise NoPlace(f"the document lacks {begin} or {end}")
    return f"{before}{begin}\n\n{block}\n{end}{after}"
