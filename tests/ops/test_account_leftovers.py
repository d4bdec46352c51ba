"""`leftovers`: everything that a stack could have left is found, priced and, where it carries the stack's tags, deleted in the order that AWS needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import config
from ops import Stack, cli, cli_account, left_kinds, leftovers, sweep, target
from ops.aws import Aws
from ops.left_kinds import Leftover, Scope
from tests.ops.account_server import ACCOUNT, ec2_error, paged, specification, tag_set, tags, write_stack, xml

NAME = "ray-train-efa-dev"


@pytest.fixture(autouse=True)
def stack(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no engine: what it still manages is another test's matter
    write_stack(tmp_path)
    return tmp_path


def mapped(name="dev"):
    return {tag["Key"]: tag["Value"] for tag in tags(name)}


@pytest.fixture
def wreck(account):
    """What a destroy that broke off, and EKS's own habits, can leave behind."""
    ec2, iam = account.client("ec2"), account.client("iam")
    made = {}
    vpc = made["VPC"] = ec2.create_vpc(CidrBlock="10.0.0.0/16", TagSpecifications=specification("vpc"))["Vpc"]["VpcId"]
    subnet = made["subnet"] = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24", TagSpecifications=specification("subnet"))["Subnet"]["SubnetId"]
    other = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24", AvailabilityZone="us-west-2b", TagSpecifications=specification("subnet"))["Subnet"][
        "SubnetId"
    ]
    gateway = made["internet gateway"] = ec2.create_internet_gateway(TagSpecifications=specification("internet-gateway"))["InternetGateway"][
        "InternetGatewayId"
    ]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    table = made["route table"] = ec2.create_route_table(VpcId=vpc, TagSpecifications=specification("route-table"))["RouteTable"]["RouteTableId"]
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    address = made["Elastic IP"] = ec2.allocate_address(Domain="vpc", TagSpecifications=specification("elastic-ip"))["AllocationId"]
    made["NAT gateway"] = ec2.create_nat_gateway(SubnetId=subnet, AllocationId=address, TagSpecifications=specification("natgateway"))["NatGateway"][
        "NatGatewayId"
    ]
    groups = [
        ec2.create_security_group(GroupName=name, Description="d", VpcId=vpc, TagSpecifications=specification("security-group"))["GroupId"]
        for name in ("a", "b")
    ]
    made["security group"] = groups[0]
    for one, two in (groups, groups[::-1]):  # each holds the other
        ec2.authorize_security_group_ingress(GroupId=one, IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": two}]}])
    cni = [{"ResourceType": "network-interface", "Tags": [{"Key": "cluster.k8s.amazonaws.com/name", "Value": NAME}]}]
    made["interface"] = ec2.create_network_interface(SubnetId=subnet, TagSpecifications=cni)["NetworkInterface"]["NetworkInterfaceId"]
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    launched = ec2.run_instances(
        ImageId=image, InstanceType="g6.12xlarge", MinCount=1, MaxCount=1, SubnetId=subnet, TagSpecifications=specification("instance")
    )
    made["instance"] = launched["Instances"][0]["InstanceId"]
    volume = ec2.create_volume(AvailabilityZone="us-west-2a", Size=100, VolumeType="gp3", TagSpecifications=specification("volume"))
    made["volume"] = volume["VolumeId"]
    made["snapshot"] = ec2.create_snapshot(VolumeId=volume["VolumeId"], TagSpecifications=specification("snapshot"))["SnapshotId"]
    owned = [{"ResourceType": "launch-template", "Tags": [{"Key": "eks:cluster-name", "Value": NAME}]}]
    template = ec2.create_launch_template(LaunchTemplateName="eks-1234", LaunchTemplateData={"InstanceType": "m7i.xlarge"}, TagSpecifications=owned)
    made["launch template"] = template["LaunchTemplate"]["LaunchTemplateId"]
    endpoint = ec2.create_vpc_endpoint(
        VpcId=vpc, ServiceName="com.amazonaws.us-west-2.s3", VpcEndpointType="Gateway", RouteTableIds=[table], TagSpecifications=specification("vpc-endpoint")
    )
    made["VPC endpoint"] = endpoint["VpcEndpoint"]["VpcEndpointId"]
    reserved = ec2.create_capacity_reservation(
        InstanceType="g6.12xlarge",
        InstancePlatform="Linux/UNIX",
        AvailabilityZone="us-west-2a",
        InstanceCount=2,
        InstanceMatchCriteria="targeted",
        EndDateType="unlimited",
        TagSpecifications=specification("capacity-reservation"),
    )
    made["reservation"] = reserved["CapacityReservation"]["CapacityReservationId"]
    elb = account.client("elbv2")
    balancer = elb.create_load_balancer(Name="k8s-x", Subnets=[subnet, other], Tags=[{"Key": "elbv2.k8s.aws/cluster", "Value": NAME}])["LoadBalancers"][0]
    made["load balancer"] = balancer["LoadBalancerArn"]
    targets = elb.create_target_group(Name="k8s-t", Protocol="HTTP", Port=80, VpcId=vpc, Tags=[{"Key": "elbv2.k8s.aws/cluster", "Value": NAME}])[
        "TargetGroups"
    ][0]
    made["target group"] = targets["TargetGroupArn"]
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    made["IAM role"] = f"{NAME}-node-1a2b3c4"
    iam.create_role(RoleName=made["IAM role"], AssumeRolePolicyDocument=trust, Tags=tags())
    document = json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}]})
    iam.put_role_policy(RoleName=made["IAM role"], PolicyName="p", PolicyDocument=document)
    made["IAM policy"] = iam.create_policy(PolicyName=f"{NAME}-x-1a2b3c4", PolicyDocument=document, Tags=tags())["Policy"]["Arn"]
    iam.attach_role_policy(RoleName=made["IAM role"], PolicyArn=made["IAM policy"])
    made["log group"] = f"/aws/eks/{NAME}/cluster"
    account.client("logs").create_log_group(logGroupName=made["log group"], tags=mapped())
    made["schedule"] = f"default/{NAME}-stop-8h-1a2b3c4"
    stop = {
        "Arn": "arn:aws:scheduler:::aws-sdk:eks:updateNodegroupConfig",
        "RoleArn": f"arn:aws:iam::{ACCOUNT}:role/x",
        "Input": json.dumps({"ClusterName": NAME}),
    }
    account.client("scheduler").create_schedule(
        Name=f"{NAME}-stop-8h-1a2b3c4", ScheduleExpression="at(2026-12-01T00:00:00)", FlexibleTimeWindow={"Mode": "OFF"}, Target=stop
    )
    made["bucket"] = f"{NAME}-runs-1a2b3c4"
    s3 = account.client("s3")
    s3.create_bucket(Bucket=made["bucket"], CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.put_bucket_versioning(Bucket=made["bucket"], VersioningConfiguration={"Status": "Enabled"})
    s3.put_bucket_tagging(Bucket=made["bucket"], Tagging={"TagSet": tags()})
    for body in (b"1", b"22"):
        s3.put_object(Bucket=made["bucket"], Key="runs/a/run.json", Body=body)
    made["ECR repository"] = f"{NAME}-images-1a2b3c4"
    account.client("ecr").create_repository(repositoryName=made["ECR repository"], tags=tags())
    return made


def test_every_kind_of_thing_is_found_and_priced(account, wreck):
    found = leftovers.find("dev")
    assert found.problems == ()
    kinds = {item.kind: item for item in found.items}
    assert set(wreck) <= set(kinds), set(wreck) - set(kinds)
    ids = {item.id for item in found.items}
    assert set(wreck.values()) <= ids
    assert kinds["instance"].usd_month == pytest.approx(4.6016 * 730, abs=0.01)
    assert kinds["reservation"].usd_month == pytest.approx(2 * 4.6016 * 730, abs=0.01), "unused, it bills as if it ran"
    assert kinds["NAT gateway"].usd_month == pytest.approx(0.045 * 730, abs=0.01)
    assert next(item for item in found.items if item.id == wreck["volume"]).usd_month == 8.0
    assert kinds["subnet"].usd_month == 0.0
    assert kinds["instance"].created is not None
    assert found.items[0].kind == "reservation", "what bills most comes first"


def test_nothing_of_another_stack_or_of_nobody_is_found(account):
    ec2 = account.client("ec2")
    ec2.create_volume(AvailabilityZone="us-west-2a", Size=1, TagSpecifications=specification("volume", "dev-2"))
    ec2.create_volume(AvailabilityZone="us-west-2a", Size=1)
    ec2.create_vpc(CidrBlock="10.0.0.0/16", TagSpecifications=specification("vpc", "other"))
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    account.client("iam").create_role(RoleName="ray-train-efa-dev-2-node-1a2b3c4", AssumeRolePolicyDocument=trust, Tags=tags("dev-2"))
    account.client("iam").create_role(RoleName="ray-train-efa-dev-2-stop-1a2b3c4", AssumeRolePolicyDocument=trust)
    account.client("logs").create_log_group(logGroupName="/aws/eks/ray-train-efa-dev-2/cluster")
    found = leftovers.find("dev")
    assert found.items == ()
    assert found.clean


def test_an_empty_account_is_clean_and_the_command_ends_with_0(account, capsys):
    assert cli.main(["leftovers", "dev"]) == 0
    assert f"nothing of stack dev is left in account {ACCOUNT}, us-west-2" in " ".join(capsys.readouterr().out.split())


def test_fr11_an_interface_with_the_clusters_tag_alone_is_found_and_deleted(account):
    ec2 = account.client("ec2")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    subnet = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["Subnets"][0]["SubnetId"]
    marked = [{"ResourceType": "network-interface", "Tags": [{"Key": "cluster.k8s.amazonaws.com/name", "Value": NAME}]}]
    id = ec2.create_network_interface(SubnetId=subnet, TagSpecifications=marked)["NetworkInterface"]["NetworkInterfaceId"]
    (item,) = leftovers.find("dev").items
    assert (item.kind, item.id, item.by) == ("interface", id, "cluster")
    assert item.note.startswith("available")
    assert sweep.delete(Aws("us-west-2"), [item]).deleted == (item,)
    assert leftovers.find("dev").clean


def test_what_lies_in_the_stacks_vpc_without_a_tag_is_shown_and_never_deleted(account, capsys):
    ec2 = account.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16", TagSpecifications=specification("vpc"))["Vpc"]["VpcId"]
    stranger = ec2.create_security_group(GroupName="guard-duty", Description="d", VpcId=vpc)["GroupId"]
    found = leftovers.find("dev")
    (item,) = [one for one in found.items if one.id == stranger]
    assert item.by == "vpc"
    good, not_ = sweep.deletable(found.items)
    assert [one.kind for one in good] == ["VPC"]
    assert "carries no tag of this stack" in not_[0][1]
    assert f"aws ec2 delete-security-group --group-id {stranger}" in not_[0][1]


def test_a_log_group_that_eks_made_again_has_no_tags_and_is_shown_with_its_command(account):
    account.client("logs").create_log_group(logGroupName=f"/aws/eks/{NAME}/cluster")
    found = leftovers.find("dev")
    (item,) = found.items
    assert (item.kind, item.by) == ("log group", "name")
    good, not_ = sweep.deletable(found.items)
    assert good == []
    assert f"aws logs delete-log-group --log-group-name /aws/eks/{NAME}/cluster --region us-west-2" in not_[0][1]


def test_delete_asks_shows_and_leaves_nothing_that_carries_the_tags(account, wreck, stack, capsys, monkeypatch):
    write_stack(stack, {"storage": {"onDestroy": "delete"}})
    monkeypatch.setattr(sweep, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.0)
    assert cli.main(["leftovers", "dev", "--delete"]) == 2, "nobody can be asked"
    assert "say --yes" in capsys.readouterr().err
    assert leftovers.find("dev").left, "and nothing was deleted"
    assert cli.main(["leftovers", "dev", "--delete", "--yes"]) == 0
    shown = capsys.readouterr().out
    assert "To be deleted, in this order" in shown
    assert leftovers.find("dev").items == ()
    remaining = account.client("ec2").describe_vpcs()["Vpcs"]
    assert [vpc["IsDefault"] for vpc in remaining] == [True], "the account's own is untouched"


def test_what_the_engine_still_manages_is_downs_to_delete(account, capsys, monkeypatch):
    account.client("ec2").create_volume(AvailabilityZone="us-west-2a", Size=1, TagSpecifications=specification("volume"))

    class Engine:
        def __init__(self, aim):
            self.aim = aim

        def resources(self):
            return [{"type": "pulumi:pulumi:Stack"}, {"type": "aws:ec2/vpc:Vpc", "custom": True}]

    monkeypatch.setattr(cli_account, "Engine", Engine)
    assert cli.main(["leftovers", "dev", "--delete", "--yes"]) == 6
    assert "still holds 1 resources: `python -m ops down dev` deletes them" in " ".join(capsys.readouterr().err.split())
    assert account.count("DeleteVolume") == 0


def test_the_stack_object_has_the_accounts_verbs(account, stack):
    (stack / "__main__.py").symlink_to(Path(sweep.__file__).parents[1] / "__main__.py")
    account.client("ec2").create_volume(AvailabilityZone="us-west-2a", Size=1, TagSpecifications=specification("volume"))
    stack = Stack("dev")
    assert [item.kind for item in stack.leftovers().left] == ["volume"]
    assert stack.cost().usd == 0
    assert stack.doctor().account == ACCOUNT
    assert stack.plan(offline=True).cost.an_hour == pytest.approx(9.65, abs=0.01)


def test_the_order_is_the_one_that_aws_needs(account, wreck):
    good, _ = sweep.deletable(leftovers.find("dev").items, frozenset({"dev"}))
    kinds = [item.kind for item in good]

    def before(first, second):
        return max(i for i, kind in enumerate(kinds) if kind == first) < min(i for i, kind in enumerate(kinds) if kind == second)

    assert before("instance", "interface")
    assert before("interface", "security group")
    assert before("NAT gateway", "Elastic IP")
    assert before("load balancer", "subnet")
    assert before("security group", "VPC")
    assert before("subnet", "VPC")
    assert before("internet gateway", "VPC")
    assert before("schedule", "IAM role")


def test_what_aws_holds_for_a_while_is_tried_again(account, wreck, monkeypatch):
    refusals = [2]

    def held(_):
        refusals[0] -= 1
        return ec2_error("DependencyViolation", "has a dependent object") if refusals[0] >= 0 else None

    account.answers["ec2", "DeleteSubnet"] = held
    pauses = []
    good, _ = sweep.deletable(leftovers.find("dev").items)
    swept = sweep.delete(Aws("us-west-2"), good, sleep=pauses.append)
    assert swept.refused == ()
    assert pauses.count(sweep.PAUSE_SECONDS) >= 1


def test_what_can_not_be_deleted_is_named_with_the_reason_and_the_rest_still_goes(account, monkeypatch):
    ec2 = account.client("ec2")
    for _ in range(2):
        ec2.create_volume(AvailabilityZone="us-west-2a", Size=1, TagSpecifications=specification("volume"))
    ec2.allocate_address(Domain="vpc", TagSpecifications=specification("elastic-ip"))
    account.answers["ec2", "DeleteVolume"] = lambda _: ec2_error("UnauthorizedOperation", "no", 403)
    good, _ = sweep.deletable(leftovers.find("dev").items)
    swept = sweep.delete(Aws("us-west-2"), good, sleep=lambda _: None)
    assert [item.kind for item in swept.deleted] == ["Elastic IP"]
    assert [(item.kind, "ec2:DeleteVolume in us-west-2 is not allowed" in why) for item, why in swept.refused] == [("volume", True)] * 2


def test_a_bucket_that_is_kept_on_purpose_is_listed_and_is_no_leftover(account, wreck, capsys):
    found = leftovers.find("dev")
    (bucket,) = [item for item in found.items if item.kind == "bucket"]
    assert bucket.kept, "storage.onDestroy is keep where nothing is said"
    assert "2 objects" in bucket.note, "old versions count"
    assert bucket not in found.left
    assert bucket not in sweep.deletable(found.items)[0]


def test_a_bucket_of_a_stack_without_a_file_is_never_deleted(account, wreck, stack):
    (stack / "Pulumi.dev.yaml").rename(stack / "Pulumi.renamed.yaml")
    account.answers["ec2", "DescribeRegions"] = lambda _: one_region()
    found = leftovers.find_all()
    good, not_ = sweep.deletable(found.items)
    assert "bucket" not in {item.kind for item in good}
    assert any(item.kind == "bucket" and "aws s3 rb --force" in why for item, why in not_)


def one_region():
    return xml("DescribeRegions", "<regionInfo><item><regionName>us-west-2</regionName><regionEndpoint>x</regionEndpoint></item></regionInfo>")


def test_all_finds_every_stack_in_every_region(account, stack):
    for region, name in (("us-west-2", "dev"), ("us-east-1", "ci-17")):
        client = account.client("ec2", region)
        client.create_volume(AvailabilityZone=f"{region}a", Size=1, TagSpecifications=specification("volume", name, region))
    two = "".join(f"<item><regionName>{name}</regionName><regionEndpoint>x</regionEndpoint></item>" for name in ("us-east-1", "us-west-2"))
    account.answers["ec2", "DescribeRegions"] = lambda _: xml("DescribeRegions", f"<regionInfo>{two}</regionInfo>")
    found = leftovers.find_all()
    assert {(item.stack, item.region) for item in found.items} == {("dev", "us-west-2"), ("ci-17", "us-east-1")}
    assert set(leftovers.by_stack(found.items)) == {"dev", "ci-17"}
    assert account.count("ListRoles") == 1, "IAM is the same everywhere"


def test_a_cluster_that_runs_is_told_to_be_up_rather_than_left(account, capsys):
    account.client("eks").create_cluster(name=NAME, roleArn=f"arn:aws:iam::{ACCOUNT}:role/x", resourcesVpcConfig={}, tags=mapped())
    found = leftovers.find("dev")
    assert found.alive == (NAME,)
    assert cli.main(["leftovers", "dev"]) == 6
    assert "`python -m ops down` removes a stack that is up" in " ".join(capsys.readouterr().out.split())


def test_more_than_a_thousand_things_are_all_found_page_by_page(account, capsys):
    volume = "<volumeId>vol-{i:017x}</volumeId><size>10</size><volumeType>gp3</volumeType><status>available</status>"
    account.answers["ec2", "DescribeVolumes"] = paged("DescribeVolumes", "volumeSet", [volume.format(i=i) + tag_set() for i in range(2600)])
    found = leftovers.find("dev")
    assert len({item.id for item in found.items}) == 2600
    assert found.usd_month == pytest.approx(2600 * 0.80)
    pages = [call for call in account.calls if call.operation == "DescribeVolumes" and "NextToken" in call.parameters]
    assert len(pages) == 5, "six pages of 500"
    assert cli.main(["leftovers", "dev", "--json"]) == 6
    assert len(json.loads(capsys.readouterr().out)["items"]) == 2600
    assert cli.main(["leftovers", "dev"]) == 6
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 150, "a long list is summed up"
    assert "and 2,560 more: 2,560 volume" in shown


def test_a_bucket_with_more_than_a_thousand_objects_is_emptied_in_batches(account, stack):
    s3, name = account.client("s3"), f"{NAME}-runs-1a2b3c4"
    s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": tags()})
    backend = account.backend_global("s3")
    for i in range(1100):
        backend.put_object(name, f"runs/{i}", b"x")
    write_stack(stack, {"storage": {"onDestroy": "delete"}})
    found = leftovers.find("dev")
    assert "1,100 objects" in found.items[0].note
    good, _ = sweep.deletable(found.items, frozenset({"dev"}))
    assert sweep.delete(Aws("us-west-2"), good).refused == ()
    assert leftovers.find("dev").items == ()


def test_a_cluster_and_its_nodes_go_before_the_network_and_are_waited_for(account, monkeypatch):
    eks, ec2 = account.client("eks"), account.client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    eks.create_cluster(name=NAME, roleArn=f"arn:aws:iam::{ACCOUNT}:role/x", resourcesVpcConfig={"subnetIds": [subnet]}, tags=mapped())
    eks.create_nodegroup(clusterName=NAME, nodegroupName="gpu", subnets=[subnet], nodeRole=f"arn:aws:iam::{ACCOUNT}:role/x", tags=mapped())
    good, _ = sweep.deletable(leftovers.find("dev").items)
    kinds = [item.kind for item in good]
    assert kinds.index("node group") < kinds.index("EKS cluster")
    swept = sweep.delete(Aws("us-west-2"), good, sleep=lambda _: None)
    assert {item.kind for item in swept.deleted} >= {"node group", "EKS cluster"}
    assert eks.list_clusters()["clusters"] == []


def test_every_kind_that_is_listed_can_be_deleted():
    kinds = set(sweep.ORDER)
    assert kinds == {*sweep.SIMPLE, *sweep.SPECIAL}
    assert all(sweep.command(Leftover(kind, "a/b", "n", "us-west-2", "dev", "tag")).startswith("aws ") for kind in kinds)


words = st.sampled_from(["dev", "dev-2", "prod", "x"])


@given(mine=words, theirs=words, cluster_tag=st.booleans())
def test_a_thing_is_never_claimed_from_the_stack_whose_deployment_it_names(mine, theirs, cluster_tag):
    scope = Scope(f"id-{mine}", mine, f"ray-train-efa-{mine}", ("vpc-1",))
    carried = {"project": config.PROJECT, "deployment": f"id-{theirs}"}
    if cluster_tag:
        carried["eks:cluster-name"] = f"ray-train-efa-{mine}"
    assert scope.judge(carried, "vpc-1") == ("tag" if mine == theirs else None)


@given(tags=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4))
def test_nothing_without_a_mark_is_claimed(tags):
    scope = Scope("id", "dev", "ray-train-efa-dev", ("vpc-1",))
    assert scope.judge(tags, "vpc-2") is None or tags.get("project") == config.PROJECT
    assert scope.judge(tags, "vpc-1") in ("vpc", "tag")


def test_a_price_that_the_table_lacks_is_not_guessed():
    price = left_kinds.Prices(None)
    assert price.hour("natGateway") is None
    assert price.instance("g6.12xlarge") is None
