"""Runs on a ReadWriteMany claim, then on an S3-compatible store, on one stack. The store is moto's server on this machine, which pods must reach."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import boto3
import pytest
import yaml
from moto.server import ThreadedMotoServer
from real import FOLDER, ROOT, Stack

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

BUCKET, KEY_ID, KEY = "runs", "AKIAEXAMPLE", "a-key-that-nobody-must-see"  # moto takes any key: what is tested is the way to the pods


def here(address: str) -> bool:
    """Whether a server on this machine can have that address."""
    with socket.socket() as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True


@pytest.fixture(scope="module")
def store(stack: Stack) -> Iterator[str]:
    """URL of an S3-compatible store with an empty bucket."""
    nodes = json.loads(stack.kubectl("get", "nodes", "-o", "json"))["items"]
    addresses = [entry["address"] for node in nodes for entry in node["status"]["addresses"] if entry["type"] == "InternalIP"]
    mine = [address for address in addresses if here(address)]
    if not mine:
        pytest.skip(f"no node is this machine ({', '.join(addresses)}), so pods may not reach a server on it")
    server = ThreadedMotoServer(ip_address=mine[0], port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    client(url).create_bucket(Bucket=BUCKET)
    yield url
    server.stop()


def client(url: str):
    return boto3.client("s3", endpoint_url=url, aws_access_key_id=KEY_ID, aws_secret_access_key=KEY, region_name="us-east-1")


def test_a_run_on_a_claim_that_many_may_write_ends_done(stack: Stack) -> None:
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": stack.name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Gi"},
            "storageClassName": stack.name,
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"{FOLDER}/{stack.name}"},
        },
    }
    stack.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(volume))
    try:
        stack.settings["storage"] = {"claimGiB": 1, "storageClass": stack.name}
        stack.train(steps=20)
        stack.up()
        status = stack.ended()
        assert status["jobStatus"] == "SUCCEEDED", stack.log()[-3000:]
        assert [record["outcome"] for record in stack.run_records().values()] == ["done"]
    finally:
        stack.kubectl("delete", "persistentvolume", stack.name, "--wait=false")


def test_the_same_stack_moves_to_an_s3_compatible_store_and_shows_its_key_to_nobody(stack: Stack, store: str) -> None:
    there = f"?scheme=http&endpoint_override={store.removeprefix('http://')}&region=us-east-1"
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "training").rglob("*.py"))}
    said = {"sources": ["training"], "output": f"s3://{BUCKET}/data{there}", "tokenizer": "train:400", "sequenceLength": 64, "evalFraction": 0.1}
    keys = f"AWS_ACCESS_KEY_ID={KEY_ID} AWS_SECRET_ACCESS_KEY={KEY}"
    stack.on_node(f"{stack.name}-to-s3", f"{keys} python -m training.prepare --config prepare.json", {**files, "prepare.json": json.dumps(said)})

    stack.settings["storage"] = {"endpoint": store, "bucket": BUCKET}
    stack.train(steps=20, data=said["output"])
    assert "s3AccessKeyId" in stack.stuck(), "without keys it is refused before anything is touched"
    for name, value in (("s3AccessKeyId", KEY_ID), ("s3SecretAccessKey", KEY)):
        stack.pulumi("config", "set", "--secret", name, value)
    shown = stack.up()
    status = stack.ended()
    assert status["jobStatus"] == "SUCCEEDED", stack.log()[-3000:]
    objects = [entry["Key"] for entry in client(store).list_objects_v2(Bucket=BUCKET, Prefix="runs/")["Contents"]]
    (record,) = [name for name in objects if name.endswith("/run.json")]
    assert json.loads(client(store).get_object(Bucket=BUCKET, Key=record)["Body"].read())["outcome"] == "done"
    assert any(name.endswith("/model/model.safetensors") for name in objects), "the export is there too"
    assert stack.get("persistentvolumeclaims") == [], "the claim went once no pod used it"
    for where, text in (("`up`", shown), ("the log", stack.log()), ("the state", stack.pulumi("stack", "export"))):
        assert KEY not in text, f"the key is in {where}"
