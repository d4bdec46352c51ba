"""``report.html``: a run on one page that needs nothing but a browser. ``python -m training.report RUN`` writes it anew."""

from __future__ import annotations

import argparse
import datetime
import io
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from training.errors import BadInput
from training.record import NOTABLE_RATIO, read_run
from training.schema import file_key
from training.storage import Place, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT_FILE = "report.html"
BLUE, ORANGE, GREEN, GREY, INK = "#2f6fde", "#d9730d", "#2b8a5f", "#9aa3af", "#1f2733"
# Points, and drawn at this size on a phone: the page scales the pictures up on larger screens, never far down.
CHART_SIZE, FONT_SIZE = (5.4, 2.9), 9
LABEL_WIDTH = 0.28  # of "resumed, 16 workers", as a share of the picture
STYLE: dict[Any, Any] = {
    "font.size": FONT_SIZE,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": "#5b6472",
    "axes.edgecolor": "#c9ced6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceff3",
    "xtick.color": "#5b6472",
    "ytick.color": "#5b6472",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.edgecolor": "none",
    "legend.borderpad": 0.2,
    "lines.linewidth": 1.8,
}

Run = Mapping[str, Any]
Lines = Sequence[Mapping[str, Any]]


def write_report(run_place: Place) -> Place:
    """Writes ``report.html`` into the run's folder from what the record says by now, and returns its place.

    Raises BadInput where there is no readable run, no matplotlib, or no way to write.
    """
    run, metrics = read_run(run_place)
    page = render(run, metrics, _json_if_there(run_place / "verdict.json"), _json_if_there(run_place / "samples.json"))
    target = run_place / REPORT_FILE
    try:
        target.write_bytes(page.encode())
    except OSError as error:
        raise BadInput(f"{target}: can't be written ({error})") from error
    return target


def _json_if_there(file: Place) -> Any:
    try:
        return file.read_json()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: can't be read as JSON ({error}); write it anew, or move it away to leave it out of the report") from error


def render(run: Run, metrics: Lines, verdict: Mapping[str, Any] | None = None, samples: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The page. ``metrics`` as :func:`training.record.read_run` gives them; ``samples``: ``[{prompt, base, tuned}]``."""
    steps = [line for line in metrics if "loss" in line]
    evaluations = [line for line in metrics if "evalLoss" in line]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PAGE).render(
        run=run,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        headline=headline(run, steps, evaluations),
        charts=charts(run, steps, evaluations),
        attempts=[_attempt(a) for a in run.get("attempts", [])],
        remarks=[*_slowest(run.get("stragglers")), *(_rollback(r) for r in run.get("rollbacks") or [])],
        verdict=verdict,
        traffic=[_traffic(host) for host in (verdict or {}).get("hosts") or []],
        cost=_rows(run["cost"] if isinstance(run.get("cost"), Mapping) else {"total": run["cost"]} if run.get("cost") is not None else {}),
        samples=samples or [],
        plan=_rows({file_key(key): value for key, value in (run.get("plan") or {}).items()}),
        settings=_rows(run.get("settings") or {}),
        versions=_rows({**(run.get("versions") or {}), "image": run.get("imageDigest"), "code": (run.get("codeHash") or "")[:12] or None}),
    )


def headline(run: Run, steps: Lines, evaluations: Lines) -> list[tuple[str, str, str]]:
    """(what, value, remark) of the numbers at the top; only those that are known."""
    found: list[tuple[str, str, str]] = []
    if steps:
        last, wanted = steps[-1], run.get("settings", {}).get("steps")
        found.append(("steps", f"{last['step']:,}", f"of {wanted:,}" if isinstance(wanted, int) else ""))
        found.append(("loss", _number(last["loss"]), f"from {_number(steps[0]['loss'])}"))
    if evaluations:
        first, last = evaluations[0]["perplexity"], evaluations[-1]["perplexity"]
        found.append(("eval perplexity", _number(last), f"from {_number(first)}" if len(evaluations) > 1 else "held-out text"))
    if steps:
        found.append(("tokens/s", f"{_median(steps, 'tokensPerSecond'):,.0f}", f"{_median(steps, 'tokensPerSecondPerGpu'):,.0f} a worker"))
        found.append(("tokens", _large(steps[-1]["tokens"]), ""))
    if any("mfu" in line for line in steps):
        found.append(("MFU", f"{_median(steps, 'mfu'):.1%}", "of nominal bf16"))
    spent = [_seconds(a) for a in run.get("attempts", [])]
    if any(s is not None for s in spent):
        count = len(spent)
        found.append(("time", _duration(sum(s for s in spent if s is not None)), f"in {count} attempts" if count > 1 else ""))
    return found


def _median(lines: Lines, key: str) -> float:
    values = [line[key] for line in lines if isinstance(line.get(key), (int, float)) and math.isfinite(line[key])]
    return statistics.median(values) if values else math.nan


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _large(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def _bytes(value: float) -> str:
    return f"{_large(value)}B".replace(" BB", " GB").replace(" kB", " kB")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest} s"


def _seconds(attempt: Mapping[str, Any]) -> float | None:
    if not attempt.get("started") or not attempt.get("ended"):
        return None
    start, end = (datetime.datetime.fromisoformat(attempt[key]) for key in ("started", "ended"))
    return (end - start).total_seconds()


def _attempt(attempt: Mapping[str, Any]) -> dict[str, str]:
    spent = _seconds(attempt)
    end = attempt["endStep"]
    return {
        "number": str(attempt["number"]),
        "workers": f"{attempt['worldSize']} on {', '.join(attempt['hosts'])}",
        "steps": f"{attempt['startStep']} to {end if end is not None else '...'}",
        "outcome": attempt["outcome"],
        "started": attempt["started"].replace("T", " ").replace("Z", " UTC"),
        "time": _duration(spent) if spent is not None else "",
        "reason": attempt["reason"] or "",
    }


def _slowest(found: Mapping[str, Any] | None) -> list[str]:
    if not found or found["ratio"] <= NOTABLE_RATIO:
        return []
    return [
        f"The others wait for rank {found['rank']} on host {found['host']}: it takes {found['ratio']:.2f} times what the median rank takes for a step,"
        f" {found['ownSeconds']:.3g} s against {found['medianSeconds']:.3g} s."
    ]


def _rollback(entry: Mapping[str, Any]) -> str:
    return f"Step {entry['step']}, attempt {entry['attempt']}: {entry['why']}. Back to step {entry['backTo']}, and on without the rows since then."


def _traffic(host: Mapping[str, Any]) -> list[str]:
    values = (host.get(key) for key in ("efaTx", "efaRx", "nicTx", "nicRx", "expected"))
    return [str(host.get("host", "?")), *(_bytes(value) if isinstance(value, (int, float)) else "not known" for value in values)]


def _rows(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _rows(value, f"{prefix}{key}.")
        elif value is not None:
            shown = ("yes" if value else "no") if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
            rows.append((prefix + key, shown))
    return rows


# ---- pictures


def charts(run: Run, steps: Lines, evaluations: Lines) -> list[dict[str, str]]:
    """``{title, caption, svg}`` of each picture there is data for. Raises BadInput where matplotlib is missing."""
    if not steps:
        return []
    try:
        import matplotlib
    except ImportError as error:
        raise BadInput(
            "the report needs matplotlib, which this Python has not; install it (pip install matplotlib), or run `python -m training.report RUN` where it is"
        ) from error
    made = []
    with matplotlib.rc_context(STYLE):
        for name, title, caption, draw in (
            ("loss", "Loss", _loss_caption(steps, evaluations), _draw_loss),
            ("speed", "Throughput", "Tokens per second, all workers together.", _draw_speed),
            ("gradient", "Gradient norm and learning rate", "The norm is taken before clipping.", _draw_gradient),
            ("parts", "Where a step goes", _parts_caption(steps), _draw_parts),
        ):
            made.append({"title": title, "caption": caption, "svg": _svg(name, title, lambda figure, draw=draw: draw(figure, run, steps, evaluations))})  # type: ignore[misc]
    return made


def _svg(name: str, title: str, draw: Callable[[Figure], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    # The salt keeps ids of several pictures on one page apart, and the same data gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure = Figure(figsize=CHART_SIZE, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None, "Title": title})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("<svg ", '<svg role="img" ', 1)


def _series(lines: Lines, key: str) -> tuple[list[int], list[float]]:
    """Steps and values; what is missing, not finite or too large to draw becomes a gap in the curve."""
    return [line["step"] for line in lines], [_drawable(line.get(key)) for line in lines]


def _drawable(value: Any) -> float:
    if not isinstance(value, (int, float)) or not abs(value) < 1e30:
        return math.nan
    # Axes over three hundred decades overflow inside matplotlib.
    return float(value) if abs(value) > 1e-30 else 0.0


def _curve(axes: Axes, lines: Lines, key: str, color: str, label: str = "", smoothed: bool = True) -> None:
    x, y = _series(lines, key)
    window = len(y) // 40 if smoothed else 0
    if window < 2:
        axes.plot(x, y, color=color, label=label, marker="o" if len(x) < 20 else "", markersize=3)
        return
    axes.plot(x, y, color=color, alpha=0.25, linewidth=1)
    smooth = [statistics.fmean([v for v in y[max(0, i - window) : i + window + 1] if math.isfinite(v)] or [math.nan]) for i in range(len(y))]
    axes.plot(x, smooth, color=color, label=label)


def _resumes(axes: Axes, run: Run, labelled: bool = True) -> None:
    low, high = axes.get_xlim()
    taken: list[tuple[float, float]] = []
    for attempt in run.get("attempts", [])[1:]:
        axes.axvline(attempt["startStep"], color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        at = (attempt["startStep"] - low) / (high - low)
        for side, span in (("left", (at, at + LABEL_WIDTH)), ("right", (at - LABEL_WIDTH, at))):
            if labelled and span[0] >= 0 and span[1] <= 1 and all(span[0] >= end or span[1] <= start for start, end in taken):
                axes.annotate(
                    f"resumed, {attempt['worldSize']} worker{'' if attempt['worldSize'] == 1 else 's'}",
                    (attempt["startStep"], 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(3 if side == "left" else -3, 0),
                    textcoords="offset points",
                    va="top",
                    ha=side,
                    color="#5b6472",
                    fontsize=FONT_SIZE - 1,
                )
                taken.append(span)
                break
    axes.set_xlim(low, high)


def _step_axis(axes: Axes, lines: Lines) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("step")
    last = max(line["step"] for line in lines)
    axes.set_xlim(0, max(last * 1.02, 1))


def _draw_loss(figure: Figure, run: Run, steps: Lines, evaluations: Lines) -> None:
    axes = figure.add_subplot()
    _curve(axes, steps, "loss", BLUE, "training")
    if evaluations:
        x, y = _series(evaluations, "evalLoss")
        axes.plot(x, y, color=ORANGE, marker="o", markersize=4, linewidth=1.2, label="held-out")
    _step_axis(axes, [*steps, *evaluations])
    axes.set_ylabel("nats a token")
    axes.margins(y=0.12)
    _resumes(axes, run)
    axes.legend(loc="lower left" if len(steps) > 1 and _rises(steps) else "upper right", bbox_to_anchor=None if _rises(steps) else (1, 0.92))


def _rises(steps: Lines) -> bool:
    return not steps[-1]["loss"] <= steps[0]["loss"]


def _draw_speed(figure: Figure, run: Run, steps: Lines, _evaluations: Lines) -> None:
    from matplotlib.ticker import FuncFormatter

    axes = figure.add_subplot()
    _curve(axes, steps, "tokensPerSecond", GREEN, smoothed=False)
    _step_axis(axes, steps)
    highest = max((v for v in _series(steps, "tokensPerSecond")[1] if math.isfinite(v)), default=1.0)
    axes.set_ylim(0, highest * 1.25 or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _large(value)))
    axes.set_ylabel("tokens/s")
    _resumes(axes, run)


def _draw_gradient(figure: Figure, run: Run, steps: Lines, _evaluations: Lines) -> None:
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _curve(above, steps, "gradNorm", BLUE)
    positive = [v for v in _series(steps, "gradNorm")[1] if v > 0]
    if positive and max(positive) > 20 * min(positive):
        above.set_yscale("log")
    above.set_ylabel("norm")
    below.plot(*_series(steps, "learningRate"), color=ORANGE)
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    below.set_ylim(bottom=0)
    below.set_ylabel("rate")
    _step_axis(below, steps)
    for axes in (above, below):
        _resumes(axes, run, labelled=False)


def _parts(steps: Lines) -> dict[str, list[float]]:
    """Seconds of a step, by what they go to; communication is apart only where it was measured."""
    whole, data, exposed = (_series(steps, key)[1] for key in ("stepSeconds", "dataWait", "exposedCommunication"))
    measured = any(math.isfinite(v) for v in exposed)
    known = [[v if math.isfinite(v) else 0.0 for v in values] for values in (whole, data, exposed)]
    rest = [max(0.0, w - d - e) for w, d, e in zip(*known, strict=True)]
    parts = {"compute" if measured else "compute and communication": rest}
    if measured:
        parts["waiting for communication"] = known[2]
    return {**parts, "waiting for data": known[1]}


def _draw_parts(figure: Figure, run: Run, steps: Lines, _evaluations: Lines) -> None:
    axes = figure.add_subplot()
    parts = _parts(steps)
    colors = [GREEN, ORANGE, GREY] if len(parts) == 3 else [GREEN, GREY]
    x = [line["step"] for line in steps]
    if len(x) == 1:  # an area needs two points
        x, parts = [0, *x], {name: [values[0], *values] for name, values in parts.items()}
    axes.stackplot(x, *parts.values(), labels=list(parts), colors=colors, alpha=0.85, linewidth=0)
    _step_axis(axes, steps)
    axes.set_ylim(0, max(map(sum, zip(*parts.values(), strict=True))) * 1.3 or 1)
    axes.set_ylabel("seconds a step")
    _resumes(axes, run, labelled=False)
    axes.legend(loc="upper left", ncols=len(parts), fontsize=FONT_SIZE - 1, handlelength=1, columnspacing=1)


def _loss_caption(steps: Lines, evaluations: Lines) -> str:
    text = f"Training loss went from {_number(steps[0]['loss'])} to {_number(steps[-1]['loss'])}"
    if evaluations:
        text += f"; held-out loss ended at {_number(evaluations[-1]['evalLoss'])}"
    return text + "."


def _parts_caption(steps: Lines) -> str:
    sums = {name: sum(values) for name, values in _parts(steps).items()}
    whole = sum(sums.values()) or 1.0
    shares = ", ".join(f"{name} {value / whole:.1%}" for name, value in sums.items())
    return f"{shares[0].upper()}{shares[1:]}."


# ---- the page

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{{ run.run }}: {{ run.outcome }}</title>
<style>
:root { color-scheme: light; --ink: #1f2733; --soft: #5b6472; --line: #e4e7ec; --good: #1d7a50; --bad: #b3261e; --open: #8a5a00; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 48px; }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 14px; margin-bottom: 18px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
section, figure, .numbers div { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
section { padding: 16px 18px; margin: 0 0 16px; }
.badge { border-radius: 999px; padding: 2px 12px; font-weight: 600; font-size: 14px; background: #eef0f3; color: var(--soft); }
.done, .pass { background: #e3f4eb; color: var(--good); }
.failed, .fail, .lost { background: #fbe6e4; color: var(--bad); }
.running, .stopped, .unproven { background: #fdf1d8; color: var(--open); }
.soft { color: var(--soft); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px; margin: 0 0 16px; }
.numbers div { padding: 12px 14px; }
.numbers b { display: block; font-size: 24px; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums; white-space: nowrap; }
.numbers span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; margin: 0 0 16px; }
figure { margin: 0; padding: 14px 14px 10px; min-width: 0; }
figure h2 { margin: 0 4px 4px; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: 13px; margin: 4px 4px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
thead th { color: var(--soft); font-weight: 500; border-top: 0; white-space: nowrap; }
.wide td, .wide th { white-space: nowrap; }
.wide td.long { white-space: normal; min-width: 220px; }
.pairs { columns: 2 380px; column-gap: 32px; font-size: 14px; }
.pairs div { display: flex; justify-content: space-between; gap: 16px; padding: 4px 0; border-bottom: 1px solid var(--line); break-inside: avoid; }
.pairs dt { color: var(--soft); } .pairs dd { margin: 0; text-align: right; overflow-wrap: anywhere; min-width: 0; }
dl { margin: 0; }
.sample { display: grid; grid-template-columns: 1fr 1fr; gap: 10px 18px; border-top: 1px solid var(--line); padding: 12px 0 6px; }
.sample div { min-width: 0; }
.sample h3 { font-size: 13px; font-weight: 500; color: var(--soft); margin: 0 0 2px; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
.sample .prompt { grid-column: 1 / -1; }
ul { margin: 6px 0 0; padding-left: 20px; }
footer { color: var(--soft); font-size: 13px; }
@media (max-width: 520px) {
  main { padding: 16px 10px 32px; }
  h1, .numbers b { font-size: 21px; }
  .numbers { grid-template-columns: 1fr 1fr; }
  .sample { grid-template-columns: 1fr; }
  section { padding: 14px; }
}
</style>
</head>
<body>
<main>
<header>
  <h1>{{ run.run }}</h1><span class="badge {{ run.outcome }}">{{ run.outcome }}</span>
  <span class="soft">started {{ run.started | replace("T", " ") | replace("Z", " UTC") }}</span>
</header>
{% if headline %}
<div class="numbers">
  {% for what, value, remark in headline %}
  <div><span>{{ what }}</span><b>{{ value }}</b><span>{{ remark }}&nbsp;</span></div>
  {% endfor %}
</div>
{% endif %}
{% if charts %}
<div class="charts">
  {% for chart in charts %}
  <figure><h2>{{ chart.title }}</h2>{{ chart.svg | safe }}<figcaption>{{ chart.caption }}</figcaption></figure>
  {% endfor %}
</div>
{% else %}
<section class="soft">No step has been logged yet.</section>
{% endif %}
<section>
  <h2>Network</h2>
  {% if verdict %}
  <p style="margin:0"><span class="badge {{ verdict.outcome }}">{{ verdict.outcome }}</span>
    expected {{ verdict.get("expected", "?") }}, observed {{ verdict.get("observed", "?") }}</p>
  {% if verdict.get("reasons") %}
  <ul>
    {% for reason in verdict.reasons %}
    <li>{{ [reason.get("where"), reason.get("saw")] | select | join(": ") }} <span class="soft">{{ reason.get("do") or "" }}</span></li>
    {% endfor %}
  </ul>
  {% endif %}
  {% if traffic %}
  <div class="scroll" style="margin-top:12px"><table class="wide">
    <thead><tr><th>host</th><th>EFA sent</th><th>EFA received</th><th>NIC sent</th><th>NIC received</th><th>expected</th></tr></thead>
    {% for row in traffic %}
    <tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
    {% endfor %}
  </table></div>
  {% endif %}
  {% else %}
  <span class="soft">Not judged: this run has no verdict about the network that carried it.</span>
  {% endif %}
</section>
<section>
  <h2>Attempts</h2>
  <div class="scroll"><table class="wide">
    <thead><tr><th></th><th>outcome</th><th>steps</th><th>workers</th><th>started</th><th>time</th><th></th></tr></thead>
    {% for a in attempts %}
    <tr>
      <td>{{ a.number }}</td><td><span class="badge {{ a.outcome }}">{{ a.outcome }}</span></td><td>{{ a.steps }}</td><td>{{ a.workers }}</td>
      <td>{{ a.started }}</td><td>{{ a.time }}</td><td class="{{ 'long' if a.reason }}">{{ a.reason }}</td>
    </tr>
    {% endfor %}
  </table></div>
  {% for text in remarks %}
  <p style="margin:10px 0 0">{{ text }}</p>
  {% endfor %}
</section>
{% if samples %}
<section>
  <h2>What it writes</h2>
  {% for sample in samples %}
  <div class="sample">
    <div class="prompt"><h3>prompt</h3><pre>{{ sample.get("prompt", "") }}</pre></div>
    <div><h3>before</h3><pre>{{ sample.get("base", "") }}</pre></div>
    <div><h3>after training</h3><pre>{{ sample.get("tuned", "") }}</pre></div>
  </div>
  {% endfor %}
</section>
{% endif %}
{% for title, rows in [("Cost", cost), ("Parallel plan", plan), ("Settings", settings), ("Versions", versions)] if rows %}
<section>
  <h2>{{ title }}</h2>
  <dl class="pairs">
    {% for key, value in rows %}
    <div><dt>{{ key }}</dt><dd>{{ value }}</dd></div>
    {% endfor %}
  </dl>
</section>
{% endfor %}
<footer>Made {{ made }} from run.json and metrics.jsonl.</footer>
</main>
</body>
</html>
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit code 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m training.report", description="Writes report.html into a run's folder.")
    parser.add_argument("run", metavar="RUN", help="the run's folder or URI: storage/run-name")
    args = parser.parse_args(argv)
    try:
        written = write_report(place(args.run))
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{written}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
