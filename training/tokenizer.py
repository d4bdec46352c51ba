"""Tokenizers: trained here or loaded from anywhere, told apart by a hash, and applied to documents by `prepare`'s workers.

Only :func:`train`, :func:`load` and :func:`save` need transformers; the workers do with `tokenizers`, which starts in no time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow.fs as pafs
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from training.errors import BadInput
from training.packing import joined, little_endian
from training.sources import Fragment, Piece, fragments
from training.storage import Place, place, redacted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
_WEIGHTS_BYTES = 2**26  # a file this large in a remote model's folder is not the tokenizer's
_BATCH_CHARS = 2**20
_BATCH_DOCUMENTS = 1024


class Encoded(NamedTuple):
    """What a worker hands back: per batch and split, the tokens of the batch's documents, in order.

    ``bytes`` are those of the sources that it stands for; all together are all of them. ``error`` is a sentence for a person and
    ends the job: raised through Ray it would be retried and printed with a traceback.
    """

    source: int
    held_out: bool
    documents: int
    bytes: int
    tokens: npt.NDArray[Any]
    error: str | None = None


def train(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most ``vocab_size`` tokens, learnt from ``texts``; the same texts always give the same one.

    Every text can be written in it (each byte is a token; composed characters are normalised to NFC), and END_OF_TEXT is both its
    EOS and its padding token. It cuts words as Qwen2's does, and is one: transformers reads any tokenizer beside a qwen2 model by that
    class's rules, so that one of other rules would come out of an export with other tokens.
    """
    from transformers import Qwen2Tokenizer

    rules: Any = Qwen2Tokenizer().backend_tokenizer
    learning = Tokenizer(models.BPE())
    learning.normalizer, learning.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    learning.train_from_iterator(texts, trainer)
    learnt = json.loads(learning.to_str())["model"]
    merges: Any = [tuple(pair) for pair in learnt["merges"]]
    made: Any = Qwen2Tokenizer(vocab=learnt["vocab"], merges=merges, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    return cast("PreTrainedTokenizerFast", made)


def load(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer behind a folder, a URI or a Hugging Face hub id. No code that comes with it is run.

    Raises BadInput where there is none, where it has no end-of-text token, or no fast form (tokenizer.json).
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = place(name)
    folder, shown = "://" in name or name.startswith(("/", ".", "~")) or source.exists(), redacted(name)
    if folder and not source.exists():
        raise BadInput(f"tokenizer = {shown}: no such folder; check the path or URI")
    try:
        if folder and not source.local:
            with tempfile.TemporaryDirectory() as scratch:
                for item in source.children():
                    if item.is_file and item.size < _WEIGHTS_BYTES:
                        (Path(scratch) / item.base_name).write_bytes((source / item.base_name).read_bytes())
                found = AutoTokenizer.from_pretrained(scratch)
        else:
            found = AutoTokenizer.from_pretrained(source.path if folder else name)
    except Exception as error:  # the tokenizers library raises bare Exception for a file it can't parse
        reason = " ".join(str(error).split())[:200]
        way_out = "give a folder with a Hugging Face tokenizer" if folder else "give a hub id that can be reached from here, a folder, or train:VOCAB_SIZE"
        raise BadInput(f"tokenizer = {shown}: can't be loaded ({reason}); {way_out}") from error
    if not isinstance(found, PreTrainedTokenizerFast):
        raise BadInput(f"tokenizer = {shown}: has no fast form (tokenizer.json); save one with transformers, or give another tokenizer")
    if not found("any text").input_ids:
        # For a folder with a model but without its tokenizer's files, transformers makes up one that knows no word.
        raise BadInput(f"tokenizer = {shown}: turns text into no tokens at all, so its files are missing; give a folder that holds tokenizer.json")
    if found.eos_token_id is None:
        raise BadInput(f"tokenizer = {shown}: has no end-of-text (EOS) token, which joins documents; set eos_token and save it, or give another tokenizer")
    return found


def save(tokenizer: PreTrainedTokenizerFast, folder: Place) -> None:
    """Writes it so that ``AutoTokenizer.from_pretrained`` reads it. Raises OSError."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        folder.make_folder()
        pafs.copy_files(scratch, folder.path, destination_filesystem=folder.fs)


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of what decides the tokens of a text: the tokenizer itself and its EOS, not its name, version or chat template."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for passing in ("version", "truncation", "padding"):
        rules.pop(passing, None)
    return hashlib.sha256(json.dumps([rules, tokenizer.eos_token_id], sort_keys=True).encode()).hexdigest()


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than its largest token id: what a model's embedding must hold at least."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


# In the workers


@functools.lru_cache(maxsize=2)
def _restored(rules: str, parse_special_tokens: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(rules)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special_tokens
    return tokenizer


def encode_group(
    pieces: Sequence[Piece], rules: str, eos: int, dtype: str, column: str, eval_fraction: float, parse_special_tokens: bool
) -> Iterator[list[Encoded]]:
    """The tokens of a group of pieces in order, a batch of documents at a time: the same for the same pieces, whenever it runs again.

    The last one holds a sentence in ``error`` where a piece is no good.
    """
    tokenizer = _restored(rules, parse_special_tokens)
    nothing = np.empty(0, little_endian(dtype))
    for piece in pieces:
        left, error = piece.size, None
        try:
            for batch in _batches(fragments(piece, column, eval_fraction)):
                done = min(left, sum(len(part.text.encode()) for part in batch))
                yield _encoded(tokenizer, piece.file.source, batch, eos, dtype, done)
                left -= done
        except BadInput as bad:
            error = str(bad)
        yield [Encoded(piece.file.source, False, 0, left, nothing, error)]
        if error:
            return


def _batches(parts: Iterable[Fragment]) -> Iterator[list[Fragment]]:
    batch: list[Fragment] = []
    chars = 0
    for part in parts:
        batch.append(part)
        chars += len(part.text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _encoded(tokenizer: Tokenizer, source: int, batch: list[Fragment], eos: int, dtype: str, done: int) -> list[Encoded]:
    encodings = tokenizer.encode_batch_fast([part.text for part in batch], add_special_tokens=False)
    rows: list[Encoded] = []
    for out in (False, True):
        chosen = [(part, encoding.ids) for part, encoding in zip(batch, encodings, strict=True) if part.held_out == out]
        if chosen:
            tokens = joined([(ids, part.ends) for part, ids in chosen], eos, little_endian(dtype))
            rows.append(Encoded(source, out, sum(part.ends for part, _ in chosen), done, tokens))
            done = 0
    return rows
