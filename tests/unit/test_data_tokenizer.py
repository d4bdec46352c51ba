"""Tokenizers: trained the same every time, loaded from a folder or URI, told apart by what they do."""

import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import training
from training import sources, tokenizer
from training.errors import BadInput
from training.prepare_settings import asked_vocabulary
from training.storage import place

ROOT = Path(training.__file__).parents[1]
TEXTS = ["def add(a, b):\n    return a + b\n" * 5, "for word in the words of the words:\n\tprint(word)\n" * 5, "Grüße aus 漢字"]


@pytest.fixture(scope="module")
def trained():
    return tokenizer.train(TEXTS, 300)


@pytest.fixture
def folder(tmp_path, trained):
    tokenizer.save(trained, place(str(tmp_path / "tokenizer")))
    return tmp_path / "tokenizer"


def ids(using, text):
    return using(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_can_be_written_and_comes_back(trained, text):
    tokens = tokenizer._restored(trained.backend_tokenizer.to_str(), False).encode(text, add_special_tokens=False).ids
    assert trained.eos_token_id not in tokens, "no text can forge the end of a document"
    assert trained.decode(tokens) == unicodedata.normalize("NFC", text)


def test_it_has_the_asked_size_and_an_end_of_text_for_padding_too(trained):
    assert tokenizer.vocabulary(trained) == 300
    assert trained.eos_token == trained.pad_token == "<|endoftext|>"


def test_training_again_in_another_process_gives_the_same_tokenizer(trained):
    script = "import json, sys; from training import tokenizer; print(tokenizer.fingerprint(tokenizer.train(json.load(sys.stdin), 300)))"
    done = subprocess.run([sys.executable, "-c", script], input=json.dumps(TEXTS), capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == tokenizer.fingerprint(trained)


def test_the_saved_folder_is_what_transformers_loads(folder, trained):
    again = AutoTokenizer.from_pretrained(folder)
    text = "for a in b:\n    漢\n"
    assert ids(again, text) == ids(trained, text)
    assert again.eos_token_id == trained.eos_token_id
    assert tokenizer.fingerprint(again) == tokenizer.fingerprint(trained)


def test_a_tokenizer_is_loaded_from_a_uri_too(trained, tmp_path):
    uri = f"memory://{tmp_path.name}/tokenizer"
    tokenizer.save(trained, place(uri))
    assert tokenizer.fingerprint(tokenizer.load(uri)) == tokenizer.fingerprint(trained)


def test_the_fingerprint_follows_what_a_tokenizer_does(folder, trained):
    assert tokenizer.fingerprint(tokenizer.train(TEXTS, 290)) != tokenizer.fingerprint(trained)
    other_end = tokenizer.load(str(folder))
    other_end.eos_token = other_end.convert_ids_to_tokens(5)
    assert tokenizer.fingerprint(other_end) != tokenizer.fingerprint(trained)
    templated = tokenizer.load(str(folder))
    templated.chat_template = "{{ messages }}"
    assert tokenizer.fingerprint(templated) == tokenizer.fingerprint(trained)


def test_special_tokens_in_the_text_are_text_unless_they_are_to_be_parsed(trained):
    rules = trained.backend_tokenizer.to_str()
    text = "a<|endoftext|>b"
    plain = tokenizer._restored(rules, False).encode(text, add_special_tokens=False).ids
    parsed = tokenizer._restored(rules, True).encode(text, add_special_tokens=False).ids
    assert trained.eos_token_id not in plain
    assert parsed.count(trained.eos_token_id) == 1


def test_a_long_document_in_segments_has_the_tokens_of_the_whole(trained, monkeypatch):
    monkeypatch.setattr(sources, "SEGMENT_CHARS", 128)
    text = "".join(TEXTS[:2]) * 3
    parts = sources.segments(text)
    assert len(parts) > 8
    assert [token for part in parts for token in ids(trained, part)] == ids(trained, text)


# What is refused


def refusal(name):
    with pytest.raises(BadInput) as raised:
        tokenizer.load(str(name))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_folder_without_a_tokenizer_is_told(tmp_path):
    assert refusal(tmp_path).startswith(f"tokenizer = {tmp_path}: can't be loaded")


def test_a_damaged_tokenizer_is_told(folder):
    (folder / "tokenizer.json").write_text("{")
    assert "can't be loaded" in refusal(folder)


def test_a_missing_uri_is_told():
    assert refusal("memory://nowhere/tokenizer") == "tokenizer = memory://nowhere/tokenizer: no such folder; check the path or URI"


def test_a_tokenizer_without_an_end_of_text_is_told(folder):
    settings_file = folder / "tokenizer_config.json"
    raw = json.loads(settings_file.read_text())
    raw["tokenizer_class"] = "PreTrainedTokenizerFast"  # Qwen2's own class would fill in its usual one
    settings_file.write_text(json.dumps({key: value for key, value in raw.items() if key not in ("eos_token", "pad_token")}))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    assert "has no end-of-text (EOS) token, which joins documents; set eos_token" in refusal(folder)


@pytest.mark.parametrize("name", ["train:", "train:256", "train:many", "train:-5", "train:99999999"])
def test_a_vocabulary_that_cannot_be_is_told(name):
    with pytest.raises(BadInput, match="write train:SIZE with a vocabulary of 257 to"):
        asked_vocabulary(name)


def test_a_vocabulary_is_asked_for_by_its_size():
    assert asked_vocabulary("train:4096") == 4096
    assert asked_vocabulary("train:4_096") == 4096
    assert asked_vocabulary("Qwen/Qwen2.5-1.5B") is None


def test_a_model_folder_without_tokenizer_files_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    with pytest.raises(BadInput, match=r"no tokens at all.*tokenizer\.json"):
        tokenizer.load(str(tmp_path))


def test_a_missing_folder_is_not_taken_for_a_hub_id(tmp_path):
    with pytest.raises(BadInput, match="no such folder"):
        tokenizer.load(str(tmp_path / "gone"))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_beside_a_model_transformers_reads_the_same_tokens(trained, tmp_path, model_type):
    tokenizer.save(trained, place(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "def add(a, b):\n    return a+b  # isn't 12345\n\n\n\tx"
    assert again(text).input_ids == trained(text).input_ids
    assert tokenizer.fingerprint(tokenizer.load(str(tmp_path))) == tokenizer.fingerprint(trained)
