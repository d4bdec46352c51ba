"""What a command shows: tables and lines for a person, or one JSON document for a program. Library functions never print."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

# Where the width is not known (a pipe, a CI log) lines are as long as a standard terminal's.
PLAIN_WIDTH = 80


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, 80 where there is none; colour on a terminal alone, and never with NO_COLOR."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else int(os.environ.get("COLUMNS") or PLAIN_WIDTH)
    # Text is data: log lines and names hold brackets that are no markup, and ":warning:" that is no picture.
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


class Output:
    """The output of one command: :meth:`result` once, lines before it as they come. With ``as_json`` only the result, as JSON, on stdout."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = console()
        self.progress = console(stderr=True)

    @property
    def live(self) -> bool:
        """Whether a table may be drawn over and over: on a terminal, for a person."""
        return not self.as_json and self.out.is_terminal

    def line(self, text: str = "", style: str = "") -> None:
        """A line for a person; a program gets the result alone. Wrapped at words on a terminal, whole in a pipe."""
        if not self.as_json:
            self.out.print(Text(text, style=style), soft_wrap=not self.out.is_terminal)

    def raw(self, text: str) -> None:
        """Log text as it is: no wrapping, no styles, control characters but tab and newline shown rather than obeyed."""
        if not self.as_json:
            sys.stdout.write(harmless(text))
            sys.stdout.flush()

    def table(self, *columns: str, rows: Sequence[Sequence[str | Text]], title: str | None = None, right: Sequence[int] = ()) -> None:
        """A table within the console's width; ``right``: columns of numbers."""
        self.show(table(*columns, rows=rows, title=title, right=right))

    def show(self, what: RenderableType) -> None:
        """A table or the like; in a pipe without the blanks that only fill its columns."""
        if self.as_json:
            return
        if self.out.is_terminal:
            self.out.print(what)
            return
        with self.out.capture() as captured:
            self.out.print(what)
        sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))

    def result(self, value: Any) -> None:
        """The result as JSON where that was asked for. Dataclasses, paths and times become plain data."""
        if self.as_json:
            sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")
            sys.stdout.flush()

    def error(self, message: str, exit_code: int) -> None:
        """One sentence on stderr; as JSON ``{"error": ..., "exitCode": ...}`` on stdout besides."""
        if self.as_json:
            sys.stdout.write(json.dumps({"error": message, "exitCode": exit_code}, indent=2) + "\n")
        text = Text(harmless(f"error: {message}"))
        text.stylize("bold red", 0, 6)
        self.progress.print(text, soft_wrap=not self.progress.is_terminal)


def table(*columns: str, rows: Sequence[Sequence[str | Text]], title: str | None = None, right: Sequence[int] = ()) -> Table:
    """A table without a frame, which wraps long cells rather than cutting them off."""
    made = Table(box=None, title=title, title_justify="left", pad_edge=False, show_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number in right else "left", overflow="fold", no_wrap=number in right)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(harmless(cell)) for cell in row))
    return made


def plain(value: Any) -> Any:
    """``value`` as JSON holds it; keys of dataclasses in camelCase, as in run.json and the stack file."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_camel(field.name): plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None  # JSON has no such number
    return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def harmless(text: str) -> str:
    """``text`` without what a terminal would obey: a log line must not move the cursor, set the title or colour the rest."""
    return "".join(char if char in "\t\n" or (char.isprintable() and char != "\x7f") else "" if char == "\r" else repr(char)[1:-1] for char in text)


def duration(seconds: float) -> str:
    """``45s``, ``3m 20s``, ``2h 05m``, ``3d 04h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def usd(amount: float) -> str:
    """``$9.65``; four digits where two would say nothing."""
    return f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.4f}"
