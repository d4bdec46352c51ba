"""``python -m training.prepare``: from text to shards of tokens that a training job maps into memory.

The text is read and tokenised by Ray's tasks, or by this process alone; this process packs what they return, in order, into
shards. The same sources and settings give the same bytes, whatever the number of CPUs. The manifest is written last: a folder
without one is unfinished, and the next start replaces it.

Tasks of Ray's core and not Ray Data: the autoscaler of Ray Data 2.58 asks for a node of each kind that the cluster knows, GPU nodes
included, as soon as its CPUs are busy (ray/data/_internal/cluster_autoscaler/default_cluster_autoscaler_v2.py), and those bill.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import filelock

from training import data, packing, schema, sources, tokenizer
from training.data import Manifest, Source
from training.errors import EXIT_DONE, BadInput, JobError, TrainingFailed
from training.packing import ShardWriter, Split
from training.prepare_settings import NOT_DECIDING, PrepareSettings, asked_vocabulary
from training.storage import Place, place, redacted
from training.tokenizer import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOCK = ".prepare.lock"
TRAIN_BYTES = 256 * 2**20  # of text are enough to learn a vocabulary from; a larger corpus is sampled evenly
_SAY_EVERY = 2.0  # seconds
OBJECT_STORE_BYTES = 512 * 2**20  # of a Ray of our own: what is tokenised but not yet packed waits there
_AHEAD = 16  # batches of about 2**20 characters that a task may be ahead of the packing: one piece, and not all of a large compressed file
_RETRIES = 5  # of a task whose worker or node was lost
_LEAST_TASKS = 4  # in flight, so that a cluster whose CPU nodes start on demand sees a demand
_WAITING_SECONDS = 20.0


def prepare(settings: PrepareSettings, say: Callable[[str], None] = print, launcher: str = "ray") -> Manifest:
    """Tokenises and packs the sources into ``settings.output``, unless that has been done; ``say`` is told what goes on.

    launcher: ray uses the Ray that is connected, or the cluster in RAY_ADDRESS, or starts one on this machine and stops it
    afterwards; process does it all in this process, with the same bytes as the result.
    Raises BadInput for sources, tokenizer or output that can't be used as they are, TrainingFailed for a full disk or a
    lost Ray; neither leaves anything that looks finished.
    """
    output = place(settings.output)
    files = sources.find(settings.sources, settings.suffixes)
    files = sources.checked(files, settings.text_column, _reading(say, sum(file.size for file in files)))
    asked = asked_vocabulary(settings.tokenizer)
    loaded = None if asked else tokenizer.load(settings.tokenizer)
    identities = [_identity(files, number) for number in range(len(settings.sources))]
    deciding = {key: value for key, value in _shown_settings(settings).items() if key not in NOT_DECIDING}
    if loaded:
        deciding["tokenizer"] = tokenizer.fingerprint(loaded)
    inputs = hashlib.sha256(json.dumps([data.SCHEMA, deciding, identities], sort_keys=True).encode()).hexdigest()
    with _alone_in(output, redacted(settings.output)):
        finished = _finished(output, settings, inputs, identities)
        if finished:
            say(f"already prepared: {redacted(settings.output)} holds these sources with these settings ({_summary(finished)})")
            return finished
        _remove_leftovers(output)
        try:
            return _written(settings, output, files, identities, inputs, loaded or asked, say, launcher)
        except BaseException:
            # Best effort, so that a full disk gets its room back; what is left has no manifest and the next start replaces it.
            with contextlib.suppress(OSError):
                if not (output / data.MANIFEST).exists():
                    _remove_leftovers(output)
            raise


def _written(
    settings: PrepareSettings,
    output: Place,
    files: list[sources.File],
    identities: list[str],
    inputs: str,
    how: PreTrainedTokenizerFast | int | None,
    say: Callable[[str], None],
    launcher: str,
) -> Manifest:
    assert how is not None
    groups = sources.plan(files)
    if not groups:
        raise _no_document(settings)
    if isinstance(how, int):
        how = _trained(how, groups, settings, say)
    vocabulary = tokenizer.vocabulary(how)
    dtype = packing.token_dtype(vocabulary)
    try:
        tokenizer.save(how, output / data.TOKENIZER)
    except OSError as error:
        raise _write_error(settings, error) from error
    total = sum(piece.size for group in groups for piece in group)  # of Parquet what it unpacks to, as its pieces count
    writers = {split: ShardWriter(output, split, dtype, settings.shard_tokens, settings.sequence_length) for split in data.SPLITS}
    documents = [0] * len(settings.sources)
    progress = _Progress(say, "tokenising", total)
    try:
        with _ray(say) if launcher == "ray" else contextlib.nullcontext(), contextlib.closing(_tokenised(groups, how, dtype, settings, say, launcher)) as rows:
            for row in rows:
                if row.error:
                    raise BadInput(row.error)
                writers["eval" if row.held_out else "train"].write(row.tokens, row.documents)
                documents[row.source] += row.documents
                progress.more(row.bytes, f"{sum(writer.tokens for writer in writers.values()):,} tokens")
        splits = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
    _enough(settings, splits)
    if settings.eval_fraction == 0:
        del splits["eval"]
    sizes = [sum(file.size for file in files if file.source == number) for number in range(len(settings.sources))]
    parts = zip(settings.sources, sizes, documents, identities, strict=True)
    manifest = Manifest(
        sequence_length=settings.sequence_length,
        vocab_size=vocabulary,
        eos_token_id=int(how.eos_token_id),
        tokenizer_hash=tokenizer.fingerprint(how),
        dtype=dtype,
        splits=splits,
        sources=tuple(Source(redacted(uri), size, count, sha) for uri, size, count, sha in parts),
        settings=_shown_settings(settings),
        inputs=inputs,
    )
    try:
        (output / data.MANIFEST).write_json(manifest.as_json())
    except OSError as error:
        raise _write_error(settings, error) from error
    say(f"prepared {redacted(settings.output)}: {_summary(manifest)}")
    return manifest


def _summary(manifest: Manifest) -> str:
    splits = [f"{split.rows:,} {name} rows from {split.documents:,} documents" for name, split in manifest.splits.items()]
    return f"{', '.join(splits)}; {manifest.sequence_length} tokens a row, vocabulary {manifest.vocab_size:,}"


def _shown_settings(settings: PrepareSettings) -> dict[str, Any]:
    shown = schema.as_mapping(settings)
    shown["sources"] = [redacted(uri) for uri in settings.sources]
    for key in ("output", "tokenizer"):
        shown[key] = redacted(shown[key])
    return shown


def _identity(files: Sequence[sources.File], source: int) -> str:
    contents = [file.sha256 for file in files if file.source == source]
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()


def _no_document(settings: PrepareSettings) -> BadInput:
    shown = ", ".join(map(redacted, settings.sources))
    return BadInput(f"sources: no document in {shown}: there is no row, or every text is empty; check the files and textColumn")


def _enough(settings: PrepareSettings, splits: Mapping[str, Split]) -> None:
    documents = sum(split.documents for split in splits.values())
    if documents == 0:
        raise _no_document(settings)
    needed = settings.sequence_length + 1
    train, held_out = splits["train"], splits["eval"]
    if train.rows == 0:
        raise BadInput(
            f"sources: {train.tokens:,} tokens in {train.documents:,} training documents are fewer than one row needs ({needed:,});"
            " add text, or lower sequenceLength" + (" or evalFraction" if held_out.tokens else "")
        )
    if settings.eval_fraction > 0 and held_out.rows == 0:
        raise BadInput(
            f"evalFraction = {settings.eval_fraction} holds out {held_out.documents:,} of {documents:,} documents with {held_out.tokens:,} tokens,"
            f" fewer than one row needs ({needed:,}); raise evalFraction, lower sequenceLength, add documents or set evalFraction=0 to go without an eval split"
        )


# The output folder


@contextlib.contextmanager
def _alone_in(output: Place, shown: str) -> Iterator[None]:
    """Makes the folder and keeps a second `prepare` on this machine out of it."""
    lock = filelock.FileLock(f"{output.path}/{LOCK}", timeout=0) if output.local else None
    try:
        output.make_folder()
        if lock:
            lock.acquire()
    except filelock.Timeout as error:
        raise BadInput(f"output = {shown}: another prepare is writing there; wait for it or give another output") from error
    except OSError as error:
        raise BadInput(
            f"output = {shown}: can't be written to ({os.strerror(error.errno) if error.errno else error}); give a folder where you may write"
        ) from error
    try:
        yield
    finally:
        if lock:
            lock.release()


def _finished(output: Place, settings: PrepareSettings, inputs: str, identities: Sequence[str]) -> Manifest | None:
    if not (output / data.MANIFEST).exists():
        return None
    manifest = data.open_data(settings.output).manifest
    if manifest.inputs == inputs:
        return manifest
    before, now = manifest.settings, _shown_settings(settings)
    changed = [f"{key} {before.get(key)} -> {now[key]}" for key in now if key not in NOT_DECIDING and before.get(key) != now[key]]
    if [source.sha256 for source in manifest.sources] != list(identities):
        changed.append("the sources' content")
    raise BadInput(
        f"output = {redacted(settings.output)}: holds data prepared otherwise (different: {', '.join(changed) or 'the tokenizer'});"
        " give another output, or delete this one to replace it"
    )


def _remove_leftovers(output: Place) -> None:
    """Only what `prepare` itself writes: the folder may hold other things."""
    for item in output.children():
        shard = item.base_name.startswith(tuple(f"{split}-" for split in data.SPLITS)) and item.base_name.endswith(".bin")
        if shard or item.base_name == data.TOKENIZER:
            dataclasses.replace(output, path=item.path).delete()


def _write_error(settings: PrepareSettings, error: OSError) -> JobError:
    if error.errno in packing.NO_ROOM:
        return TrainingFailed(
            f"output = {redacted(settings.output)}: no room to write on ({os.strerror(error.errno)}); free some space or give another output, then start again"
        )
    return TrainingFailed(f"output = {redacted(settings.output)}: can't be written to ({error}); the attempt is unfinished, start again when this is mended")


# Progress


class _Progress:
    """Says how far the work is, every two seconds, and nothing where it takes less."""

    def __init__(self, say: Callable[[str], None], what: str, total: int) -> None:
        self._say, self._what, self._total = say, what, total
        self._done = 0
        self._begun: float | None = None
        self._said = time.monotonic()

    def more(self, done: int, also: str = "") -> None:
        now = time.monotonic()
        if self._begun is None:  # what came before the first result was waiting for Ray, and says nothing of the speed
            self._begun, self._first = now, done
            self._said = now
        self._done += done
        if now - self._said < _SAY_EVERY:
            return
        self._said = now
        parts = [f"{self._what}: {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB"]
        if also:
            parts.append(also)
        if self._done > self._first:
            parts.append(f"{(now - self._begun) * max(0, self._total - self._done) / (self._done - self._first):.0f} s left")
        self._say(", ".join(parts))


def _reading(say: Callable[[str], None], total: int) -> Callable[[int], None]:
    return _Progress(say, "checking the sources", total).more


# Tokenising


def _trained(size: int, groups: Sequence[Sequence[sources.Piece]], settings: PrepareSettings, say: Callable[[str], None]) -> PreTrainedTokenizerFast:
    pieces = [piece for group in groups for piece in group]
    every = -(-sum(piece.size for piece in pieces) // TRAIN_BYTES)
    total = min(TRAIN_BYTES, sum(piece.size for piece in pieces[::every]))
    say(f"training a tokenizer with {size:,} tokens on {total / 1e6:,.1f} MB of text")
    # Set, so that the library uses all cores here and does not warn when Ray forks its processes afterwards.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    parts = (part for piece in pieces[::every] for part in sources.fragments(piece, settings.text_column, settings.eval_fraction))
    return tokenizer.train(_at_most(TRAIN_BYTES, (part.text for part in parts if not part.held_out), _Progress(say, "training the tokenizer", total)), size)


def _at_most(limit: int, texts: Iterable[str], progress: _Progress) -> Iterator[str]:
    """The first texts of ``limit`` bytes: a compressed file holds more than its size says."""
    for text in texts:
        if limit <= 0:
            return
        size = len(text.encode())
        limit -= size
        progress.more(size)
        yield text


@contextlib.contextmanager
def _ray(say: Callable[[str], None]) -> Iterator[None]:
    """Ray for the time of the job: the one that is connected, the cluster in RAY_ADDRESS, or a small one of our own.

    Raises TrainingFailed where it can't be reached or started.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            _check_reachable(address)
            ray.init(**quiet)
        else:
            say("starting Ray on this machine")
            ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    except Exception as error:  # Ray raises a bare Exception where its processes don't come up in 30 s
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else " ".join(str(error).split())[:300]
        if address:
            way_out = "check the address, or unset it to use this machine"
            raise TrainingFailed(f"the Ray cluster at RAY_ADDRESS={address} can't be reached ({reason}); {way_out}") from error
        raise TrainingFailed(f"Ray can't start on this machine ({reason}); start again when the machine is less busy") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray ends the whole process, from C++, where nothing answers at host:port. Raises OSError."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def _tokenised(
    groups: Sequence[Sequence[sources.Piece]],
    using: PreTrainedTokenizerFast,
    dtype: str,
    settings: PrepareSettings,
    say: Callable[[str], None],
    launcher: str,
) -> Generator[Encoded]:
    """What the sources hold, in their order. Raises TrainingFailed where Ray gives up."""
    encode = functools.partial(
        tokenizer.encode_group,
        eos=int(using.eos_token_id),
        dtype=dtype,
        column=settings.text_column,
        eval_fraction=settings.eval_fraction,
        parse_special_tokens=settings.parse_special_tokens,
    )
    rules = using.backend_tokenizer.to_str()
    if launcher == "process":
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        for group in groups:
            for rows in encode(group, rules):
                yield from rows
    else:
        yield from _by_tasks(groups, encode, rules, settings, say)


def _by_tasks(
    groups: Sequence[Sequence[sources.Piece]],
    encode: Callable[[Sequence[sources.Piece], str], Iterator[list[Encoded]]],
    rules: str,
    settings: PrepareSettings,
    say: Callable[[str], None],
) -> Generator[Encoded]:
    """One task a group, a bounded number at a time and each a bounded way ahead, consumed in the order of the groups."""
    import ray

    options: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 0,
        "num_returns": "streaming",
        "max_retries": _RETRIES,
        "_generator_backpressure_num_objects": _AHEAD,
        **({"resources": {settings.ray_resource: 1}} if settings.ray_resource else {}),
    }

    def on_one_cpu(group: Sequence[sources.Piece], rules: str) -> Iterator[list[Encoded]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks are what runs in parallel
        yield from encode(group, rules)

    task: Any = ray.remote(**options)(on_one_cpu)  # Any: a task that streams has no type in Ray's annotations
    running: deque[Any] = deque()
    todo = iter(groups)
    try:
        shared = ray.put(rules)

        def start() -> None:
            most = settings.parallelism or max(_LEAST_TASKS, 2 * int(ray.cluster_resources().get("CPU", 0)))  # type: ignore[no-untyped-call]
            running.extend(task.remote(group, shared) for group in itertools.islice(todo, most - len(running)))

        start()
        _await_first(running[0], settings, say)
        while running:
            for rows in running[0]:
                yield from ray.get(rows)
            running.popleft()
            start()
    except ray.exceptions.RayError as error:
        raise TrainingFailed(f"Ray stopped tokenising ({' '.join(str(error).split())[:300]}); the output is unfinished, start again") from error
    finally:
        for rows in running:
            ray.cancel(rows)


def _await_first(task: Any, settings: PrepareSettings, say: Callable[[str], None]) -> None:
    """Waits for the first result, and says for what: a CPU node of a cluster may take minutes to start, or never come."""
    import ray

    wanted = "a CPU" + (f" with the resource {settings.ray_resource!r}" if settings.ray_resource else "")
    while not ray.wait([task], timeout=_WAITING_SECONDS, fetch_local=False)[0]:
        say(f"waiting for {wanted} in the Ray cluster, which has {_shown_resources(ray.cluster_resources())}")  # type: ignore[no-untyped-call]


def _shown_resources(resources: Mapping[str, float]) -> str:
    named = [f"{resources[name]:g} {name}" for name in sorted(resources) if ":" not in name and "memory" not in name]
    return ", ".join(named) or "none"


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: returns the exit code (0 done, 2 bad input, 3 failed half-way)."""
    parser = argparse.ArgumentParser(prog="python -m training.prepare", description="Tokenises and packs text into rows for the training job.")
    parser.add_argument("--config", metavar="FILE", help="YAML file with the settings")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="a setting, over the file's; may be repeated")
    parser.add_argument(
        "--launcher", choices=("ray", "process"), default="ray", help="tokenise with Ray's tasks (default), or in this process alone; the result is the same"
    )
    parser.add_argument("--help-settings", action="store_true", help="list every setting with its default and meaning")
    chosen = parser.parse_args(arguments)
    if chosen.help_settings:
        for key, default, meaning in schema.describe(PrepareSettings):
            _print(f"{key} ({default})\n    {meaning}")
        return EXIT_DONE
    try:
        raw = schema.read_file(chosen.config) if chosen.config else {}
        if not raw and not chosen.overrides:
            raise BadInput("no settings; give --config FILE or --set key=value (--help-settings lists them)")
        prepare(schema.parse(PrepareSettings, schema.apply_overrides(raw, chosen.overrides), where=chosen.config or "settings"), _print, chosen.launcher)
    except JobError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the output is unfinished and the next start replaces it", file=sys.stderr)  # noqa: T201
        return 130
    return EXIT_DONE


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
