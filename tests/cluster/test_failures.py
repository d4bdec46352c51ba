"""What goes wrong on a real Kubernetes: pods that find no place, an image that is not there, an `up` that is cut off, pods that are lost.

The tests go in this order, on one stack.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import yaml
from real import IMAGE, Stack

pytestmark = pytest.mark.cluster


def only_run(stack: Stack, *before: str) -> dict:
    """The record of the one run that is not among ``before``."""
    (record,) = [record for name, record in stack.run_records().items() if name not in before]
    return record


def test_a_pod_that_finds_no_place_ends_up_with_the_reason_and_the_way_out(stack: Stack) -> None:
    stack.settings["ray"]["workerMemory"] = "9000Gi"
    stack.train(steps=20, run=False)
    said = stack.stuck()
    assert "finds no node (it asks for cpu 350m, memory 9000Gi): 0/" in said, said
    assert "Insufficient memory" in said, said
    assert "Ask for less (ray.headCpu" in said, said


def test_an_image_that_is_not_there_ends_up_with_its_name(stack: Stack) -> None:
    stack.settings["ray"] |= {"workerMemory": "3Gi", "image": "registry.invalid/no/such-image:1"}
    stack.write()
    said = stack.stuck()
    assert "Check the name and that the nodes may pull it (ray.image): registry.invalid/no/such-image:1" in said, said


def test_an_up_that_is_interrupted_or_killed_goes_on_when_it_is_repeated(stack: Stack) -> None:
    stack.settings["ray"]["image"] = IMAGE
    stack.write()
    stack.interrupted(signal.SIGINT, at="Ray cluster: ")
    stack.settings["ray"]["workerMemory"] = "2900Mi"  # new pods, in case the first ones were ready before it stopped
    stack.write()
    stack.interrupted(signal.SIGKILL, at="Ray cluster: ")
    stack.pulumi("cancel", "--yes")  # the dead one's lock
    stack.up()
    assert [len(stack.pods(kind)) for kind in ("head", "worker")] == [1, 2]
    assert " unchanged" in stack.up()


def test_a_worker_that_is_lost_comes_back_and_the_run_goes_on_from_its_checkpoint(stack: Stack) -> None:
    stack.train(steps=400, logEvery=10, checkpointEvery=50)
    stack.up()
    stack.wait_for("the second checkpoint", lambda: "step 110/400" in stack.log())
    stack.kill("worker")
    status = stack.ended()
    assert (status["jobStatus"], status["jobDeploymentStatus"]) == ("SUCCEEDED", "Complete"), stack.log()[-3000:]
    record = only_run(stack)
    assert record["outcome"] == "done"
    first, *_, last = record["attempts"]
    assert first["outcome"] != "done"
    assert (last["outcome"], last["endStep"]) == ("done", 400)
    assert last["startStep"] >= 100, "it began at the last checkpoint, and not anew"
    assert "resuming" in stack.log()


def test_a_run_whose_pod_is_stopped_goes_on_from_the_step_it_had_reached_and_no_restart_is_counted(stack: Stack) -> None:
    """Stopped with its grace period, as a node that is taken away stops it: the run hears of it in time, and moves."""
    before = list(stack.run_records())
    # So many steps that it can't be over before the pod is gone, and no checkpoint but the one that the notice asks for.
    stack.train(steps=100000, warmupSteps=5, logEvery=5, checkpointEvery=100000, learningRate=0.0005, evalRows=0, export=False, maxFailures=0)
    stack.up()
    stack.wait_for("some steps", lambda: "step     50/" in stack.log())
    going = stack.pods("worker")[0]["metadata"]["name"]
    stack.kubectl("-n", stack.namespace, "delete", "pod", going, "--wait=false")
    stack.wait_for("the notice", lambda: "is being taken away; step" in stack.log())
    stack.wait_for("the run to go on", lambda: "resuming" in stack.log())
    stack.wait_for("steps after it", lambda: "step" in stack.log().rpartition("resuming")[2].partition("\n")[2])
    first, second = only_run(stack, *before)["attempts"]
    assert first["outcome"] == "preempted", first
    assert first["notice"]["saveSeconds"] > 0, "the checkpoint was complete"
    assert second["startStep"] >= first["notice"]["step"] >= 50, "not more than a step before what was done at the notice"
    assert second["outcome"] == "running", "maxFailures is 0, and it runs"
    assert going not in [pod["metadata"]["name"] for pod in stack.pods("worker")]


def test_a_head_that_is_lost_fails_the_run_and_says_so(stack: Stack) -> None:
    before = list(stack.run_records())
    stack.train(steps=20000, logEvery=10, checkpointEvery=50, learningRate=0.0007)
    stack.up()
    stack.wait_for("the first checkpoint", lambda: "step    60/20000" in stack.log())
    stack.kill("head")
    status = stack.ended()
    assert status["jobDeploymentStatus"] == "Failed"
    assert "the Ray head was lost" in stack.log().splitlines()[-1]
    # A new head tells the submitter at once that the job is gone; the workers make sure of it for some seconds more.
    attempt = stack.wait_for("the run's own record of it", lambda: (a := only_run(stack, *before)["attempts"][-1])["outcome"] != "running" and a)
    assert attempt["outcome"] == "failed"
    assert attempt["reason"].startswith("the Ray head was lost"), attempt


def test_the_same_run_goes_on_when_its_job_is_made_again(stack: Stack) -> None:
    """What docs/kubernetes.md says to do after a head was lost."""
    urns = stack.pulumi("stack", "--show-urns")
    (urn,) = [line.split("urn:")[1] for line in urns.splitlines() if "::RayJob" in line or "RayJob::" in line]
    stack.pulumi("up", "--yes", "--skip-preview", "--replace", f"urn:{urn.strip()}")
    stack.wait_for("the run to go on", lambda: "resuming" in stack.log())


def test_a_stack_whose_kubernetes_is_gone_is_destroyed_all_the_same(stack: Stack) -> None:
    """The rescue of docs/kubernetes.md. The API server is only out of reach here, so the state is put back afterwards."""
    kept = stack.home / "state.json"
    stack.pulumi("stack", "export", "--file", str(kept))
    file = Path(stack.environment["KUBECONFIG"])
    reachable = file.read_text()
    away = yaml.safe_load(reachable)
    for cluster in away["clusters"]:
        cluster["cluster"]["server"] = "https://127.0.0.1:1"
    file.write_text(yaml.safe_dump(away))
    try:
        assert "127.0.0.1:1" in stack.pulumi("destroy", "--yes", "--skip-preview", code=255)
        (provider,) = re.findall(r"urn:.*pulumi:providers:kubernetes::.*-kubernetes$", stack.pulumi("stack", "--show-urns"), re.MULTILINE)
        stack.pulumi("state", "delete", provider, "--target-dependents", "--yes")
        stack.destroy()
        assert json.loads(stack.pulumi("stack", "export"))["deployment"].get("resources", []) == []
    finally:
        file.write_text(reachable)
        stack.pulumi("stack", "import", "--file", str(kept), "--force")


def test_destroy_stops_it_all(stack: Stack) -> None:
    stack.destroy()
    assert stack.kubectl("get", "namespace", stack.namespace, "--ignore-not-found") == ""
