"""`python -m training.prepare` from text to rows, with a real Ray, real files and real kills."""

import functools
import gzip
import hashlib
import http.server
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import training
from training import shards, tokenizer
from training.data import open_data
from training.errors import BadInput, TrainingFailed
from training.prepare import PrepareSettings, prepare
from training.sources import held_out
from training.storage import place

ROOT = Path(training.__file__).parents[1]
WORDS = ["def", "return", "value", "self", "for", "in", "range", "if", "not", "none", "Grüße", "漢字", "<|endoftext|>", "\n", "\n    ", "0", "42"]
LENGTH = 32


@pytest.fixture(scope="module", autouse=True)
def connected():
    """One Ray for the module; the processes that tests start join it through RAY_ADDRESS."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=256 * 2**20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        yield
    ray.shutdown()


@pytest.fixture(scope="module")
def texts():
    chosen = random.Random(1)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(1, 120))) for _ in range(61)]


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    """One text file a document, named so that their order is that of the list."""
    at = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (at / f"{number:03d}.txt").write_text(text)
    return at


@pytest.fixture(scope="module")
def saved_tokenizer(texts, tmp_path_factory):
    at = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.train(texts, 300), place(str(at)))
    return str(at)


def asked(source, output, using, **others):
    return PrepareSettings(sources=(str(source),), output=str(output), tokenizer=using, sequence_length=LENGTH, **{"eval_fraction": 0.2, **others})


def silent(line):
    pass


def stream(prepared, split):
    return np.concatenate([np.fromfile(f"{prepared.folder.path}/{shard.file}", "<u2") for shard in prepared.manifest.splits[split].shards])


def documents_in(prepared, split):
    """The documents of a split, decoded: what a reader of the shards would see."""
    using = tokenizer.load(prepared.tokenizer_folder.path)
    tokens = stream(prepared, split)
    ends = np.flatnonzero(tokens == prepared.manifest.eos_token_id)
    assert ends[-1] == len(tokens) - 1, "the last document has its end too"
    return [using.decode(part[:-1]) for part in np.split(tokens, ends[:-1] + 1)]


def split_of(texts, fraction):
    out = [held_out(hashlib.sha256(text.encode()).digest(), fraction) for text in texts]
    return [t for t, o in zip(texts, out, strict=True) if not o], [t for t, o in zip(texts, out, strict=True) if o]


def test_the_shards_hold_every_document_once_in_order_and_nothing_else(folder, texts, tmp_path):
    said = []
    manifest = prepare(asked(folder, tmp_path / "out", "train:300"), said.append)
    prepared = open_data(str(tmp_path / "out"))
    assert prepared.manifest == manifest
    train, held = split_of(texts, 0.2)
    assert documents_in(prepared, "train") == train
    assert documents_in(prepared, "eval") == held
    assert len(train) > len(held) > 0
    for name, documents in (("train", train), ("eval", held)):
        split = manifest.splits[name]
        assert split.documents == len(documents)
        assert split.rows * LENGTH + 1 + split.dropped == split.tokens == len(stream(prepared, name))
        rows = np.concatenate([prepared.row(name, i)[1:] for i in range(prepared.rows(name))])
        assert rows.tolist() == stream(prepared, name)[1 : split.rows * LENGTH + 1].tolist(), "every token is a label once"
    assert manifest.sources[0].documents == len(texts)
    assert manifest.sources[0].bytes == sum(len(text.encode()) for text in texts)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".prepare.lock", "eval-00000.bin", "manifest.json", "tokenizer", "train-00000.bin"]
    assert said[-1].startswith(f"prepared {tmp_path}/out: ")
    assert ray.is_initialized(), "a Ray that was there before stays"


def test_the_bytes_depend_on_neither_parallelism_nor_time(folder, tmp_path):
    one = prepare(asked(folder, tmp_path / "one", "train:300", parallelism=1, shard_tokens=1024), silent)
    two = prepare(asked(folder, tmp_path / "two", "train:300", parallelism=2, shard_tokens=1024), silent)
    assert one.hash == two.hash
    assert len(one.splits["train"].shards) > 2, "this must be about several shards"
    files = sorted(p.name for p in (tmp_path / "one").glob("*.bin"))
    assert files == sorted(p.name for p in (tmp_path / "two").glob("*.bin"))
    for name in [*files, "tokenizer/tokenizer.json"]:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_one_process_alone_gives_the_same_bytes(folder, tmp_path, saved_tokenizer):
    tasks = prepare(asked(folder, tmp_path / "tasks", saved_tokenizer, parallelism=2, shard_tokens=1024), silent)
    done = command("--launcher", "process", *arguments_of(asked(folder, tmp_path / "alone", saved_tokenizer, shard_tokens=1024)))
    assert done.returncode == 0, done.stderr
    assert open_data(str(tmp_path / "alone")).manifest.hash == tasks.hash
    for file in (tmp_path / "tasks").glob("*.bin"):
        assert file.read_bytes() == (tmp_path / "alone" / file.name).read_bytes(), file.name
    assert "Ray" not in done.stdout


def test_a_task_whose_process_is_killed_runs_again(folder, tmp_path, saved_tokenizer, monkeypatch):
    """Killed after it has handed over its first batch, once; what was handed over is not there twice."""
    killed = str(tmp_path / "killed")
    honest = tokenizer.encode_group

    def killing(*arguments, **named):
        for batch in honest(*arguments, **named):
            yield batch
            if not os.path.exists(killed):
                with open(killed, "x"):
                    os.kill(os.getpid(), signal.SIGKILL)

    reference = prepare(asked(folder, tmp_path / "reference", saved_tokenizer), silent)
    monkeypatch.setattr(tokenizer, "encode_group", killing)
    again = prepare(asked(folder, tmp_path / "out", saved_tokenizer), silent)
    assert os.path.exists(killed), "nothing was killed"
    assert again.hash == reference.hash


def test_a_task_that_is_killed_each_time_ends_the_job_and_leaves_no_manifest(folder, tmp_path, saved_tokenizer, monkeypatch):
    monkeypatch.setattr(training.prepare, "_RETRIES", 1)
    monkeypatch.setattr(tokenizer, "encode_group", lambda *arguments, **named: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(TrainingFailed, match="Ray stopped tokenising"):
        prepare(asked(folder, tmp_path / "out", saved_tokenizer), silent)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".prepare.lock"]


def test_tasks_run_only_where_the_resource_is_and_say_what_they_wait_for(folder, tmp_path, saved_tokenizer, monkeypatch):
    monkeypatch.setattr(training.prepare, "_WAITING_SECONDS", 0.2)
    said = []
    with pytest.raises(KeyboardInterrupt):
        prepare(asked(folder, tmp_path / "out", saved_tokenizer, ray_resource="elsewhere"), interrupting(said))
    assert said[-1].startswith("waiting for a CPU with the resource 'elsewhere' in the Ray cluster, which has 2 CPU")
    assert not (tmp_path / "out" / "manifest.json").exists()


def interrupting(said):
    def say(line):
        said.append(line)
        if line.startswith("waiting for"):
            raise KeyboardInterrupt

    return say


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "arrow", "memory", "http"])
def test_the_same_documents_from_elsewhere_give_the_same_rows(kind, folder, texts, tmp_path, saved_tokenizer, served):
    source, output = tmp_path / f"data.{kind}", str(tmp_path / "out")
    if kind == "jsonl.gz":
        with gzip.open(source, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"body": text}) + "\n" for text in texts)
    elif kind == "parquet":
        pq.write_table(pa.table({"body": texts}), source, row_group_size=7)
    elif kind == "arrow":
        source.mkdir()
        table = pa.table({"body": texts})
        with pa.OSFile(str(source / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
        (source / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
        (source / "dataset_info.json").write_text("{}")
    elif kind == "memory":
        source, output = folder, f"memory://{tmp_path.name}/out"
    else:
        (served.folder / "data.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
        source = f"{served.url}/data.jsonl"
    manifest = prepare(asked(source, output, saved_tokenizer, text_column="body"), silent)
    reference = prepare(asked(folder, tmp_path / "reference", saved_tokenizer), silent)
    assert manifest.hash == reference.hash
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(shards.CACHE_VARIABLE, str(tmp_path / "cache"))
        assert open_data(output).row("eval", 0).tolist() == open_data(str(tmp_path / "reference")).row("eval", 0).tolist()


@pytest.fixture
def served(tmp_path):
    """A folder behind a real HTTP server."""
    at = tmp_path / "served"
    at.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(at))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield types.SimpleNamespace(folder=at, url=f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join()


# Started again


def test_the_same_again_does_nothing_and_says_so(folder, tmp_path, saved_tokenizer):
    first = prepare(asked(folder, tmp_path / "out", saved_tokenizer), silent)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file() and p.name != ".prepare.lock"}
    said = []
    assert prepare(asked(folder, tmp_path / "out", saved_tokenizer, parallelism=1), said.append) == first
    assert said[-1].startswith(f"already prepared: {tmp_path}/out holds these sources with these settings")
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_finished_data_is_never_overwritten_by_other_data(folder, texts, tmp_path, saved_tokenizer):
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    first = prepare(asked(source, tmp_path / "out", saved_tokenizer), silent)
    with pytest.raises(BadInput, match=r"holds data prepared otherwise \(different: evalFraction 0.2 -> 0.3\); give another output, or delete this one"):
        prepare(asked(source, tmp_path / "out", saved_tokenizer, eval_fraction=0.3), silent)
    (source / "000.txt").write_text("something else")
    with pytest.raises(BadInput, match=r"\(different: the sources' content\)"):
        prepare(asked(source, tmp_path / "out", saved_tokenizer), silent)
    assert open_data(str(tmp_path / "out")).manifest == first


KILLED = """
import os, signal, sys
from training import packing, prepare
where, arguments = sys.argv[1], sys.argv[2:]
class Killed(packing.ShardWriter):
    def write(self, tokens, documents):
        super().write(tokens, documents)
        if where == "packing" and self.tokens > 1500:
            os.kill(os.getpid(), signal.SIGKILL)
    def finish(self):
        split = super().finish()
        if where == "finishing" and self._split == "eval":
            os.kill(os.getpid(), signal.SIGKILL)
        return split
prepare.ShardWriter = Killed
sys.exit(prepare.main(arguments))
"""


def arguments_of(settings):
    named = {"sources": settings.sources[0], "output": settings.output, "tokenizer": settings.tokenizer, "sequenceLength": settings.sequence_length}
    named |= {"evalFraction": settings.eval_fraction, "shardTokens": settings.shard_tokens}
    return [word for key, value in named.items() for word in ("--set", f"{key}={value}")]


def test_a_killed_prepare_leaves_nothing_that_looks_finished_and_is_replaced(folder, tmp_path, saved_tokenizer):
    """Killed in the middle of a shard, and between the last shard and the manifest."""
    moments = {where: asked(folder, tmp_path / where, saved_tokenizer, shard_tokens=1024) for where in ("packing", "finishing")}
    children = {
        where: subprocess.Popen([sys.executable, "-c", KILLED, where, *arguments_of(settings)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for where, settings in moments.items()
    }
    whole = prepare(asked(folder, tmp_path / "fresh", saved_tokenizer), silent)
    for where, child in children.items():
        _, told = child.communicate()
        output = tmp_path / where
        assert child.returncode == -signal.SIGKILL, told
        assert list(output.glob("train-*.bin")), "it was killed in the middle, not before it began"
        with pytest.raises(BadInput, match=r"no manifest.json in it, so it is unfinished"):
            open_data(str(output))
        (output / "train-00099.bin").write_bytes(b"left over")
        (output / "notes.md").write_text("mine")
        assert prepare(moments[where], silent).hash == whole.hash
        assert not (output / "train-00099.bin").exists()
        assert (output / "notes.md").read_text() == "mine", "what others put there is left alone"


def test_two_prepares_never_write_into_one_folder(folder, tmp_path, saved_tokenizer):
    (tmp_path / "out").mkdir()
    with filelock.FileLock(tmp_path / "out" / ".prepare.lock"), pytest.raises(BadInput, match="another prepare is writing there"):
        prepare(asked(folder, tmp_path / "out", saved_tokenizer), silent)


def test_a_full_disk_is_one_sentence_and_exit_3(folder, tmp_path, saved_tokenizer):
    """A real file system of 64 KiB, in a mount namespace of the process's own."""
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs "$0" && exec "$@"', str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no process mount a file system of its own")
    source = tmp_path / "many"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text("".join(p.read_text() for p in sorted(folder.iterdir())) + str(number))
    look = f'"$@"; code=$?; ls {tmp_path}/out; exit $code'
    command = [*inside, "sh", "-c", look, "sh", sys.executable, "-m", "training.prepare", *arguments_of(asked(source, tmp_path / "out", saved_tokenizer))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "no room to write on (No space left on device)" in done.stderr
    assert done.stderr.count("\n") == 1, "one sentence, no traceback"
    assert done.stdout.split() == [], "nothing of it is left, so the disk has its room back"


# Refused


def refusal(settings):
    with pytest.raises(BadInput) as raised:
        prepare(settings, silent)
    if place(settings.output).exists():
        assert [p.name for p in Path(settings.output).iterdir() if p.name != ".prepare.lock"] == [], "nothing is left behind"
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_text_that_is_too_short_is_told_with_the_way_out(tmp_path, saved_tokenizer):
    (tmp_path / "a.txt").write_text("short")
    told = refusal(asked(tmp_path / "a.txt", tmp_path / "out", saved_tokenizer, eval_fraction=0.0))
    assert "are fewer than one row needs (33)" in told
    assert "add text, or lower sequenceLength" in told


def test_an_eval_split_that_is_too_short_is_told_with_the_way_out(folder, tmp_path, saved_tokenizer):
    told = refusal(asked(folder, tmp_path / "out", saved_tokenizer, eval_fraction=0.0001))
    assert "evalFraction = 0.0001 holds out 0 of 61 documents" in told
    assert "set evalFraction=0 to go without" in told


def test_without_an_eval_split_every_document_is_trained_on(folder, tmp_path, texts, saved_tokenizer):
    manifest = prepare(asked(folder, tmp_path / "out", saved_tokenizer, eval_fraction=0.0), silent)
    assert set(manifest.splits) == {"train"}
    assert documents_in(open_data(str(tmp_path / "out")), "train") == texts


@pytest.mark.parametrize("rows", [["", None], []])
def test_rows_without_any_text_are_told(rows, tmp_path, saved_tokenizer):
    pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), tmp_path / "a.parquet")
    assert f"no document in {tmp_path}/a.parquet" in refusal(asked(tmp_path / "a.parquet", tmp_path / "out", saved_tokenizer))


def test_a_bad_line_found_by_a_task_is_told_by_its_number(tmp_path, saved_tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    assert "a.jsonl: line 2: 'text' holds int, not text" in refusal(asked(tmp_path / "a.jsonl", tmp_path / "out", saved_tokenizer))


def test_an_output_that_cannot_be_written_to_is_told(folder, tmp_path, saved_tokenizer):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=f"output = {tmp_path}/file/out: can't be written to"):
        prepare(asked(folder, tmp_path / "file" / "out", saved_tokenizer), silent)


# The command


def command(*arguments, **environment):
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | environment
    return subprocess.run([sys.executable, "-m", "training.prepare", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, env=env)


def test_the_command_starts_a_ray_of_its_own_and_stops_it(folder, tmp_path, saved_tokenizer):
    (tmp_path / "prepare.yaml").write_text(
        f"sources: [{folder}]\noutput: {tmp_path}/out\ntokenizer: {saved_tokenizer}\nsequenceLength: 99\nevalFraction: 0.2\n"
    )
    done = command("--config", str(tmp_path / "prepare.yaml"), "--set", f"sequenceLength={LENGTH}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing on the terminal but what the person wants to know"
    lines = done.stdout.splitlines()
    assert lines[0] == "starting Ray on this machine"
    assert lines[-1].startswith(f"prepared {tmp_path}/out: ")
    assert open_data(str(tmp_path / "out")).manifest.hash == prepare(asked(folder, tmp_path / "again", saved_tokenizer), silent).hash


def test_the_command_with_bad_input_is_exit_2_and_one_sentence(tmp_path):
    done = command("--set", "sources=/nowhere/at/all", "--set", f"output={tmp_path}/out", "--set", "tokenizer=train:300")
    assert done.returncode == 2
    assert done.stderr == "sources: /nowhere/at/all: no such file or folder; check the path\n"
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()
