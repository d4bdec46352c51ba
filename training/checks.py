"""What is looked at before a run: settings, data, model and storage must fit together before anything is billed for them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig

from training import model, tokenizer
from training.data import PreparedData, open_data
from training.errors import BadInput
from training.record import refuse_another
from training.settings import Settings, identity, not_divisible, run_name
from training.storage import Place, patiently, place, redacted
from training.world import World


@dataclasses.dataclass(frozen=True)
class Checked:
    """Settings whose data, model and run folder were looked at and found to fit together."""

    settings: Settings
    data: PreparedData
    config: PretrainedConfig
    run: str
    folder: Place
    identity: Mapping[str, Any]
    resumes: bool = False
    """Whether the folder holds this run already."""

    @property
    def last_step(self) -> int:
        """The step at which this start ends: ``steps``, or ``stop_after`` where that is earlier."""
        return min(self.settings.steps, self.settings.stop_after or self.settings.steps)

    @property
    def sequence_length(self) -> int:
        """Tokens in a row."""
        return self.data.manifest.sequence_length


def check(settings: Settings) -> Checked:
    """Opens data, model configuration and run folder, before any worker or GPU is asked for. Raises BadInput."""
    data = open_data(settings.data)
    length = data.manifest.sequence_length
    if settings.sequence_length not in (None, length):
        raise BadInput(f"sequenceLength = {settings.sequence_length}, but the data was prepared in rows of {length}; leave it out, or prepare the data anew")
    if settings.tokens_per_step % length:
        raise BadInput(not_divisible(settings.tokens_per_step, length))
    if data.rows("train") == 0:
        raise BadInput(f"data = {settings.data}: no whole training row in it; prepare it with more text or a shorter sequenceLength")
    config = model.load_config(settings.model, data.manifest.vocab_size)
    model.check_config(config, vocab_size=data.manifest.vocab_size, sequence_length=length)
    storage = place(settings.storage)
    run = run_name(settings, data.manifest.hash)
    deciding = identity(settings, data.manifest.hash)
    try:
        before = refuse_another(storage / run, deciding)
    except OSError as error:
        raise BadInput(f"storage = {settings.storage}: can't be read ({error}); give a folder or bucket that you may write to") from error
    return Checked(settings, data, config, run, storage / run, deciding, resumes=before is not None)


def check_again(settings: Settings, say: Callable[[str], None]) -> Checked:
    """As :func:`check`, which has passed before any worker was started: what can't be read now is asked for again, for ``storage_patience`` seconds."""
    refusal: BadInput | None = None

    def attempt() -> Checked:
        nonlocal refusal
        try:
            return check(settings)
        except BadInput as error:
            refusal = error
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, (PermissionError, NotADirectoryError)):
                raise error.__cause__ from None
            raise

    try:
        return patiently(attempt, settings.storage_patience, say, "data and storage")
    except OSError:
        assert refusal is not None
        raise refusal from None


def check_tokenizer(job: Checked) -> None:
    """Refuses data that was tokenised for another model than the pretrained one; a model without a tokenizer is not held against it. Raises BadInput."""
    if job.settings.model.pretrained is None:
        return
    with model.pretrained_source(job.settings.model.pretrained, weights=False) as source:
        try:
            own = tokenizer.load(source)
        except BadInput:
            return
    if tokenizer.fingerprint(own) != job.data.manifest.tokenizer_hash:
        raise BadInput(
            f"data = {redacted(job.settings.data)} was not tokenised with the tokenizer of model.pretrained = {redacted(job.settings.model.pretrained)};"
            " prepare it again with that one"
        )


def share_storage(job: Checked, world: World, say: Callable[[str], None]) -> None:
    """Proves before the first step that all hosts see the same storage. Raises BadInput on all ranks where they don't."""
    probe = job.folder / f".probe-{world.broadcast(time.time_ns())}"
    # A run that has written there before may do so; a new one's mistake is told at once.
    patience = job.settings.storage_patience if job.resumes else 0.0

    def write() -> None:
        try:
            patiently(lambda: probe.write_bytes(b"shared"), patience, say, f"storage = {redacted(job.settings.storage)}")
        except OSError as error:
            raise BadInput(f"storage = {job.settings.storage}: can't be written to ({error}); give a folder or bucket that you may write to") from error

    def read() -> None:
        if not probe.exists():
            raise BadInput(f"storage = {job.settings.storage} is not the same folder on all hosts; use an s3:// URI or a shared file system")

    try:
        world.on_main(write)
        world.together(read)
    finally:
        if world.is_main:
            with contextlib.suppress(OSError):
                probe.delete()
