"""Waits, while `pulumi up` runs, until nodes or Ray pods are what they should be, and stops it with the cause where they will not be.

The engine's own waiting can't fail early, nor tell an old status from a new one. These waits are hooks of the engine, run before
the resource that needs the answer; nothing of them is left in the cluster, and `pulumi destroy` does not know them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pulumi

from workloads import diagnosis

# 10 GB of image per node, through a throttled registry; causes that are known end a wait long before.
CLUSTER_SECONDS = 2700.0
DEVICES_SECONDS = 900.0
PAUSE, UNREACHABLE = 1.0, 60.0
LOG_LINES = 8
RAY = "/apis/ray.io/v1"


class Stuck(Exception):
    """What is waited for will not come; the text says why, and what to do."""


class Gone(Stuck):
    """Stuck for a cause that is known."""

    def __init__(self, cause: diagnosis.Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


@dataclasses.dataclass
class Cluster:
    """The Kubernetes API as the stack reaches it. kubeconfig: its text, None for the user's own; context: which one of it."""

    kubeconfig: str | None
    context: str | None

    def __post_init__(self) -> None:
        from kubernetes import client, config  # a second of import that a preview need not spend

        if self.kubeconfig is None:
            made = config.new_client_from_config(context=self.context)
        else:
            made = config.new_client_from_config_dict(json.loads(self.kubeconfig), context=self.context)
        self._api: Any = made
        self._refused: type[Exception] = client.ApiException

    def get(self, path: str, text: bool = False, **query: Any) -> Any:
        """The object or list at ``path``, None where there is none. Raises Stuck where the API refuses, OSError where it is not reached."""
        try:
            found = self._api.call_api(
                path,
                "GET",
                query_params=list(query.items()),
                header_params={"Accept": "*/*" if text else "application/json"},
                auth_settings=["BearerToken"],
                response_type="str" if text else "object",
                _return_http_data_only=True,
                _request_timeout=10,
            )
        except self._refused as error:
            status: Any = getattr(error, "status", None)
            if status == 404:
                return None
            if status in (401, 403):
                raise Stuck(f"Kubernetes refuses to show {path} ({status} {getattr(error, 'reason', '')}): who runs `pulumi up` must be allowed to") from error
            raise OSError(f"{path}: {status} {getattr(error, 'reason', '')}") from error
        except Exception as error:  # urllib3's own kinds, a failed login command: nothing that more of them would not mend
            raise OSError(f"{type(error).__name__}: {error}") from error
        return found

    def items(self, path: str, **query: Any) -> list[Any]:
        return list((self.get(path, **query) or {}).get("items") or [])


async def settle(
    look: Callable[[], Awaitable[diagnosis.Moment]],
    limit: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> diagnosis.Moment:
    """Looks until ready. Raises Stuck with the gravest cause that outlasts its patience, or with the last look at the limit (seconds)."""
    began = clock()
    since: dict[str, float] = {}
    said = ""
    while True:
        try:
            moment = await look()
        except OSError as error:
            silent = "the Kubernetes API does not answer"
            moment = diagnosis.Moment(False, silent, (diagnosis.Cause("api", f"{silent}: {error}", UNREACHABLE),))
        now = clock()
        if moment.ready:
            return moment
        since = {cause.key: since.get(cause.key, now) for cause in moment.causes}
        for cause in moment.causes:
            if now - since[cause.key] >= cause.patience:
                raise Gone(cause)
        if now - began >= limit:
            raise Stuck(f"not ready after {limit / 60:.0f} minutes: {moment.text}" + "".join(f"; {cause.text}" for cause in moment.causes[:1]))
        if moment.text != said:
            said = moment.text
            say(f"{said}, {now - began:.0f} s")
        await pause(PAUSE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """Where to look: the kubeconfig's text once it is known, None for the user's own with ``context``."""

    kubeconfig: pulumi.Input[str] | None
    context: str | None

    async def cluster(self) -> Cluster:
        known = None if self.kubeconfig is None else await pulumi.Output.from_input(self.kubeconfig).future()
        return await asyncio.to_thread(Cluster, known, self.context)


def devices_hook(name: str, where: Watched, want: diagnosis.Devices) -> pulumi.ResourceHook:
    """Runs before the Ray cluster: every GPU node must show its devices."""

    async def check(_args: pulumi.ResourceHookArgs) -> None:
        cluster = await where.cluster()

        def look() -> diagnosis.Moment:
            nodes, system = cluster.items("/api/v1/nodes"), "/api/v1/namespaces/kube-system/pods"
            return diagnosis.devices(nodes, cluster.items("/apis/apps/v1/namespaces/kube-system/daemonsets"), cluster.items(system), want)

        found = await settle(lambda: asyncio.to_thread(look), DEVICES_SECONDS, _say("GPU nodes"))
        pulumi.log.info(found.text)

    return pulumi.ResourceHook(name, check)


def crd_hook(name: str, where: Watched, kind: str, spec: Mapping[str, Any], update: str) -> pulumi.ResourceHook:
    """Runs before an object whose fields an old CRD would drop without a word, among them the one that asks for a token."""

    async def check(_args: pulumi.ResourceHookArgs) -> None:
        cluster = await where.cluster()

        def look() -> diagnosis.Moment:
            return diagnosis.crd(cluster.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind}"), kind, spec, update)

        await settle(lambda: asyncio.to_thread(look), UNREACHABLE * 2, _say("operator"))

    return pulumi.ResourceHook(name, check)


def one_node_hook(name: str, where: Watched) -> pulumi.ResourceHook:
    """Runs before a Ray cluster whose pods share a folder of their node."""

    async def check(_args: pulumi.ResourceHookArgs) -> None:
        cluster = await where.cluster()
        await settle(lambda: asyncio.to_thread(lambda: diagnosis.one_node(cluster.items("/api/v1/nodes"))), UNREACHABLE, _say("nodes"))

    return pulumi.ResourceHook(name, check)


def ready_hook(
    name: str, where: Watched, namespace: pulumi.Input[str], ray_cluster: str, operator: Mapping[str, str], want: diagnosis.RayPods
) -> pulumi.ResourceHook:
    """Runs before whatever needs a working Ray cluster. operator: the labels of the operator's pods."""

    async def check(_args: pulumi.ResourceHookArgs) -> None:
        cluster = await where.cluster()
        space = await pulumi.Output.from_input(namespace).future()
        pods = f"/api/v1/namespaces/{space}/pods"

        def look() -> diagnosis.Moment:
            made = cluster.get(f"{RAY}/namespaces/{space}/rayclusters/{ray_cluster}")
            of_it = cluster.items(pods, labelSelector=f"ray.io/cluster={ray_cluster}")
            operators = cluster.items(pods, labelSelector=",".join(f"{key}={value}" for key, value in operator.items()))
            return diagnosis.ray_cluster(made, of_it, operators, want)

        try:
            await settle(lambda: asyncio.to_thread(look), CLUSTER_SECONDS, _say("Ray cluster"))
        except Gone as stuck:
            if stuck.cause.log_of is None:
                raise
            pod, container = stuck.cause.log_of
            raise Stuck(f"{stuck}\n{await asyncio.to_thread(_last_words, cluster, f'{pods}/{pod}/log', container)}") from stuck

    return pulumi.ResourceHook(name, check)


def _last_words(cluster: Cluster, path: str, container: str) -> str:
    try:
        text = cluster.get(path, text=True, container=container, previous="true", tailLines=LOG_LINES)
    except (OSError, Stuck) as error:
        return f"(its log can't be read: {error})"
    return f"the end of its log:\n{text or '(empty)'}"


def _say(what: str) -> Callable[[str], None]:
    def say(text: str) -> None:
        pulumi.log.info(f"{what}: {text}")

    return say
