"""What only the account's region knows, looked up and written into the stack file: zone, AMI release, add-on versions, image digest."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import config
import versions
from ops import image
from ops.aws import Aws, AwsError, tags_of
from ops.errors import BadInput, Refused
from ops.target import Target

KEY = f"{config.PROJECT}:pins"
# https://docs.aws.amazon.com/eks/latest/userguide/retrieve-ami-id.html
AMI_PARAMETER = "/aws/service/eks/optimized-ami/{version}/amazon-linux-2023/x86_64/{kind}/recommended/release_version"
AMI_KINDS = ("nvidia", "standard")


@dataclasses.dataclass(frozen=True)
class Pinned:
    """before and after: the stack file's pins; running: the values are those of the stack that is up, so that pinning changes nothing."""

    file: Path
    before: dict[str, Any]
    after: dict[str, Any]
    running: bool
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return self.before != self.after


def older(releases: Mapping[str, str]) -> str:
    """Of the releases of two AMIs (``1.36.0-20261112``) the older, which both have: they come out together, but not at the same minute."""
    return min(releases.values(), key=lambda release: (release.rpartition("-")[2], release))


def ami_release(aws: Aws, kubernetes: str) -> str:
    """The newest release that AWS recommends for both node groups' AMIs. Raises AwsError, and Refused for a version without AMIs."""
    found = {}
    for kind in AMI_KINDS:
        try:
            answer = aws.ask("ssm", "get_parameter", Name=AMI_PARAMETER.format(version=kubernetes, kind=kind))
        except AwsError as error:
            if error.code == "ParameterNotFound":
                raise Refused(f"AWS has no AL2023 {kind} AMI for Kubernetes {kubernetes} in {aws.region}; set cluster.kubernetesVersion to another") from error
            raise
        found[kind] = str(answer["Parameter"]["Value"])
    return older(found)


def addon_versions(aws: Aws, kubernetes: str, names: tuple[str, ...]) -> dict[str, str]:
    """The version of each add-on that EKS itself would take for a new cluster. Raises AwsError, and Refused where there is none."""
    found: dict[str, str] = {}
    for name in names:
        offers = aws.pages("eks", "describe_addon_versions", "addons", addonName=name, kubernetesVersion=kubernetes)
        usual = [
            version["addonVersion"]
            for offer in offers
            for version in offer.get("addonVersions", [])
            if any(fit.get("clusterVersion") == kubernetes and fit.get("defaultVersion") for fit in version.get("compatibilities", []))
        ]
        if not usual:
            raise Refused(f"EKS has no version of the add-on {name} for Kubernetes {kubernetes} in {aws.region}; set cluster.kubernetesVersion to another")
        found[name] = str(usual[0])
    return found


def wanted_addons(stack: config.Stack) -> tuple[str, ...]:
    return (*versions.NODE_ADDONS, *(name for name in versions.LATE_ADDONS if stack.storage.fsx or "fsx" not in name))


def running(aws: Aws, target: Target, deployment: str) -> dict[str, Any]:
    """The pins of the stack as it runs; empty where it has no cluster."""
    cluster = target.prefix
    try:
        found = aws.ask("eks", "describe_cluster", name=cluster)["cluster"]
    except AwsError as error:
        if error.code == "ResourceNotFoundException":
            return {}
        raise
    if tags_of(found, "tags").get("deployment") != deployment:
        return {}
    pins: dict[str, Any] = {"kubernetes": found.get("version")}
    releases: dict[str, str] = {}
    for name in aws.pages("eks", "list_nodegroups", "nodegroups", clusterName=cluster):
        release = aws.ask("eks", "describe_nodegroup", clusterName=cluster, nodegroupName=name)["nodegroup"].get("releaseVersion")
        if release:
            releases[name] = str(release)
    if len(set(releases.values())) == 1:
        pins["amiRelease"] = next(iter(releases.values()))
    addons = {}
    for name in wanted_addons(target.settings):
        try:
            addons[name] = str(aws.ask("eks", "describe_addon", clusterName=cluster, addonName=name)["addon"]["addonVersion"])
        except AwsError as error:
            if error.hopeless:
                raise  # else: an add-on that is not there yet has no version to keep
    if addons:
        pins["addonVersions"] = addons
    filters = [{"Name": "tag:deployment", "Values": [deployment]}, {"Name": "tag:Name", "Values": [f"{cluster}-nodes"]}]
    for subnet in aws.pages("ec2", "describe_subnets", "Subnets", Filters=filters):
        pins["zone"] = subnet["AvailabilityZone"]
    return pins


def lookup(aws: Aws, target: Target, deployment: str, best_zone: str | None) -> tuple[dict[str, Any], bool, list[str]]:
    """(pins, whether they are those of the running stack, notes). Raises AwsError and Refused.

    The zone never moves: the stack's own, the running one's, else the best. Of a stack that is up the versions it runs are pinned, for other ones would
    replace its nodes at the next `up`; a newer release is a note.
    """
    stack, kubernetes, notes = target.settings, target.settings.cluster.kubernetes_version, []
    live = running(aws, target, deployment)
    newest = ami_release(aws, kubernetes)
    found: dict[str, Any] = {}
    zone = stack.zone or live.get("zone") or best_zone
    if zone:
        found["zone"] = zone
    release = str(live.get("amiRelease", ""))
    found["amiRelease"] = release if release.startswith(f"{kubernetes}.") else newest
    if found["amiRelease"] != newest:
        notes.append(f"AMI release {newest} is newer than {found['amiRelease']}, which runs; set pins.amiRelease to it to replace the nodes")
    addons = addon_versions(aws, kubernetes, wanted_addons(stack))
    found["addonVersions"] = {**addons, **(live.get("addonVersions") or {})} if live.get("kubernetes") == kubernetes else addons
    if stack.ray.image is None:
        found["imageDigest"] = image.digest(versions.image(), aws)
    return found, bool(live), notes


def write(file: Path, pins: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes the stack file's pins these, in one step: (before, after). All other lines stay as they are, comments included.

    Raises BadInput where the file can't be written, or is in a form that can't be edited line by line; it is then untouched.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: can't be read ({error})") from error
    before = (yaml.safe_load(text) or {}).get("config", {}).get(KEY) or {}
    after = {key: value for key, value in pins.items() if value}
    edited = replaced(text, after, file)
    if (yaml.safe_load(edited) or {}).get("config", {}).get(KEY) != after:
        raise BadInput(f"{file}: its form is not one that can be edited line by line; put this in yourself:\n{_block(after, '  ')}")
    _replace(file, edited)
    return dict(before), after


def replaced(text: str, pins: Mapping[str, Any], file: Path) -> str:
    """``text`` of a stack file with other pins: their lines are exchanged, or added at the end of ``config``."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return text.rstrip("\n") + ("\n" if text.strip() else "") + "config:\n" + _block(pins, "  ")
    pairs = {key.value: (key, value) for key, value in root.value} if isinstance(root, yaml.MappingNode) else {}
    if not isinstance(root, yaml.MappingNode) or root.flow_style or ("config" in pairs and not isinstance(pairs["config"][1], yaml.MappingNode)):
        raise BadInput(f"{file}: `config` must be a mapping of keys to values, a key a line")
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    if "config" not in pairs:
        return "".join(lines) + "config:\n" + _block(pins, "  ")
    values = pairs["config"][1]
    if values.flow_style or not values.value:
        raise BadInput(f"{file}: `config` is written on one line; write a key a line, so that comments and order can be kept")
    indent = " " * values.value[0][0].start_mark.column
    for key, value in values.value:
        if key.value == KEY:
            return "".join(lines[: key.start_mark.line]) + _block(pins, indent) + "".join(lines[_last_line(value) + 1 :])
    last = _last_line(values.value[-1][1])
    return "".join(lines[: last + 1]) + _block(pins, indent) + "".join(lines[last + 1 :])


def _last_line(node: yaml.Node) -> int:
    """The last line that a value stands on; the end of a block as YAML has it lies behind the comments that follow."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    mark = node.end_mark
    return mark.line - 1 if mark.column == 0 and mark.line > node.start_mark.line else mark.line


def _block(pins: Mapping[str, Any], indent: str) -> str:
    made = yaml.safe_dump({KEY: dict(pins)}, default_flow_style=False, sort_keys=False, width=1000)
    return "".join(f"{indent}{line}\n" for line in made.splitlines())


def _replace(file: Path, text: str) -> None:
    """A reader sees the old file or the new one; the mode stays."""
    try:
        handle, draft = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.chmod(draft, file.stat().st_mode & 0o7777)
            os.replace(draft, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:
        raise BadInput(f"{file}: can't be written ({error.strerror}); the pins were not changed") from error
