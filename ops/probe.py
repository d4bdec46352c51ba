"""Is there capacity now: an on-demand reservation for the stack's nodes, made and cancelled at once.

It bills from the moment it stands, so it always carries an end date, and is cancelled whatever happens: errors, Ctrl-C, SIGTERM, a closed terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ops.aws import Aws, AwsError
from ops.errors import Refused

# Should nothing of this program be left to cancel it: EC2 ends a reservation within the hour after its end date.
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateCapacityReservation.html
ENDS_AFTER = datetime.timedelta(minutes=30)
NO_CAPACITY = ("InsufficientInstanceCapacity", "InsufficientCapacity", "Unsupported")
NO_QUOTA = ("InstanceLimitExceeded", "VcpuLimitExceeded", "ReservationCapacityExceeded")
CANCEL_ATTEMPTS = 5
TAG = "probe"


@dataclasses.dataclass(frozen=True)
class Probed:
    """A zone's answer. capacity: None where it could not be learned; seconds: how long the reservation stood."""

    zone: str
    capacity: bool | None
    said: str
    reservation: str | None = None
    seconds: float = 0.0


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP end this block as Ctrl-C does, so that what stands in a finally is done. Only where signals can be caught: in the main thread."""

    def stop(number: int, _: Any) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait until this block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: late.append(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if late:
            raise KeyboardInterrupt(f"signal {late[0]}")


def probe(
    aws: Aws,
    instance_type: str,
    count: int,
    zones: Sequence[str],
    tags: Mapping[str, str],
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
) -> list[Probed]:
    """Tries the zones in this order, until one has the capacity. Nothing of it stays.

    Raises AwsError for what is no answer about capacity (no right, no network), and Refused where a reservation could not be cancelled.
    """
    found: list[Probed] = []
    with _stoppable():
        for zone in zones:
            found.append(_probe(aws, instance_type, count, zone, tags, now()))
            if found[-1].capacity or (found[-1].capacity is None):
                break
    return found


def _probe(aws: Aws, instance_type: str, count: int, zone: str, tags: Mapping[str, str], now: datetime.datetime) -> Probed:
    token = uuid.uuid4().hex
    ends = now + ENDS_AFTER
    marked = [{"Key": key, "Value": value} for key, value in {**tags, "Name": f"{tags.get('stack', '')}-probe", TAG: token}.items()]
    made, began = "", time.monotonic()
    try:
        answer = aws.ask(
            "ec2",
            "create_capacity_reservation",
            ClientToken=token,  # a retry after a lost answer gets the same reservation
            InstanceType=instance_type,
            InstancePlatform="Linux/UNIX",
            AvailabilityZone=zone,
            InstanceCount=count,
            InstanceMatchCriteria="targeted",  # or instances that run already would slip into it
            EndDateType="limited",
            EndDate=ends,
            TagSpecifications=[{"ResourceType": "capacity-reservation", "Tags": marked}],
        )
        made = str(answer["CapacityReservation"]["CapacityReservationId"])
    except AwsError as error:
        if error.code in NO_CAPACITY:
            return Probed(zone, False, f"no capacity for {count} x {instance_type} ({error.code})")
        if error.code in NO_QUOTA:
            return Probed(zone, None, f"the vCPU quota does not allow {count} x {instance_type}, so capacity can't be learned ({error.code})")
        raise
    finally:
        with _undisturbed():
            # Interrupted, or the answer lost: what was asked for may stand all the same, and is found by its mark.
            for id in [made] if made else _marked(aws, token):
                _cancel(aws, id, ends)
    return Probed(zone, True, f"{count} x {instance_type} are there", made, time.monotonic() - began)


def _marked(aws: Aws, token: str) -> list[str]:
    filters = [{"Name": f"tag:{TAG}", "Values": [token]}, {"Name": "state", "Values": ["active", "pending"]}]
    try:
        return [item["CapacityReservationId"] for item in aws.pages("ec2", "describe_capacity_reservations", "CapacityReservations", Filters=filters)]
    except AwsError:
        return []  # whoever may not even look could not have made one; the end date holds for all else


def _cancel(aws: Aws, id: str, ends: datetime.datetime) -> None:
    problem = ""
    for attempt in range(CANCEL_ATTEMPTS):
        try:
            aws.ask("ec2", "cancel_capacity_reservation", CapacityReservationId=id)
            return
        except AwsError as error:
            if error.code == "InvalidCapacityReservationId.NotFound":  # just made, and not known everywhere yet
                problem = str(error)
                time.sleep(2**attempt / 4)
                continue
            problem = str(error)
            if error.kind == "denied":
                break
    raise Refused(
        f"the probe's reservation {id} in {aws.region} could not be cancelled ({problem}). It bills until EC2 ends it, within the hour after {ends:%H:%M} UTC;"
        f" cancel it: aws ec2 cancel-capacity-reservation --capacity-reservation-id {id} --region {aws.region}"
    )
