"""``python -m ops``: the commands. Each shows what a function of the library returns; none does the work itself."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from config import BadInput
from ops import errors
from ops.errors import OpsError
from ops.output import Output

app = typer.Typer(
    name="python -m ops",
    help="Starts, watches, explains, proves and stops a Ray Train stack on EFA.",
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in errors.MEANINGS.items()) + ".",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _commands() -> None:
    """Without it an app of a single command would take no command name."""


StackArgument = Annotated[str, typer.Argument(metavar="STACK", help="Name of the stack: dev means Pulumi.dev.yaml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of text.")]

# The account's half has its commands in a module of its own: doctor, plan, cost, leftovers.
if importlib.util.find_spec("ops.cli_account") is not None:
    importlib.import_module("ops.cli_account").register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a failure is one sentence."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(given, prog_name="python -m ops")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else errors.EXIT_BAD_INPUT
    except (OpsError, BadInput) as error:
        Output("--json" in given).error(str(error), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return errors.EXIT_INTERRUPTED
    return errors.EXIT_DONE
