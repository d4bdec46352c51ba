"""Every setting of `python -m training.prepare`. Apart, for the Pulumi program checks them too, and has neither tokenizers nor pyarrow."""

from __future__ import annotations

import dataclasses
import re

from training.errors import BadInput
from training.schema import setting

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
SMALLEST = 257  # one token a byte, and the end of text


@dataclasses.dataclass(frozen=True)
class PrepareSettings:
    """What decides the rows. Lengths are in tokens."""

    sources: tuple[str, ...] = setting(
        doc="Text files (one document each), JSON lines (.jsonl, .json, gzipped or not), .parquet, folders of these, a Hugging Face dataset saved on"
        " disk; each a path, an s3:// or any other URI that pyarrow or fsspec opens. The word stdlib is the source code of the running Python."
    )
    output: str = setting(doc="Folder or URI for the shards, the tokenizer and manifest.json; what `data` of the training job names.")
    tokenizer: str = setting(
        doc="A Hugging Face hub id, folder or URI: that of the model to fine-tune. Or train:SIZE, a byte-level BPE with SIZE tokens learnt from the"
        " sources' training documents (an even sample of 256 MiB of larger ones)."
    )
    sequence_length: int = setting(1024, "Tokens in a row.", at_least=2, at_most=2**20)
    eval_fraction: float = setting(0.01, "Part of the documents held out for evaluation, chosen by a hash of their text. 0: none.", at_least=0, at_most=0.9)
    text_column: str = setting("text", "Column (or JSON key) with the text; rows where it is empty or null are left out.")
    suffixes: tuple[str, ...] = setting(SUFFIXES, "Endings of the files to take from a folder. A file that is named itself is taken whatever its ending.")
    parse_special_tokens: bool = setting(
        False,
        "Read the tokenizer's special tokens (<|im_start|> and the like) where the text spells them, as chat data needs. false: they are plain text.",
    )
    shard_tokens: int = setting(2**27, "Tokens in a shard at most: 256 MiB at two bytes a token.", at_least=1024)
    parallelism: int | None = setting(
        None, "Tokenising tasks at a time, one CPU each. None: two for each CPU that Ray has, so that none waits for work.", at_least=1
    )
    ray_resource: str | None = setting(
        None, "A custom resource of Ray, of which each task takes one besides its CPU: tasks then run only on nodes that have it, and start no others."
    )

    def __post_init__(self) -> None:
        asked_vocabulary(self.tokenizer)


# Where and how, not what.
NOT_DECIDING = frozenset(("sources", "output", "suffixes", "parallelism", "shardTokens", "rayResource"))


def asked_vocabulary(name: str) -> int | None:
    """The size in ``train:SIZE``; None where a tokenizer is to be loaded. Raises BadInput for a size that can't be."""
    if not name.startswith("train:"):
        return None
    size = name.removeprefix("train:").replace("_", "")
    if not re.fullmatch(r"[0-9]+", size) or not SMALLEST <= int(size) <= 2**20:
        raise BadInput(f"tokenizer = {name}: write train:SIZE with a vocabulary of {SMALLEST} to {2**20} tokens, for example train:4096")
    return int(size)
