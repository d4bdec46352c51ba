"""Is a container image there, and what is its digest: asked of its registry, or of ECR for images of an AWS account."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping

from ops.aws import Aws, AwsError
from ops.errors import Refused

# What a registry may answer with: https://github.com/opencontainers/distribution-spec/blob/main/spec.md and the formats before OCI.
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
TIMEOUT_SECONDS = 10
LARGEST_MANIFEST = 8 * 2**20
CLOSED = "{} may not be read without signing in; use an image that may be pulled freely, or one in this account's ECR"
PRIVATE_ECR = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")


class Unreachable(Refused):
    """The registry did not answer."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """``registry/repository:tag`` or ``registry/repository@sha256:...``."""

    registry: str
    repository: str
    tag: str
    digest: str

    @property
    def wanted(self) -> str:
        return self.digest or self.tag


def parse(text: str) -> Reference:
    """Docker's reading: without a registry it is Docker Hub, without a tag it is latest."""
    name, _, digest = text.partition("@")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry, path = first, rest
    else:
        registry, path = "registry-1.docker.io", name if slash else f"library/{name}"
    path, colon, tag = path.rpartition(":") if ":" in path.rsplit("/", 1)[-1] else (path, "", "")
    return Reference(registry, path, tag if colon else ("" if digest else "latest"), digest)


def digest(image: str, aws: Aws | None = None) -> str:
    """``sha256:...`` of what the reference names now. Raises Refused, in a sentence, where it can't be had."""
    reference = parse(image)
    private = PRIVATE_ECR.fullmatch(reference.registry)
    if private and aws is not None:
        return _of_ecr(aws.elsewhere(private[2]), private[1], reference)
    return _of_registry(reference)


def _of_ecr(aws: Aws, account: str, reference: Reference) -> str:
    wanted = {"imageDigest": reference.digest} if reference.digest else {"imageTag": reference.tag}
    try:
        found = aws.ask("ecr", "describe_images", registryId=account, repositoryName=reference.repository, imageIds=[wanted])["imageDetails"]
    except AwsError as error:
        if error.code in ("ImageNotFoundException", "RepositoryNotFoundException"):
            what = "repository" if error.code.startswith("Repository") else f"image {reference.wanted} in"
            raise Refused(f"{reference.registry} has no {what} {reference.repository}; push it there, or correct ray.image") from error
        raise
    return str(found[0]["imageDigest"])


def _of_registry(reference: Reference) -> str:
    host = reference.registry.rsplit(":", 1)[0]
    # Registries on this machine speak plain HTTP, as Docker has it.
    scheme = "http" if host == "localhost" or host.startswith("127.") else "https"
    url = f"{scheme}://{reference.registry}/v2/{reference.repository}/manifests/{urllib.parse.quote(reference.wanted, safe=':')}"
    headers = {"Accept": ", ".join(MANIFESTS)}
    try:
        return _asked(url, headers)
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise _refused(reference, error) from error
        challenge = error.headers.get("WWW-Authenticate", "")
    try:
        return _asked(url, {**headers, "Authorization": f"Bearer {_token(challenge, scheme)}"})
    except urllib.error.HTTPError as error:
        raise _refused(reference, error) from error
    except (KeyError, ValueError) as error:
        raise Refused(CLOSED.format(f"{reference.registry}/{reference.repository}")) from error


def _asked(url: str, headers: Mapping[str, str]) -> str:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 (the scheme is ours)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
            named = answer.headers.get("Docker-Content-Digest")
            body = answer.read(LARGEST_MANIFEST)
    except urllib.error.HTTPError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"the registry of the training image can't be reached ({urllib.parse.urlsplit(url).netloc}: {reason}); check the network") from error
    return named or "sha256:" + hashlib.sha256(body).hexdigest()


def _token(challenge: str, scheme: str) -> str:
    """An anonymous token from where the registry says. https://distribution.github.io/distribution/spec/auth/token/"""
    given = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = given.pop("realm")
    if urllib.parse.urlsplit(realm).scheme not in ("https", scheme):
        raise ValueError(realm)
    request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(given)}")  # noqa: S310 (checked above)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
            found = json.load(answer)
    except OSError as error:
        raise ValueError(str(error)) from error
    return str(found.get("token") or found["access_token"])


def _refused(reference: Reference, error: urllib.error.HTTPError) -> Refused:
    name = f"{reference.registry}/{reference.repository}"
    if error.code == 404:
        return Refused(f"{name} has no {reference.wanted}; correct ray.image (or pins.imageDigest), or push the image")
    if error.code in (401, 403):
        return Refused(CLOSED.format(name))
    if error.code == 429:
        return Refused(f"{reference.registry} refuses for too many requests; public ECR allows about one a second from an address. Try again in a minute")
    return Refused(f"{name}: the registry answered {error.code} {error.reason}")
