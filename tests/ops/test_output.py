"""What is shown: within the width, without colour in a pipe, and never what a terminal would obey."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ops import output

ROOT = Path(__file__).parents[2]


@given(st.text())
def test_no_text_moves_the_cursor_or_colours_the_terminal(text: str) -> None:
    shown = output.harmless(text)
    assert not [char for char in shown if char not in "\t\n" and not char.isprintable()]


def test_ordinary_log_text_is_shown_as_it_is() -> None:
    line = "step 10/20\tloss 6.93 [rank 0] :warning: größer\n"
    assert output.harmless(line) == line


@given(st.floats(min_value=0, max_value=1e8))
def test_a_duration_is_short_and_never_more_than_the_truth(seconds: float) -> None:
    shown = output.duration(seconds)
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    told = sum(int(part[:-1]) * units[part[-1]] for part in shown.split())
    assert len(shown) <= 9
    assert told <= seconds < told + max(1, *(units[part[-1]] for part in shown.split()[-1:]))


def test_help_fits_eighty_columns_and_has_no_colour_in_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-m", "ops", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    assert "Exit codes:" in done.stdout
