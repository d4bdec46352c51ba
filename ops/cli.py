"""``python -m ops``: the commands. Each shows what a function of the library returns; none does the work itself."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from config import BadInput
from ops import errors
from ops.errors import OpsError
from ops.output import Output, plain

if TYPE_CHECKING:
    from ops.inside import Job
    from ops.stack import Stack

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

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
GOES_ON = "no longer following; the job goes on (`python -m ops cancel STACK` stops it)"
JOB_CODES = (errors.EXIT_TRAINING_FAILED, errors.EXIT_TRANSPORT_NOT_PROVEN)


@app.command(short_help="Make the stack what its file says.", epilog=errors.help_text(errors.EXIT_BUSY))
def up(
    stack: StackArgument,
    refresh: Annotated[bool, typer.Option("--refresh", help="First ask what is really there: after changes by hand, an auto-stop or a killed `up`.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make the stack what its file says: network, cluster, nodes, Ray, and the training job where training.run is true.

    Takes about 20 minutes on AWS and a minute on a cluster you have. Shows what is being made, for how long, and how long that usually takes. It may be
    run again at any time: what is there stays, what failed is made. Ctrl-C once lets the engine end what is under way; `up` again goes on from there.
    """
    from ops import show
    from ops.stack import Stack

    output = Output(as_json)
    done = show.watched(output, lambda watch: Stack(stack).up(watch, refresh=refresh))
    show.update(output, done)
    output.result(done)


@app.command(short_help="Remove the stack, and prove that it is gone.", epilog=errors.help_text(errors.EXIT_BUSY, errors.EXIT_LEFT))
def down(
    stack: StackArgument,
    yes: YesOption = False,
    cluster_gone: Annotated[
        bool, typer.Option("--cluster-gone", help="The existing Kubernetes cluster is gone for good: take its objects out of the state, do not ask it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove everything of the stack, prove that nothing is left that bills, and give the receipt.

    Stops the training job, asks what is really there, destroys in the order that AWS needs, tries again what AWS refuses only for now, and then looks
    for leftovers. An EKS cluster that is already gone is no obstacle. The bucket with the runs stays unless storage.onDestroy is delete.
    """
    from ops import cli_account, show
    from ops.stack import Stack

    output = Output(as_json)
    found = Stack(stack)
    if not yes:
        _agree(found, output)
    done = show.watched(output, lambda watch: found.down(watch, cluster_gone=cluster_gone, note=watch.note))
    show.gone(output, done)
    if done.receipt is not None:
        cli_account.show_spent(output, done.receipt)
    if done.leftovers is not None:
        cli_account.show_leftovers(output, done.leftovers)
    output.result({**plain(done), "usd": done.receipt.usd if done.receipt else None, "clean": done.clean})
    if not done.clean:
        raise typer.Exit(errors.EXIT_LEFT)


def _agree(stack: Stack, output: Output) -> None:
    """Asks before something is removed; without a terminal --yes is the only answer."""
    if output.as_json or not sys.stdin.isatty():
        raise BadInput(f"`down` removes the whole stack {stack.name} and stops its job; say --yes where nobody can be asked")
    running = stack.status()
    about = f"job {running.job.name} is {running.job.state} and will be stopped. " if running.job and not running.job.over else ""
    if not typer.confirm(f"{about}Remove everything of stack {stack.name}?"):
        raise errors.Interrupted("nothing was removed")


@app.command(short_help="Start the training job.", epilog=errors.help_text(errors.EXIT_BUSY, *JOB_CODES))
def train(
    stack: StackArgument,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the job, such as steps=100 or model.random=tiny; may be repeated. Kept in the stack file."
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the log to the job's end, and end with its exit code.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Stop a job that runs with other settings.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the training job (`python -m training.job --help-settings` lists what --set takes).

    Runs the update that makes the job, says its id and returns; the job goes on without this machine. The same settings are the same job: one that
    runs is left alone, one that failed or was stopped is started again and goes on from its last checkpoint. Makes the stack where it is not up yet.
    """
    from ops import show
    from ops.stack import Stack

    output = Output(as_json)
    found = Stack(stack)
    job = show.watched(output, lambda watch: found.train(setting or [], replace=replace, listener=watch))
    if not job.new:
        output.line("nothing new to start: these settings are this job")
    if not wait:
        show.job(output, job, stack)
        output.result(job)
        return
    output.line(f"job {job.name} ({job.submission_id})")
    with _interrupted(GOES_ON):
        ended = found.logs(output.raw, follow_on=True, note=lambda text: output.progress.print(f"[{text}]", style="dim"))
    _end(ended, output, stack)


@app.command(short_help="Show the job's log; -f follows it to the job's end.", epilog=errors.help_text(*JOB_CODES))
def logs(
    stack: StackArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended, over broken connections; end with its exit code.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the training job's log.

    With -f a connection that breaks is taken up again where it stopped, each line once; only Ray's own status ends it. Ctrl-C ends the following, not
    the job. Without -f the exit code is 0 whatever became of the job.
    """
    from ops import show
    from ops.stack import Stack

    output = Output(as_json)
    text: list[str] = []
    with _interrupted(GOES_ON):
        job = Stack(stack).logs(text.append if as_json else output.raw, follow_on=follow, note=lambda said: output.progress.print(f"[{said}]", style="dim"))
    if follow and not as_json:
        _end(job, output, stack)
        return
    if job.submission_id is None:
        show.job(output, job, stack)
    output.result({"job": job, "log": "".join(text)})
    if follow and job.code:
        raise typer.Exit(job.code)


@contextlib.contextmanager
def _busy(output: Output, what: str) -> Iterator[None]:
    """Shows on a terminal that something is being done, while it takes seconds."""
    if output.as_json or not output.progress.is_terminal:
        yield
        return
    with output.progress.status(what):
        yield


@contextlib.contextmanager
def _interrupted(what: str) -> Iterator[None]:
    """Ctrl-C as a sentence that says what stands now."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise errors.Interrupted(what) from error


def _end(job: Job, output: Output, stack: str) -> None:
    from ops import show

    show.job(output, job, stack)
    output.result(job)
    if job.code:
        raise typer.Exit(job.code)


@app.command(short_help="State, cost, step, loss, speed, time left, network.", epilog=errors.help_text())
def status(stack: StackArgument, as_json: JsonOption = False) -> None:
    """Show state, uptime, money so far, time to the auto-stop, and the job: step, loss, tokens/s, time left, and which network carries it."""
    from ops import show
    from ops.stack import Stack

    output = Output(as_json)
    with _busy(output, "asking the engine, Kubernetes and Ray"):
        found = Stack(stack).status()
    show.status(output, found)
    output.result(found)


@app.command(short_help="Stop the training job.", epilog=errors.help_text())
def cancel(stack: StackArgument, as_json: JsonOption = False) -> None:
    """Stop the training job and wait until it is stopped. Its checkpoints stay; `train` goes on from the last one. The stack stays up, and bills."""
    from ops import show
    from ops.stack import Stack

    output = Output(as_json)
    job = Stack(stack).cancel(lambda text: output.progress.print(text, style="dim"))
    show.job(output, job, stack)
    output.result(job)


@app.command(short_help="Why is the job not running? One sentence.", epilog=errors.help_text(errors.EXIT_LEFT))
def explain(stack: StackArgument, as_json: JsonOption = False) -> None:
    """Say in one sentence why the job is not running, and what to do.

    Looks at operator, node groups and their scaling activities, nodes, pods, events and Ray, in that order, and names the first thing that stands in the
    way. Exit code 0 where the job runs, has ended well or is on its way; 6 where something must be mended.
    """
    from ops import show
    from ops.stack import Stack

    output = Output(as_json)
    with _busy(output, "looking at operator, nodes, pods and Ray"):
        found = Stack(stack).explain()
    show.explained(output, found)
    output.result(found)
    if not found.running and not found.waiting:
        raise typer.Exit(errors.EXIT_LEFT)


RUN_HELP = "A run: its folder, s3://bucket/runs/NAME, STACK (the run of its newest job) or STACK/NAME."


@app.command(short_help="Which network carried a run, and how we know.", epilog=errors.help_text(errors.EXIT_TRANSPORT_NOT_PROVEN))
def verdict(run: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)], as_json: JsonOption = False) -> None:
    """Show which network carried a run, and how we know: the gate's verdict, rank by rank and host by host.

    Exit code 0 where the run's network is proven, or none was demanded; 4 where it is the wrong one, unproven, or never judged.
    """
    from ops import runs, show

    output = Output(as_json)
    with _busy(output, "reading the run's record"):
        found = runs.find(run)
    ok = show.verdict(output, found)
    output.result(found.verdict or {"outcome": "unproven", "reasons": [], "run": found.name})
    if not ok:
        raise typer.Exit(errors.EXIT_TRANSPORT_NOT_PROVEN)


@app.command(short_help="What differs between runs, and what it did.", epilog=errors.help_text())
def compare(
    run: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help=RUN_HELP)],
    picture: Annotated[Path, typer.Option("--page", metavar="FILE", help="Where the page with the picture goes.")] = Path("comparison.html"),
    as_json: JsonOption = False,
) -> None:
    """Show what differs between runs (settings, versions, image, code, data, hosts) and what it did to loss, tokens/s, network and cost.

    A table here, and a page with the curves that needs nothing but a browser.
    """
    from ops import compare as comparing
    from ops import runs, show

    output = Output(as_json)
    with _busy(output, "reading the runs' records"):
        found = [runs.find(one) for one in run]
    told = comparing.compare(found)
    show.write(picture, comparing.as_page(told, found))
    show.compared(output, told)
    output.line(f"page: {picture}")
    output.result({**plain(told), "page": str(picture)})


@app.command(short_help="Prove the gate, and what EFA is worth here.", epilog=errors.help_text(errors.EXIT_BUSY, errors.EXIT_TRANSPORT_NOT_PROVEN))
def prove(
    stack: StackArgument,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=20, help="How often each pair of legs runs; each round turns the order around.")] = 2,
    steps: Annotated[int, typer.Option("--steps", min=5, help="Optimizer steps of a leg.")] = 40,
    curve: Annotated[bool, typer.Option("--curve/--no-curve", help="Measure the all-reduce bandwidth curve, too.")] = True,
    picture: Annotated[Path, typer.Option("--page", metavar="FILE", help="Where the page with the picture goes.")] = Path("proof.html"),
    as_json: JsonOption = False,
) -> None:
    """Prove that the gate works here, and say what EFA is worth: the same short job over EFA and with TCP forced, in both orders, repeated.

    The gate must pass the first and reject the second; a third leg takes NCCL's plugin away and must be refused. Prints EFA's speed over TCP's with its
    spread, and the all-reduce bandwidth curve. On workers without EFA (a cluster you have) the gate must pass tcp and refuse efa, over gloo; that is
    said. Runs on the stack's own Ray cluster, so the stack must be up, with training.data and training.model set and no job running. Exit code 4 where
    any leg did not go as it must.
    """
    from ops import prove as proving
    from ops import show
    from ops.stack import Stack

    output = Output(as_json)
    with _interrupted("the proof was stopped, and its job with it; nothing is proven"):
        found = Stack(stack).prove(rounds=rounds, steps=steps, curve=curve, note=lambda text: output.progress.print(text, style="dim"))
    show.write(picture, proving.as_page(found))
    show.proved(output, found)
    output.line(f"page: {picture}")
    output.result({**plain(found), "page": str(picture)})
    if not found.holds:
        raise typer.Exit(errors.EXIT_TRANSPORT_NOT_PROVEN)


@app.command(
    name="drill", short_help="What does a fault cost here? Harms short runs on purpose.", epilog=errors.help_text(errors.EXIT_BUSY, errors.EXIT_TRAINING_FAILED)
)
def drill_(
    stack: StackArgument,
    kinds: Annotated[
        str, typer.Option("--faults", metavar="LIST", help="Which, separated by commas: worker, notice, storage, head.")
    ] = "worker,notice,storage,head",
    steps: Annotated[int, typer.Option("--steps", min=20, help="Optimizer steps of each run.")] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Decides when each fault strikes, and whom.")] = 0,
    away: Annotated[float, typer.Option("--away", min=0, metavar="SECONDS", help="How long the store is away.")] = 60,
    as_json: JsonOption = False,
) -> None:
    """Harm short runs on purpose, and say what each fault cost: steps, seconds, money; whether the loss went on as if nothing had been; whether the
    network was judged again.

    One run undisturbed, then one with each fault: a worker is killed; a worker's pod is evicted, as a spot notice does; the store is away for a while; the
    Ray head is killed, and the job submitted again. On the stack's own Ray cluster, so the stack must be up, with training.data and training.model set and
    no job running. The table goes into the undisturbed run's record. Exit code 3 where a run did not end as the undisturbed one.
    `python -m training.drill` does the same on this machine.
    """
    from ops import show
    from ops.stack import Stack
    from training import faults

    output = Output(as_json)
    chosen = faults.chosen(kinds)
    with _interrupted("the drill was stopped, and its job with it"):
        found = Stack(stack).drill(chosen, steps=steps, seed=seed, away=away, note=lambda text: output.progress.print(text, style="dim"))
    show.drilled(output, found)
    output.result({"stack": stack, "tolls": faults.as_json(found)})
    if not all(one.survived for one in found):
        raise typer.Exit(errors.EXIT_TRAINING_FAILED)


@functools.cache
def _account_commands() -> None:
    """doctor, plan, cost and leftovers: the account's half, which imports this one."""
    from ops import cli_account

    cli_account.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a failure is one sentence."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _account_commands()
        app(given, prog_name="python -m ops")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else errors.EXIT_BAD_INPUT
    except (OpsError, BadInput) as error:
        Output("--json" in given).error(str(error), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return errors.EXIT_INTERRUPTED
    return errors.EXIT_DONE
