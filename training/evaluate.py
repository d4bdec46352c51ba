"""What training changed: the model a run began with and the one it exported, side by side on the run's own data.

``python -m training.evaluate RUN`` measures loss and perplexity on the held-out rows, lets both models continue the same
prompts, and writes evaluation.json, samples.json and report.html into the run's folder. With ``--endpoint`` a model behind
an OpenAI-compatible API scores the continuations. Exit codes: 0 done, 2 bad input, 3 the endpoint or the storage failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PretrainedConfig

from training import model, schema, tokenizer
from training.data import PreparedData, eval_batches, open_data
from training.errors import EXIT_DONE, BadInput, JobError
from training.loop import token_loss
from training.record import RUN_FILE, now, read_run
from training.report import write_report
from training.scoring import Endpoint, Scores, endpoint, score
from training.settings import ModelSettings, Settings
from training.storage import Place, as_local_folder, place
from training.world import pick_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SCHEMA = 1
EVALUATION_FILE, SAMPLES_FILE = "evaluation.json", "samples.json"
ROWS, SAMPLES = 256, 4
PROMPT_TOKENS, CONTINUATION_TOKENS = 32, 64
BATCH_TOKENS = 8192  # in one forward pass; without gradients this fits wherever the weights do
# Plain sampling lets small models wander off; the single likeliest token sends them round in circles.
TEMPERATURE, TOP_P = 0.7, 0.9
WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Sample:
    """What both models made of one prompt."""

    prompt: str
    base: str
    tuned: str


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The base and the tuned model on the same rows and prompts. A loss is in nats per token; None: there are no held-out rows."""

    run: str
    base: str
    """The model the run began with (or the one named instead), in words."""
    tuned: str
    """The run's export: its place."""
    step: int | None
    """Optimizer steps behind the export."""
    steps: int
    """Optimizer steps of the whole run."""
    sequence_length: int
    rows: int
    """Held-out rows that were read."""
    tokens: int
    """Their tokens that have a label; both losses are means over these."""
    base_loss: float | None
    tuned_loss: float | None
    samples: tuple[Sample, ...]
    seed: int
    """Of the continuations and of the order in which an endpoint sees them."""
    compute: str
    """Device and type of the forward passes."""
    notes: tuple[str, ...]
    """What a reader must know to read the numbers right, as sentences."""
    scores: Scores | None = None

    @property
    def base_perplexity(self) -> float | None:
        """exp(base_loss)."""
        return perplexity(self.base_loss)

    @property
    def tuned_perplexity(self) -> float | None:
        """exp(tuned_loss)."""
        return perplexity(self.tuned_loss)

    def as_json(self) -> dict[str, Any]:
        """Plain data for evaluation.json. What JSON has no number for is written by name: "NaN", "Infinity"."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "step": self.step,
            "steps": self.steps,
            "sequenceLength": self.sequence_length,
            "rows": self.rows,
            "tokens": self.tokens,
            "base": {"model": self.base, "loss": _number_or_name(self.base_loss), "perplexity": _number_or_name(self.base_perplexity)},
            "tuned": {"model": self.tuned, "loss": _number_or_name(self.tuned_loss), "perplexity": _number_or_name(self.tuned_perplexity)},
            "compute": self.compute,
            "seed": self.seed,
            "notes": list(self.notes),
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
            "scores": self.scores.as_json() if self.scores else None,
        }


def perplexity(loss: float | None) -> float | None:
    """exp(loss), infinite where a float can't hold it."""
    if loss is None or math.isnan(loss):
        return loss
    return math.exp(loss) if loss < 700 else math.inf


def _number_or_name(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _silent(_text: str) -> None:
    pass


def evaluate(
    run_place: Place,
    *,
    base: str | None = None,
    prompts: Sequence[str] | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    rows: int | None = None,
    say: Callable[[str], None] = _silent,
) -> Evaluation:
    """:func:`measure` and :func:`save` in one."""
    result = measure(run_place, base=base, prompts=prompts, samples=samples, tokens=tokens, rows=rows, say=say)
    save(run_place, result, say)
    return result


def measure(
    run_place: Place,
    *,
    base: str | None = None,
    prompts: Sequence[str] | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    rows: int | None = None,
    say: Callable[[str], None] = _silent,
) -> Evaluation:
    """Loss and continuations of the base model and of the run's export; one of them in memory at a time. Writes nothing.

    base: a hub id, folder or URI instead of what the run began with. prompts: None means the beginnings of held-out documents.
    samples: prompts used at most (None: all that were given, or 4). tokens: length of a continuation (None: 64, or what the model
    has room for). rows: held-out rows read at most (None: the run's evalRows). ``say`` is told what goes on.

    Raises BadInput where there is no run, no export, no data, or where they don't fit together.
    """
    for name, value, least in (("samples", samples, 0), ("tokens", tokens, 1), ("rows", rows, 1)):
        if value is not None and value < least:
            raise BadInput(f"--{name} {value}: give {least} or more")
    run, _ = read_run(run_place)
    settings = schema.parse(Settings, run.get("settings") or {}, f"settings in {run_place / RUN_FILE}")
    _check_export(run_place, run, settings)
    data = _open_data(run_place, run, settings)
    step, notes = _exported_step(run, settings)

    device = pick_device("auto", 0)
    dtype = torch.bfloat16 if settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda") else torch.float32
    found = min(rows or settings.eval_rows or ROWS, data.rows("eval"))
    if not found:
        notes.append("The data has no held-out row, so there is no loss to compare; prepare it with a higher evalFraction for a run that can be measured.")

    losses: list[float] = []
    texts: list[list[str]] = []
    counted = 0
    with _local(run_place / "model") as exported:
        candidates = (
            _Candidate("base", ModelSettings(pretrained=base) if base else settings.model, f"--base {base}" if base else None),
            _Candidate("tuned", ModelSettings(pretrained=str(exported)), str(run_place / "model")),
        )
        words = _common_tokenizer(run_place, data, exported, base)
        configs = [candidate.config(data) for candidate in candidates]
        chosen, tokens = _prompts(prompts, samples, tokens, words, configs, data, notes)
        for candidate, config in zip(candidates, configs, strict=True):
            say(f"{candidate.title} model: loading")
            net = candidate.load(config, settings.seed, device, dtype)
            if found:
                loss, counted = _loss(net, data, found, settings, device, lambda text, title=candidate.title: say(f"{title} model: {text}"))  # type: ignore[misc]
                losses.append(loss)
            texts.append([_continued(net, ids, tokens, data.manifest.eos_token_id, settings.seed + i, words) for i, (_, ids) in enumerate(chosen)])
            del net
    return Evaluation(
        run=str(run.get("run", run_place.name)),
        base=base or settings.model.pretrained or _random_in_words(settings),
        tuned=str(run_place / "model"),
        step=step,
        steps=settings.steps,
        sequence_length=data.manifest.sequence_length,
        rows=found,
        tokens=counted,
        base_loss=losses[0] if losses else None,
        tuned_loss=losses[1] if losses else None,
        samples=tuple(Sample(prompt, before, after) for (prompt, _), before, after in zip(chosen, *texts, strict=True)),
        seed=settings.seed,
        compute=f"{device.type} {str(dtype).removeprefix('torch.')}",
        notes=tuple(notes),
    )


def save(run_place: Place, result: Evaluation, say: Callable[[str], None] = _silent) -> None:
    """Writes evaluation.json and samples.json into the run's folder and its report anew. Raises JobError where the folder can't be written."""
    try:
        (run_place / SAMPLES_FILE).write_json([dataclasses.asdict(sample) for sample in result.samples])
        (run_place / EVALUATION_FILE).write_json({**result.as_json(), "made": now()})
    except OSError as error:
        raise JobError(f"{run_place}: the evaluation can't be saved ({error}); make room or give access, and start again") from error
    try:
        write_report(run_place)
    except BadInput as error:
        say(f"the report is as it was: {error}")


def scored(result: Evaluation, at: Endpoint, say: Callable[[str], None] = _silent) -> Evaluation:
    """``result`` with the endpoint's scores of its samples. What made the endpoint fail is in ``scores.failure``; nothing is raised or written."""
    return dataclasses.replace(result, scores=score([(s.prompt, s.base, s.tuned) for s in result.samples], at, result.seed, say))


# ---- the run


def _check_export(run_place: Place, run: dict[str, Any], settings: Settings) -> None:
    try:
        if (run_place / "model" / "config.json").exists():
            return
    except OSError as error:
        raise BadInput(f"{run_place}: can't be read ({error})") from error
    attempts = run.get("attempts") or [{}]
    last, at = attempts[-1], f"{run_place}: there is no model/ to evaluate"
    if run.get("outcome") == "running":
        raise BadInput(f"{at}: the run is still going on, or was ended without a word; wait for it, or start it again to go on from its last checkpoint")
    if not settings.export and run.get("outcome") in ("done", "stopped"):
        raise BadInput(f"{at}: the run was told not to export; start it again with --set export=true (done steps are not repeated)")
    why = f" ({last['reason']})" if last.get("reason") else ""
    raise BadInput(f"{at}: the run {run.get('outcome')} at step {last.get('endStep')} of {settings.steps}{why}; start it again to go on, with export = true")


def _exported_step(run: dict[str, Any], settings: Settings) -> tuple[int | None, list[str]]:
    """The step that model/ is of, None where the record can't tell, and what a reader must know about it."""
    if not settings.export:
        return None, ["The last start of the run was told not to export, so model/ is of an earlier step."]
    attempts = run.get("attempts") or []
    ended = [attempt for attempt in attempts if attempt["outcome"] in ("done", "stopped")]
    if not ended:
        return None, ["No attempt of the run came to its end, so the step that model/ was exported at is not known."]
    notes = []
    if attempts[-1] is not ended[-1]:
        notes.append(f"model/ was exported at step {ended[-1]['endStep']}; a later attempt ({attempts[-1]['outcome']}) has not exported.")
    return ended[-1]["endStep"], notes


def _open_data(run_place: Place, run: dict[str, Any], settings: Settings) -> PreparedData:
    try:
        data = open_data(settings.data)
    except BadInput as error:
        raise BadInput(f"{run_place}: what the run was trained on can't be opened: {error}") from error
    before = (run.get("identity") or {}).get("dataHash")
    if before != data.manifest.hash:
        raise BadInput(
            f"{run_place}: data = {settings.data} is not what the run was trained on (its hash is {data.manifest.hash[:12]}, was {str(before)[:12]});"
            " prepare the same text again with the same settings"
        )
    return data


def _random_in_words(settings: Settings) -> str:
    size = settings.model.random
    return f"random weights ({size if isinstance(size, str) else (size or {}).get('model_type', 'custom')}, seed {settings.seed})"


# ---- models


@contextlib.contextmanager
def _local(folder: Place) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(as_local_folder(folder))
        except OSError as error:
            raise BadInput(f"{folder}: can't be copied to this machine ({error})") from error
        yield found


def _common_tokenizer(run_place: Place, data: PreparedData, exported: Path, base: str | None) -> PreTrainedTokenizerFast:
    """The tokenizer of data, export and ``base``. Raises BadInput where they differ: a loss per token would compare different tokens."""
    with _local(data.tokenizer_folder) as folder:
        words = tokenizer.load(str(folder))
    vocabulary = words.get_vocab()
    try:
        own = tokenizer.load(str(exported))
    except BadInput as error:
        raise BadInput(f"{run_place / 'model'}: {error}; start the run again, which exports it anew") from error
    if own.get_vocab() != vocabulary:
        raise BadInput(f"{run_place / 'model'}: its tokenizer is not that of the run's data; start the run again, which exports it anew")
    if base is not None:
        try:
            other = tokenizer.load(base)
        except BadInput as error:
            raise BadInput(f"--base {base}: {error}; without its tokenizer there is no telling whether its losses can be compared") from error
        if other.get_vocab() != vocabulary:
            raise BadInput(
                f"--base {base}: its tokenizer is not that of the run's data, so their losses can't be compared; give a model with the same tokenizer"
            )
    return words


@dataclasses.dataclass(frozen=True)
class _Candidate:
    title: str
    source: ModelSettings
    shown: str | None
    """What errors call it, where it is not the run's own setting."""

    def config(self, data: PreparedData) -> PretrainedConfig:
        with self._named():
            found = model.load_config(self.source, data.manifest.vocab_size)
            model.check_config(found, vocab_size=data.manifest.vocab_size, sequence_length=data.manifest.sequence_length)
        return found

    def load(self, config: PretrainedConfig, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
        """The model with its weights on ``device``, computing in ``dtype``; weights are drawn with ``seed`` where the run drew them."""
        with self._named(), _no_progress_bar():
            weights = model.full_weights(self.source, config, seed)
        net = model.build_empty(config)
        model.allocate(net, torch.device("cpu"))
        net.load_state_dict(weights, assign=True)
        net.tie_weights()
        for parameter in net.parameters():  # and not buffers: rotary frequencies stay float32, as in training
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
        return net.to(device).eval()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        setting = f"model.pretrained = {self.source.pretrained}"
        shown = self.shown or setting
        try:
            yield
        except SafetensorError as error:
            raise BadInput(f"{shown}: its weights can't be read ({error}); the files are not whole, write or copy them anew") from error
        except BadInput as error:
            text = str(error).replace(setting, shown)
            raise BadInput(text if shown in text else f"{shown}: {text}") from error


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws one on stderr for every model it loads."""
    from transformers.utils import logging

    before: bool = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _loss(net: Any, data: PreparedData, rows: int, settings: Settings, device: torch.device, say: Callable[[str], None]) -> tuple[float, int]:
    """Mean loss in nats per token over ``rows`` held-out rows, spread over the split, and how many tokens that are."""
    batch = max(1, BATCH_TOKENS // data.manifest.sequence_length)
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with torch.inference_mode():
        for number, micro in enumerate(eval_batches(data, rows, batch, 1, 0, settings.document_mask)):
            total += token_loss(net, micro, settings.loss_chunk, device)
            count += int((micro.labels != -100).sum())
            say(f"{min(rows, (number + 1) * batch)} of {rows} held-out rows")
    return float(total) / max(count, 1), count


def _continued(net: Any, ids: list[int], tokens: int, eos: int, seed: int, words: PreTrainedTokenizerFast) -> str:
    """The text that follows ``ids``: ``tokens`` tokens, fewer where the model ends the document. The same seed draws the same."""
    how = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=TEMPERATURE, top_p=TOP_P, top_k=0, max_new_tokens=tokens, eos_token_id=eos, pad_token_id=eos, use_cache=True
    )
    prompt = torch.tensor([ids], device=net.device)
    with torch.random.fork_rng(devices=[net.device] if net.device.type == "cuda" else []), torch.inference_mode():
        torch.manual_seed(seed)
        written = net.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
    return _decoded(words, written[0, len(ids) :].tolist())


def _decoded(words: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return str(words.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


# ---- prompts


def read_prompts(file: str) -> list[str]:
    """The lines of a text file that are not blank. Raises BadInput where there is none."""
    try:
        text = place(file).read_bytes().decode()
    except OSError as error:
        raise BadInput(f"--prompts {file}: can't be read ({error}); give a text file with a prompt a line") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"--prompts {file}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    found = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    if not found:
        raise BadInput(f"--prompts {file}: holds no prompt; write one a line")
    return found


def _prompts(
    given: Sequence[str] | None,
    samples: int | None,
    tokens: int | None,
    words: PreTrainedTokenizerFast,
    configs: Sequence[PretrainedConfig],
    data: PreparedData,
    notes: list[str],
) -> tuple[list[tuple[str, list[int]]], int]:
    """Prompts as text and as token ids, and the length of a continuation. Raises BadInput where they have no room in a model."""
    room = min(getattr(config, "max_position_embeddings", None) or sys.maxsize for config in configs)
    if given is None:
        split = "eval" if data.rows("eval") else "train"
        wanted = SAMPLES if samples is None else samples
        texts = beginnings(data, split, wanted, min(PROMPT_TOKENS, room // 2), lambda ids: _decoded(words, ids))
        if split == "train" and texts:
            notes.append("The prompts are the beginnings of training documents: both models go on from text that the tuned one was trained on.")
        if len(texts) < wanted:
            notes.append(f"Only {len(texts)} of {wanted} samples: there are no more documents to take a beginning from; give prompts of your own (--prompts).")
    else:
        texts = list(given[:samples])
    encoded = [(text, list(words(text, add_special_tokens=False)["input_ids"])) for text in texts]
    longest = max((len(ids) for _, ids in encoded), default=1)
    length = tokens or max(1, min(CONTINUATION_TOKENS, room - longest))
    for text, ids in encoded:
        if not ids:
            raise BadInput(f"prompt {text!r}: the tokenizer makes nothing of it; leave it out")
        if len(ids) + length > room:
            raise BadInput(
                f"prompt {text[:40]!r}: {len(ids)} tokens and a continuation of {length} exceed the model's limit of {room};"
                " shorten the prompt or lower --tokens"
            )
    return encoded, length


def beginnings(data: PreparedData, split: str, count: int, tokens: int, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The first ``tokens`` tokens (at most half) of the first ``count`` documents of a split, as text; those without visible text are left out."""
    found: list[str] = []
    for document in _documents(data, split, 2 * tokens):
        if len(found) >= count:
            break
        text = decode(document[: max(1, min(tokens, len(document) // 2))]).rstrip("\ufffd")  # the cut may go through a character
        if text.strip():
            found.append(text)
    return found


def _documents(data: PreparedData, split: str, longest: int) -> Iterator[list[int]]:
    """The first ``longest`` tokens of each document, without its EOS."""
    eos = data.manifest.eos_token_id
    document: list[int] = []
    for number in range(data.rows(split)):
        for token in data.row(split, number)[:-1].tolist():
            if token == eos:
                if document:
                    yield document
                document = []
            elif len(document) < longest:
                document.append(token)
    if document:
        yield document


# ---- for a person


def lines(result: Evaluation) -> list[str]:
    """The evaluation as lines of at most 80 columns. Control characters that a model wrote are shown, not sent to the terminal."""
    of = f"step {result.step} of {result.steps}" if result.step is not None else "unknown step"
    made = [*_wrapped(f"{result.run}, {of}; computed on {result.compute}", "")]
    made += _wrapped(result.base, "  base   ")
    made += _wrapped(result.tuned, "  tuned  ")
    if result.base_loss is not None and result.tuned_loss is not None:
        count = f"{result.rows:,} held-out row{'s' if result.rows > 1 else ''} of {result.sequence_length:,} tokens ({result.tokens:,} predicted)"
        made += ["", *_wrapped(count, "")]
        change = result.tuned_loss - result.base_loss
        rows = (
            ("", "base", "tuned", "change"),
            ("loss, nats a token", _nats(result.base_loss), _nats(result.tuned_loss), _nats(change, "+")),
            ("perplexity", _shown(result.base_perplexity), _shown(result.tuned_perplexity), f"x {_shown(perplexity(change))}"),
        )
        made += ["", *(f"{a:20}{b:>14}{c:>14}{d:>14}" for a, b, c, d in rows)]
    for note in result.notes:
        made += ["", *_wrapped(note, "note: ")]
    for number, sample in enumerate(result.samples, start=1):
        made += ["", f"sample {number} of {len(result.samples)}"]
        for title, text in (("prompt", sample.prompt), ("base", sample.base), ("tuned", sample.tuned)):
            made += _wrapped(text or "(nothing: it ends the document at once)", f"  {title:6} | ", f"  {'':6} | ")
    if result.scores is not None:
        made += ["", *score_lines(result.scores)]
    return made


def score_lines(scores: Scores) -> list[str]:
    """The endpoint's scores as lines of at most 80 columns."""
    valid = scores.valid
    made = _wrapped(f"scores of {scores.model}, 1 to 10, which was not told which is which", "")
    made.append(f"{'':20}{'base':>14}{'tuned':>14}{'change':>14}")
    for number, pair in enumerate(scores.pairs, start=1):
        made.append(f"{f'sample {number}':20}" + (f"{pair[0]:>14}{pair[1]:>14}{pair[1] - pair[0]:>+14}" if pair else f"{'-':>14}{'-':>14}"))
    if scores.means is not None:
        before, after = scores.means
        made.append(f"{f'mean of {len(valid)}':20}{before:>14.2f}{after:>14.2f}{after - before:>+14.2f}")
    if scores.malformed:
        made += _wrapped(f"{scores.malformed} of the answers were not in the form asked for, and count for neither model", "note: ")
    return made


def _nats(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if abs(value) < 1e6 else f"{value:{sign}.4g}"


def _shown(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.4g}"


def _wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    """``text`` cut to 80 columns after ``first``, further lines after ``rest`` (None: blanks); at a blank where there is one near."""
    rest = " " * len(first) if rest is None else rest
    made: list[str] = []
    for line in text.split("\n"):
        left = _visible(line)
        while True:
            lead = rest if made else first
            room = _fitting(left, WIDTH - len(lead))
            if room < len(left) and (blank := left.rfind(" ", room // 2, room + 1)) > 0:
                room = blank + 1
            made.append((lead + left[:room]).rstrip())
            left = left[room:]
            if not left:
                break
    return made


def _visible(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line.expandtabs(4))


def _fitting(text: str, columns: int) -> int:
    """How many characters of ``text`` fit into so many columns of a terminal; at least one."""
    taken = 0
    for number, c in enumerate(text):
        taken += 2 if unicodedata.east_asian_width(c) in "WF" else 1
        if taken > columns:
            return max(1, number)
    return len(text)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate", description=(__doc__ or "").split("\n\n", 1)[1], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder or URI: storage/run-name")
    parser.add_argument("--base", metavar="MODEL", help="hub id, folder or URI to compare with; default: the model that the run began with")
    parser.add_argument("--prompts", metavar="FILE", help="text file with a prompt a line; default: the beginnings of held-out documents")
    parser.add_argument("--samples", metavar="N", type=int, help=f"prompts at most; default: all of FILE, else {SAMPLES}")
    parser.add_argument("--tokens", metavar="N", type=int, help=f"length of a continuation; default: {CONTINUATION_TOKENS}")
    parser.add_argument("--rows", metavar="N", type=int, help="held-out rows at most; default: the run's evalRows")
    parser.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible address (.../v1) that scores the samples; its key comes from OPENAI_API_KEY")
    parser.add_argument("--judge-model", metavar="NAME", help="the model to ask there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args(argv)


def _endpoint(arguments: argparse.Namespace) -> Endpoint | None:
    if (arguments.endpoint is None) != (arguments.judge_model is None):
        raise BadInput("--endpoint and --judge-model go together: where to ask, and which model there")
    if arguments.endpoint is None:
        return None
    if arguments.samples == 0:
        raise BadInput("--samples 0 leaves nothing for --endpoint to score; ask for one sample or more")
    return endpoint(arguments.endpoint, arguments.judge_model)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code. Progress goes to stderr."""
    arguments = _arguments(argv)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    def show(text: str) -> None:
        print(text, flush=True)  # noqa: T201

    try:
        return _run(arguments, say, show)
    except JobError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _run(arguments: argparse.Namespace, say: Callable[[str], None], show: Callable[[str], None]) -> int:
    at = _endpoint(arguments)
    if at is not None and at.key is not None and not at.loopback and at.url.startswith("http:"):
        say(f"warning: the key travels to {at.url} unencrypted; use https where the way there is not your own")
    prompts = read_prompts(arguments.prompts) if arguments.prompts else None
    run_place = place(arguments.run)
    result = measure(run_place, base=arguments.base, prompts=prompts, samples=arguments.samples, tokens=arguments.tokens, rows=arguments.rows, say=say)
    if not arguments.json:
        show("\n".join(lines(result)))
    try:
        save(run_place, result, say)
        if at is not None and not result.samples:
            say("there is no sample to score; give prompts of your own (--prompts)")
        elif at is not None:
            say(f"asking {at.model} at {at.url} to score {len(result.samples)} samples")
            result = scored(result, at, say)
            if not arguments.json and result.scores is not None:
                show("\n".join(["", *score_lines(result.scores)]))
            save(run_place, result, say)
    finally:  # whatever failed after it, what was measured is told
        if arguments.json:
            show(json.dumps(result.as_json(), indent=2, allow_nan=False))
    say(f"saved: {run_place / EVALUATION_FILE}, {run_place / SAMPLES_FILE}")
    if result.scores is not None and result.scores.failure is not None:
        say(f"error: {result.scores.failure}")
        return result.scores.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
