"""One AWS account and region through boto3: clients that threads share, paging, and a sentence for every way a call can fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import boto3
from botocore import exceptions as boto
from botocore.config import Config

from ops.errors import BadInput, Refused

# Standard mode waits with jitter between attempts, longer each time: https://docs.aws.amazon.com/sdkref/latest/guide/feature-retry-behavior.html
CALLS = Config(
    retries={"mode": "standard", "total_max_attempts": 5}, connect_timeout=5, read_timeout=60, max_pool_connections=20, user_agent_extra="ray-train-efa"
)

DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "OptInRequired", "Forbidden", "403"}
THROTTLED = {"Throttling", "ThrottlingException", "ThrottledException", "RequestLimitExceeded", "TooManyRequestsException", "SlowDown", "RequestThrottled"}
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
UNKNOWN_CREDENTIALS = {
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "AuthFailure",
    "SignatureDoesNotMatch",
    "InvalidAccessKeyId",
    "MissingAuthenticationToken",
}


class AwsError(Refused):
    """A call that failed, in a sentence. kind: denied, throttled, credentials, network, or other (AWS's own words); code: AWS's error code."""

    def __init__(self, message: str, kind: str, code: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code

    @property
    def hopeless(self) -> bool:
        """Whether every other call would fail in the same way."""
        return self.kind in ("credentials", "network")


class Aws:
    """An account as one set of credentials sees it, in one region. Threads may share it."""

    def __init__(self, region: str | None, profile: str | None = None, _shared: Aws | None = None) -> None:
        """Raises BadInput for a profile that does not exist or a region that no one names."""
        self._lock: threading.Lock = _shared._lock if _shared else threading.Lock()
        self._clients: dict[tuple[str, str], Any] = _shared._clients if _shared else {}
        self.profile = profile
        try:
            self._session: Any = _shared._session if _shared else boto3.Session(profile_name=profile)
        except boto.ProfileNotFound as error:
            raise BadInput(f"aws:profile = {profile!r}: there is no such profile; see `aws configure list-profiles`, or unset it (AWS_PROFILE too)") from error
        found = region or self._session.region_name
        if not found:
            raise BadInput("no region: set aws:region in the stack file (pulumi config set aws:region us-west-2), or AWS_REGION")
        self.region = str(found)

    def elsewhere(self, region: str) -> Aws:
        """The same credentials in another region."""
        return Aws(region, self.profile, _shared=self)

    def client(self, service: str) -> Any:
        """A boto3 client; made once, for making one is slow and not safe among threads."""
        with self._lock:
            key = (service, self.region)
            if key not in self._clients:
                self._clients[key] = self._session.client(service, region_name=self.region, config=CALLS)
            return self._clients[key]

    def ask(self, service: str, operation: str, /, **parameters: Any) -> dict[str, Any]:
        """A call's answer. Raises AwsError."""
        try:
            return dict(getattr(self.client(service), operation)(**parameters) or {})
        except (boto.BotoCoreError, boto.ClientError, boto.HTTPClientError) as error:
            raise self._explained(error, service, operation) from error

    def pages(self, service: str, operation: str, key: str, /, **parameters: Any) -> Iterator[Any]:
        """The items under ``key`` of all pages, one page in memory at a time. Raises AwsError."""
        try:
            client = self.client(service)
            if client.can_paginate(operation):
                for page in client.get_paginator(operation).paginate(**parameters):
                    yield from page.get(key) or []
            else:
                parameters.pop("PaginationConfig", None)
                yield from getattr(client, operation)(**parameters).get(key) or []
        except (boto.BotoCoreError, boto.ClientError, boto.HTTPClientError) as error:
            raise self._explained(error, service, operation) from error

    def identity(self) -> dict[str, str]:
        """{"Account", "Arn", "UserId"} of the caller. Raises AwsError."""
        answer = self.ask("sts", "get_caller_identity")
        return {key: str(answer[key]) for key in ("Account", "Arn", "UserId")}

    def _explained(self, error: Exception, service: str, operation: str) -> AwsError:
        action = f"{_prefix(service)}:{''.join(part.capitalize() for part in operation.split('_'))}"
        return explained(error, action, self.region)


def explained(error: Exception, action: str, region: str) -> AwsError:
    """The sentence for what botocore raised when ``action`` (``ec2:DescribeInstances``) was called."""
    code, said = "", str(error)
    if isinstance(error, boto.ClientError):
        body: Mapping[str, Any] = error.response.get("Error", {})
        code, said = str(body.get("Code", "")), str(body.get("Message", "")) or str(error)
    where = f"{action} in {region}"
    signed_in = "sign in again (aws sso login, or new keys for the profile), then repeat the command"
    if code in EXPIRED or isinstance(error, (boto.UnauthorizedSSOTokenError, boto.SSOTokenLoadError, boto.TokenRetrievalError)):
        return AwsError(f"your AWS credentials have expired; {signed_in}", "credentials", code)
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError, boto.NoAuthTokenError)):
        source = f"profile {os.environ['AWS_PROFILE']!r} gave none" if os.environ.get("AWS_PROFILE") else "none in the environment, a profile or this machine"
        return AwsError(f"no AWS credentials ({source}); set AWS_PROFILE or aws:profile, or run `aws configure`", "credentials", code)
    if code in UNKNOWN_CREDENTIALS:
        return AwsError(f"AWS does not know these credentials ({code}); check the keys of the profile and this machine's clock", "credentials", code)
    if isinstance(error, (boto.HTTPClientError, boto.EndpointConnectionError)):
        detail = said.splitlines()[0][:200]
        return AwsError(f"AWS can't be reached for {where}: {detail}; check the network, the proxy (HTTPS_PROXY) and the region's name", "network", code)
    if code in DENIED:
        return AwsError(f"{where} is not allowed for these credentials ({code}); ask for the right {action}", "denied", code)
    if code in THROTTLED:
        return AwsError(f"{where} was refused as too frequent, five times in a row ({code}); try again in a minute", "throttled", code)
    if said.lstrip().startswith("<"):  # a page of something on the way, not AWS's words
        said = f"the answer was no AWS answer but a web page ({code or 'no code'}); a proxy or a captive network may stand between"
    return AwsError(f"{where}: {' '.join(said.split())}" + (f" ({code})" if code and code not in said else ""), "other", code)


def _prefix(service: str) -> str:
    """The IAM prefix of a service; boto3 has other names for some."""
    return {"service-quotas": "servicequotas", "elb": "elasticloadbalancing", "elbv2": "elasticloadbalancing", "ecr-public": "ecr-public"}.get(service, service)


def tags_of(item: Mapping[str, Any], key: str = "Tags") -> dict[str, str]:
    """Tags as a mapping, from any of the shapes that AWS gives them; EC2's network interfaces call them TagSet."""
    found = item.get(key) or item.get("TagSet") or {}
    if isinstance(found, Mapping):
        return {str(k): str(v) for k, v in found.items()}
    return {str(tag.get("Key", tag.get("key"))): str(tag.get("Value", tag.get("value", ""))) for tag in found}
