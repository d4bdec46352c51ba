"""`cost`: what was made when, what each run took, and a price table that says its day."""

from __future__ import annotations

import datetime
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prices
from ops import cli, cost, pricelist, target
from ops.aws import AwsError
from ops.errors import BadInput, Refused
from tests.ops.account_server import ACCOUNT, json_error, plain_json, specification, tags, write_stack

NAME = "ray-train-efa-dev"
NOON = datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)


@pytest.fixture(autouse=True)
def stack(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "ROOT", tmp_path)
    write_stack(tmp_path)
    return tmp_path


def in_an_hour():
    return datetime.datetime.now(datetime.UTC) + HOUR


@pytest.fixture
def up(account):
    """A control plane, two GPU nodes and a NAT gateway, made just now."""
    ec2 = account.client("ec2")
    own = {tag["Key"]: tag["Value"] for tag in tags()}
    account.client("eks").create_cluster(name=NAME, roleArn=f"arn:aws:iam::{ACCOUNT}:role/x", resourcesVpcConfig={}, tags=own)
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    ec2.run_instances(ImageId=image, InstanceType="g6.12xlarge", MinCount=2, MaxCount=2, TagSpecifications=specification("instance"))
    ec2.run_instances(ImageId=image, InstanceType="g6.12xlarge", MinCount=1, MaxCount=1, TagSpecifications=specification("instance", "other"))
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    ec2.create_nat_gateway(SubnetId=subnet, AllocationId=address, TagSpecifications=specification("natgateway"))
    return account


def test_an_hour_of_what_runs_costs_its_price_an_hour(up):
    found = cost.so_far("dev", now=in_an_hour())
    parts = {part.what: part for part in found.parts}
    assert parts["g6.12xlarge"].running == 2, "another stack's node is not this one's"
    assert parts["g6.12xlarge"].hours == pytest.approx(2, abs=0.2)
    assert set(parts) == {"controlPlane", "g6.12xlarge", "disk of g6.12xlarge", "natGateway", "publicIpv4"}
    assert found.usd_hour == pytest.approx(2 * 4.6016 + 2 * 0.0425 + 0.1 + 0.045 + 0.005, abs=0.001)
    assert found.usd == pytest.approx(found.usd_hour, rel=0.1)
    assert found.prices_as_of == prices.table()["asOf"]
    assert found.problems == ()


def test_a_stack_that_is_not_up_costs_nothing(account, capsys):
    assert cost.so_far("dev").usd == 0
    assert cli.main(["cost", "dev"]) == 0
    assert "nothing of dev runs" in capsys.readouterr().out


def test_the_receipt_counts_to_the_end_and_leaves_nothing_running(up):
    before = cost.so_far("dev", now=in_an_hour())
    bill = cost.receipt(before, before.until + 2 * HOUR)
    assert bill.usd_hour == 0
    assert bill.usd == pytest.approx(before.usd + 2 * before.usd_hour, abs=0.001)
    assert cost.receipt(before, before.until - HOUR).usd == pytest.approx(before.usd), "never less than before"


def activity(said, start, end=None, status="Successful"):
    return {"Description": said, "StartTime": start, "EndTime": end, "StatusCode": status}


def test_nodes_that_are_gone_are_in_the_scaling_groups_history():
    found = cost.history(
        iter(
            [
                activity("Terminating EC2 instance: i-0aa", NOON + 2 * HOUR, NOON + 3 * HOUR),
                activity("Launching a new EC2 instance: i-0bb.  Status Reason: no capacity", NOON, status="Failed"),
                activity("Launching a new EC2 instance: i-0cc", NOON + HOUR),
                activity("Launching a new EC2 instance: i-0aa", NOON),
            ]
        ),
        "g6.12xlarge",
    )
    assert {use.id: use.hours(NOON + 5 * HOUR) for use in found} == {"i-0aa": 3.0, "i-0cc": 4.0}


@given(hours=st.lists(st.floats(0, 1000), max_size=5), more=st.floats(0, 100))
def test_a_receipt_is_never_less_than_what_was_spent(hours, more):
    parts = tuple(cost.Part(f"p{i}", each, i % 2, 0.5 if i % 3 else None) for i, each in enumerate(hours))
    before = cost.Spent("dev", ACCOUNT, "us-west-2", NOON, NOON, parts, (), (), (), "2026-09-10")
    after = cost.receipt(before, NOON + datetime.timedelta(hours=more))
    assert after.usd >= before.usd - 1e-3
    assert after.usd == pytest.approx(before.usd + more * before.usd_hour, rel=1e-6, abs=1e-2)


def record(**more):
    attempt = {"started": "2026-11-29T10:00:00Z", "ended": "2026-11-29T11:00:00Z"}
    return {"schema": 1, "run": "a", "outcome": "done", "started": "2026-11-29T10:00:00Z", "attempts": [attempt], **more}


def metrics(tokens):
    return f'{{"step": 1, "loss": 2.0, "tokens": {tokens // 2}}}\n{{"step": 2, "loss": 1.0, "tokens": {tokens}}}\n{{"step": 2, "evalLoss": 1.1}}\n{{"st'


def test_a_run_costs_its_attempts_hours_at_the_stacks_price():
    twice = [{"started": "2026-11-29T10:00:00Z", "ended": "2026-11-29T11:00:00Z"}, {"started": "2026-11-29T11:30:00Z", "ended": None}]
    found = cost.run_of(record(attempts=twice, outcome="running"), metrics(2_000_000), 10.0, NOON)
    assert found.hours == pytest.approx(1.5), "an attempt that runs counts until now"
    assert found.usd == pytest.approx(15.0)
    assert found.tokens == 2_000_000, "the last whole line that names tokens"
    assert found.usd_per_million_tokens == pytest.approx(7.5)


def test_a_run_without_metrics_or_prices_says_what_it_knows():
    assert cost.run_of(record(), "", 10.0, NOON).usd_per_million_tokens is None
    assert cost.run_of(record(), metrics(10), None, NOON).usd is None


def test_runs_are_read_from_the_stacks_bucket(up, capsys):
    s3, bucket = up.client("s3"), f"{NAME}-runs-1a2b3c4"
    s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": tags()})
    s3.put_object(Bucket=bucket, Key="runs/a/run.json", Body=json.dumps(record()))
    s3.put_object(Bucket=bucket, Key="runs/a/metrics.jsonl", Body=b"x" * 100_000 + b"\n" + metrics(3_000_000).encode())
    s3.put_object(Bucket=bucket, Key="runs/broken/run.json", Body=b"{")
    s3.put_object(Bucket=bucket, Key="runs/newer/run.json", Body=json.dumps(record(schema=2)))
    found = cost.so_far("dev")
    assert [(run.name, run.tokens) for run in found.runs] == [("a", 3_000_000)]
    assert cli.main(["cost", "dev"]) == 0
    shown = capsys.readouterr().out
    assert "3,000,000" in shown
    assert "a million tokens" in shown
    assert cli.main(["cost", "dev", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usdHour"] == pytest.approx(found.usd_hour)


def test_a_bucket_that_may_not_be_read_is_said(up, stack):
    write_stack(stack, {"storage": {"bucket": "someone-elses-bucket"}})
    found = cost.so_far("dev")
    assert found.usd_hour > 9
    assert "s3:ListObjects" in found.problems[0]


def test_a_stack_on_an_existing_cluster_has_no_bill_of_aws(account, stack):
    write_stack(stack, {"cluster": {"kind": "existing", "context": "kind"}})
    with pytest.raises(BadInput, match="AWS bills nothing"):
        cost.so_far("dev")


# ---- the price list


def product(usd, usage="", region="eu-west-1", begin="0"):
    dimension = {"unit": "Hrs", "beginRange": begin, "pricePerUnit": {"USD": str(usd)}}
    terms = {"OnDemand": {"x": {"priceDimensions": {"y": dimension}}}}
    return json.dumps({"product": {"attributes": {"usagetype": usage, "regionCode": region}}, "terms": terms})


def price_list(call):
    """AWS's documented answer: products as JSON texts; a usage type has a region's prefix."""
    fields = {item["Field"]: item["Value"] for item in call.parameters["Filters"]}
    assert call.region == "us-east-1", "the API lives there"
    if "instanceType" in fields:
        usd = {"g6.12xlarge": 5.1, "m7i.xlarge": 0.22}.get(fields["instanceType"])
        return plain_json({"FormatVersion": "aws_v1", "PriceList": [product(usd)] if usd else []})
    usage = fields.get("usagetype")
    found = {
        "NatGateway-Hours": [product(0.048, "EU-NatGateway-Hours")],
        "AmazonEKS-Hours:perCluster": [product(0.6, "EU-AmazonEKS-Hours:extendedSupport:perCluster"), product(0.1, "EU-AmazonEKS-Hours:perCluster")],
        "EBS:VolumeUsage.gp3": [product(0.088, "EU-EBS:VolumeUsage.gp3")],
        "EBS:VolumeP-Throughput.gp3": [product(45.056, "EU-EBS:VolumeP-Throughput.gp3")],
    }
    return plain_json({"FormatVersion": "aws_v1", "PriceList": found.get(usage, [])})


@pytest.fixture
def table(stack):
    file = stack / "prices.json"
    shutil.copy(prices.TABLE, file)
    return file


def test_refresh_keeps_a_regions_own_prices_with_their_day(account, stack, table):
    write_stack(stack, region="eu-west-1")
    account.answers["pricing", "GetProducts"] = price_list
    found = cost.refresh("dev", file=table)
    own = json.loads(table.read_text())["byRegion"]["eu-west-1"]
    assert own["instances"] == {"g6.12xlarge": 5.1, "m7i.xlarge": 0.22}
    assert own["hourly"]["controlPlane"] == 0.1, "not the price of extended support"
    assert own["monthly"]["gp3Mibps"] == pytest.approx(0.044), "listed per GiB/s"
    assert own["asOf"] == datetime.datetime.now(datetime.UTC).date().isoformat()
    assert found.changed["natGateway"] == (None, 0.048)
    bill = prices.hourly(target.read("dev").settings, "eu-west-1", json.loads(table.read_text()))
    assert "publicIpv4" in bill.unknown, "what the list lacks is not guessed"
    assert bill.as_of == own["asOf"]
    west = prices.hourly(target.read("dev").settings, "us-west-2", json.loads(table.read_text()))
    assert west.as_of == prices.table()["asOf"], "other regions keep theirs"


def test_a_refresh_that_is_denied_or_empty_changes_nothing(account, table):
    before = table.read_text()
    account.answers["pricing", "GetProducts"] = lambda _: json_error("AccessDeniedException", "no")
    with pytest.raises(AwsError, match="ask for the right pricing:GetProducts"):
        cost.refresh("dev", file=table)
    account.answers["pricing", "GetProducts"] = lambda _: plain_json({"FormatVersion": "aws_v1", "PriceList": []})
    with pytest.raises(Refused, match=r"no on-demand price of g6\.12xlarge, m7i\.xlarge in us-west-2; prices\.json is unchanged"):
        cost.refresh("dev", file=table)
    assert table.read_text() == before


def test_a_free_first_tier_is_not_the_price():
    tiers = {"a": {"beginRange": "0", "pricePerUnit": {"USD": "0"}}, "b": {"beginRange": "750", "pricePerUnit": {"USD": "0.0225"}}}
    assert pricelist.usd(json.dumps({"terms": {"OnDemand": {"x": {"priceDimensions": tiers}}}})) == 0.0225
    assert pricelist.usd("{}") is None
