"""The engine's, AWS's and Kubernetes' error texts as one sentence a person can act on. Pure: texts in, a sentence out."""

from __future__ import annotations

import re
from collections.abc import Sequence

# (what the text must contain, what to say). First match wins: causes stand before what follows from them.
# {0}, {1}: groups of the match.
KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"incorrect passphrase|passphrase must be set|PULUMI_CONFIG_PASSPHRASE",
        "the stack's secrets can't be opened: set PULUMI_CONFIG_PASSPHRASE (or PULUMI_CONFIG_PASSPHRASE_FILE) to the passphrase that the stack was made with",
    ),
    (
        r"PULUMI_ACCESS_TOKEN must be set|pulumi login|not logged in",
        "the engine has no place for its state: run `pulumi login` (or `pulumi login --local`, or set PULUMI_BACKEND_URL) and try again",
    ),
    (
        r"no stack named '([^']+)' found",
        "the engine knows no stack {0}: `python -m ops up {0}` makes it; if it exists elsewhere, log in to that backend (`pulumi login`)",
    ),
    (
        r"ExpiredToken|security token included in the request is expired|token has expired|TokenRefreshRequired"
        r"|SSOTokenLoadError|session associated with this profile has expired",
        "the AWS credentials have expired: sign in again (aws sso login, or new keys) and start the same command again; nothing is lost",
    ),
    (
        r"NoCredentialProviders|no valid credential sources|failed to refresh cached credentials|Unable to locate credentials|No valid credential",
        "no AWS credentials found: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and try again",
    ),
    (
        r"InvalidClientTokenId|SignatureDoesNotMatch|UnrecognizedClientException|AuthFailure",
        "AWS does not know these credentials: check AWS_PROFILE and the keys (and the machine's clock)",
    ),
    (
        r"InsufficientInstanceCapacity|UnfulfillableCapacity|MaxSpotInstanceCountExceeded",
        "EC2 has no capacity for these instances in this zone now: take another zone (network.zone), fewer nodes, no placement group"
        " (gpu.placementGroup: false), another type or region, reserved capacity (gpu.capacity), or try later",
    ),
    (
        r"VcpuLimitExceeded",
        "the account's vCPU quota is too small for these instances: lower gpu.nodes, or ask for more (`python -m ops doctor STACK` gives the command)",
    ),
    (
        r"AddressLimitExceeded|VpcLimitExceeded|NatGatewayLimitExceeded|LimitExceeded",
        "an AWS quota of this region is used up: `python -m ops doctor STACK` names it and the command that asks for more;"
        " `python -m ops leftovers --all` lists what old stacks still hold",
    ),
    (
        r"NodeCreationFailure|failed to join",
        "the nodes started but did not join the cluster: `python -m ops explain STACK` says what it knows;"
        " check that the zone's way out (NAT) and the node role are as the program made them",
    ),
    (
        r"AccessDenied|UnauthorizedOperation|not authorized to perform:? ?([a-zA-Z0-9:*]+)?",
        "AWS denies it to these credentials: `python -m ops doctor STACK` lists the rights that are missing; use a role that has them",
    ),
    (
        r"DependencyViolation|has a dependent object|dependencies and cannot be deleted|DeleteConflict",
        "something that AWS removes with a delay still uses it (network interfaces of nodes just gone outlive them by minutes):"
        " run the same command again; `python -m ops leftovers STACK` lists what it is",
    ),
    (
        r"BucketNotEmpty",
        "the bucket holds objects: set storage.onDestroy to delete (the runs are lost) or keep, run `up`, then `down` again",
    ),
    (
        r"the stack is currently locked|Another update is currently in progress|conflict: Another update",
        "another operation works on this stack, or one was killed and left its lock: wait for it, or, if surely none runs, `pulumi cancel --stack STACK`",
    ),
    (
        r"pending operation|interrupted while|operations? pending",
        "an earlier operation was killed in the middle: run `pulumi refresh --stack STACK` in a terminal,"
        " answer for each thing that was being made, then go on",
    ),
    (
        r"unable to load schema information from the API server|configured Kubernetes cluster is unreachable|Kubernetes cluster unreachable",
        "the Kubernetes API server does not answer: is the cluster up, the context right and the network open (cluster.publicAccessCidrs)?"
        " If the cluster is gone, `python -m ops down STACK` takes its objects out of the state",
    ),
    (
        r"failed calling webhook|connection refused|no route to host|i/o timeout|no such host|TLS handshake timeout|Could not connect to the endpoint",
        "a server did not answer ({text}): check the network and proxy, and start the same command again",
    ),
    (
        r"context deadline exceeded|timed out waiting for the condition",
        "it was not ready in time ({text}): `python -m ops explain STACK` says what it waits for",
    ),
    (r"Throttling|RequestLimitExceeded|Rate exceeded|TooManyRequests", "AWS is being asked too often: wait a minute and start the same command again"),
    (r"no resource plugin|plugin .* not found", "the engine lacks a provider plugin ({text}): `pulumi install` in the program's folder fetches it"),
    (
        r"failed to locate .*virtual environment|virtual environment .* (doesn't|does not) (exist|appear)|No module named '?(\w+)'?",
        "the program's Python environment is incomplete ({text}): python3 -m venv .venv-pulumi && .venv-pulumi/bin/pip install -r requirements.txt",
    ),
)
# Worth another try by itself, after a pause: AWS finishes in the background what they complain about.
RETRYABLE = re.compile(
    r"DependencyViolation|has a dependent object|dependencies and cannot be deleted|DeleteConflict|ResourceInUse|Throttling|RequestLimitExceeded"
    r"|Rate exceeded|TooManyRequests|connection reset|TLS handshake timeout|InternalError|ServiceUnavailable",
)
UNREACHABLE = re.compile(r"unable to load schema information from the API server|configured Kubernetes cluster is unreachable|Kubernetes cluster unreachable")
_NOISE = re.compile(r"^(update failed|destroy failed|refresh failed|resource .* failed|preview failed)\b|^\s*$", re.IGNORECASE)
_PREFIX = re.compile(r"^(error: |\d+ errors? occurred:\s*|\* |sdk-v2/provider2?\.go:\d+: sdk\.helper_schema: |[a-z]+ing urn:\S+: )+", re.IGNORECASE)


def cleaned(text: str) -> str:
    """One line without the engine's prefixes and addresses; at most 300 characters."""
    line = " ".join(text.split())
    while (shorter := _PREFIX.sub("", line).strip()) != line:
        line = shorter
    return line if len(line) <= 300 else line[:297] + "..."


def sentence(errors: Sequence[str], stack: str, where: str | None = None) -> str:
    """What to tell. errors: the engine's error texts, oldest first. where: the part of the program that failed."""
    told = [text for text in errors if not _NOISE.match(text.strip())]
    whole = "\n".join(told)
    at = f"{where}: " if where else ""
    # The program's own words are made for people already.
    for text in told:
        if hook := re.search(r'(?:before|after) hook "[^"]*" failed: (.+)', text, re.DOTALL):
            return f"{at}{' '.join(hook[1].split())[:1000]}"
        if (
            re.search(r"this stack's configuration has|does not fit the account|Ways out:|ray-train-efa:\w+", text)
            and "urn:pulumi" not in text.split("Ways out:")[0]
        ):
            return _own(text)
    for pattern, say in KNOWN:
        if match := re.search(pattern, whole):
            line = next((text for text in told if re.search(pattern, text)), whole)
            groups = [group or "" for group in match.groups()] + ["", ""]
            said = say.replace("{0}", groups[0]).replace("{1}", groups[1]).replace("{text}", cleaned(line)).replace("STACK", stack)
            return f"{at}{said}"
    return f"{at}{cleaned(told[0])}" if told else f"{at}the engine stopped without saying why"


def _own(text: str) -> str:
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return "\n".join(line.removeprefix("error: ") for line in lines)


def retryable(errors: Sequence[str]) -> bool:
    """Whether AWS makes the same request succeed later."""
    return any(RETRYABLE.search(text) for text in errors)


def cluster_unreachable(errors: Sequence[str]) -> bool:
    """Whether Kubernetes objects could not be reached for want of an API server."""
    return any(UNREACHABLE.search(text) for text in errors)
