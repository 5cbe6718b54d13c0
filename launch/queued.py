"""A slice by the Cloud TPU API: a queued resource with one node. Flags as in the help of gcloud 528.

That API gets no new features, and has no tpu7x; for v2 to v5e it is the only one.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from launch.slices import Slice
from launch.tools import KEEP_ALIVE, Tools

LABEL = "podracer-launch"
WAITING, READY, GONE, FAILED, MISSING, FOREIGN = "waiting", "ready", "gone", "failed", "missing", "foreign"
LOST = (GONE, FAILED, MISSING, FOREIGN)  # what was there is not any more


class State(NamedTuple):
    """What has become of a slice."""

    kind: str  # one of the words above
    text: str  # in the words of the cloud


class QueuedResource:
    """The slice NAME in a zone; its only node has the same name."""

    def __init__(self, tools: Tools, name: str, zone: str, project: str | None, hosts: int = 1):
        self._tools, self.name, self._expected = tools, name, hosts
        self._where = [f"--zone={zone}"] + ([f"--project={project}"] if project else [])

    def create_commands(self, piece: Slice, spot: bool, account: str | None, runtime: str | None) -> list[list[str]]:
        """What creates it."""
        words = ["gcloud", "compute", "tpus", "queued-resources", "create", self.name, *self._where]
        words += [f"--node-id={self.name}", f"--accelerator-type={piece.name}"]
        words += [f"--runtime-version={runtime or piece.generation.runtime}", f"--labels={LABEL}={self.name}"]
        words += ["--spot"] if spot else []
        words += [f"--service-account={account}"] if account else []
        return [words]

    def delete_commands(self) -> list[list[str]]:
        """What deletes it, with its node; waits for the end, so that the name is free again."""
        words = ["gcloud", "compute", "tpus", "queued-resources", "delete", self.name, *self._where]
        return [[*words, "--force", "--quiet"]]

    def question(self) -> list[str]:
        return ["gcloud", "compute", "tpus", "queued-resources", "describe", self.name, *self._where]

    def state(self) -> State:
        """Ask what has become of it."""
        found = self._tools.ask_json(self.question())
        if found is None:
            return State(MISSING, "no such queued resource")
        if not _is_ours(found, self.name):
            return State(FOREIGN, f"without the label {LABEL}={self.name}")
        state = found.get("state", {})
        word = state.get("state", "UNKNOWN")
        if word == "FAILED":
            error = state.get("failedData", {}).get("error", {}).get("message", "no reason given")
            return State(FAILED, f"FAILED: {error}")
        if word in ("SUSPENDED", "SUSPENDING"):
            return State(GONE, word)
        if word != "ACTIVE":  # ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, CREATING, DELETING
            return State(WAITING, word)
        node = self._node().get("state", "MISSING")
        if node in ("PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "HIDING", "HIDDEN", "MISSING"):
            return State(GONE, f"its node is {node}")
        return State(READY if node == "READY" else WAITING, f"ACTIVE, node {node}")

    def hosts(self) -> list[str]:
        """Names of the hosts, the first one first."""
        return [str(worker) for worker in range(len(self._node().get("networkEndpoints", [])) or self._expected)]

    def on_all(self, script: str) -> list[str]:
        """What a script says on all hosts."""
        return [self._tools.run(self._ssh("all", script))]

    def on_first(self, script: str, each_line: Callable[[str], None]) -> None:
        """Give each line that a script says on the first host to a function, as it comes."""
        words = self._ssh("0", script)
        self._tools.show(words)
        if not self._tools.dry_run:
            self._tools.stream(words, each_line)

    def upload(self, path: pathlib.Path) -> None:
        """Copy a file into the home folder on all hosts."""
        self._tools.run([*self._scp(), str(path), f"{self.name}:", "--worker=all"])

    def on_host(self, host: str, script: str) -> str:
        """What a script says on one host; the command is not shown."""
        return self._tools.ask(self._ssh(host, script))

    def download(self, host: str, remote: str, path: pathlib.Path) -> list[str]:
        """The command that copies a file from one host."""
        return [*self._scp(), f"{self.name}:{remote}", str(path), f"--worker={host}"]

    def _node(self) -> dict[str, Any]:
        words = ["gcloud", "compute", "tpus", "tpu-vm", "describe", self.name, *self._where]
        return {} if self._tools.dry_run else self._tools.ask_json(words) or {}

    def _ssh(self, worker: str, script: str) -> list[str]:
        words = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", self.name, *self._where, f"--worker={worker}"]
        return [*words, "--quiet", *(f"--ssh-flag={flag}" for flag in KEEP_ALIVE), f"--command={script}"]

    def _scp(self) -> list[str]:
        words = ["gcloud", "compute", "tpus", "tpu-vm", "scp", *self._where, "--quiet"]
        return [*words, *(f"--scp-flag={flag}" for flag in KEEP_ALIVE)]


def _is_ours(found: dict[str, Any], name: str) -> bool:
    nodes = found.get("tpu", {}).get("nodeSpec", [])
    return bool(nodes) and all(node.get("node", {}).get("labels", {}).get(LABEL) == name for node in nodes)
