"""Every way an account can say no is a sentence with a way out, an exit code, and no trace."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ops import cli, target
from ops.aws import Aws, AwsError
from ops.errors import BadInput
from tests.ops.account_server import ec2_error, json_error, query_error, specification, write_stack


@pytest.fixture(autouse=True)
def stack(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "ROOT", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_stack(tmp_path)
    return tmp_path


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        yield taken.getsockname()[1]


COMMANDS = (["doctor", "dev"], ["leftovers", "dev"], ["cost", "dev"], ["cost", "dev", "--refresh"])


def refused(capsys, command, says, code):
    assert cli.main(command) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert says in " ".join(shown.err.split()), shown.err
    assert "Traceback" not in shown.err + shown.out
    assert "AKIAEXAMPLE" not in shown.err + shown.out
    assert "not-a-secret" not in shown.err + shown.out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_expired_credentials(account, capsys, command):
    account.answers["sts", "GetCallerIdentity"] = lambda _: query_error("ExpiredToken", "The security token included in the request is expired")
    account.answers["pricing", "GetProducts"] = lambda _: json_error("ExpiredTokenException", "expired")
    refused(capsys, command, "credentials have expired; sign in again", 5)


@pytest.mark.parametrize("command", COMMANDS[:3], ids=" ".join)
def test_credentials_that_aws_does_not_know(account, capsys, command):
    account.answers["sts", "GetCallerIdentity"] = lambda _: query_error("InvalidClientTokenId", "The security token is invalid")
    refused(capsys, command, "AWS does not know these credentials (InvalidClientTokenId)", 5)


@pytest.mark.parametrize("command", COMMANDS[:3], ids=" ".join)
def test_no_credentials(account, capsys, monkeypatch, command):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    refused(capsys, command, "no AWS credentials", 5)


@pytest.mark.parametrize("command", COMMANDS[:3], ids=" ".join)
def test_no_region(account, capsys, stack, command):
    write_stack(stack, region=None)
    refused(capsys, command, "no region: set aws:region", 2)


@pytest.mark.parametrize("command", COMMANDS[:2], ids=" ".join)
def test_no_network(account, capsys, monkeypatch, closed_port, command):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed_port}")
    refused(capsys, command, "AWS can't be reached for sts:GetCallerIdentity in us-west-2", 5)


def test_a_profile_that_does_not_exist(account, capsys, stack):
    write_stack(stack, profile="nobody")
    refused(capsys, ["doctor", "dev"], "aws:profile = 'nobody': there is no such profile", 2)


def test_a_stack_that_does_not_exist_names_those_that_do(account, capsys):
    refused(capsys, ["doctor", "prod"], "there is no stack 'prod'", 2)
    assert cli.main(["leftovers", "prod"]) == 2
    assert "Stacks here: dev" in " ".join(capsys.readouterr().err.split())


def test_a_stack_file_that_is_no_yaml(account, capsys, stack):
    (stack / "Pulumi.dev.yaml").write_text("config: [")
    refused(capsys, ["doctor", "dev"], "not valid YAML", 2)


def test_a_stack_file_with_a_wrong_key_lists_the_problems(account, capsys, stack):
    write_stack(stack, {"gpu": {"node": 2}})
    refused(capsys, ["cost", "dev"], "ray-train-efa:gpu.node is no setting; did you mean", 2)


def test_a_call_that_is_throttled_twice_is_asked_again(account):
    left = [2]

    def throttled(_):
        left[0] -= 1
        return ec2_error("RequestLimitExceeded", "Request limit exceeded.", 503) if left[0] >= 0 else None

    account.answers["ec2", "DescribeVpcs"] = throttled
    assert list(Aws("us-west-2").pages("ec2", "describe_vpcs", "Vpcs"))
    assert account.count("DescribeVpcs") == 3


def test_a_call_that_is_throttled_for_ever_says_so(account):
    account.answers["ec2", "DescribeVpcs"] = lambda _: ec2_error("RequestLimitExceeded", "Request limit exceeded.", 503)
    with pytest.raises(AwsError, match="refused as too frequent, five times in a row") as caught:
        list(Aws("us-west-2").pages("ec2", "describe_vpcs", "Vpcs"))
    assert caught.value.kind == "throttled"
    assert account.count("DescribeVpcs") == 5


@pytest.mark.parametrize(
    ("service", "operation", "call", "answer"),
    [
        ("ec2", "DescribeVpcs", "describe_vpcs", ec2_error("UnauthorizedOperation", "You are not authorized", 403)),
        ("service-quotas", "ListServiceQuotas", "list_services", json_error("AccessDeniedException", "no", 400)),
        ("iam", "ListRoles", "list_roles", query_error("AccessDenied", "no")),
    ],
)
def test_a_denied_call_names_the_right_that_is_missing(account, service, operation, call, answer):
    account.answers[service, "*"] = lambda _: answer
    with pytest.raises(AwsError) as caught:
        Aws("us-west-2").ask(service, call)
    assert caught.value.kind == "denied"
    prefix = service.replace("-", "")
    assert f"ask for the right {prefix}:" in str(caught.value)


def test_a_web_page_in_place_of_an_answer_is_told_as_such(account):
    account.answers["eks", "GET /clusters"] = lambda _: (502, "text/html", b"<html>Bad gateway</html>")
    with pytest.raises(AwsError) as caught:
        Aws("us-west-2").ask("eks", "list_clusters")
    assert "<html>" not in str(caught.value)


def test_regions_and_threads_share_clients(account):
    aws = Aws("us-west-2")
    other = aws.elsewhere("us-east-1")
    assert other.client("ec2").meta.region_name == "us-east-1"
    assert aws.client("ec2") is aws.elsewhere("us-west-2").client("ec2"), "making one takes a tenth of a second"


def test_pages_hold_one_page_in_memory(account):
    account.many_instances(1100)
    pages = Aws("us-west-2").pages("ec2", "describe_instances", "Reservations", PaginationConfig={"PageSize": 500})
    next(pages)
    assert account.count("DescribeInstances") == 1, "the second page is asked for when the first is used up"
    assert 1 + sum(1 for _ in pages) == 1100
    assert account.count("DescribeInstances") == 3


def test_the_command_itself_shows_one_sentence(account, tmp_path, aws_server):
    """As a person runs it: a process of its own."""
    account.answers["sts", "GetCallerIdentity"] = lambda _: query_error("ExpiredToken", "expired")
    done = subprocess.run(
        [sys.executable, "-m", "ops", "doctor", "dev"],
        cwd=cli.__file__.rsplit("/ops/", 1)[0],
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 5
    assert done.stdout == ""
    assert done.stderr.count("\n") <= 2
    assert "expired" in done.stderr


def test_a_bad_combination_of_options_is_one_sentence(capsys):
    assert cli.main(["leftovers"]) == 2
    assert "name one stack, or say --all" in capsys.readouterr().err
    assert cli.main(["leftovers", "dev", "--all"]) == 2


def test_leftovers_that_may_not_all_be_asked_for_prove_nothing(account, capsys):
    account.answers["elasticloadbalancing", "DescribeLoadBalancers"] = lambda _: query_error("AccessDenied", "no")
    assert cli.main(["leftovers", "dev"]) == 6
    shown = " ".join(capsys.readouterr().out.split())
    assert "not asked: load balancers: elasticloadbalancing:DescribeLoadBalancers in us-west-2 is not allowed" in shown
    assert "but not everything could be asked" in shown


def test_the_wrong_account_is_never_searched_or_swept(account, stack):
    account.client("ec2").create_volume(AvailabilityZone="us-west-2a", Size=1, TagSpecifications=specification("volume"))
    write_stack(stack, allowedAccountIds=["999999999999"])
    from ops import leftovers

    with pytest.raises(BadInput, match="aws:allowedAccountIds"):
        leftovers.find("dev")
