"""The judge for logs on disk: NCCL output of any framework, told as a table or as JSON."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from training.errors import BadInput
from training.transport.verdict import Verdict, rank_spans

WIDTH = 80
_OWN_NAME = re.compile(r"nccl\.(?P<run>.+)\.attempt-(?P<attempt>\d+)\.rank-\d+\.log")  # as training.transport.preflight.log_file writes it


def files_in(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """The files to read, each once, and what to tell about those left out: of this project's own logs only a run's newest attempt counts.

    Raises BadInput for a path that isn't there, and where no file is left.
    """
    found: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            for folder, below, names in os.walk(path, onerror=_unreadable):
                below.sort()
                found.update((os.path.join(folder, name), None) for name in sorted(names) if os.path.isfile(os.path.join(folder, name)))
        elif os.path.exists(path):
            found[path] = None
        else:
            raise BadInput(f"{path}: no such file or folder; give NCCL logs, or a folder that holds them")
    if not found:
        raise BadInput(f"{', '.join(paths)}: no file in there; give NCCL logs, or a folder that holds them")
    return _newest_attempts(found)


def _unreadable(error: OSError) -> None:
    # A folder that is passed over would be evidence that is missing without a word.
    raise BadInput(f"{error.filename}: can't be read ({error.strerror}); give a folder that you may read") from error


def _newest_attempts(paths: Collection[str]) -> tuple[list[str], list[str]]:
    own = {path: match for path in paths if (match := _OWN_NAME.fullmatch(os.path.basename(path)))}
    newest: dict[str, int] = {}
    for match in own.values():
        newest[match["run"]] = max(newest.get(match["run"], 0), int(match["attempt"]))
    kept = [path for path in paths if path not in own or int(own[path]["attempt"]) == newest[own[path]["run"]]]
    left = len(paths) - len(kept)
    return kept, [f"{left} files of earlier attempts left out"] if left else []


def table(verdict: Verdict, extra_notes: Sequence[str] = ()) -> str:
    """The verdict for a person, no line wider than 80 columns, nothing in it that a terminal could obey."""
    lines = [*_wrapped(verdict.line()), *_wrapped(verdict.notes[0]), ""]
    rows = [("host", "ranks", "network", "provider", "NICs", "channels"), *_rows(verdict.ranks)]
    widths = [min(max(len(row[i]) for row in rows), limit) for i, limit in enumerate((26, 10, 13, 9, 4, 13))]
    if len(rows) > 1:
        lines += [" ".join(_fitted(cell, width, tail=i == 0) for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]
        lines.append("")
    moved = [h for h in verdict.hosts if h["efaTx"] is not None or h["nicTx"] is not None]
    for h in moved:
        lines += _wrapped(f"{h['host']}: EFA sent {_gb(h['efaTx'])}, received {_gb(h['efaRx'])}; NIC sent {_gb(h['nicTx'])}, received {_gb(h['nicRx'])}")
    for number, reason in enumerate(verdict.reasons, 1):
        lines += [*_wrapped(f"{number}. {reason.rule}: {reason.where}"), *_wrapped(f"saw {reason.saw}", "   "), *_wrapped(f"do  {reason.do}", "   "), ""]
    for note in (*verdict.notes[1:], *extra_notes):
        lines += _wrapped(f"note: {note}")
    return "\n".join(lines).rstrip() + "\n"


def _rows(ranks: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row per host and kind of rank."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for r in ranks:
        named = {channel.split("/")[1] for channel in r["channels"] if channel.startswith("NET/")}
        network = "+".join(sorted({*r["networks"], *named})) or ("gloo" if r["backend"] == "gloo" else "-")
        nics = "-" if r["nics"] is None else str(r["nics"])
        groups.setdefault((r["host"], network, "+".join(r["providers"]) or "-", nics), []).append(r)
    rows: list[tuple[str, ...]] = []
    for (host, network, provider, nics), group in sorted(groups.items()):
        numbers = rank_spans(r["rank"] for r in group if r["rank"] is not None)
        kinds = {channel.split("/")[0] + ("+GDR" if channel.endswith("/GDRDMA") else "") for r in group for channel in r["channels"]}
        rows.append((host, numbers or "-", network, provider, nics, " ".join(sorted(kinds, key=lambda kind: (not kind.startswith("NET"), kind))) or "-"))
    return rows


def _gb(number: int | None) -> str:
    return "not counted" if number is None else f"{number / 1e9:.2f} GB"


def _fitted(text: str, width: int, tail: bool) -> str:
    """Padded or shortened to ``width``; a name keeps its ``tail``, where the names of a group's pods differ."""
    text = _safe(text)
    if len(text) <= width:
        return text.ljust(width)
    return ".." + text[-(width - 2) :] if tail else text[: width - 2] + ".."


def _safe(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text).encode("ascii", "replace").decode()


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(_safe(text), WIDTH, initial_indent=indent, subsequent_indent=indent + ("    " if indent else "  "), break_on_hyphens=False) or [""]
