"""An AWS account behind a real HTTP server: moto's, and in front of it the answers that moto lacks, in AWS's own wire format.

What a test wants refused is refused here as AWS does it: a status and a body that botocore has to read.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import threading
import urllib.parse
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import boto3
import yaml
from moto.backends import get_backend
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

import naming

ACCOUNT = "123456789012"
Answer = tuple[int, str, bytes]
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_EC2_METADATA_DISABLED": "true"}


def xml(operation: str, inside: str, namespace: str = "http://ec2.amazonaws.com/doc/2016-11-15/") -> Answer:
    return 200, "text/xml", f'<{operation}Response xmlns="{namespace}"><requestId>1</requestId>{inside}</{operation}Response>'.encode()


def paged(operation: str, container: str, items: Sequence[str]) -> Callable[[Call], Answer]:
    """Many of EC2's items, in pages as EC2 gives them (moto has no pages for most calls, and looks for tags among all tags for each of them)."""

    def answer(call: Call) -> Answer:
        size, start = int(call.parameters.get("MaxResults", len(items))), int(call.parameters.get("NextToken", 0))
        wanted = items if any(name == "tag:deployment" for name, _ in filters_of(call.parameters)) else []
        more = f"<nextToken>{start + size}</nextToken>" if start + size < len(wanted) else ""
        return xml(operation, f"<{container}>{''.join(f'<item>{item}</item>' for item in wanted[start : start + size])}</{container}>{more}")

    return answer


def plain_json(document: Any) -> Answer:
    return 200, "application/x-amz-json-1.1", json.dumps(document).encode()


def ec2_error(code: str, message: str, status: int = 400) -> Answer:
    body = f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors><RequestID>1</RequestID></Response>"
    return status, "text/xml", body.encode()


def query_error(code: str, message: str, status: int = 403) -> Answer:
    """IAM, STS, ELB."""
    return status, "text/xml", f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>".encode()


def json_error(code: str, message: str, status: int = 400) -> Answer:
    return status, "application/x-amz-json-1.1", json.dumps({"__type": code, "message": message, "code": code}).encode()


@dataclasses.dataclass
class Call:
    service: str
    operation: str
    region: str
    parameters: dict[str, Any]


@dataclasses.dataclass
class Account:
    """``answers``: (service, operation) to what answers instead of moto; a callable gets the call, and returns None to let moto answer."""

    url: str = ""
    answers: dict[tuple[str, str], Callable[[Call], Answer | None]] = dataclasses.field(default_factory=dict)
    calls: list[Call] = dataclasses.field(default_factory=list)
    quotas: dict[str, float] = dataclasses.field(default_factory=dict)
    reservations: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    versions: list[tuple[str, str, str]] = dataclasses.field(
        default_factory=lambda: [
            ("1.36", "STANDARD_SUPPORT", "2027-08-02"),
            ("1.35", "STANDARD_SUPPORT", "2027-03-27"),
            ("1.33", "EXTENDED_SUPPORT", "2026-07-29"),
        ]
    )
    capacity: dict[str, str] = dataclasses.field(default_factory=dict)  # zone to the error of a reservation there; all others have room

    def __post_init__(self) -> None:
        self.usual = {
            ("ec2", "DescribeCapacityReservations"): self._reservations,
            ("ec2", "CreateCapacityReservation"): self._reserve,
            ("ec2", "CancelCapacityReservation"): self._cancel,
            ("ec2", "GetSpotPlacementScores"): self._scores,
            ("ec2", "DescribePlacementGroups"): lambda _: xml("DescribePlacementGroups", "<placementGroupSet/>"),
            ("service-quotas", "GetServiceQuota"): self._quota,
            ("eks", "GET /cluster-versions"): self._cluster_versions,
            ("eks", "GET /addons/supported-versions"): self._addons,
            ("iam", "SimulatePrincipalPolicy"): self._simulate,
            ("ssm", "GetParameter"): self._parameter,
            ("pricing", "GetProducts"): lambda _: plain_json({"FormatVersion": "aws_v1", "PriceList": []}),
        }

    def answer(self, call: Call) -> Answer | None:
        self.calls.append(call)
        for table in (self.answers, self.usual):
            for key in ((call.service, call.operation), (call.service, "*")):
                if key in table:
                    found = table[key](call)
                    if found is not None:
                        return found
        return None

    def count(self, operation: str) -> int:
        return sum(call.operation == operation for call in self.calls)

    def backend(self, service: str, region: str = "us-west-2") -> Any:
        """moto's own, for what would take minutes by calls."""
        return get_backend(service)[ACCOUNT][region]

    def backend_global(self, service: str) -> Any:
        return get_backend(service)[ACCOUNT]["aws"]

    def many_instances(self, count: int, instance_type: str = "g6.xlarge", tagged: Mapping[str, str] | None = None) -> None:
        """Each of a reservation of its own, by which DescribeInstances counts its pages."""
        backend, (image, *_) = self.backend("ec2"), self.client("ec2").describe_images(Owners=["amazon"])["Images"]
        how = {"instance_type": instance_type, "is_instance_type_default": False, "region_name": "us-west-2"}
        for _ in range(count):
            backend.run_instances(image["ImageId"], 1, "", [], tags={"instance": dict(tagged or {})}, **how)

    def client(self, service: str, region: str = "us-west-2") -> Any:
        keys = {"aws_access_key_id": KEYS["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"]}
        return boto3.client(service, region_name=region, endpoint_url=self.url, **keys)

    def _quota(self, call: Call) -> Answer:
        code = call.parameters["QuotaCode"]
        return plain_json({"Quota": {"ServiceCode": call.parameters["ServiceCode"], "QuotaCode": code, "Value": self.quotas.get(code, 1000.0)}})

    def _cluster_versions(self, _: Call) -> Answer:
        items = [
            {
                "clusterVersion": version,
                "status": status.lower().replace("_", "-"),
                "versionStatus": status,
                "endOfStandardSupportDate": f"{end}T00:00:00Z",
                "defaultVersion": False,
            }
            for version, status, end in self.versions
        ]
        return plain_json({"clusterVersions": items})

    def _addons(self, call: Call) -> Answer:
        name, version = call.parameters["addonName"], call.parameters["kubernetesVersion"]
        offers = [("v1.99.0-eksbuild.9", False), ("v1.20.4-eksbuild.2", True)]
        made = [{"addonVersion": offer, "compatibilities": [{"clusterVersion": version, "defaultVersion": usual}]} for offer, usual in offers]
        return plain_json({"addons": [{"addonName": name, "addonVersions": made}]})

    def _parameter(self, call: Call) -> Answer | None:
        match = re.fullmatch(
            r"/aws/service/eks/optimized-ami/([\d.]+)/amazon-linux-2023/x86_64/(nvidia|standard)/recommended/release_version", call.parameters["Name"]
        )
        if match is None:
            return None
        day = {"nvidia": "20261112", "standard": "20261119"}[match[2]]
        return plain_json({"Parameter": {"Name": match[0], "Type": "String", "Value": f"{match[1]}.0-{day}", "Version": 1}})

    def _simulate(self, call: Call) -> Answer:
        names = [value for key, value in sorted(call.parameters.items()) if key.startswith("ActionNames.member.")]
        members = "".join(f"<member><EvalActionName>{name}</EvalActionName><EvalDecision>allowed</EvalDecision></member>" for name in names)
        inside = (
            f"<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults>{members}</EvaluationResults></SimulatePrincipalPolicyResult>"
        )
        return xml("SimulatePrincipalPolicy", inside, "https://iam.amazonaws.com/doc/2010-05-08/")

    def _scores(self, call: Call) -> Answer:
        region = call.parameters.get("RegionName.1", call.region)
        zones = call.parameters.get("SingleAvailabilityZone") == "true"
        place = {"us-west-2": "usw2", "us-east-1": "use1"}.get(region, "zz")
        items = [(f"<availabilityZoneId>{place}-az{i}</availabilityZoneId>", i) for i in (1, 2, 3)] if zones else [("", 7)]
        inside = "".join(f"<item><region>{region}</region>{zone}<score>{score}</score></item>" for zone, score in items)
        return xml("GetSpotPlacementScores", f"<spotPlacementScoreSet>{inside}</spotPlacementScoreSet>")

    def _reserve(self, call: Call) -> Answer:
        zone = call.parameters["AvailabilityZone"]
        if zone in self.capacity:
            return ec2_error(self.capacity[zone], "We currently do not have sufficient capacity", 500 if "Insufficient" in self.capacity[zone] else 400)
        id = f"cr-{uuid.uuid4().hex[:17]}"
        keys = {key: value for key, value in call.parameters.items() if key.startswith("TagSpecification") and key.endswith(".Key")}
        tags = {value: call.parameters[key.removesuffix("Key") + "Value"] for key, value in keys.items()}
        self.reservations[id] = {
            "capacityReservationId": id,
            "instanceType": call.parameters["InstanceType"],
            "availabilityZone": zone,
            "totalInstanceCount": call.parameters["InstanceCount"],
            "availableInstanceCount": call.parameters["InstanceCount"],
            "instanceMatchCriteria": call.parameters["InstanceMatchCriteria"],
            "endDateType": call.parameters["EndDateType"],
            "endDate": call.parameters.get("EndDate", ""),
            "state": "active",
            "reservationType": "default",
            "instancePlatform": call.parameters["InstancePlatform"],
            "createDate": "2026-11-29T10:00:00.000Z",
            **{f"tag:{key}": value for key, value in tags.items()},
        }
        return xml("CreateCapacityReservation", f"<capacityReservation>{self._shown(id)}</capacityReservation>")

    def _cancel(self, call: Call) -> Answer:
        id = call.parameters["CapacityReservationId"]
        if id not in self.reservations:
            return ec2_error("InvalidCapacityReservationId.NotFound", f"{id} does not exist")
        self.reservations[id]["state"] = "cancelled"
        return xml("CancelCapacityReservation", "<return>true</return>")

    def _reservations(self, call: Call) -> Answer:
        wanted = [value for key, value in call.parameters.items() if key.startswith("CapacityReservationId.")]
        if set(wanted) - set(self.reservations):
            return ec2_error("InvalidCapacityReservationId.NotFound", f"{wanted[0]} does not exist")
        found = [id for id, item in self.reservations.items() if (not wanted or id in wanted) and _passes(item, call.parameters)]
        inside = "".join(f"<item>{self._shown(id)}</item>" for id in found)
        return xml("DescribeCapacityReservations", f"<capacityReservationSet>{inside}</capacityReservationSet>")

    def _shown(self, id: str) -> str:
        item = self.reservations[id]
        tags = "".join(f"<item><key>{key[4:]}</key><value>{value}</value></item>" for key, value in item.items() if key.startswith("tag:"))
        fields = "".join(f"<{key}>{value}</{key}>" for key, value in item.items() if not key.startswith("tag:") and value)
        return f"{fields}<tagSet>{tags}</tagSet>"


def filters_of(parameters: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """EC2's ``Filter.1.Name``, ``Filter.1.Value.1``."""
    found = []
    for i in range(1, 20):
        if f"Filter.{i}.Name" in parameters:
            values = [value for key, value in parameters.items() if key.startswith(f"Filter.{i}.Value.")]
            found.append((parameters[f"Filter.{i}.Name"], values))
    return found


def _passes(item: Mapping[str, str], parameters: Mapping[str, str]) -> bool:
    return all(item.get(name) in values for name, values in filters_of(parameters))


class _Front:
    """Reads what a request asks for, answers it or hands it on to moto."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        call = _call(environ, body)
        answer = self.account.answer(call) if call else None
        if answer is None:
            return self.moto(environ, start_response)
        status, kind, content = answer
        start_response(f"{status} {'OK' if status == 200 else 'Error'}", [("Content-Type", kind), ("Content-Length", str(len(content)))])
        return iter([content])


def _call(environ: Mapping[str, Any], body: bytes) -> Call | None:
    scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/aws4_request", environ.get("HTTP_AUTHORIZATION", ""))
    if scope is None:
        return None
    region, service = scope[1], {"servicequotas": "service-quotas"}.get(scope[2], scope[2])
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    query = dict(urllib.parse.parse_qsl(environ.get("QUERY_STRING", "")))
    if target:
        return Call(service, target.split(".")[-1], region, json.loads(body or b"{}"))
    form = dict(urllib.parse.parse_qsl(body.decode(errors="replace"))) if "form" in environ.get("CONTENT_TYPE", "") else {}
    if "Action" in form:
        return Call(service, form.pop("Action"), region, form)
    return Call(service, f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}", region, query)


class _Silent(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """A line for each request would bury what a failing test says."""


class Server:
    """A running server; ``account`` is replaced by a fresh one with :meth:`reset`."""

    def __init__(self) -> None:
        self.front = _Front(Account())
        self.http = make_server("127.0.0.1", 0, self.front, threaded=True, request_handler=_Silent)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def reset(self) -> Account:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset", method="POST"), timeout=30).close()
        self.front.account = Account(self.url)
        return self.front.account

    def stop(self) -> None:
        self.http.shutdown()
        self.thread.join(timeout=10)
        self.http.server_close()


def summary(account: Account) -> Counter[str]:
    return Counter(f"{call.service}:{call.operation}" for call in account.calls)


def write_stack(folder: Path, settings: Mapping[str, Any] | None = None, *, name: str = "dev", region: str | None = "us-west-2", **aws: Any) -> Path:
    """A stack file: ``{"gpu": {...}}``; further keys are aws:... ones."""
    values: dict[str, Any] = {"aws:region": region} if region else {}
    values |= {f"aws:{key}": value for key, value in aws.items()}
    values |= {f"ray-train-efa:{key}": value for key, value in (settings or {}).items()}
    file = folder / f"Pulumi.{name}.yaml"
    file.write_text(yaml.safe_dump({"config": values}))
    return file


def tags(stack: str = "dev", region: str = "us-west-2") -> list[dict[str, str]]:
    """The tags of everything that a stack makes."""
    found = naming.base_tags("ray-train-efa", stack, "someone", naming.deployment_id("ray-train-efa", stack, ACCOUNT, region))
    return [{"Key": key, "Value": value} for key, value in found.items()]


def tag_set(stack: str = "dev", name: str = "tagSet") -> str:
    """The same as EC2 words it."""
    return f"<{name}>" + "".join(f"<item><key>{tag['Key']}</key><value>{tag['Value']}</value></item>" for tag in tags(stack)) + f"</{name}>"


def specification(kind: str, stack: str = "dev", region: str = "us-west-2", **more: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": tags(stack, region) + [{"Key": key, "Value": value} for key, value in more.items()]}]
