"""The JobSet of a launch: one Job with one pod per host of a TPU slice, started again as a whole.

Needs JobSet 0.10 or newer on the cluster: before, it could not tell by its message why a Job failed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from launch import container, remote
from launch.queued import LABEL
from launch.slices import Slice
from podracer import exits

RUNS = "/runs"  # the bucket, or a volume of the pod
CONTAINER = "podracer"
# The rules of the Job, in order; JobSet learns which one it was from the end of the Job's message.
FREE, FINAL = 0, 2
FREE_RULES = (FREE, 1)


class Job(NamedTuple):
    """What a JobSet is made from."""

    name: str
    piece: Slice
    image: str
    command: list[str]
    bucket: str | None
    spot: bool
    max_restarts: int
    namespace: str | None
    service_account: str | None
    privileged: bool


def manifest(job: Job) -> dict[str, Any]:
    """The JobSet as data."""
    metadata: dict[str, Any] = {"name": job.name}
    if job.namespace:
        metadata["namespace"] = job.namespace
    metadata["labels"] = {LABEL: job.name}
    # A slice is a node pool: all pods of this job go to one, and nobody else's do.
    metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    hosts = {"name": "hosts", "replicas": 1, "template": {"spec": _job(job)}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"failurePolicy": _failure_policy(job.max_restarts), "replicatedJobs": [hosts]},
    }


def _failure_policy(max_restarts: int) -> dict[str, Any]:
    """Bad input ends it; pre-emption starts it again for free; anything else counts."""

    def rule(name: str, action: str, index: int) -> dict[str, Any]:
        pattern = f"matching FailJob rule at index {index}$"
        reason = {"onJobFailureReasons": ["PodFailurePolicy"], "onJobFailureMessagePatterns": [pattern]}
        return {"name": name, "action": action, **reason}

    free = [rule(f"preempted{index}", "RestartJobSetAndIgnoreMaxRestarts", index) for index in FREE_RULES]
    return {"maxRestarts": max_restarts, "rules": [*free, rule("final", "FailJobSet", FINAL)]}


def _job(job: Job) -> dict[str, Any]:
    def on_status(*values: int) -> dict[str, Any]:
        found = {"containerName": CONTAINER, "operator": "In", "values": list(values)}
        return {"action": "FailJob", "onExitCodes": found}

    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    final = on_status(exits.BAD_INPUT, exits.NOT_FINITE)
    return {
        "completionMode": "Indexed",
        "parallelism": job.piece.hosts,
        "completions": job.piece.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [disrupted, on_status(exits.PREEMPTED), final]},
        "template": {"metadata": _pod_metadata(job), "spec": _pod(job)},
    }


def _pod_metadata(job: Job) -> dict[str, Any]:
    metadata: dict[str, Any] = {"labels": {LABEL: job.name}}
    if job.bucket:
        metadata["annotations"] = {"gke-gcsfuse/volumes": "true"}
    return metadata


def _pod(job: Job) -> dict[str, Any]:
    selector = {
        "cloud.google.com/gke-tpu-accelerator": accelerator(job.piece),
        "cloud.google.com/gke-tpu-topology": job.piece.topology_text,
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if job.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append(
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60,
        "automountServiceAccountToken": False,
        "nodeSelector": selector,
        "tolerations": tolerations,
        "securityContext": _pod_security(job.privileged),
        "containers": [_container(job)],
        "volumes": _volumes(job),
    }
    if job.service_account:
        pod["serviceAccountName"] = job.service_account
    if job.piece.hosts > 1:  # the hosts find one another by their nodes' addresses, without the pod network between
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return pod


def accelerator(piece: Slice) -> str | None:
    """The value of GKE's node label; v3 has another one for single hosts."""
    name = piece.generation.gke
    return "tpu-v3-device" if name == "tpu-v3-slice" and piece.hosts == 1 else name


def _pod_security(privileged: bool) -> dict[str, Any]:
    if privileged:
        return {"runAsUser": 0}
    user = container.USER
    ids = {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}}


def _container(job: Job) -> dict[str, Any]:
    security: dict[str, Any] = {"readOnlyRootFilesystem": True}
    if job.privileged:
        security["privileged"] = True
    else:
        security |= {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    settings = {**remote.ENVIRONMENT, "HOME": "/tmp", "XDG_CACHE_HOME": "/cache"}
    return {
        "name": CONTAINER,
        "image": job.image,
        "command": job.command,
        "env": [{"name": name, "value": value} for name, value in settings.items()],
        "resources": {"limits": {"google.com/tpu": str(job.piece.chips_per_host)}},
        "securityContext": security,
        "volumeMounts": [
            {"name": name, "mountPath": path}
            for name, path in (("runs", RUNS), ("cache", "/cache"), ("tmp", "/tmp"), ("shm", "/dev/shm"))
        ],
    }


def _volumes(job: Job) -> list[dict[str, Any]]:
    """What can be written to, as the rest of the image cannot."""
    return [
        {"name": "runs", "csi": _bucket(job)} if job.bucket else {"name": "runs", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _bucket(job: Job) -> dict[str, Any]:
    # Checkpoints become visible by renaming their folder, which gcsfuse has to be allowed.
    options = ["implicit-dirs", "rename-dir-limit=200000"]
    options += [] if job.privileged else [f"uid={container.USER}", f"gid={container.USER}"]
    attributes = {"bucketName": job.bucket, "mountOptions": ",".join(options)}
    if job.piece.hosts > 1:
        attributes["hostNetworkPodKSA"] = "true"  # pods on the host's network have to ask for their own account
    return {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
