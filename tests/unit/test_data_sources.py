"""Sources: which files are read, how they are cut for the tasks, and what is refused before any work."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import training
from training import sources
from training.errors import BadInput
from training.prepare_settings import SUFFIXES
from training.sources import checked, find, fragments, held_out, plan, segments
from training.storage import redacted

ROOT = Path(training.__file__).parents[1]
TEXTS = ["first\ndocument", "zweites Dokument äöü 漢字", "", "third " * 50]


def documents(paths, column="text"):
    """What the tasks would read: the whole documents of all groups, in order."""
    read, parts = [], []
    for group in plan(checked(find(tuple(map(str, paths)), SUFFIXES), column, lambda done: None)):
        for piece in group:
            for fragment in fragments(piece, column, 0.0):
                parts.append(fragment.text)
                if fragment.ends:
                    read.append("".join(parts))
                    parts = []
    assert parts == [], "every document has an end"
    return read


def refusal(paths, column="text"):
    with pytest.raises(BadInput) as raised:
        documents(paths, column)
    assert "\n" not in str(raised.value), "one sentence"
    return str(raised.value)


def write_jsonl(path, texts, open_=open, key="text"):
    with open_(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": number, key: text}, ensure_ascii=number % 2 == 0) + "\n" for number, text in enumerate(texts))


def write_dataset(folder, texts, **state):
    """A folder as `datasets.Dataset.save_to_disk` leaves it: Arrow streams in two files and two descriptions."""
    folder.mkdir()
    files = []
    for number, part in enumerate((texts[:2], texts[2:])):
        table = pa.table({"text": pa.array(part, pa.string()), "id": list(range(len(part)))})
        files.append({"filename": f"data-{number:05d}-of-00002.arrow"})
        with pa.OSFile(str(folder / files[-1]["filename"]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train", **state}))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "parquet", "dataset"])
def test_every_row_of_a_table_is_a_document(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "dataset":
        write_dataset(path, TEXTS)
    elif kind == "parquet":
        pq.write_table(pa.table({"text": [*TEXTS, None], "id": [1, 2, 3, 4, 5]}), path, row_group_size=2)
    else:
        write_jsonl(path, [*TEXTS, None], gzip.open if kind.endswith("gz") else open)
    assert documents([path]) == [text for text in TEXTS if text], "in order, without empty ones"


def test_a_dataset_saved_by_the_library_itself_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "data"), num_shards=2)
    assert documents([tmp_path / "data"]) == [text for text in TEXTS if text]


def test_a_text_file_is_one_document_and_a_folder_is_read_by_path(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b/c.py", ".hidden.txt", ".git/config.txt", "a/__pycache__/x.py", "picture.png"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    assert documents([tmp_path / "in"]) == ["a/b/c.py", "a/z.md", "b.txt"], "hidden files and other endings are left alone"
    assert documents([tmp_path / "in" / "picture.png", tmp_path / "in" / "b.txt"]) == ["picture.png", "b.txt"], "a named file is taken, in the order given"


def test_line_ends_are_kept_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert documents([tmp_path / "a.txt"]) == ["one\r\ntwo\rthree\n"]


def test_the_standard_library_is_text_that_is_always_there():
    files = find(("stdlib",), SUFFIXES)
    paths = [file.place.path for file in files]
    assert sum(file.size for file in files) > 5e6, "several megabytes"
    assert any(path.endswith("/json/decoder.py") for path in paths)
    assert not any("/site-packages/" in path or "/test/" in path or "/tests/" in path for path in paths)


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=30),
    piece=st.integers(1, 60),
    kind=st.sampled_from(["txt", "jsonl"]),
)
def test_a_large_file_is_cut_without_loss(tmp_path_factory, lines, piece, kind):
    path = tmp_path_factory.mktemp("cut") / f"a.{kind}"
    if kind == "txt":
        texts = ["\n".join(["x", *lines])]
        path.write_bytes(texts[0].encode())
    else:
        texts = [text for text in lines if text]
        write_jsonl(path, ["first", *lines])
        texts = ["first", *texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", piece)
        patch.setattr(sources, "GROUP_BYTES", piece)
        assert documents([path]) == texts
        assert len([p for group in plan(checked(find((str(path),), SUFFIXES), "text", lambda done: None)) for p in group]) <= path.stat().st_size // piece + 1


def test_row_groups_of_parquet_are_shared_out_among_tasks(tmp_path, monkeypatch):
    texts = [f"document {number} " * 20 for number in range(50)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=5)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1)
    monkeypatch.setattr(sources, "GROUP_BYTES", 1)
    assert len(plan(checked(find((str(tmp_path),), SUFFIXES), "text", lambda done: None))) == 10
    assert documents([tmp_path]) == texts


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab \n\t"), max_size=200), size=st.integers(4, 40))
def test_segments_put_together_are_the_text(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SEGMENT_CHARS", size)
        parts = segments(text)
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts)


def test_a_segment_ends_between_two_visible_lines_where_there_are_some(monkeypatch):
    monkeypatch.setattr(sources, "SEGMENT_CHARS", 20)
    assert segments("aaaaaaaaaaaa\nbbb\n\n  cccccccccc") == ["aaaaaaaaaaaa\n", "bbb\n\n  cccccccccc"]


@given(digest=st.binary(min_size=32, max_size=32), one=st.floats(0, 1), other=st.floats(0, 1))
def test_a_larger_fraction_holds_out_the_same_documents_and_more(digest, one, other):
    less, more = sorted((one, other))
    assert held_out(digest, less) <= held_out(digest, more)
    assert not held_out(digest, 0.0)
    assert held_out(digest, 1.0)


def test_about_the_asked_fraction_is_held_out(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(2000)])
    pieces = [piece for group in plan(checked(find((str(tmp_path),), SUFFIXES), "text", lambda done: None)) for piece in group]
    few = {f.text for piece in pieces for f in fragments(piece, "text", 0.1) if f.held_out}
    assert 150 < len(few) < 250


def test_a_document_is_held_out_alike_in_a_file_of_its_own_and_in_a_table(tmp_path):
    texts = [f"document {number}" for number in range(50)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02d}.txt").write_text(text)
    files = checked(find((str(tmp_path),), SUFFIXES), "text", lambda done: None)
    sides = {}
    for piece in [piece for group in plan(files) for piece in group]:
        for f in fragments(piece, "text", 0.3):
            sides.setdefault(f.text, set()).add(f.held_out)
    assert len(sides) == 50
    assert {len(found) for found in sides.values()} == {1}
    assert len({found.pop() for found in sides.values()}) == 2


# What is refused


def test_a_missing_path_is_told(tmp_path):
    assert refusal([tmp_path / "no.txt"]) == f"sources: {tmp_path}/no.txt: no such file or folder; check the path"


def test_a_folder_without_a_file_of_the_wanted_endings_is_told(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"x")
    assert "no file in this folder ends in .txt, .md" in refusal([tmp_path])


def test_empty_files_are_told(tmp_path):
    (tmp_path / "a.txt").write_text("")
    assert "every file is empty" in refusal([tmp_path])


def test_an_unknown_scheme_is_told():
    assert "nothing here opens nonsense://" in refusal(["nonsense://bucket/x"])


def test_text_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    told = refusal([tmp_path])
    assert told.startswith(f"{tmp_path}/latin.txt: not UTF-8 text")
    assert "convert it" in told


def test_utf_8_cut_by_the_size_of_a_block_is_still_utf_8(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", 3)
    (tmp_path / "a.txt").write_text("漢字äöü🙂" * 10)
    assert documents([tmp_path]) == ["漢字äöü🙂" * 10]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "dataset"])
def test_a_wrong_column_is_told_with_those_there_are(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "dataset":
        write_dataset(path, TEXTS)
    elif kind == "parquet":
        pq.write_table(pa.table({"text": TEXTS, "id": [1, 2, 3, 4]}), path)
    else:
        write_jsonl(path, TEXTS, gzip.open if kind.endswith("gz") else open)
    told = refusal([path], column="content")
    assert "'content'" in told
    assert "text" in told.split("it has ")[1]
    assert "id" in told.split("it has ")[1]
    assert "textColumn" in told
    assert "not text" in refusal([path], column="id")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 3 is not JSON"),
        ("[1]", "line 3 holds a list"),
        ("7", "line 3 is no JSON object"),
        ('{"other": "x"}', "line 3 has no 'text'; it has other"),
        ('{"text": 7}', "line 3: 'text' holds int, not text"),
    ],
)
def test_a_line_that_is_no_document_is_told_by_its_number(tmp_path, line, what):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n\n{line}\n{{"text": "two"}}\n')
    assert f"{tmp_path}/a.jsonl: {what}" in refusal([tmp_path])


def test_a_json_array_is_told_how_to_become_lines(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"}]')
    assert "jq -c '.[]'" in refusal([tmp_path / "a.json"])


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude42"}\n')
    assert documents([tmp_path]) == ["a\ufffdb 🙂"]


@pytest.mark.parametrize(("name", "content"), [("a.parquet", b"no parquet at all"), ("a.jsonl.gz", b"no gzip at all"), ("a.parquet", b"PAR1")])
def test_a_file_that_is_not_what_its_ending_says_is_told(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert refusal([tmp_path]).startswith(f"{tmp_path}/{name}: can't be read")


def test_a_cut_off_gzip_file_is_told(tmp_path):
    write_jsonl(tmp_path / "a.jsonl.gz", [os.urandom(2000).hex() for _ in range(3)], gzip.open)
    whole = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert refusal([tmp_path]).startswith(f"{tmp_path}/a.jsonl.gz: ")


def test_several_splits_in_one_dataset_are_told_by_name(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    told = refusal([tmp_path])
    assert "the splits train, test" in told
    assert f"{tmp_path}/train" in told


def test_a_selection_of_a_dataset_is_refused_with_the_way_out(tmp_path):
    write_dataset(tmp_path / "data", TEXTS, _indices_files=[{"filename": "indices.arrow"}])
    assert "flatten_indices()" in refusal([tmp_path / "data"])


def test_a_dataset_with_a_missing_file_is_told(tmp_path):
    write_dataset(tmp_path / "data", TEXTS)
    (tmp_path / "data" / "data-00001-of-00002.arrow").unlink()
    assert "data-00001-of-00002.arrow: the dataset's state.json names this file" in refusal([tmp_path / "data"])


CHECK = """
import sys
from training.errors import BadInput
from training.prepare_settings import SUFFIXES
from training.sources import checked, find
try:
    checked(find((sys.argv[1],), SUFFIXES), "text", lambda done: None)
except BadInput as error:
    print(error)
"""


def test_a_file_without_permission_is_named(tmp_path):
    (tmp_path / "secret.txt").write_text("text")
    (tmp_path / "secret.txt").chmod(0)
    command = [sys.executable, "-c", CHECK, str(tmp_path)]
    if os.geteuid() == 0:  # root reads everything, unless the capability to do so is taken away
        if not shutil.which("setpriv"):
            pytest.skip("root, and no setpriv to take the right to read everything away")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == f"{tmp_path}/secret.txt: can't be read (Permission denied)\n", done.stderr


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://KEY:SECRET@bucket/text", "s3://***@bucket/text"),
        ("s3://bucket/text?access_key=A&secret_key=B&region=x", "s3://bucket/text?access_key=***&secret_key=***&region=x"),
        ("s3://bucket/text", "s3://bucket/text"),
        ("/home/me@work/text", "/home/me@work/text"),
    ],
)
def test_credentials_in_a_uri_are_never_shown(uri, shown):
    assert redacted(uri) == shown
