"""`doctor` against an account behind a real server: what it finds, and what it says when the account says no."""

from __future__ import annotations

import datetime
import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fit
from ops import checks, cli, doctor, target, tools, zones
from ops.errors import BadInput
from tests.ops.account_server import ACCOUNT, ec2_error, json_error, query_error, specification, tags, write_stack, xml
from tests.ops.registry import DIGEST, Registry

ALL_FREE = datetime.datetime(2026, 11, 29, tzinfo=datetime.UTC)


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """`pulumi` and `aws` that say their versions."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, says in (("pulumi", "v3.272.0"), ("aws", "aws-cli/2.31.0 Python/3.13")):
        file = folder / name
        file.write_text(f"#!/bin/sh\necho {says}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def registry():
    with Registry({"team/ray:v1": DIGEST}) as running:
        yield running


@pytest.fixture
def stack(tmp_path, monkeypatch, registry):
    """Writes the stack file; its image is in a registry on this machine."""
    monkeypatch.setattr(target, "ROOT", tmp_path)

    def write(settings=None, **how):
        return write_stack(tmp_path, {"ray": {"image": f"{registry.host}/team/ray:v1"}, **(settings or {})}, **how)

    write()
    return write


def findings(report, check):
    return [finding for finding in report.findings if finding.check == check]


def one(report, check):
    found = findings(report, check)
    assert len(found) == 1, found
    return found[0]


def test_an_account_that_has_all_is_found_able(account, stack):
    report = doctor.examine("dev")
    assert report.ok
    assert {finding.level for finding in report.findings} <= {"ok", "note"}, [f for f in report.findings if f.level not in ("ok", "note")]
    assert report.account == ACCOUNT
    assert report.usd_hour == pytest.approx(9.65, abs=0.01)
    assert "1 EFA interface on 1 network card" in one(report, "EFA").what
    assert {zone.name for zone in report.zones if zone.fits} == {f"us-west-2{letter}" for letter in "abcd"}


def test_nothing_is_made_or_changed(account, stack):
    doctor.examine("dev", regions=["us-east-1"])
    reading = ("Describe", "Get", "List", "Simulate", "GET ")
    assert [call.operation for call in account.calls if not call.operation.startswith(reading)] == []


def test_what_is_not_ok_says_why_it_matters_and_what_to_do(account, stack):
    account.quotas |= {"L-DB2E81BA": 64, "L-0263D0A3": 0}
    account.client("eks").create_cluster(name="ray-train-efa-dev", roleArn=f"arn:aws:iam::{ACCOUNT}:role/x", resourcesVpcConfig={})
    report = doctor.examine("dev")
    bad = [finding for finding in report.findings if finding.level in ("fail", "warn")]
    assert {finding.check for finding in bad} == {"vCPU quota", "limits", "names"}
    assert all(finding.what and finding.why and finding.do for finding in bad)
    assert report.findings[0].level == "fail", "the worst comes first"


def test_fr02_a_quota_too_small_says_needed_allowed_used_code_region_and_the_request(account, stack):
    account.quotas["L-DB2E81BA"] = 64
    report = doctor.examine("dev")
    (bad,) = [finding for finding in findings(report, "vCPU quota") if finding.level == "fail"]
    for text in ("2 x g6.12xlarge need 96 vCPUs", "L-DB2E81BA", "us-west-2", "64 allowed", "0 in use by others"):
        assert text in bad.what
    assert "gpu.nodes" in bad.do
    assert "request-service-quota-increase --service-code ec2 --quota-code L-DB2E81BA --desired-value 96 --region us-west-2" in bad.do
    assert not report.ok


def run(account, count, kind="g6.12xlarge", **tagged):
    ec2 = account.client("ec2")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    return ec2.run_instances(ImageId=image, InstanceType=kind, MinCount=count, MaxCount=count, **tagged)["Instances"]


def test_fr02_what_others_run_is_taken_off_and_the_stacks_own_is_not(account, stack):
    account.quotas["L-DB2E81BA"] = 144
    run(account, 1)
    run(account, 2, TagSpecifications=specification("instance"))
    assert doctor.examine("dev").ok, "144 allowed, 48 of others, 96 needed"
    run(account, 1)
    (bad,) = [finding for finding in findings(doctor.examine("dev"), "vCPU quota") if finding.level == "fail"]
    assert "96 in use by others, 48 free" in bad.what
    assert "--desired-value 192" in bad.do


def test_a_thousand_and_more_instances_are_all_counted(account, stack):
    account.quotas["L-DB2E81BA"] = 10_000
    account.many_instances(1100)
    ok = [finding for finding in findings(doctor.examine("dev"), "vCPU quota") if "g6.12xlarge" in finding.what]
    assert f"{1100 * 4} in use by others" in ok[0].what
    pages = [call for call in account.calls if call.operation == "DescribeInstances" and "NextToken" in call.parameters]
    assert pages, "it took more than one page"


def test_fr02_a_quota_that_may_not_be_read_is_no_failure(account, stack):
    account.answers["service-quotas", "GetServiceQuota"] = lambda _: json_error("AccessDeniedException", "no identity-based policy allows it")
    report = doctor.examine("dev")
    assert report.ok
    unknown = [finding for finding in report.findings if finding.level == "unknown"]
    assert any("servicequotas:GetServiceQuota in us-west-2 is not allowed" in finding.what for finding in unknown)


def test_an_empty_reservation_of_others_counts_against_the_quota(account, stack):
    account.quotas["L-DB2E81BA"] = 100
    account.client("ec2").create_capacity_reservation(
        InstanceType="g6.12xlarge",
        InstancePlatform="Linux/UNIX",
        AvailabilityZone="us-west-2a",
        InstanceCount=1,
        InstanceMatchCriteria="open",
        EndDateType="unlimited",
    )
    assert any(finding.level == "fail" and "48 in use" in finding.what for finding in findings(doctor.examine("dev"), "vCPU quota"))


def test_rights_that_iam_would_refuse_are_a_warning_and_name_themselves(account, stack):
    names = ["iam:CreateRole", "iam:PassRole"]
    members = "".join(f"<member><EvalActionName>{name}</EvalActionName><EvalDecision>implicitDeny</EvalDecision></member>" for name in names)
    inside = f"<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults>{members}</EvaluationResults></SimulatePrincipalPolicyResult>"
    account.answers["iam", "SimulatePrincipalPolicy"] = lambda _: xml("SimulatePrincipalPolicy", inside, "https://iam.amazonaws.com/doc/2010-05-08/")
    found = one(doctor.examine("dev"), "permissions")
    assert found.level == "warn"
    assert "iam:CreateRole, iam:PassRole" in found.what


def test_rights_that_may_not_be_simulated_are_not_known(account, stack):
    account.answers["iam", "SimulatePrincipalPolicy"] = lambda _: query_error("AccessDenied", "User is not authorized")
    report = doctor.examine("dev")
    assert one(report, "permissions").level == "unknown"
    assert report.ok


@pytest.mark.parametrize(
    ("status", "end", "level", "says"),
    [
        ("STANDARD_SUPPORT", "2029-01-01", "ok", "in standard support until 2029-01-01"),
        ("STANDARD_SUPPORT", None, "warn", "days"),
        ("EXTENDED_SUPPORT", "2026-01-01", "fail", "out of standard support"),
        ("UNSUPPORTED", "2025-01-01", "fail", "EKS does not offer 1.36"),
    ],
)
def test_the_kubernetes_version_and_how_long_it_is_supported(account, stack, status, end, level, says):
    soon = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=10)).date().isoformat()
    account.versions = [("1.36", status, end or soon), ("1.37", "STANDARD_SUPPORT", "2030-01-01")]
    found = one(doctor.examine("dev"), "Kubernetes")
    assert (found.level, says in found.what) == (level, True), found
    if level != "ok":
        assert "'1.37'" in found.do, "the way out names a version that EKS supports"


def test_support_is_told_from_a_dated_table_where_eks_may_not_be_asked(account, stack):
    account.answers["eks", "GET /cluster-versions"] = lambda _: json_error("AccessDeniedException", "denied", 403)
    stack({"cluster": {"kubernetesVersion": "1.35"}})
    found = one(doctor.examine("dev"), "Kubernetes")
    assert "until 2027-03-27" in found.what
    assert "versions.py" in found.what
    stack()
    assert one(doctor.examine("dev"), "Kubernetes").level == "unknown"


def test_a_cluster_of_the_same_name_is_a_clash_unless_it_is_the_stacks_own(account, stack):
    eks = account.client("eks")
    eks.create_cluster(name="ray-train-efa-dev", roleArn=f"arn:aws:iam::{ACCOUNT}:role/x", resourcesVpcConfig={})
    assert one(doctor.examine("dev"), "names").level == "fail"
    eks.delete_cluster(name="ray-train-efa-dev")
    own = {tag["Key"]: tag["Value"] for tag in tags()}
    eks.create_cluster(name="ray-train-efa-dev", roleArn=f"arn:aws:iam::{ACCOUNT}:role/x", resourcesVpcConfig={}, tags=own)
    assert one(doctor.examine("dev"), "names").level == "note"


def test_a_log_group_that_a_destroy_left_is_found_before_up_stumbles_over_it(account, stack):
    logs = account.client("logs")
    logs.create_log_group(logGroupName="/aws/eks/ray-train-efa-dev-2/cluster")
    assert one(doctor.examine("dev"), "names").level == "ok", "another stack's"
    logs.create_log_group(logGroupName="/aws/eks/ray-train-efa-dev/cluster")
    found = one(doctor.examine("dev"), "names")
    assert found.level == "fail"
    assert "aws logs delete-log-group --log-group-name /aws/eks/ray-train-efa-dev/cluster" in found.do


def test_limits_of_the_network_are_counted_without_the_stacks_own(account, stack):
    account.quotas["L-F678F1CE"] = 1
    assert next(finding for finding in findings(doctor.examine("dev"), "limits") if finding.level == "fail").what.startswith("VPCs: others use 1 of 1")
    account.client("ec2").create_vpc(CidrBlock="10.0.0.0/16", TagSpecifications=specification("vpc"))
    assert doctor.examine("dev").ok, "the stack is up and has its own"


def test_the_wrong_account_ends_the_questions(account, stack):
    stack(allowedAccountIds=["999999999999"])
    report = doctor.examine("dev")
    (found,) = report.findings
    assert found.level == "fail"
    assert ACCOUNT in found.what
    assert "999999999999" in found.what
    assert {call.operation for call in account.calls} == {"GetCallerIdentity"}


def test_fr09_another_profile_in_the_shell_than_in_the_stack_file_is_said(account, stack, tmp_path, monkeypatch):
    credentials = tmp_path / "credentials"
    credentials.write_text("[team-b]\naws_access_key_id = a\naws_secret_access_key = b\n[other]\naws_access_key_id = c\naws_secret_access_key = d\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_PROFILE", "other")
    stack(profile="team-b")
    warned = [finding for finding in findings(doctor.examine("dev"), "account") if finding.level == "warn"]
    assert "aws:profile = team-b, but AWS_PROFILE is other" in warned[0].what


def test_fr01_the_zone_that_can_not_host_a_control_plane_is_marked_by_its_id(account, stack):
    stack(region="us-east-1")
    report = doctor.examine("dev")
    unable = [zone for zone in report.zones if not zone.control_plane]
    assert [zone.id for zone in unable] == ["use1-az3"]


def test_fr03_a_zone_that_does_not_offer_the_type_fails_and_names_those_that_do(account, stack):
    stack({"network": {"zone": "us-east-1e"}}, region="us-east-1")
    found = [finding for finding in findings(doctor.examine("dev"), "fit") if "does not offer" in finding.what]
    assert "us-east-1e" in found[0].what
    assert "zones that do: us-east-1a, us-east-1b" in found[0].what + found[0].do


def test_fr18_a_type_without_efa_fails_with_the_sizes_that_have_it(account, stack):
    stack({"gpu": {"instanceType": "g6.4xlarge"}})
    found = [finding for finding in findings(doctor.examine("dev"), "fit") if "has no EFA" in finding.what]
    assert "g6.12xlarge" in found[0].do


def test_a_type_that_does_not_exist_is_one_finding(account, stack):
    stack({"gpu": {"instanceType": "g99.12xlarge"}})
    found = one(doctor.examine("dev"), "fit")
    assert "'g99.12xlarge': EC2 has no such type in us-west-2" in found.what


def test_an_image_that_is_not_there_fails(account, stack, registry):
    stack({"ray": {"image": f"{registry.host}/team/ray:v2"}})
    found = one(doctor.examine("dev"), "image")
    assert found.level == "fail"
    assert "has no v2" in found.what


def test_a_registry_that_does_not_answer_is_not_known(account, stack):
    stack({"ray": {"image": "127.0.0.1:9/team/ray:v1"}})
    found = one(doctor.examine("dev"), "image")
    assert found.level == "unknown"


def test_a_missing_program_fails_and_an_old_one_warns(account, stack, programs, monkeypatch):
    (programs / "aws").write_text("#!/bin/sh\necho aws-cli/1.18.0\n")
    (programs / "pulumi").unlink()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    levels = {finding.what.split()[0]: finding.level for finding in tools.findings()}
    assert levels == {"pulumi": "fail", "aws": "warn"}


def test_regions_are_ranked_by_what_fits_and_then_by_price(account, stack):
    account.answers["service-quotas", "GetServiceQuota"] = lambda call: json_error("AccessDeniedException", "") if call.region == "us-east-2" else None
    report = doctor.examine("dev", regions=["us-east-1", "eu-west-1", "us-east-2"])
    found = {region.name: region for region in report.regions}
    assert set(found) == {"us-west-2", "us-east-1", "eu-west-1", "us-east-2"}
    assert not found["eu-west-1"].fits, "no zone there offers g6.12xlarge"
    assert found["us-east-2"].free_vcpus is None
    assert [region.name for region in report.regions][-1] == "eu-west-1"
    assert found["us-east-1"].usd_hour == pytest.approx(9.65, abs=0.01)
    assert found["us-east-2"].usd_hour is None, "not in the table, and the price list has nothing"


def test_a_region_that_does_not_exist_is_told_and_ends_nothing(account, stack):
    account.answers["ec2", "DescribeInstanceTypes"] = lambda call: ec2_error("AuthFailure", "", 401) if call.region == "xx-nowhere-1" else None
    with pytest.raises(Exception, match="does not know these credentials"):
        doctor.examine("dev", regions=["xx-nowhere-1"])


def test_a_probe_finds_the_zone_that_has_capacity_and_pins_take_it(account, stack, monkeypatch):
    monkeypatch.setattr(doctor.image, "digest", lambda *_: DIGEST)
    stack({"ray": {}})
    first = next(zone.name for zone in doctor.examine("dev").zones if zone.fits)
    account.capacity[first] = "InsufficientInstanceCapacity"
    report = doctor.examine("dev", probing=True, pin=True)
    assert (report.probed[0].zone, report.probed[0].capacity) == (first, False)
    assert report.probed[-1].capacity
    assert report.pinned.after["zone"] == report.probed[-1].zone != first
    assert not [finding for finding in report.findings if finding.level == "warn"], "one zone is enough"
    assert all(item["state"] == "cancelled" for item in account.reservations.values())


def test_no_capacity_anywhere_is_a_warning_with_ways_out(account, stack):
    account.capacity |= {f"us-west-2{letter}": "InsufficientInstanceCapacity" for letter in "abcd"}
    warned = [finding for finding in doctor.examine("dev", probing=True).findings if finding.check == "capacity"]
    assert {finding.level for finding in warned} == {"warn"}
    assert len(warned) == 4
    assert all("--regions" in finding.do for finding in warned)


def test_a_stack_on_an_existing_cluster_asks_no_aws(account, stack, registry):
    stack({"cluster": {"kind": "existing", "context": "kind"}}, region=None)
    report = doctor.examine("dev")
    assert report.ok
    assert account.calls == []
    with pytest.raises(BadInput, match="--pin and --regions"):
        doctor.examine("dev", pin=True, regions=["us-east-1"])


def test_json_is_one_document_and_the_exit_code_says_whether_something_failed(account, stack, capsys):
    assert cli.main(["doctor", "dev", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["account"] == ACCOUNT
    account.quotas["L-DB2E81BA"] = 1
    assert cli.main(["doctor", "dev", "--json"]) == 6
    document = json.loads(capsys.readouterr().out)
    assert document["findings"][0]["level"] == "fail"
    assert cli.main(["doctor", "dev"]) == 6
    shown = capsys.readouterr()
    assert "FAIL" in shown.out
    assert "would stop `up` of dev" in shown.err


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.booleans(), st.integers(0, 10)), min_size=1, max_size=6, unique_by=lambda zone: zone[0]),
)
def test_a_zone_that_fits_is_never_ranked_behind_one_that_does_not(rows):
    every = [fit.Zone(f"us-west-2{letter}", f"usw2-az{i}") for i, (letter, *_) in enumerate(rows)]
    ranked = zones.rank(
        every,
        [f"us-west-2{letter}" for letter, gpu, _, _ in rows if gpu],
        [f"us-west-2{letter}" for letter, _, system, _ in rows if system],
        {zone.id: score for zone, (_, _, _, score) in zip(every, rows, strict=True) if score},
        None,
    )
    assert len(ranked) == len(every)
    assert [zone.fits for zone in ranked] == sorted((zone.fits for zone in ranked), reverse=True)
    fitting = [zone.score or 0 for zone in ranked if zone.fits]
    assert fitting == sorted(fitting, reverse=True)


RESERVED = {"gpu": {"capacity": {"kind": "reservation", "id": "cr-0123456789abcdef0"}}, "network": {"zone": "us-west-2b"}}


def judged(settings, tmp_path, **item):
    write_stack(tmp_path, settings)
    aim = target.read("dev", tmp_path)
    g6 = fit.Instance("g6.12xlarge", 48, 192, 4, 22, 1, 1, ("x86_64",))
    facts = fit.Facts(ACCOUNT, "aws", "us-west-2", g6, g6, (), (), (), None)
    good = {
        "CapacityReservationId": "cr-0123456789abcdef0",
        "InstanceType": "g6.12xlarge",
        "State": "active",
        "AvailableInstanceCount": 2,
        "TotalInstanceCount": 2,
        "AvailabilityZone": "us-west-2b",
        "InstancePlatform": "Linux/UNIX",
        "ReservationType": "default",
    }
    context = checks.Context(aim, None, ACCOUNT, "arn:aws:iam::1:user/x", facts, ALL_FREE)
    return checks._judged({**good, **item}, context, "key")


def test_a_reservation_that_fits_is_ok(tmp_path):
    assert judged(RESERVED, tmp_path).level == "ok"


@pytest.mark.parametrize(
    ("item", "says", "do"),
    [
        ({"ReservationType": "capacity-block"}, "is a capacity-block, not a reservation", "gpu.capacity.kind"),
        ({"InstanceType": "p5.48xlarge"}, "is of p5.48xlarge", "gpu.instanceType"),
        ({"State": "expired"}, "is expired", "another"),
        ({"AvailableInstanceCount": 1}, "has 1 free of 2, and 2 are needed", "gpu.nodes"),
        ({"AvailabilityZone": "us-west-2a"}, "lies in us-west-2a, the stack in us-west-2b", "network.zone"),
        ({"StartDate": ALL_FREE + datetime.timedelta(days=2)}, "begins only at 2026-12-01", "then"),
        ({"EndDate": ALL_FREE - datetime.timedelta(hours=1)}, "ended at", "another"),
        ({"InstancePlatform": "Windows"}, "is for Windows", "Linux"),
    ],
)
def test_a_reservation_that_does_not_fit_says_how(tmp_path, item, says, do):
    found = judged(RESERVED, tmp_path, **item)
    assert found.level == "fail"
    assert says in found.what
    assert do in found.do


def test_a_capacity_block_ends_half_an_hour_before_its_end(tmp_path):
    block = {**RESERVED, "gpu": {"capacity": {"kind": "capacity-block", "id": "cr-0123456789abcdef0"}}}
    found = judged(block, tmp_path, ReservationType="capacity-block", EndDate=datetime.datetime(2026, 12, 1, 12, tzinfo=datetime.UTC))
    assert "until 2026-12-01 11:30 UTC" in found.what


def test_a_reservation_that_is_not_there_is_found(account, stack):
    stack(RESERVED)
    found = one(doctor.examine("dev"), "reservation")
    assert found.level == "fail"
    assert "not in us-west-2" in found.what


def test_the_console_lines_that_tell_why_a_node_does_not_join():
    text = "\n".join(["booting", "nodeadm[1]: error: could not reach the API server", "systemd: fine", "kubelet: Unauthorized", "login:"])
    assert checks.console_lines(text) == ["nodeadm[1]: error: could not reach the API server", "kubelet: Unauthorized"]


def test_nodes_that_did_not_join_show_their_groups_issue_and_their_console(account, stack):
    own = {tag["Key"]: tag["Value"] for tag in tags()}
    account.client("eks").create_cluster(name="ray-train-efa-dev", roleArn=f"arn:aws:iam::{ACCOUNT}:role/x", resourcesVpcConfig={}, tags=own)
    issue = {"code": "NodeCreationFailure", "message": "Instances failed to join the kubernetes cluster", "resourceIds": ["i-0123"]}
    group = {"nodegroupName": "gpu-g6-12xlarge", "status": "CREATE_FAILED", "health": {"issues": [issue]}}
    console = "bm9kZWFkbTogZXJyb3I6IGNhbid0IHJlYWNoIHRoZSBBUEkgc2VydmVy"  # nodeadm: error: can't reach the API server
    path = "GET /clusters/ray-train-efa-dev/node-groups"
    account.answers["eks", path] = lambda _: (200, "application/json", json.dumps({"nodegroups": ["gpu-g6-12xlarge"]}).encode())
    account.answers["eks", f"{path}/gpu-g6-12xlarge"] = lambda _: (200, "application/json", json.dumps({"nodegroup": group}).encode())
    account.answers["ec2", "GetConsoleOutput"] = lambda _: xml("GetConsoleOutput", f"<instanceId>i-0123</instanceId><output>{console}</output>")
    found = one(doctor.examine("dev"), "nodes")
    assert "NodeCreationFailure" in found.what
    assert "can't reach the API server" in found.why
