"""Where the pods keep runs and find data: S3 by Pod Identity, an S3-compatible store by keys, a shared volume, or a folder of one node."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import Any

import config

MOUNT = "/storage"
CLAIM = "runs"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
KEYS_SECRET = "s3-keys"  # noqa: S105 - the name of the Secret


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStorage:
    """uri: where runs go. volume: what is mounted at /storage, None for an object store. one_node: all pods must share a node. keys: pods need the S3 keys."""

    uri: str
    volume: Mapping[str, Any] | None = None
    claim: Mapping[str, Any] | None = None
    one_node: bool = False
    keys: bool = False


def run_storage(stack: config.Stack) -> RunStorage:
    """The storage of a stack on an existing cluster; on EKS the bucket's own URI stands in its place."""
    given = stack.storage
    if given.endpoint:
        url = urllib.parse.urlsplit(given.endpoint)
        # pyarrow's S3 options (https://arrow.apache.org/docs/cpp/api/filesystem.html, S3Options::FromUri); a compatible store has no regions to ask for.
        query = urllib.parse.urlencode({"scheme": url.scheme, "endpoint_override": url.netloc, "region": "us-east-1"})
        return RunStorage(uri=f"s3://{given.bucket}/{given.prefix}?{query}", keys=True)
    if given.claim_gib:
        claim = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{given.claim_gib}Gi"}},
            **({"storageClassName": given.storage_class} if given.storage_class else {}),
        }
        return RunStorage(uri=f"{MOUNT}/{given.prefix}", volume={"persistentVolumeClaim": {"claimName": CLAIM}}, claim=claim)
    if given.host_path:
        volume = {"hostPath": {"path": given.host_path, "type": "DirectoryOrCreate"}}
        return RunStorage(uri=f"{MOUNT}/{given.prefix}", volume=volume, one_node=True)
    return RunStorage(uri="")
