"""Data and runs on S3: the same job against a real HTTP server that speaks S3."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from tests.training.test_job import start
from training.record import read_run
from training.storage import place


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("w") as out:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=out, stderr=subprocess.STDOUT)
        try:
            port = None
            while port is None:
                assert server.poll() is None, log.read_text()
                found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
                port = found and found[1]
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def test_a_run_lives_on_s3_from_data_to_export(data: Path, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("TRAINING_DATA_CACHE", str(tmp_path / "cache"))
    fs = pafs.S3FileSystem(endpoint_override=endpoint, scheme="http", region="us-west-2", allow_bucket_creation=True)
    fs.create_dir("bucket")
    pafs.copy_files(str(data), "bucket/prepared", destination_filesystem=fs)
    query = f"?endpoint_override={endpoint}&scheme=http&region=us-west-2"
    source, storage = f"s3://bucket/prepared{query}", f"s3://bucket/runs{query}"

    start(Path("unused"), tmp_path, steps=8, data=source, storage=storage, stopAfter=5, export=False)
    said: list[str] = []
    summary = start(Path("unused"), tmp_path, "process", said.append, data=source, storage=storage)
    assert summary["resumedFrom"] == 5, said
    run, lines = read_run(place(storage) / "r")
    assert run["outcome"] == "done"
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    names = {info.path.removeprefix("bucket/runs/r/") for info in fs.get_file_info(pafs.FileSelector("bucket/runs/r", recursive=True)) if info.is_file}
    assert {"run.json", "metrics.jsonl", "report.html", "model/model.safetensors", "model/tokenizer.json"} <= names, names
    markers = [json.loads(fs.open_input_stream(f"bucket/runs/r/{name}").read()) for name in names if name.endswith("complete.json")]
    assert sorted(marker["step"] for marker in markers) == [6, 8] or sorted(marker["step"] for marker in markers) == [5, 8], "the last two are kept"
    assert not [name for name in names if "probe" in name], "the probe must be gone"

    tuned = start(Path("unused"), tmp_path, data=source, storage=storage, run="tuned", steps=2, model={"pretrained": f"s3://bucket/runs/r/model{query}"})
    assert tuned["loss"] < lines[0]["loss"] - 0.1, "it must begin with the weights that were trained"
