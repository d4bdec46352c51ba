"""Storage that refuses, stalls, cuts off, fills up or alters what it was given: a run waits, and what it resumes from is what it wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.training.pretended import S3_ENVIRONMENT, Run, fill, go, prepare, values
from tests.training.proxy import EXPIRED, SLOW_DOWN, Credentials, Fault, Proxy, Request, moto
from tests.training.ranks import collect, free_port, run_ranks, start_ranks
from tests.training.test_job import ROOT, settings, start
from tests.training.tiny import Case, build
from training import checkpoint, checks, dcp, record, schema, storage
from training.errors import BadInput
from training.record import read_run
from training.storage import place
from training.world import World


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto(tmp_path_factory.mktemp("moto")) as address:
        fs = pafs.S3FileSystem(access_key="test", secret_key="test", endpoint_override=address, scheme="http", region="us-west-2", allow_bucket_creation=True)
        fs.create_dir("bucket")
        yield address


# Storage that is away for a while


def refuses(first: int, last: int, fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda request: fault if first <= request.number <= last else None


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fault", [Fault(refusal=SLOW_DOWN), Fault(cut="before"), Fault(cut="after")], ids=["503", "cut", "answer lost"])
def test_a_store_that_is_away_for_a_while_costs_checkpoints_and_not_the_run(server: str, tmp_path: Path, asynchronous: bool, fault: Fault) -> None:
    # The window lies in the first two saves, whose 2 ranks make some 20 requests each.
    with Proxy(server, refuses(12, 40, fault)) as proxy:
        results = run_ranks(2, go, Run(proxy.uri(f"bucket/{tmp_path.name}"), steps=12, asynchronous=asynchronous))
        assert len(proxy.requests) > 40, "the store must have come back while the run was on"
    for result in results:
        assert (result["final"], result["values"]) == (12, {12.0})
        assert any("could not be written" in text and "training goes on" in text for text in result["said"]), result["said"]
        assert any("storage takes checkpoints again" in text for text in result["said"]), result["said"]
    assert results[0]["begun"] == results[1]["begun"], "what is tried again, and when, must be one decision"


def test_the_job_goes_on_while_its_bucket_refuses_everything(data: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for module, name in ((storage, "FIRST_PAUSE"), (checkpoint, "FIRST_PAUSE"), (record, "_FIRST_PAUSE")):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(storage, "PATIENT", (1.0, 3.0, 1))
    monkeypatch.setattr(storage, "HASTY", (1.0, 3.0, 1))
    began: list[int] = []

    def fault(request: Request) -> Fault | None:
        if "step-00000003.1/complete.json" in request.path and request.method == "PUT":
            began.append(request.number)
        return Fault(refusal=SLOW_DOWN) if began and began[0] < request.number <= began[0] + 12 else None

    said: list[str] = []
    with Proxy(server, fault) as proxy:
        uri = proxy.uri(f"bucket/{tmp_path.name}")
        summary = start(data, Path("unused"), "process", said.append, storage=uri, steps=20, export=False, evalRows=0)
        run, lines = read_run(place(uri) / "r")
        found = checkpoint.find(place(uri) / "r" / "checkpoints")
    assert began
    assert summary["step"] == 20
    assert (run["outcome"], len(run["attempts"])) == ("done", 1), "no restart was needed"
    assert [line["step"] for line in lines] == list(range(1, 21)), "every line is there, once and in order"
    assert [(c.step, c.torn) for c in found] == [(20, None), (18, None)]
    assert any("could not be written" in text for text in said), said
    assert any("storage takes checkpoints again" in text for text in said), said


def test_a_restart_waits_for_a_store_that_is_away_and_a_first_start_does_not(data: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(storage, "PATIENT", (1.0, 3.0, 1))
    said: list[str] = []
    with Proxy(server) as proxy:
        job = settings(data, Path("unused"), storage=proxy.uri(f"bucket/{tmp_path.name}"))
        (place(job.storage) / "r").make_folder()
        checks.check(job)
        proxy.fault = lambda request: Fault(refusal=SLOW_DOWN) if len(said) < 2 else None
        assert checks.check_again(job, said.append).run == "r"
        proxy.fault = lambda request: Fault(refusal=SLOW_DOWN)
        with pytest.raises(BadInput, match="can't be read"):
            checks.check(job)
        with pytest.raises(BadInput, match="can't be read"):
            checks.check_again(dataclasses.replace(job, storage_patience=0), said.append)
    assert len(said) == 2
    assert "storage does not answer" in said[0]
    assert "is asked again for" in said[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_faults_at_random_never_make_a_checkpoint_that_is_wrong(server: str, tmp_path: Path, seed: int) -> None:
    chance, faults = random.Random(seed), [Fault(refusal=SLOW_DOWN), Fault(cut="before"), Fault(cut="after")]
    with Proxy(server, lambda _: chance.choice(faults) if chance.random() < 0.04 else None) as proxy:
        run = Run(proxy.uri(f"bucket/{tmp_path.name}"), steps=10, asynchronous=seed % 2 == 1, client=(1.0, 3.0, 2))
        for result in run_ranks(2, go, run):
            assert (result["final"], result["values"]) == (10, {10.0})


@pytest.mark.parametrize(("patience", "tries"), [(0.0, 1), (0.5, 2)])
def test_when_patience_is_over_all_ranks_stop_and_the_checkpoint_before_is_there(server: str, tmp_path: Path, patience: float, tries: int) -> None:
    def fault(request: Request) -> Fault | None:
        return Fault(refusal=SLOW_DOWN) if "step-00000002" not in request.path and request.method in ("PUT", "POST", "DELETE") else None

    with Proxy(server, fault) as proxy:
        run = Run(proxy.uri(f"bucket/{tmp_path.name}"), steps=4, patience=patience)
        outcomes = collect(*start_ranks(2, go, run))
        removals = [r for r in proxy.requests if r.method == "HEAD" and r.path.endswith("step-00000004.1/complete.json")]
    for rank, (_, error) in enumerate(outcomes):
        assert error is not None, f"rank {rank} must stop"
        assert error[0] == "TrainingFailed", error[2]
        for part in ("step 4 could not be written", "SLOW_DOWN", "the one of step 2 is untouched"):
            assert part in error[1]
    assert len(removals) >= tries, "what each try left is removed, and with patience there is more than one"
    after = run_ranks(1, go, Run(proxy_free(server, tmp_path), steps=6, attempt=2))[0]
    assert (after["start"], after["final"]) == (2, 6)


def proxy_free(server: str, tmp_path: Path) -> str:
    return f"s3://bucket/{tmp_path.name}?endpoint_override={server}&scheme=http&region=us-west-2"


# Storage that is slow


def test_a_slow_store_makes_checkpoints_rarer_and_never_more_than_one_at_a_time(server: str, tmp_path: Path) -> None:
    gate = threading.Event()

    def fault(request: Request) -> Fault | None:
        if request.path.startswith("/open"):
            gate.set()
            return Fault(refusal=(200, "Opened", ""))
        return None if gate.is_set() or "step-" not in request.path else Fault(gate=gate)

    with Proxy(server, fault) as proxy:
        run = Run(proxy.uri(f"bucket/{tmp_path.name}"), steps=41, asynchronous=True, client=(1.0, 120.0, 1), tell=f"http://{proxy.endpoint}/open")
        results = run_ranks(2, go, run)
        opened = next(r.number for r in proxy.requests if r.path.startswith("/open"))
        held = {found[0] for r in proxy.requests[: opened - 1] if (found := re.search(r"step-\d+", r.path))}
    assert held == {"step-00000002"}, "while it is on its way no other may be begun: each holds a copy of the state"
    for result in results:
        assert result["begun"] == [2, 41], "training went on meanwhile, and the last step was saved"
        assert (result["final"], result["values"]) == (41, {41.0})
        assert sum("still on its way" in text for text in result["said"]) == 1, result["said"]


def test_a_store_that_takes_nothing_for_as_long_as_patience_lasts_ends_the_run(server: str, tmp_path: Path) -> None:
    gate = threading.Event()
    with Proxy(server, lambda request: Fault(gate=gate) if "step-" in request.path else None) as proxy:
        outcomes = collect(*start_ranks(2, _waits_for_ever, proxy.uri(f"bucket/{tmp_path.name}")))
        gate.set()
    for _, error in outcomes:
        assert error is not None
        assert error[0] == "TrainingFailed", error[2]
        assert "it has taken nothing for" in error[1]


def _waits_for_ever(world: World, uri: str) -> None:
    prepare(Run(uri, client=(1.0, 600.0, 1)))
    _, net, optimizer = build(world, Case())
    ticks = iter(range(0, 10_000, 50))
    checkpoints = checkpoint.Checkpointer(place(uri) / "checkpoints", world, 1, 2, True, patience=300.0, clock=lambda: float(next(ticks)))
    checkpoints.save(1, net, optimizer, {})
    checkpoints.wait()


def test_parts_and_files_travel_at_the_same_time_both_ways(server: str, tmp_path: Path) -> None:
    both = threading.Barrier(4)

    def fault(request: Request) -> Fault | None:
        # Four files of a rank (and then four blocks) are held until all four are here: one after the other they would never be.
        if re.search(r"step-\d+\.1/__0_\d", request.path) and request.method in ("PUT", "GET"):
            both.wait(timeout=60)
        return None

    with Proxy(server, fault) as proxy:
        assert run_ranks(1, _there_and_back, proxy.uri(f"bucket/{tmp_path.name}")) == [{3.0}]
        assert proxy.most_at_once >= 4


def _there_and_back(world: World, uri: str) -> set[float]:
    prepare(Run(uri))
    _, net, optimizer = build(world, Case())
    checkpoint._state(net, optimizer, world)
    fill(net, optimizer, 3)
    checkpoints = checkpoint.Checkpointer(place(uri) / "checkpoints", world, 1, 2, False)
    checkpoints.save(3, net, optimizer, {})
    found = checkpoint.latest(checkpoints.folder, world, print)
    assert found is not None
    fill(net, optimizer, -1)
    checkpoints.load(found, net, optimizer)
    return values(net, optimizer)


# Storage that is full


def test_a_disk_that_was_full_and_has_room_again_costs_only_the_checkpoints_between(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        # Leaves room for one checkpoint of some 500 kB, and not for two.
        result = run_ranks(1, _fills_and_frees, Run(str(disk), steps=8), 3_300_000)[0]
    assert result["final"] == 8
    refused = [text for text in result["said"] if "could not be written" in text]
    assert refused, result["said"]
    assert "No space left on device" in refused[0]
    assert result["half"] == [], "what was half written must not keep the disk full"


def _fills_and_frees(world: World, run: Run, ballast: int) -> dict[str, Any]:
    file = Path(run.folder) / "ballast"
    file.write_bytes(b"x" * ballast)
    half: list[str] = []
    refused = checkpoint.Checkpointer._refused

    def refused_and_freed(self: Any, step: int, error: Any) -> None:
        half.extend(child.name for child in (Path(run.folder) / "checkpoints").iterdir() if not (child / "complete.json").exists())
        refused(self, step, error)
        file.unlink(missing_ok=True)

    checkpoint.Checkpointer._refused = refused_and_freed  # type: ignore[method-assign]
    return {**go(world, run), "half": half}


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a disk of limited size needs a tmpfs, which can't be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# Storage that alters what it was given


def test_a_flipped_bit_anywhere_is_found_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    # Small blocks, so that most tensors lie in several.
    run = Run(str(tmp_path), block=4096)
    run_ranks(2, go, run)
    for rank, found in enumerate(run_ranks(2, _flips, run, 12)):
        assert found == [4] * 12, f"rank {rank}"
    assert run_ranks(1, _flips, run, 6)[0] == [4] * 6, "another world size reads other parts, and checks those"


def _flips(world: World, run: Run, times: int) -> list[int]:
    """Flips one bit of the newest checkpoint, loads, and puts it back; the steps that were loaded."""
    prepare(run)
    _, net, optimizer = build(world, Case())
    checkpoint._state(net, optimizer, world)
    folder, newest, loaded = place(run.folder) / "checkpoints", Path(run.folder) / "checkpoints" / "step-00000006.1", []
    files = sorted(path for path in newest.iterdir() if path.name != "complete.json")
    for seed in range(times):
        chance, said = random.Random(seed), []
        file = files[seed % len(files)]
        good = world.on_main(file.read_bytes)

        def flip(file: Path = file, good: bytes | None = good, chance: random.Random = chance) -> None:
            assert good is not None
            bad = bytearray(good)
            bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
            file.write_bytes(bad)

        world.on_main(flip)
        checkpoints = checkpoint.Checkpointer(folder, world, 2, 2, False, say=said.append)
        found = checkpoints.load_newest(checkpoint.latest(folder, world, said.append), net, optimizer)
        assert found is not None
        assert values(net, optimizer) == {float(found.step)}, "nothing of the damaged one may be left"
        assert f"step-00000006.1 is not used: {file.name} is not what was written" in said[0], said
        loaded.append(found.step)
        world.on_main(lambda file=file, good=good: file.write_bytes(good))
    return loaded


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew_by_itself(tmp_path: Path) -> None:
    run_ranks(1, go, Run(str(tmp_path), steps=2))
    file = tmp_path / "checkpoints" / "step-00000002.1" / "__0_1.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (_, error) = collect(*start_ranks(1, go, Run(str(tmp_path), attempt=2)))[0]
    assert error is not None
    assert error[0] == "TrainingFailed", error[2]
    assert "no checkpoint of the run holds what was written" in error[1]
    assert (file.parent / "complete.json").exists(), "it is left for whoever looks into it"


def test_a_checkpoint_of_before_there_were_checksums_is_still_used(tmp_path: Path) -> None:
    run_ranks(2, go, Run(str(tmp_path)))
    for marker in tmp_path.glob("checkpoints/*/complete.json"):
        facts = json.loads(marker.read_text())
        del facts["crc32"], facts["blockBytes"]
        marker.write_text(json.dumps(facts))
    assert run_ranks(2, go, Run(str(tmp_path), steps=8, attempt=2))[0]["start"] == 6


@given(chunks=st.lists(st.binary(max_size=60), max_size=12), block=st.sampled_from([1, 7, 16]))
@example(chunks=[], block=16)
@example(chunks=[b"x" * 32], block=16)
@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_checksums_of_a_file_are_those_of_its_blocks_however_it_was_written(tmp_path: Path, chunks: list[bytes], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "BLOCK", block)
        target = dcp._Target(place(str(tmp_path)))
        with target.create_stream(str(tmp_path / "file"), "wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
    whole = b"".join(chunks)
    assert target.error is None
    assert (tmp_path / "file").read_bytes() == whole
    assert target.sums["file"] == dcp.Sums("file", len(whole), tuple(zlib.crc32(whole[i : i + block]) for i in range(0, len(whole), block)))
    reader = dcp.Reader(place(str(tmp_path)), {"file": len(whole)}, {"file": target.sums["file"].crc32}, block)
    assert b"".join(reader.fetch(("file", i)) for i in range(-(-len(whole) // block))) == whole


def test_an_error_of_one_of_a_ranks_threads_is_not_lost(tmp_path: Path) -> None:
    (_, error) = collect(*start_ranks(1, _one_file_refused, str(tmp_path)))[0]
    assert error is not None, "torch itself would commit a checkpoint without the tensors of that file"
    assert error[0] == "TrainingFailed", error[2]
    assert "no room" in error[1]
    assert not list((tmp_path / "checkpoints").glob("*/complete.json"))


def _one_file_refused(world: World, folder: str) -> None:
    put = dcp._Stream._put

    def refuse(stream: Any, view: memoryview) -> None:
        if stream.path.endswith("__0_2.distcp"):
            raise OSError("no room")
        put(stream, view)

    dcp._Stream._put = refuse  # type: ignore[method-assign]
    go(world, Run(folder, patience=0.0))


# Credentials


def test_credentials_that_run_out_are_fetched_anew_while_the_run_goes_on(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    for name in S3_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # AWS's client takes new ones five seconds before the old ones run out.
    with Credentials(seconds=8.0) as credentials, Proxy(server, lambda request: None if credentials.knows(request) else Fault(refusal=EXPIRED)) as proxy:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", credentials.uri)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
        file = place(proxy.uri(f"bucket/{tmp_path.name}/file"))
        writes = 0
        while len(credentials.issued) < 4:
            file.write_bytes(f"{writes}".encode())
            token.write_text(f"token {writes}")  # EKS replaces the pod's token too
            writes += 1
        assert file.read_bytes() == f"{writes - 1}".encode()
        assert not [r for r in proxy.requests if not credentials.knows(r, ever=True)], "every request was signed with a key of the endpoint's"
    assert credentials.tokens[0] == "first"
    assert credentials.tokens[-1] != "first", "the token's file is read each time"


# Neighbours, and hosts that do not share


names = st.one_of(
    st.from_regex(r"step-[0-9]{8}\.[0-9]{1,2}", fullmatch=True),
    st.sampled_from(
        ["step-00000001", "step-1.1", "step-000000001.1", "step-00000001.1.old", "Step-00000001.1", "xstep-00000001.1", "step-00000001.x", ".step-00000001.1"]
    ),
    st.from_regex(r"[a-z.]{1,6}", fullmatch=True).filter(lambda name: name not in (".", "..")),
)


@given(
    others=st.lists(st.tuples(names, st.sampled_from(["whole", "torn", "file"])), max_size=8, unique_by=lambda item: item[0]),
    keep=st.integers(1, 3),
    newest=st.integers(1, 9),
    attempt=st.integers(1, 4),
)
@hypothesis_settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pruning_touches_nothing_but_older_checkpoints_of_this_run(tmp_path: Path, others: list[tuple[str, str]], keep: int, newest: int, attempt: int) -> None:
    root = tmp_path / "storage"
    shutil.rmtree(root, ignore_errors=True)
    for run in ("r", "r2", "a"):
        for name, kind in others:
            _lay(root / run / "checkpoints" / name, kind)
    _lay(root / "r" / "checkpoints" / f"step-{newest:08d}.{attempt}", "whole")
    _lay(root / "r" / "run.json", "file")
    before = _all(root)
    checkpoint.prune(place(str(root / "r" / "checkpoints")), newest, attempt, keep)
    after = _all(root)
    gone = {Path(path).parts[0:3] for path in before.keys() - after.keys()}
    assert all(before[path] == after[path] for path in after), "nothing may be altered"
    for run, folder, name in gone:
        assert (run, folder) == ("r", "checkpoints"), f"{run}/{folder}/{name} is another's"
        found = re.fullmatch(r"step-(\d{8})\.(\d+)", name)
        assert found, f"{name} is no checkpoint's name"
        assert int(found[1]) <= newest
        assert int(found[2]) <= attempt
    left = [c for c in checkpoint.find(place(str(root / "r" / "checkpoints"))) if c.torn is None and c.step <= newest and c.attempt <= attempt]
    assert 1 <= len(left) <= keep
    assert left[0].step == newest, "the one that was just written stays"


def _lay(path: Path, kind: str) -> None:
    if kind == "file":
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text("a file")
        return
    if path.is_file():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    (path / "data").write_text("12345")
    (path / "complete.json").unlink(missing_ok=True)
    if kind == "whole":
        (path / "complete.json").write_text('{"files": {"data": 5}}')


def _all(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_folder_that_is_not_the_same_on_all_hosts_is_refused_before_the_first_step(data: Path, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("two hosts are played by mount namespaces, which can't be made here (unshare -m)")
    config = tmp_path / "job.yaml"
    config.write_text(json.dumps(schema.as_mapping(settings(data, tmp_path / "runs", workers=2))))
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-port", str(free_port())]
    command += ["--master-addr", "127.0.0.1", "--node-rank", "{}", "-m", "training.job", "--config", str(config)]
    hosts = [
        subprocess.Popen(
            ["unshare", "-m", "sh", "-c", f'mount -t tmpfs tmpfs "{tmp_path}/runs" && exec "$@"; ls -RA "{tmp_path}/runs"', "sh"]
            + [part.format(node) if part == "{}" else part for part in command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    out = [host.communicate(timeout=300) for host in hosts]
    assert all(host.returncode for host in hosts)
    assert "is not the same folder on all hosts; use an s3:// URI or a shared file system" in out[0][1], out
    assert "step " not in out[0][0], "nothing may have been trained"
