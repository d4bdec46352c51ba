"""`up` to a finished run, `up` again, another job, `destroy` in the middle of a run. The tests go in this order, on one stack."""

from __future__ import annotations

import datetime
import json
import re

import pytest
from real import IMAGE, OTHER_IMAGE, Stack

pytestmark = pytest.mark.cluster

PORTS = (6379, 8265, 10001)
# Prints {port: reached} for the host in argv.
KNOCK = """
import json, socket, sys
def reached(port):
    try:
        socket.create_connection((sys.argv[1], port), timeout=5).close()
    except OSError:
        return False
    return True
print(json.dumps({port: reached(port) for port in map(int, sys.argv[2:])}))
"""
# Prints the status that the job API answers with no token, a wrong one and the right one.
ASK = """
import os, sys, urllib.error, urllib.request
for token in (None, "wrong", os.environ["RAY_AUTH_TOKEN"]):
    request = urllib.request.Request(f"http://{sys.argv[1]}:8265/api/jobs/", headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        print(urllib.request.urlopen(request, timeout=10).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


def head_address(stack: Stack) -> str:
    return str(stack.pods("head")[0]["status"]["podIP"])


def in_worker(stack: Stack, script: str, *arguments: str) -> str:
    name = stack.pods("worker")[0]["metadata"]["name"]
    return stack.kubectl("-n", stack.namespace, "exec", name, "-c", "ray-worker", "--", "python", "-c", script, *arguments)


def test_up_goes_from_nothing_to_a_finished_run(stack: Stack) -> None:
    stack.train(steps=20, logEvery=1)
    began = datetime.datetime.now(datetime.UTC)
    said = stack.up()
    assert "created" in said
    done = (datetime.datetime.now(datetime.UTC) - began).total_seconds()
    status = stack.ended()
    assert (status["jobStatus"], status["jobDeploymentStatus"]) == ("SUCCEEDED", "Complete"), status.get("message")
    assert [record["outcome"] for record in stack.run_records().values()] == ["done"]
    # docs/kubernetes.md shows both; pytest --basetemp says where the file is.
    (stack.home / "up.txt").write_text(f"{said}\n{stack.log()}\n{json.dumps({**stack.timeline(began), 'up done': done})}\n")


def test_a_second_up_changes_nothing(stack: Stack) -> None:
    said = stack.up()
    assert re.search(r"Resources:\s+\d+ unchanged", said), said[-1500:]


def test_every_pod_carries_the_image_that_the_stack_names(stack: Stack) -> None:
    found = [container["image"] for kind in ("head", "worker") for pod in stack.pods(kind) for container in pod["spec"]["containers"]]
    assert found == [IMAGE] * 3


def test_the_clusters_own_pods_reach_each_other_and_a_stranger_reaches_nobody(stack: Stack) -> None:
    ports = [str(port) for port in PORTS]
    assert in_worker(stack, KNOCK, head_address(stack), *ports).count("true") == len(PORTS)
    stranger = stack.on_node(f"{stack.name}-stranger", f"python knock.py {head_address(stack)} {' '.join(ports)}", {"knock.py": KNOCK})
    assert stranger.count("false") == len(PORTS), stranger


def test_a_wrong_token_is_refused_inside_the_fence_too(stack: Stack) -> None:
    assert in_worker(stack, ASK, head_address(stack)).split() == ["401", "403", "200"]


def test_other_settings_are_a_new_job_on_the_same_pods_which_may_prepare_its_own_data(stack: Stack) -> None:
    before = {pod["metadata"]["uid"] for kind in ("head", "worker") for pod in stack.pods(kind)}
    old = stack.job()["metadata"]["name"]
    # The folder of Python's json, by way of the one that all pods see.
    stack.on_node(f"{stack.name}-text", "cp -r $(python -c 'import json; print(*json.__path__)') /storage/text")
    text = {"sources": ["/storage/text"], "tokenizer": "train:400", "sequenceLength": 64, "evalFraction": 0}
    stack.train(steps=3000, learningRate=0.001, logEvery=10, prepare=text)
    stack.up()
    assert stack.job()["metadata"]["name"] != old
    assert {pod["metadata"]["uid"] for kind in ("head", "worker") for pod in stack.pods(kind)} == before
    log: str = stack.wait_for("the new job's first steps", lambda: (said := stack.log()) and re.search(r"step +\d+/3000", said) and said)
    assert re.search(r"^prepared /storage/\S+: [\d,]+ train rows", log, re.M), f"it trains on data that it did not prepare\n{log}"
    assert stack.job()["status"]["jobStatus"] == "RUNNING"


@pytest.mark.skipif(not OTHER_IMAGE, reason="CLUSTER_OTHER_IMAGE names no second image")
def test_another_image_is_on_every_pod_when_up_ends_and_runs_the_job_anew(stack: Stack) -> None:
    before, old = {pod["metadata"]["uid"] for kind in ("head", "worker") for pod in stack.pods(kind)}, stack.job()["metadata"]["name"]
    stack.settings["ray"]["image"] = OTHER_IMAGE
    stack.write()
    stack.up()
    after = [pod for kind in ("head", "worker") for pod in stack.pods(kind)]
    assert [container["image"] for pod in after for container in pod["spec"]["containers"]] == [OTHER_IMAGE] * 3
    assert not before & {pod["metadata"]["uid"] for pod in after}
    assert all(status["ready"] for pod in after for status in pod["status"]["containerStatuses"]), "`up` ended before the new pods were ready"
    assert stack.job()["metadata"]["name"] != old
    stack.wait_for("the job's start on the new pods", lambda: stack.job().get("status", {}).get("jobStatus") == "RUNNING")


def test_destroy_in_the_middle_of_a_run_leaves_nothing(stack: Stack) -> None:
    assert stack.job()["status"]["jobStatus"] == "RUNNING"
    stack.destroy()
    assert stack.kubectl("get", "namespace", stack.namespace, "--ignore-not-found") == ""
    kinds = "clusterroles,clusterrolebindings,rayclusters,rayjobs"
    assert stack.name not in stack.kubectl("get", kinds, "--all-namespaces", "-o", "name")
