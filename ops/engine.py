"""The Pulumi engine through the Automation API: one operation at a time per stack, progress as plain data, failures as a sentence, Ctrl-C once to stop well."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pulumi import automation as auto
from pulumi.automation.errors import create_command_error

import config
from ops import phases, trouble
from ops.errors import BadInput, Busy, Interrupted, OpsError, Refused
from ops.phases import Progress
from ops.target import Target

Listener = Callable[[Progress], None]
# How often a listener is called while an operation runs.
TICK_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Done:
    """An operation that ended well. changes: number of resources by what was done to them (create, update, delete, same, ...)."""

    seconds: float
    changes: Mapping[str, int]
    progress: Progress


class EngineFailed(Refused):
    """The engine stopped; ``texts`` are its own error texts, oldest first."""

    def __init__(self, message: str, texts: Sequence[str]) -> None:
        super().__init__(message)
        self.texts = tuple(texts)


class _Command(auto.PulumiCommand):
    """The CLI in a session of its own: Ctrl-C on the terminal reaches this process alone, which passes it on once."""

    def __init__(self) -> None:
        super().__init__()
        self.process: subprocess.Popen[str] | None = None

    def run(
        self,
        args: list[str],
        cwd: str,
        additional_env: Mapping[str, str],
        on_output: Callable[[str], Any] | None = None,
        on_error: Callable[[str], Any] | None = None,
    ) -> auto.CommandResult:
        if "--non-interactive" not in args:
            args = ["--non-interactive", *args]
        environment = {**os.environ, **additional_env, "PULUMI_AUTOMATION_API": "true", "PULUMI_SKIP_UPDATE_CHECK": "true"}
        kept: tuple[list[str], list[str]] = ([], [])
        with subprocess.Popen(
            [self.command, *args], cwd=cwd, env=environment, encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            self.process = process

            def read(stream: Any, lines: list[str], tell: Callable[[str], Any] | None) -> None:
                for line in stream:
                    lines.append(line.rstrip())
                    if tell:
                        tell(lines[-1])

            readers = [
                threading.Thread(target=read, args=(stream, lines, tell))
                for stream, lines, tell in ((process.stdout, kept[0], on_output), (process.stderr, kept[1], on_error))
            ]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            code = process.wait()
        result = auto.CommandResult(stdout="\n".join(kept[0]), stderr="\n".join(kept[1]), code=code)
        if code:
            raise create_command_error(result)
        return result

    def interrupt(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)


class Engine:
    """The engine for one stack. Raises Refused where there is no Pulumi CLI."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.folder = target.file.parent
        try:
            self._command = _Command()
        except (OSError, subprocess.CalledProcessError) as error:
            raise Refused(f"the Pulumi CLI can't be started ({error}); install it (https://www.pulumi.com/docs/install/) and put it on the PATH") from error
        except RuntimeError as error:
            raise Refused(str(error)) from error
        self.log: Path | None = None

    # ---- reading

    def outputs(self) -> dict[str, Any] | None:
        """The stack's outputs; None where the engine knows no such stack, {} where it is empty. Secrets stay hidden."""
        try:
            found = self._command.run(["stack", "output", "--json", "--stack", self.target.name], str(self.folder), {})
        except auto.CommandError as error:
            if "no stack named" in str(error):
                return None
            raise self._failure(error, []) from error
        return dict(json.loads(found.stdout or "{}"))

    def resources(self) -> list[dict[str, Any]] | None:
        """The state's resources, as `pulumi stack export` tells them, secrets encrypted; None where the engine knows no such stack."""
        try:
            found = self._command.run(["stack", "export", "--stack", self.target.name], str(self.folder), {})
        except auto.CommandError as error:
            if "no stack named" in str(error):
                return None
            raise self._failure(error, []) from error
        return list((json.loads(found.stdout).get("deployment") or {}).get("resources") or [])

    def last_update(self) -> dict[str, Any] | None:
        """The newest operation: kind, startTime, endTime, result."""
        try:
            found = self._command.run(["stack", "history", "--json", "--page-size", "1", "--page", "1", "--stack", self.target.name], str(self.folder), {})
        except auto.CommandError as error:
            raise self._failure(error, []) from error
        entries = json.loads(found.stdout or "[]")
        return dict(entries[0]) if entries else None

    # ---- changing

    def make(self) -> None:
        """Makes the stack known to the engine, with nothing in it yet."""
        self._stack()

    def set_object(self, key: str, value: Mapping[str, Any]) -> None:
        """Writes an object into the stack file as the engine does, which keeps comments. key without the project's name."""
        document = {f"{config.PROJECT}:{key}": {"value": json.dumps(value), "objectValue": value, "secret": False}}
        try:
            self._command.run(["config", "set-all", "--stack", self.target.name, "--json", json.dumps(document)], str(self.folder), {})
        except auto.CommandError as error:
            raise self._failure(error, []) from error

    def up(self, listener: Listener | None = None, replace: Sequence[str] = (), refresh: bool = False) -> Done:
        """Makes the stack what its file says. replace: URNs to be made anew."""
        return self._operation("up", lambda stack, hooks: stack.up(replace=list(replace), refresh=refresh, **hooks), listener)

    def preview(self, on_step: Callable[[str, str, str], Any]) -> Done:
        """What an `up` would do, and does not; on_step is told of each resource: URN, type, op."""

        def call(stack: auto.Stack, hooks: dict[str, Any]) -> Any:
            def told(event: auto.EngineEvent) -> None:
                hooks["on_event"](event)
                if before := event.resource_pre_event:
                    on_step(before.metadata.urn, before.metadata.type, _op(before.metadata.op))

            return stack.preview(**{**hooks, "on_event": told})

        return self._operation("preview", call, None)

    def refresh(self, listener: Listener | None = None) -> Done:
        """Asks what is really there, and writes it into the state.

        What a killed `up` was just making is cleared from it, for nobody can be asked here: if AWS made it all the same, leftovers finds it by its tags.
        """
        return self._operation("refresh", lambda stack, hooks: stack.refresh(clear_pending_creates=True, **hooks), listener)

    def destroy(self, listener: Listener | None = None) -> Done:
        """Removes everything of the stack; the stack file and its history stay."""
        return self._operation("destroy", lambda stack, hooks: stack.destroy(**hooks), listener)

    def forget(self, unwanted: Callable[[Mapping[str, Any]], bool]) -> list[str]:
        """Takes resources out of the state, and touches nothing else; returns their URNs. What depends on them forgets the dependency."""
        with self.lock("down"):
            stack = self._stack()
            try:
                exported = stack.export_stack()
                deployment: dict[str, Any] = dict(exported.deployment or {})
                resources = list(deployment.get("resources") or [])
                gone = {str(found["urn"]) for found in resources if unwanted(found)}
                deployment["resources"] = [_without(found, gone) for found in resources if found["urn"] not in gone]
                deployment["pending_operations"] = [
                    found for found in deployment.get("pending_operations") or [] if found.get("resource", {}).get("urn") not in gone
                ]
                stack.import_stack(auto.Deployment(version=exported.version, deployment=deployment))
            except auto.CommandError as error:
                raise self._failure(error, []) from error
        return sorted(gone)

    # ---- inside

    @contextlib.contextmanager
    def lock(self, what: str) -> Iterator[None]:
        """Holds this stack for one operation of this machine; the engine's own lock guards against other machines. Raises Busy."""
        folder = _private("locks")
        key = f"{os.environ.get('PULUMI_BACKEND_URL', '')}\n{self.folder}\n{self.target.name}"
        path = folder / f"{self.target.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                raise Busy(f"stack {self.target.name} is busy: {file.read().strip() or 'another operation runs'}; wait for it to end") from error
            file.truncate(0)
            file.write(f"`{what}` runs since {datetime.datetime.now().astimezone():%H:%M:%S} (process {os.getpid()})")
            file.flush()
            yield

    def _stack(self) -> auto.Stack:
        try:
            return auto.create_or_select_stack(self.target.name, work_dir=str(self.folder), opts=auto.LocalWorkspaceOptions(pulumi_command=self._command))
        except auto.CommandError as error:
            raise self._failure(error, []) from error

    def _operation(self, kind: str, call: Callable[[auto.Stack, dict[str, Any]], Any], listener: Listener | None) -> Done:
        with self.lock(kind):
            began = time.monotonic()
            stack = self._stack()
            progress = Progress(began, kind)
            errors: list[str] = []
            failed: list[str] = []
            changes: dict[str, int] = {}

            def on_event(event: auto.EngineEvent) -> None:
                _take(event, progress, errors, failed, changes)

            self.log = _private("logs") / f"{self.target.name}-{kind}-{datetime.datetime.now():%Y%m%dT%H%M%S}-{os.getpid()}.log"
            with self.log.open("w", encoding="utf-8") as kept:
                self.log.chmod(0o600)

                def keep(line: str) -> None:
                    kept.write(line + "\n")
                    kept.flush()

                hooks = {"on_event": on_event, "on_output": keep, "on_error": keep, "color": "never"}
                outcome, stops = self._wait(lambda: call(stack, hooks), progress, listener)
            if stops:
                went_on = (
                    "the engine ended what was under way"
                    if stops == 1
                    else "the engine was stopped hard; if the next command speaks of pending operations, follow it"
                )
                if isinstance(outcome, auto.CommandError):
                    raise Interrupted(f"interrupted: {went_on}. The stack is as far as it got; run `python -m ops up {self.target.name}` to go on, or `down`")
            if isinstance(outcome, auto.CommandError):
                raise self._failure(outcome, errors, failed)
            if outcome is not None:
                raise outcome
            return Done(time.monotonic() - began, changes, progress)

    def _wait(self, call: Callable[[], Any], progress: Progress, listener: Listener | None) -> tuple[BaseException | None, int]:
        """Runs ``call`` beside this thread, which draws and takes signals. Returns what it raised, and how often it was interrupted."""
        outcome: list[BaseException] = []

        def work() -> None:
            try:
                call()
            except BaseException as error:
                outcome.append(error)

        stops = 0

        def stop(_number: int, _frame: Any) -> None:
            nonlocal stops
            stops += 1
            progress.note = (
                "stopping: the engine ends what is under way, then stops; Ctrl-C again stops it hard, and may leave things that the state does not know"
                if stops == 1
                else "stopping hard"
            )
            self._command.interrupt()

        worker = threading.Thread(target=work, name="engine", daemon=True)
        main = threading.current_thread() is threading.main_thread()
        # A terminal that closes is a wish to stop, too; the engine itself is in another session and would go on alone.
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)} if main else {}
        drawn: BaseException | None = None
        try:
            worker.start()
            while worker.is_alive():
                worker.join(TICK_SECONDS)
                try:
                    if listener and drawn is None:
                        listener(progress)
                except Exception as error:  # the operation goes on: half of it would be worse than no picture of it
                    drawn = error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return (outcome[0] if outcome else drawn), stops

    def _failure(self, error: auto.CommandError, errors: Sequence[str], failed: Sequence[str] = ()) -> OpsError:
        texts = [*errors, *([] if errors else str(error).splitlines())]
        whole = [*texts, str(error)]
        part = phases.part_of(failed[0]) if failed else None
        said = trouble.sentence(texts if errors else [_stderr(error)], self.target.name, part.title if part else None)
        if isinstance(error, auto.ConcurrentUpdateError) or "currently locked by" in str(error):
            return Busy(trouble.sentence(["the stack is currently locked"], self.target.name))
        if "this stack's configuration has" in said or "does not fit the account" in said:
            return BadInputFromEngine(said)
        return EngineFailed(f"{said}" + (f" (all that the engine said: {self.log})" if self.log else ""), whole)


class BadInputFromEngine(OpsError):
    """The program refused the stack file; the message lists every problem."""

    exit_code = BadInput.exit_code


def _stderr(error: auto.CommandError) -> str:
    """The CLI's own error text, without what it printed before."""
    text = str(error)
    return text.split("\n stderr: ", 1)[1].strip() or text if "\n stderr: " in text else text


def _take(event: auto.EngineEvent, progress: Progress, errors: list[str], failed: list[str], changes: dict[str, int]) -> None:
    now = time.monotonic()
    if before := event.resource_pre_event:
        progress.started(before.metadata.urn, _op(before.metadata.op), now)
    elif after := event.res_outputs_event:
        progress.finished(after.metadata.urn, _op(after.metadata.op), now)
    elif bad := event.res_op_failed_event:
        progress.failed(bad.metadata.urn, now)
        failed.append(bad.metadata.urn)
    elif said := event.diagnostic_event:
        if said.severity == "error":
            errors.append(said.message)
        elif said.severity in ("info", "info#err") and said.message.strip():
            progress.detail = " ".join(said.message.split())[:300]
    elif (end := event.summary_event) and end.resource_changes:
        changes.update({_op(op): int(count) for op, count in end.resource_changes.items()})


def _op(op: Any) -> str:
    return str(getattr(op, "value", op))


def _without(resource: Mapping[str, Any], gone: set[str]) -> dict[str, Any]:
    kept = dict(resource)
    if "dependencies" in kept:
        kept["dependencies"] = [urn for urn in kept["dependencies"] if urn not in gone]
    if "propertyDependencies" in kept:
        kept["propertyDependencies"] = {key: [urn for urn in urns or [] if urn not in gone] for key, urns in kept["propertyDependencies"].items()}
    return kept


def _private(name: str) -> Path:
    """A folder of the user's own for locks and the engine's output."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ray-train-efa" / name
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    return root
