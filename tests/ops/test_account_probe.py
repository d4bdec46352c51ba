"""The capacity probe bills from the moment its reservation stands: it always has an end date, and is cancelled whatever happens."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time

import pytest

from ops import probe
from ops.aws import Aws, AwsError
from ops.errors import Refused
from tests.ops.account_server import ec2_error

TAGS = {"project": "ray-train-efa", "stack": "dev"}
ROOT = os.path.dirname(os.path.dirname(probe.__file__))


def run(zones=("us-west-2a",)):
    return probe.probe(Aws("us-west-2"), "g6.12xlarge", 2, zones, TAGS)


def standing(account):
    return [id for id, item in account.reservations.items() if item["state"] == "active"]


def test_capacity_that_is_there_is_found_and_given_back(account):
    (answer,) = run()
    assert answer.capacity
    assert len(account.reservations) == 1
    assert standing(account) == []


def test_the_reservation_is_targeted_tagged_and_ends_by_itself(account):
    run()
    (item,) = account.reservations.values()
    assert item["instanceMatchCriteria"] == "targeted", "an open one would take in instances that run already"
    assert item["endDateType"] == "limited"
    ends = datetime.datetime.fromisoformat(item["endDate"].replace("Z", "+00:00"))
    assert datetime.timedelta() < ends - datetime.datetime.now(datetime.UTC) < datetime.timedelta(hours=1)
    assert item["tag:project"] == "ray-train-efa", "or `leftovers` could not find it"


def test_zones_are_walked_until_one_has_capacity(account):
    account.capacity |= {"us-west-2a": "InsufficientInstanceCapacity"}
    answers = run(("us-west-2a", "us-west-2b", "us-west-2c"))
    assert [(answer.zone, answer.capacity) for answer in answers] == [("us-west-2a", False), ("us-west-2b", True)]
    assert standing(account) == []


def test_a_quota_in_the_way_leaves_capacity_unknown(account):
    account.capacity |= {"us-west-2a": "InstanceLimitExceeded"}
    (answer,) = run()
    assert answer.capacity is None
    assert "quota" in answer.said


def test_who_may_not_reserve_is_told_so(account):
    account.answers["ec2", "CreateCapacityReservation"] = lambda _: ec2_error("UnauthorizedOperation", "no", 403)
    with pytest.raises(AwsError, match="ask for the right ec2:CreateCapacityReservation"):
        run()


def test_an_answer_that_gets_lost_leaves_no_reservation(account):
    """EC2 made it, and the connection broke before anyone heard its id."""

    def made_and_lost(call):
        account._reserve(call)
        return ec2_error("InternalFailure", "lost", 400)

    account.answers["ec2", "CreateCapacityReservation"] = made_and_lost
    with pytest.raises(AwsError):
        run()
    assert len(account.reservations) == 1
    assert standing(account) == []


def test_a_cancellation_that_fails_names_the_reservation_the_command_and_the_end(account):
    account.answers["ec2", "CancelCapacityReservation"] = lambda _: ec2_error("UnauthorizedOperation", "no", 403)
    with pytest.raises(Refused) as caught:
        run()
    (id,) = standing(account)
    assert f"aws ec2 cancel-capacity-reservation --capacity-reservation-id {id} --region us-west-2" in str(caught.value)
    assert "bills until EC2 ends it" in str(caught.value)


def test_a_cancellation_that_comes_too_early_is_tried_again(account):
    left = [1]

    def not_yet(_):
        left[0] -= 1
        return ec2_error("InvalidCapacityReservationId.NotFound", "not yet") if left[0] >= 0 else None

    account.answers["ec2", "CancelCapacityReservation"] = not_yet
    assert run()[0].capacity
    assert standing(account) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_probe_that_is_stopped_in_the_middle_cancels_first(account, number):
    """In a process of its own: the reservation stands, the answer is held back, and the signal comes."""
    process = None

    def held(call):
        answer = account._reserve(call)
        process.send_signal(number)
        time.sleep(0.5)  # the signal is being handled while the call has no answer yet
        return answer

    account.answers["ec2", "CreateCapacityReservation"] = held
    # A shell starts what it puts into the background deaf to SIGINT, and that is inherited.
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = hears + "from ops import probe; from ops.aws import Aws; probe.probe(Aws('us-west-2'), 'g6.12xlarge', 2, ['us-west-2a'], {'stack': 'dev'})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0, "it was stopped"
    assert "KeyboardInterrupt" in said
    assert len(account.reservations) == 1, "the case is real"
    assert standing(account) == []


def test_a_signal_during_the_cancellation_does_not_break_it_off(account):
    process = None

    def held(call):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        return account._cancel(call)

    account.answers["ec2", "CancelCapacityReservation"] = held
    # A shell starts what it puts into the background deaf to SIGINT, and that is inherited.
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = hears + "from ops import probe; from ops.aws import Aws; probe.probe(Aws('us-west-2'), 'g6.12xlarge', 2, ['us-west-2a'], {'stack': 'dev'})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert standing(account) == []
