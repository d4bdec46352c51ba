"""config.py: what a stack may say, without the engine."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from recorder import ROOT

import config
from training import schema
from training.errors import BadInput


def refused(values, region="us-west-2"):
    with pytest.raises(BadInput) as caught:
        config.load(values, region)
    return str(caught.value)


def test_an_empty_stack_is_the_documented_default():
    stack = config.load({})
    assert (stack.gpu.instance_type, stack.gpu.size, stack.system.instance_type, stack.zone) == ("g6.12xlarge", (2, 2), "m7i.xlarge", None)
    assert not stack.training.run, "a first `up` burns no GPU hours"


def test_fr46_every_problem_is_named_in_one_error_with_key_value_and_way_out():
    text = refused(
        {
            "gpu": {"nodes": "two", "nodeCout": 4, "diskGiB": 200},
            "gpus": {},
            "owner": 83,
            "network": {"zone": ["us-west-2a", "us-west-2b"]},
            "training": {"transprot": "efa"},
        }
    )
    for part in (
        "ray-train-efa:gpu.nodes = 'two': a whole number expected",
        "ray-train-efa:gpu.nodeCout is no setting; did you mean ray-train-efa:gpu.nodes?",
        "ray-train-efa:gpus is no setting; did you mean ray-train-efa:gpu?",
        "ray-train-efa:owner = 83",
        "ray-train-efa:network.zone = ['us-west-2a', 'us-west-2b']",
        "ray-train-efa:training.transprot is no setting; did you mean ray-train-efa:training.transport?",
    ):
        assert part in text, text
    assert "6 problems" in text


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"gpu": {"nodes": 0}}, "ray-train-efa:gpu.nodes = 0: must be at least 1"),
        ({"gpu": {"nodes": 2, "minNodes": 0, "maxNodes": 2}}, "exclude each other"),
        ({"gpu": {"minNodes": 1}}, "minNodes and maxNodes go together"),
        ({"gpu": {"minNodes": 3, "maxNodes": 2}}, "minNodes = 3 is more than maxNodes = 2"),
        ({"gpu": {"instanceType": "big"}}, "instanceType = 'big'"),
        ({"gpu": {"capacity": {"kind": "rented"}}}, "one of on-demand, spot, reservation, capacity-block expected"),
        ({"gpu": {"capacity": {"kind": "reservation"}}}, "needs the id of your reservation"),
        ({"gpu": {"capacity": {"id": "cr-0123456789abcdef0"}}}, "has no meaning for on-demand"),
        ({"gpu": {"capacity": {"kind": "capacity-block", "id": "cr-0123456789abcdef0"}}}, "ray-train-efa:network.zone is missing"),
        ({"gpu": {"nodes": 1}, "training": {"transport": "efa"}}, "a single node has no one to reach over EFA"),
        ({"gpu": {"diskGiB": 20}}, "diskGiB = 20 does not hold the training image"),
        ({"system": {"diskGiB": 20}}, "diskGiB = 20 does not hold the training image"),
        ({"ray": {"headMemory": "2Gi"}}, "gets the head killed"),
        ({"ray": {"headMemory": "lots"}}, "is no amount of memory"),
        ({"ray": {"image": "my/image:latest"}}, "moves under the running cluster"),
        ({"ray": {"image": "my/image"}}, "moves under the running cluster"),
        ({"ray": {"charts": {"kuberay": {}}}}, "charts.kuberay is no chart of this project"),
        ({"cluster": {"kubernetesVersion": "1.34"}}, "out of standard support"),
        ({"cluster": {"kubernetesVersion": 1.35}}, "a text expected; put it in quotes"),
        ({"cluster": {"kind": "existing"}}, "needs cluster.context"),
        ({"cluster": {"context": "kind-lab"}}, "is for kind existing"),
        ({"cluster": {"publicAccessCidrs": ["10.0.0.1/8"]}}, "is no IPv4 network"),
        ({"cluster": {"admins": ["me"]}}, "is no IAM principal"),
        ({"cluster": {"logs": ["api", "etcd"]}}, "'etcd' is no kind of log"),
        ({"cluster": {"logRetentionDays": 2}}, "logRetentionDays = 2: CloudWatch takes 1, 3, 5, 7, 14"),
        ({"network": {"cidr": "10.0.0.0/8"}}, "between /16 and /24"),
        ({"network": {"cidr": "8.8.0.0/16"}}, "no private IPv4 network"),
        ({"network": {"cidr": "10.0.0.0/24"}}, "leaves 123 addresses for 3 nodes"),
        ({"network": {"zone": "us-east-1a"}}, "is not in aws:region = 'us-west-2'"),
        ({"network": {"zone": "us-west-2a"}, "pins": {"zone": "us-west-2b"}}, "differ; keep one of the two"),
        ({"network": {"natMode": "none"}}, "ray-train-efa:network.natMode is no setting"),
        ({"storage": {"bucket": "s3://mine"}}, "write it without s3://"),
        ({"storage": {"bucket": "mine", "checkpointDays": 3}}, "is for the stack's own bucket"),
        ({"storage": {"prefix": "/runs/"}}, "without slashes at the ends"),
        ({"storage": {"onDestroy": "burn"}}, "one of keep, delete, protect expected"),
        ({"storage": {"fsx": {"capacityGiB": 1500}}}, "1200 or a multiple of 2400"),
        ({"training": {"storage": "/tmp/results"}}, "is not shared by 2 nodes"),
        ({"training": {"run": "yes"}}, "ray-train-efa:training.run = 'yes': true or false expected"),
        ({"training": {"run": True, "model": {"random": "tiny"}}}, "ray-train-efa:training.data is missing"),
        ({"training": {"steps": 10, "warmupSteps": 20}}, "ray-train-efa:training: warmupSteps"),
        ({"budget": {"stopAfter": "soon"}}, "write 90m, 8h or 2d"),
        ({"budget": {"stopAfter": "5m"}}, "between 30m and 365d"),
        ({"budget": {"maxHourlyUsd": 0}}, "must be more than 0"),
        ({"budget": {"idleStopMinutes": 10}}, "needs gpu.minNodes and gpu.maxNodes"),
        ({"pins": {"imageDigest": "sha256:1"}}, "is no digest"),
        ({"pins": {"amiRelease": "newest"}}, "is no release"),
        ({"pins": {"amiRelease": "1.35.1-20261101"}}, "is not of Kubernetes 1.36"),
        ({"pins": {"addonVersions": {"vpc-cni": 1.2}}}, "addonVersions.vpc-cni = 1.2"),
        ({"training": ["run"]}, "ray-train-efa:training must be a mapping"),
        ({"gpu": 3}, "must be a mapping of keys to values"),
    ],
)
def test_what_can_not_work_is_refused_with_its_key_and_the_way_out(values, says):
    text = refused(values)
    assert says in text
    assert "ray-train-efa:" in text


@pytest.mark.parametrize(
    "values",
    [
        {"gpu": {"instanceType": "p5.48xlarge", "nodes": 4}},
        {"gpu": {"minNodes": 0, "maxNodes": 4}, "budget": {"idleStopMinutes": 15}},
        {"gpu": {"capacity": {"kind": "reservation", "id": "cr-0123456789abcdef0"}}, "network": {"zone": "us-west-2b"}},
        {"gpu": {"capacity": {"kind": "capacity-block", "id": "cr-0123456789abcdef0"}}, "pins": {"zone": "us-west-2b"}},
        {"gpu": {"nodes": 1}, "training": {"transport": "any"}},
        {"training": {"storage": "s3://elsewhere/runs"}},
        {"training": {"storage": "/fsx/runs"}, "storage": {"fsx": {"capacityGiB": 2400}}},
        {"cluster": {"kind": "existing", "context": "kind-lab"}},
        {"owner": "0123"},
    ],
)
def test_what_works_is_accepted(values):
    config.load(values, "us-west-2")


def test_fr45_type_and_count_are_the_only_edits_from_g6_to_p5():
    before = yaml.safe_load((ROOT / "Pulumi.dev.yaml").read_text())["config"]
    after = json.loads(json.dumps(before))
    after["ray-train-efa:gpu"] = {"instanceType": "p5.48xlarge", "nodes": 4}
    after["ray-train-efa:budget"]["maxHourlyUsd"] = 300
    stack = config.from_pulumi({key: value if isinstance(value, str) else json.dumps(value) for key, value in after.items()})
    assert stack.gpu.size == (4, 4)


def test_the_engine_and_a_stack_file_give_the_same_stack(tmp_path):
    file = tmp_path / "Pulumi.x.yaml"
    file.write_text('config:\n  aws:region: us-west-2\n  ray-train-efa:owner: "0123"\n  ray-train-efa:gpu:\n    nodes: 3\n')
    values, region = config.read_stack_file(str(file))
    from_file = config.load(values, region)
    from_engine = config.from_pulumi({"aws:region": "us-west-2", "ray-train-efa:owner": "0123", "ray-train-efa:gpu": '{"nodes":3}'})
    assert from_file == from_engine
    assert from_engine.owner == "0123", "a digit-only text stays a text"


def test_a_renamed_project_is_told_to_rename_its_keys():
    with pytest.raises(BadInput, match="rename them to mine:"):
        config.from_pulumi({"ray-train-efa:gpu": "{}"}, "mine")
    assert config.from_pulumi({"mine:gpu": '{"nodes": 5}'}, "mine").gpu.size == (5, 5)


def test_other_namespaces_are_none_of_our_business():
    assert config.from_pulumi({"aws:region": "us-west-2", "other:gpu": "{}"}).gpu.size == (2, 2)


def test_a_stack_file_that_is_not_there_is_one_sentence():
    with pytest.raises(BadInput, match="can't be read"):
        config.read_stack_file("/nowhere/Pulumi.x.yaml")


@given(
    st.dictionaries(
        st.sampled_from(config.KEYS),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c), max_leaves=6),
    )
)
def test_whatever_is_given_ends_in_a_stack_or_in_bad_input(values):
    try:
        found = config.load(values)
    except BadInput as error:
        found = str(error)
    assert isinstance(found, config.Stack) or "ray-train-efa:" in found


@given(least=st.integers(0, 50), most=st.integers(1, 50))
def test_sizes_are_ordered_or_refused(least, most):
    values = {"gpu": {"minNodes": least, "maxNodes": most}}
    if least <= most:
        assert config.load(values).gpu.size == (least, most)
    else:
        assert "swap them" in refused(values)


def test_pulumi_yaml_documents_every_key_with_its_default():
    project = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())
    assert project["name"] == config.PROJECT
    assert set(project["config"]) == set(config.KEYS)
    assert project["runtime"]["options"]["virtualenv"] == ".venv-pulumi"
    for name, section in config.SECTIONS.items():
        entry = project["config"][name]
        assert entry["type"] == "object"
        for key, _, meaning in schema.describe(section):
            assert f"{key} (" in entry["description"], f"{name}.{key} is not documented"
            assert " ".join(meaning.split()[:6]) in " ".join(entry["description"].split()), f"{name}.{key} has another meaning in config.py"
        assert schema.collect(section, entry["default"], "", problems := []) == section(), f"the defaults of {name} differ from config.py's: {problems}"
    assert project["config"]["owner"]["default"] == config.SCALARS["owner"]
    assert config.load({key: entry["default"] for key, entry in project["config"].items()}) == config.load({})


def test_the_project_serves_as_a_template():
    project = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())
    assert project["template"]["config"]["aws:region"]["default"] == "us-west-2"
    assert project["template"]["description"]
    config.load(*config.read_stack_file(str(ROOT / "Pulumi.dev.yaml")))


def test_images_are_by_digest_where_one_is_pinned():
    digest = "sha256:" + "a" * 64
    assert config.load({"pins": {"imageDigest": digest}}).image == f"public.ecr.aws/deep-learning-containers/ray@{digest}"
    assert config.load({}).image == "public.ecr.aws/deep-learning-containers/ray:train-ml-cuda-v1.1.0"
    assert config.load({"ray": {"image": "my/image:7"}}).image == "my/image:7"
