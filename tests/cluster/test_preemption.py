"""A worker pod that is stopped with its grace period, as a node that is taken away stops it: the run hears of it in time, and moves."""

from __future__ import annotations

import pytest
from real import Stack

pytestmark = pytest.mark.cluster


def test_a_run_whose_pod_is_stopped_goes_on_from_the_step_it_had_reached_and_no_restart_is_counted(stack: Stack) -> None:
    # So many steps that it can't be over before the pod is gone, and no checkpoint but the one that the notice asks for.
    stack.train(steps=100000, warmupSteps=5, logEvery=5, checkpointEvery=100000, evalRows=0, export=False, maxFailures=0)
    stack.up()
    stack.wait_for("some steps", lambda: "step     50/" in stack.log())
    going = stack.pods("worker")[0]["metadata"]["name"]
    stack.kubectl("-n", stack.namespace, "delete", "pod", going, "--wait=false")
    stack.wait_for("the notice", lambda: "is being taken away; step" in stack.log())
    stack.wait_for("the run to go on", lambda: "resuming" in stack.log())
    stack.wait_for("steps after it", lambda: "step" in stack.log().rpartition("resuming")[2].partition("\n")[2])
    (record,) = stack.run_records().values()
    first, second = record["attempts"]
    assert first["outcome"] == "preempted", first
    assert first["notice"]["saveSeconds"] > 0, "the checkpoint was complete"
    assert second["startStep"] >= first["notice"]["step"] >= 50, "not more than a step before what was done at the notice"
    assert second["outcome"] == "running", "maxFailures is 0, and it runs"
    assert going not in [pod["metadata"]["name"] for pod in stack.pods("worker")]
