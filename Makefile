# make demo: train on this machine. make test: check everything. Both install what they need, into .venv and .venv-pulumi.
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test test-training test-faults test-program test-aws-sim test-cluster test-chain test-on-demand clean

# Two environments: torch's gigabytes have no place where `pulumi up` runs.
T := .venv/bin/python
P := .venv-pulumi/bin/python

demo: .venv/demo-ready
	@$(T) -m training.demo

# Side by side, for each leaves a part of two cores idle. What each has to say comes when it is done.
test:
	@echo "Installing and testing both halves side by side: 12 minutes on two cores, 20 the first time; each shows its output at its end"
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-program test-training

# The training package: style, types, and its tests with real processes.
test-training: .venv/test-ready
	$(T) -m ruff check .
	$(T) -m ruff format --check .
	$(T) -m mypy training benchmarks
	$(T) -m pytest -n 2 --dist worksteal tests/unit tests/transport tests/fast tests/gpu tests/training

# Lost, drained and new Ray nodes, stopped workers, the drill: minutes each, with real processes on this machine.
test-faults: .venv/test-ready
	$(T) -m pytest -n 3 --dist loadfile -m soak $(addprefix tests/training/test_,elastic.py drill.py hang.py job.py storage_faults.py transport_of_a_job.py)

# The Pulumi program: types, and what it would create.
test-program: .venv-pulumi/test-ready
	$(P) -m mypy config.py versions.py prices.py fit.py naming.py infra workloads ops examples __main__.py
	$(P) -m pytest tests/graph tests/ops -m "not aws_sim and not cluster"

# The real Pulumi engine against a simulated AWS. LAB: the folder with the simulator, which builds the engine and an API server on first use.
LAB ?= ../shared/lab
test-aws-sim: .venv-pulumi/test-ready
	$(LAB)/build pulumi pulumi-resource-kubernetes etcd kube
	AWS_SIM_LAB=$(abspath $(LAB)) $(P) -m pytest tests/aws_sim tests/ops -m "aws_sim and not soak"

# The real engine on a real Kubernetes: make test-cluster KUBECONFIG=... CLUSTER_IMAGE=... (tests/cluster/real.py says what else may be named).
test-cluster: .venv-pulumi/test-ready
	$(P) -m pytest tests/cluster tests/ops -m "cluster and not soak"

# Both at once, on one machine: the program for AWS from VPC to a finished job. What test-cluster is told, and LAB.
test-chain: .venv-pulumi/test-ready .venv/test-ready
	AWS_SIM_LAB=$(abspath $(LAB)) $(P) -m pytest tests/chain

# The same where GPU nodes come on demand, after the data is prepared.
test-on-demand: .venv-pulumi/test-ready .venv/test-ready
	AWS_SIM_LAB=$(abspath $(LAB)) $(P) -m pytest -m soak tests/chain

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; say which with make PYTHON=...") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv .venv

.venv/demo-ready: training/requirements.txt training/constraints.txt | .venv/bin/python
	@echo "Installing PyTorch, Ray and transformers into .venv: several GB, a few minutes the first time"
	@$(T) -m pip install --quiet --disable-pip-version-check -r training/requirements.txt -c training/constraints.txt
	@touch $@

.venv/test-ready: training/requirements-test.txt training/requirements.txt requirements-dev.txt training/constraints.txt | .venv/bin/python
	@echo "Installing PyTorch, Ray and transformers into .venv: several GB, a few minutes the first time"
	@$(T) -m pip install --quiet --disable-pip-version-check -r training/requirements-test.txt -c training/constraints.txt
	@touch $@

.venv-pulumi/test-ready: requirements.txt requirements-dev.txt constraints.txt
	@$(PYTHON) -m venv .venv-pulumi
	@echo "Installing Pulumi's packages into .venv-pulumi"
	@$(P) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt -c constraints.txt
	@touch $@

clean:
	rm -rf .venv .venv-pulumi demo .mypy_cache .ruff_cache
