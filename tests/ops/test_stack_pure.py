"""What is shown of an operation, an error and a log: pure functions over the engine's, AWS's and the job's own words."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops import errors, job_log, phases, trouble

VPC = "urn:pulumi:dev::ray-train-efa::ray-train-efa:infra:Network$aws:ec2/vpc:Vpc::ray-train-efa-dev"
SUBNET = "urn:pulumi:dev::ray-train-efa::ray-train-efa:infra:Network$aws:ec2/subnet:Subnet::ray-train-efa-dev-nodes"
GPUS = "urn:pulumi:dev::ray-train-efa::ray-train-efa:infra:GpuNodes$aws:eks/nodeGroup:NodeGroup::ray-train-efa-dev-gpu"
RAY = "urn:pulumi:dev::ray-train-efa::ray-train-efa:workloads:RayCluster$kubernetes:ray.io/v1:RayCluster::ray-train-efa-dev-ray-cluster"
STACK = "urn:pulumi:dev::ray-train-efa::pulumi:pulumi:Stack::ray-train-efa-dev"


def rows(progress: phases.Progress, at: float) -> dict[str, phases.Row]:
    return {row.title: row for row in progress.rows(at)}


def test_parts_are_told_in_order_with_time_from_first_to_last_change() -> None:
    progress = phases.Progress(began=100.0)
    progress.started(STACK, "create", 100.0)
    progress.started(GPUS, "create", 130.0)
    progress.started(VPC, "create", 101.0)
    progress.finished(VPC, "create", 104.0)
    progress.started(SUBNET, "create", 104.0)
    found = progress.rows(150.0)
    assert [row.title for row in found] == ["network", "GPU nodes"]
    network, gpus = found
    assert (network.state, network.done, network.known, network.seconds, network.now) == (phases.WORKING, 1, 2, 49.0, ("Subnet",))
    assert gpus.usual == "3-5 min"
    progress.finished(SUBNET, "create", 106.0)
    assert rows(progress, 500.0)["network"].seconds == 5.0, "the time of what is done does not go on"


def test_a_down_goes_the_other_way_and_a_failure_is_seen() -> None:
    progress = phases.Progress(began=0.0, kind="destroy")
    for urn in (VPC, GPUS, RAY):
        progress.started(urn, "delete", 1.0)
    progress.failed(GPUS, 9.0)
    assert [row.title for row in progress.rows(10.0)] == ["Ray cluster", "GPU nodes", "network"]
    assert rows(progress, 10.0)["GPU nodes"].state == phases.FAILED


def test_events_of_one_thread_and_the_drawing_of_another_do_not_meet() -> None:
    progress = phases.Progress(began=0.0)
    over = threading.Event()

    def events() -> None:
        for number in range(2_000):
            progress.started(f"{VPC}-{number}", "create", 1.0)
        over.set()

    thread = threading.Thread(target=events)
    thread.start()
    while not over.is_set():
        progress.rows(2.0)
    thread.join()
    assert rows(progress, 2.0)["network"].known == 2_000


def test_what_is_as_it_should_be_takes_no_time() -> None:
    progress = phases.Progress(began=0.0)
    progress.started(VPC, "same", 1.0)
    progress.finished(VPC, "same", 1.0)
    row = rows(progress, 99.0)["network"]
    assert (row.state, row.seconds, row.done) == (phases.SAME, 0.0, 1)


@given(st.lists(st.tuples(st.sampled_from([VPC, SUBNET, GPUS, RAY, STACK, "no urn"]), st.sampled_from(["start", "end", "fail"]), st.floats(0, 1e4))))
def test_no_order_of_events_breaks_the_table(events: list[tuple[str, str, float]]) -> None:
    progress = phases.Progress(began=0.0)
    for urn, what, at in sorted(events, key=lambda event: event[2]):
        if what == "start":
            progress.started(urn, "create", at)
        elif what == "end":
            progress.finished(urn, "create", at)
        else:
            progress.failed(urn, at)
    for row in progress.rows(1e4):
        assert 0 <= row.done <= row.known
        assert 0 <= row.seconds <= 1e4


SAYS = [
    ("error: incorrect passphrase", "PULUMI_CONFIG_PASSPHRASE"),
    ("error: no stack named 'dev' found", "knows no stack dev"),
    ("operation error STS: GetCallerIdentity, ExpiredToken: The security token included in the request is expired", "have expired: sign in again"),
    ("error: No valid credential sources found", "no AWS credentials"),
    ("creating EKS Node Group: UnfulfillableCapacity: Could not launch On-Demand Instances. InsufficientInstanceCapacity", "no capacity"),
    ("VcpuLimitExceeded - You have requested more vCPU capacity than your current vCPU limit of 64", "doctor dev"),
    ("creating EC2 EIP: AddressLimitExceeded: The maximum number of addresses has been reached", "quota of this region"),
    ("waiting for EKS Node Group create: NodeCreationFailure: Instances failed to join the kubernetes cluster", "did not join"),
    ("creating EC2 VPC: UnauthorizedOperation: You are not authorized to perform this operation", "denies it"),
    ("deleting EC2 Subnet: DependencyViolation: The subnet 'subnet-1' has dependencies and cannot be deleted", "run the same command again"),
    ("error: the stack is currently locked by 1 lock(s)", "another operation works"),
    ("configured Kubernetes cluster is unreachable: unable to load schema information from the API server", "down dev"),
    ("dial tcp 10.0.0.1:443: i/o timeout", "did not answer"),
    ("Throttling: Rate exceeded", "wait a minute"),
    ("error: no resource plugin 'pulumi-resource-aws' found", "pulumi install"),
]


@pytest.mark.parametrize(("text", "word"), SAYS, ids=[word for _, word in SAYS])
def test_a_known_error_becomes_one_sentence_with_a_way_out(text: str, word: str) -> None:
    said = trouble.sentence([text, "update failed"], "dev", "GPU nodes")
    assert word in said
    assert said.startswith("GPU nodes: ")
    assert "\n" not in said
    assert "STACK" not in said


def test_an_unknown_error_is_told_without_the_engines_prefixes() -> None:
    said = trouble.sentence(["sdk-v2/provider2.go:572: sdk.helper_schema: the moon is full: provider=aws@7.51.1"], "dev")
    assert said == "the moon is full: provider=aws@7.51.1"


def test_the_programs_own_words_are_kept_whole() -> None:
    text = "this stack's configuration has 2 problems\n  - ray-train-efa:gpu.nodes = 0: at least 1\n  - ray-train-efa:ray.headCpu = 0: at least 1"
    assert trouble.sentence(["error: " + text], "dev") == text
    hook = 'before hook "ray-train-efa-dev-ray-ready" failed: pod x finds no node: 0/1 nodes are available. ' + "y" * 400
    assert "y" * 400 in trouble.sentence([hook], "dev")


@given(st.lists(st.text(max_size=400), max_size=4))
def test_any_errors_give_a_sentence(texts: list[str]) -> None:
    assert trouble.sentence(texts, "dev").strip()


def test_only_what_time_mends_is_tried_again() -> None:
    assert trouble.retryable(["deleting EC2 Subnet: DependencyViolation"])
    assert not trouble.retryable(["UnauthorizedOperation"])
    assert not trouble.retryable([])


LOG = """\
run tiny-46e164cb: qwen2, 0.2 M parameters, 2 x cpu on 2 hosts; fsdp, no resharding, recompute none, 16 rows of 128 a step in micro-batches of 8
transport not-required: expected any, observed tcp (2 ranks on 2 hosts)
step  5/20  loss 6.9354     12,477 tokens/s  0:00:03 left
step 15/20  loss 6.6529     19,669 tokens/s, 12.5% MFU  1 day, 2:03:04 left
step 15: held-out loss 6.5762, perplexity 717.84
"""


def test_a_log_tells_run_step_loss_speed_time_left_and_network() -> None:
    found = job_log.read(LOG)
    assert (found.run, found.step, found.steps, found.loss) == ("tiny-46e164cb", 15, 20, 6.6529)
    assert (found.tokens_per_second, found.mfu, found.left) == (19669.0, 0.125, "1 day, 2:03:04")
    assert (found.verdict, found.expected, found.observed) == ("not-required", "any", "tcp")
    assert found.last_line.startswith("step 15: held-out")


def test_a_refused_run_tells_its_verdict_and_its_error() -> None:
    log = LOG + "error: transport fail: expected efa, observed tcp (2 ranks on 2 hosts); rank 0: network Socket; give it EFA\n"
    assert job_log.read(log).verdict == "fail"
    assert job_log.errors(log)[0].startswith("transport fail")


@given(st.text())
def test_no_text_breaks_the_reading_of_a_log(text: str) -> None:
    job_log.read(text)
    job_log.speeds(text)


def test_exit_codes_mean_what_the_job_means_by_them() -> None:
    from training import errors as job

    assert (errors.EXIT_BAD_INPUT, errors.EXIT_TRAINING_FAILED, errors.EXIT_TRANSPORT_NOT_PROVEN) == (
        job.EXIT_BAD_INPUT,
        job.EXIT_TRAINING_FAILED,
        job.EXIT_TRANSPORT_NOT_PROVEN,
    )


def test_a_forward_that_is_cut_leaves_no_trace_and_any_other_thread_does() -> None:
    """The Kubernetes client's thread dies with an SSL error where a pod goes; other errors, and other threads, are told as ever."""
    code = """
import ssl, threading
from ops import kube
kube._no_trace_of_cut_forwards()
def end(error):
    raise error
forward = "Kubernetes port forward proxy: 8265"
for name, error in ((forward, ssl.SSLEOFError("cut")), (forward, KeyError("bug")), ("mine", OSError("told"))):
    thread = threading.Thread(target=end, args=(error,), name=name)
    thread.start()
    thread.join()
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "cut" not in said
    assert "KeyError: 'bug'" in said
    assert "OSError: told" in said
