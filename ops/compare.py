"""What differs between runs, and what it did: pure over the runs' records, and a page with a picture."""

from __future__ import annotations

import dataclasses
import datetime
import html
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ops.errors import BadInput
from ops.output import duration, usd
from ops.runs import Run

# As training/report.py draws: text stays text, and the colours tell five runs apart for most eyes.
COLORS = ("#2f6fde", "#d9730d", "#2b8a5f", "#8a5a9e", "#9aa3af")
# What a setting does not decide: where a run lies and what it is called differs always.
NOT_TOLD = frozenset({"run", "storage"})
MISSING = "-"


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that was compared: a value for each run, in the order of the runs."""

    what: str
    values: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """names: the runs, told apart. differences: settings, versions, image and code that are not the same. results: what came out."""

    names: tuple[str, ...]
    differences: tuple[Row, ...]
    results: tuple[Row, ...]


def compare(runs: Sequence[Run]) -> Comparison:
    """Raises BadInput for fewer than two runs."""
    if len(runs) < 2:
        raise BadInput("compare needs two runs or more")
    names = _names(runs)
    told = [_inputs(run) for run in runs]
    keys = list(dict.fromkeys(key for one in told for key in one))
    rows = [Row(key, tuple(_text(one.get(key)) for one in told)) for key in keys]
    return Comparison(
        names=names,
        differences=tuple(row for row in rows if len(set(row.values)) > 1),
        results=tuple(Row(what, tuple(_result(run, what) for run in runs)) for what in RESULTS if any(_result(run, what) != MISSING for run in runs)),
    )


RESULTS = (
    "outcome",
    "steps",
    "loss, first to last",
    "held-out loss",
    "tokens/s",
    "MFU",
    "seconds a step",
    "waiting for data",
    "network",
    "bytes",
    "attempts",
    "time",
    "cost",
    "cost a million tokens",
)


def _names(runs: Sequence[Run]) -> tuple[str, ...]:
    plain = [run.name for run in runs]
    return tuple(run.name if plain.count(run.name) == 1 else run.where for run in runs)


def _inputs(run: Run) -> dict[str, Any]:
    document = run.document
    attempts = document.get("attempts") or [{}]
    return {
        **{key: value for key, value in flat(document.get("settings") or {}).items() if key not in NOT_TOLD},
        **{f"version of {key}": value for key, value in (document.get("versions") or {}).items()},
        "image": document.get("imageDigest"),
        "code": str(document.get("codeHash") or "")[:12] or None,
        "data": (document.get("identity") or {}).get("dataHash"),
        "hosts": len(document.get("hosts") or []) or None,
        "world size": attempts[-1].get("worldSize"),
        **{f"plan: {key}": value for key, value in flat(document.get("plan") or {}).items()},
    }


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """``{"model": {"random": "tiny"}}`` as ``{"model.random": "tiny"}``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def _steps(run: Run) -> list[Mapping[str, Any]]:
    return [line for line in run.metrics if "loss" in line]


def median(run: Run, key: str) -> float | None:
    """The median of a metric over the logged steps but the first, which holds compilation and warm-up."""
    values = [line[key] for line in _steps(run)[1:] or _steps(run) if isinstance(line.get(key), (int, float)) and math.isfinite(line[key])]
    return statistics.median(values) if values else None


def seconds(run: Run) -> float | None:
    """Seconds of all attempts."""
    total, known = 0.0, False
    for attempt in run.document.get("attempts") or []:
        began, ended = (_time(attempt.get(key)) for key in ("started", "ended"))
        if began and not ended and run.metrics:
            ended = _time(run.metrics[-1].get("time"))
        if began and ended:
            total, known = total + (ended - began).total_seconds(), True
    return total if known else None


def cost(run: Run) -> float | None:
    """Dollars: what the record says, else the stack's price for the run's time."""
    told = run.document.get("cost")
    if isinstance(told, (int, float)):
        return float(told)
    if isinstance(told, Mapping) and isinstance(told.get("usd"), (int, float)):
        return float(told["usd"])
    took = seconds(run)
    return None if run.usd_hour is None or took is None else run.usd_hour * took / 3600


def _result(run: Run, what: str) -> str:
    steps, document = _steps(run), run.document
    evaluations = [line for line in run.metrics if "evalLoss" in line]
    verdict = run.verdict or {}
    tokens = steps[-1].get("tokens") if steps else None
    spent = cost(run)
    if what == "outcome":
        return str(document.get("outcome") or MISSING)
    if what == "steps":
        return f"{steps[-1]['step']:,}" if steps else MISSING
    if what == "loss, first to last":
        return f"{_number(steps[0]['loss'])} -> {_number(steps[-1]['loss'])}" if steps else MISSING
    if what == "held-out loss":
        return _number(evaluations[-1]["evalLoss"]) if evaluations else MISSING
    if what == "network":
        return f"{verdict.get('observed', '?')} ({verdict.get('outcome', '?')})" if verdict else MISSING
    if what == "bytes":
        return str(verdict.get("bytes") or MISSING)
    if what == "attempts":
        return str(len(document.get("attempts") or []) or MISSING)
    if what == "time":
        took = seconds(run)
        return duration(took) if took is not None else MISSING
    if what == "cost":
        return usd(spent) if spent is not None else MISSING
    if what == "cost a million tokens":
        return usd(spent / tokens * 1e6) if spent is not None and tokens else MISSING
    value = median(run, {"tokens/s": "tokensPerSecond", "MFU": "mfu", "seconds a step": "stepSeconds", "waiting for data": "dataWait"}[what])
    if value is None:
        return MISSING
    return f"{value:,.0f}" if what == "tokens/s" else f"{value:.1%}" if what == "MFU" else f"{value:.3g} s"


def _text(value: Any) -> str:
    return MISSING if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and math.isfinite(value) else "not finite"


def _time(text: Any) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00")) if text else None


# ---- the picture


def picture(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Loss and speed over steps, a line a run, as SVG."""
    curves = [[(line["step"], line.get("loss"), line.get("tokensPerSecond")) for line in _steps(run)] for run in runs]

    def draw(figure: Any) -> None:
        above, below = figure.subplots(1, 2)
        for index, (name, lines) in enumerate(zip(names, curves, strict=True)):
            style = {
                "color": COLORS[index % len(COLORS)],
                "linestyle": ("-", "--", ":")[index // len(COLORS) % 3],
                "marker": "o" if len(lines) < 20 else "",
                "markersize": 3,
            }
            above.plot([line[0] for line in lines], [_drawable(line[1]) for line in lines], label=name, **style)
            below.plot([line[0] for line in lines], [_drawable(line[2]) for line in lines], **style)
        above.set_ylabel("loss, nats a token")
        below.set_ylabel("tokens/s")
        below.set_ylim(bottom=0)
        for axes in (above, below):
            axes.set_xlabel("step")
        figure.legend(loc="outside upper left", ncols=1 if max(map(len, names)) > 30 else 3)

    return svg(draw, "comparison", (9.0, 3.4 + 0.2 * len(runs)))


def svg(draw: Any, name: str, size: tuple[float, float]) -> str:
    """What ``draw(figure)`` draws; the same data gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.edgecolor": "#c9ced6",
        "grid.color": "#eceff3",
        "legend.frameon": False,
        "lines.linewidth": 1.6,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _drawable(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e30 else math.nan


def page(title: str, parts: Sequence[str]) -> str:
    """A self-contained page of HTML parts; ``title`` is escaped, the parts are markup."""
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;color:#1f2733}"
        "table{border-collapse:collapse;font-size:14px}th,td{text-align:left;vertical-align:top;padding:4px 16px 4px 0;border-top:1px solid #e4e7ec;"
        "overflow-wrap:anywhere}thead th{border-top:0;color:#5b6472}svg{width:100%;height:auto}"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title><style>{style}</style></head>'
        f"<body><h1>{html.escape(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def rows_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A titled table; every cell is escaped, for names and settings are data."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h2>{html.escape(title)}</h2><table><thead><tr>{head}</tr></thead>{body}</table>"


def as_page(found: Comparison, runs: Sequence[Run]) -> str:
    """The comparison on one page that needs nothing but a browser."""
    return page(
        "Comparison of " + ", ".join(found.names),
        [
            picture(runs, found.names),
            rows_html("What came out", ["", *found.names], [[row.what, *row.values] for row in found.results]),
            rows_html("What differs", ["", *found.names], [[row.what, *row.values] for row in found.differences]),
        ],
    )
