"""One `up` from VPC to a finished job, `up` again, one `destroy` to nothing. The nodes have no GPU, so the job trains on the CPU; its place is a GPU node's."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from typing import Any

import pytest

from tests.aws_sim.simulated import Account
from tests.chain.lab import CHARTS, HOME, IMAGE, KUBECONFIG, Hardware, Store, get, kubectl, node_names, prepare, store

pytestmark = pytest.mark.chain

STACK = "chain"
NAMESPACE = "ray"  # fixed on EKS
OURS = f"ray-train-efa-{STACK}"
# As big as a node of the lab can bear: a worker takes what is left of 3 vCPU and 10 GiB after the daemons' share, 1 CPU and 5 GiB.
SIMULATION = {"instance_types": {"g6.12xlarge": {"vcpu": 3, "mem": 10, "gpus": 1, "gpu": "L4", "gpu_mem": 22, "efa": 1, "cards": 1}}}
# The limit only ends a run that has failed; head and workers take a minute where nothing else is at work.
LIMIT_SECONDS = 1200
TRAINING = {
    "run": True,
    "model": {"random": "tiny"},
    "steps": 20,
    "warmupSteps": 5,
    "tokensPerStep": 1024,
    "checkpointEvery": 10,
    "evalRows": 8,
    "device": "cpu",
}


@dataclasses.dataclass
class Chain:
    """What each part said, and what was there meanwhile. left: names of Kubernetes objects of ours after `destroy`."""

    up: str
    job: dict[str, Any]
    log: str
    run: dict[str, Any]
    pods: list[dict[str, Any]]
    plugins: list[dict[str, Any]]
    nodes: list[dict[str, Any]]
    again: str
    audit: str
    destroy: str
    report: dict[str, Any]
    left: list[str]


def ours() -> list[str]:
    """Names of everything in the Kubernetes that a stack like this one makes."""
    named = kubectl("get", "clusterroles,clusterrolebindings,rayclusters,rayjobs", "--all-namespaces", "-o", "name", code=None).split()
    daemons = kubectl("get", "daemonsets,secrets", "-n", "kube-system", "-o", "name").split()
    return [
        *[name for name in named if OURS in name],
        *[name for name in daemons if any(chart in name for chart in CHARTS)],
        *kubectl("get", "namespace", NAMESPACE, "--ignore-not-found", "-o", "name").split(),
    ]


def ended() -> dict[str, Any]:
    """The job once it has an end that stays."""
    limit = time.monotonic() + LIMIT_SECONDS
    while True:
        (job,) = get("rayjob", "-n", NAMESPACE)
        if job.get("status", {}).get("jobDeploymentStatus") in ("Complete", "Failed"):
            return dict(job)
        assert time.monotonic() < limit, f"no end of the job\n{json.dumps(job.get('status'))}\n{kubectl('get', 'pods', '-n', NAMESPACE, '-o', 'wide')}"
        time.sleep(1)


def settings(store: Store, gpu_nodes: int) -> dict[str, Any]:
    charts = {name: {"chart": str(HOME / "charts" / name)} for name in CHARTS}
    return {
        "gpu": {"instanceType": "g6.12xlarge", "nodes": gpu_nodes},
        "ray": {"image": IMAGE, "headCpu": 1, "headMemory": "4Gi", "charts": charts},
        "storage": {"onDestroy": "delete"},
        "budget": {"maxHourlyUsd": 20, "stopAfter": "8h"},
        "training": {**TRAINING, "data": "s3://prepared/data", "environment": store.environment},
    }


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    before = ours()
    assert not before, f"these stand in the way: {', '.join(before)}"
    folder = tmp_path_factory.mktemp("chain")
    with store(folder) as s3:
        s3.make("prepared")
        prepare(s3, folder, "s3://prepared/data")
        account = Account(folder / "account", STACK, KUBECONFIG)
        account.write(settings(s3, len(node_names()) - 1))
        account.init()
        with Hardware(account, s3, SIMULATION) as hardware:
            try:
                up = account.up(simulation=SIMULATION, limit=LIMIT_SECONDS)
                job = ended()
                pods, plugins, nodes = get("pods", "-n", NAMESPACE), get("pods", "-n", "kube-system"), get("nodes")
                log = kubectl("logs", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=ray-job-submitter", "--tail", "-1")
                (bucket,) = hardware.buckets
                runs = [key for key in s3.keys(bucket) if key.endswith("/run.json")]
                assert len(runs) == 1, f"{runs}\n{job['status']}\n{log}"
                run = json.loads(s3.read(f"{bucket}/{runs[0]}"))
                account.sim("put-object", bucket, runs[0])
                (folder / "up.txt").write_text(f"{up}\n{log}")  # docs/kubernetes.md shows it; pytest --basetemp says where it is
                again, audit = account.up(simulation=SIMULATION, limit=LIMIT_SECONDS), account.audit()
            finally:
                destroy = account.destroy(simulation=SIMULATION, limit=LIMIT_SECONDS)
    return Chain(up, job, log, run, pods, plugins, nodes, again, audit, destroy, account.report(), ours())


def on(chain: Chain, role: str) -> set[str]:
    """The nodes of a role."""
    return {node["metadata"]["name"] for node in chain.nodes if node["metadata"]["labels"].get("ray-train-efa/role") == role}


def test_one_up_goes_from_the_vpc_to_a_finished_job(chain: Chain) -> None:
    assert re.search(r"aws:ec2:Vpc .*created", chain.up), chain.up
    status = chain.job["status"]
    assert (status["jobStatus"], status["jobDeploymentStatus"]) == ("SUCCEEDED", "Complete"), f"{status}\n{chain.log}"
    assert re.search(r"step 20/20 .*loss", chain.log), chain.log


def test_the_run_is_in_the_bucket_that_the_stack_made(chain: Chain) -> None:
    assert chain.run["outcome"] == "done"


def test_the_head_the_operator_and_the_submitter_take_no_gpu_node(chain: Chain) -> None:
    where = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in chain.pods if pod["metadata"]["labels"].get("ray.io/node-type") != "worker"}
    assert len(where) >= 3, where
    assert set(where.values()) <= on(chain, "system"), where


def test_each_gpu_node_has_one_worker_with_all_its_devices(chain: Chain) -> None:
    workers = [pod for pod in chain.pods if pod["metadata"]["labels"].get("ray.io/node-type") == "worker"]
    assert {pod["spec"]["nodeName"] for pod in workers} == on(chain, "gpu")
    assert len(workers) == len(on(chain, "gpu"))
    for pod in workers:
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == ("1", "1")


@pytest.mark.parametrize("plugin", ["nvidia-device-plugin", "aws-efa-k8s-device-plugin"])
def test_a_device_plugin_runs_on_every_gpu_node(chain: Chain, plugin: str) -> None:
    assert {pod["spec"]["nodeName"] for pod in chain.plugins if pod["metadata"]["name"].startswith(plugin)} >= on(chain, "gpu")


def test_a_second_up_changes_nothing(chain: Chain) -> None:
    assert re.search(r"^Resources:\s+\d+ unchanged", chain.again, re.M), chain.again[-3000:]


def test_no_dependency_is_missing(chain: Chain) -> None:
    assert "missing dependencies: 0" in chain.audit, chain.audit


def test_every_kubernetes_object_is_gone_before_the_first_node(chain: Chain) -> None:
    lines = chain.destroy.splitlines()
    gone = max(i for i, line in enumerate(lines) if re.search(r" kubernetes:\S+ .*deleted", line))
    first = min(i for i, line in enumerate(lines) if re.search(r" aws:eks:NodeGroup .*deleting", line))
    assert gone < first, chain.destroy


def test_destroy_leaves_nothing_in_the_account_and_nothing_of_ours_in_the_cluster(chain: Chain) -> None:
    assert chain.report["leftovers"] == []
    assert chain.report["findings"] == []
    assert chain.report["usd_per_hour_now"] == 0
    assert chain.left == []
