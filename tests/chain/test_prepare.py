"""Data is prepared by a job of a stack whose GPU nodes come on demand: none of them comes before the data is there: make test-on-demand."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from tests.aws_sim.simulated import Account
from tests.chain.lab import KUBECONFIG, Hardware, kubectl, node_names, store
from tests.chain.test_chain import LIMIT_SECONDS, NAMESPACE, SIMULATION, STACK, TRAINING, ended, ours, settings

pytestmark = [pytest.mark.chain, pytest.mark.soak]

# In the place of Cluster Autoscaler's chart, whose image is nowhere here: Hardware does its work.
CHART = {"Chart.yaml": "apiVersion: v2\nname: cluster-autoscaler\nversion: 1.0.0\n", "templates/none.yaml": ""}


@dataclasses.dataclass
class Prepared:
    """said_before: the job's log when the first GPU node was about to come."""

    said_before: str | None
    said: str
    status: dict[str, Any]
    left: list[str]


def said() -> str:
    return kubectl("logs", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=ray-job-submitter", "--tail", "-1", code=None)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("chain")
    chart = folder / "cluster-autoscaler"
    for name, text in CHART.items():
        (chart / name).parent.mkdir(parents=True, exist_ok=True)
        (chart / name).write_text(text)
    with store(folder) as s3:
        account = Account(folder / "account", STACK, KUBECONFIG)
        wanted = settings(s3, 0)
        wanted["gpu"] = {"instanceType": "g6.12xlarge", "minNodes": 0, "maxNodes": len(node_names()) - 1}
        # A node of the lab has two CPUs for all that stands on the system node.
        wanted["system"] = {"nodes": 1, "instanceType": "m7i.xlarge"}
        wanted["ray"] |= {"workerCpu": 0.5, "workerMemory": "3Gi", "charts": {**wanted["ray"]["charts"], "cluster-autoscaler": {"chart": str(chart)}}}
        wanted["training"] = {
            **{key: value for key, value in TRAINING.items() if key != "device"},
            "environment": s3.environment,
            "prepare": {"sources": ["stdlib"], "tokenizer": "train:400", "sequenceLength": 64, "evalFraction": 0.1},
        }
        account.write(wanted)
        account.init()
        with Hardware(account, s3, SIMULATION, log=said) as hardware:
            try:
                account.up(simulation=SIMULATION, limit=LIMIT_SECONDS)
                job = ended()
                log = said()
            finally:
                account.destroy(simulation=SIMULATION, limit=LIMIT_SECONDS)
    return Prepared(hardware.said_before, log, job["status"], ours())


def test_no_gpu_node_comes_before_the_data_is_prepared(prepared: Prepared) -> None:
    assert prepared.said_before is not None, f"no pod ever waited for a GPU node\n{prepared.said}"
    assert re.search(r"^prepared s3://\S+: [\d,]+ train rows", prepared.said_before, re.M), prepared.said_before


def test_the_job_then_begins_on_the_gpu_node_which_here_has_none(prepared: Prepared) -> None:
    assert prepared.status["jobStatus"] == "FAILED", f"{json.dumps(prepared.status)}\n{prepared.said}"
    assert "ProcessGroupNCCL is only supported with GPUs, no GPUs found!" in prepared.said, prepared.said


def test_destroy_leaves_nothing_of_it(prepared: Prepared) -> None:
    assert prepared.left == []
