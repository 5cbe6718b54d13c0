"""A slice by Compute Engine: an instance group with a workload policy. Flags as in the help of gcloud 528.

The policy wires the hosts of a slice together; a slice of one host needs none. Template, policy and group have the
name of the launch and carry its label, the latter two in their description, as they have no labels.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from launch.queued import FAILED, FOREIGN, GONE, LABEL, MISSING, READY, WAITING, State
from launch.slices import Slice
from launch.tools import KEEP_ALIVE, ToolFailed, Tools

IMAGES = "ubuntu-os-accelerator-images"  # Google's project of images with the TPU driver
WORKER = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number"


class InstanceGroup:
    """The slice NAME in a zone."""

    def __init__(self, tools: Tools, name: str, zone: str, project: str, hosts: int = 1):
        self._tools, self.name, self._zone, self._project = tools, name, zone, project
        self._expected = hosts
        self._region = zone.rpartition("-")[0]
        self._names: list[str] = []  # of the hosts that run
        self._hosts: list[str] = []  # the same, in JAX's order

    def create_commands(self, piece: Slice, spot: bool, account: str | None, image: str | None) -> list[list[str]]:
        """What creates the policy, the template and the group, in this order."""
        mark = f"--description={LABEL}={self.name}"
        template = [*self._verb("instance-templates", "create"), f"--machine-type={piece.machine_type}"]
        template += [f"--image-family={image or piece.generation.image}", f"--image-project={IMAGES}"]
        template += ["--maintenance-policy=TERMINATE", "--scopes=cloud-platform", f"--labels={LABEL}={self.name}"]
        template += ["--provisioning-model=SPOT", "--instance-termination-action=STOP"] if spot else []
        template += [f"--service-account={account}"] if account else []
        group = [*self._verb("instance-groups managed", "create"), f"--zone={self._zone}", f"--template={self.name}"]
        group += [f"--size={piece.hosts}", "--default-action-on-vm-failure=do-nothing", mark]
        if piece.hosts == 1:
            return [template, group]
        policy = [*self._verb("resource-policies", "create workload-policy"), f"--region={self._region}"]
        policy += ["--type=HIGH_THROUGHPUT", f"--accelerator-topology={piece.topology_text}", mark]
        path = f"projects/{self._project}/regions/{self._region}/resourcePolicies/{self.name}"
        return [policy, template, [*group, f"--workload-policy={path}"]]

    def delete_commands(self) -> list[list[str]]:
        """What deletes the group, the template and the policy: those that are there and ours."""
        places = (
            ("instance-groups managed", [f"--zone={self._zone}"]),
            ("instance-templates", []),
            ("resource-policies", [f"--region={self._region}"]),
        )
        found = [(kind, place) for kind, place in places if self._tools.dry_run or self._is_ours(kind, place)]
        return [[*self._verb(kind, "delete"), *place, "--quiet"] for kind, place in found]

    def question(self) -> list[str]:
        return [*self._verb("instance-groups managed", "list-instances"), f"--zone={self._zone}"]

    def state(self) -> State:
        """Ask what has become of it."""
        found = self._tools.ask_json([*self._verb("instance-groups managed", "describe"), f"--zone={self._zone}"])
        if found is None:
            return State(MISSING, "no such instance group")
        if found.get("description") != f"{LABEL}={self.name}":
            return State(FOREIGN, f"its description is not {LABEL}={self.name}")
        instances = self._tools.ask_json(self.question()) or []
        words = sorted({str(each.get("instanceStatus") or each.get("currentAction", "NONE")) for each in instances})
        text = f"{len(instances)} of {found.get('targetSize', '?')} hosts: {', '.join(words) or 'none yet'}"
        errors = [e for each in instances for e in each.get("lastAttempt", {}).get("errors", {}).get("errors", [])]
        if errors:
            return State(FAILED, f"FAILED: {errors[0].get('message', errors[0].get('code', 'no reason given'))}")
        if {"STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED"} & set(words):
            return State(GONE, text)
        ready = words == ["RUNNING"] and len(instances) == found.get("targetSize")
        self._names = [each["instance"].rpartition("/")[2] for each in instances] if ready else []
        return State(READY if ready else WAITING, text)

    def hosts(self) -> list[str]:
        """Names of the hosts, the one that JAX counts first at the beginning."""
        if self._tools.dry_run:
            return [f"HOST{number}" for number in range(self._expected)]
        text = self.state().text if not self._names else ""
        if not self._names:
            raise ToolFailed(self.question(), 0, f"its hosts do not run: {text}")
        if set(self._hosts) != set(self._names):
            question = f"curl -sf -H 'Metadata-Flavor: Google' {WORKER} || echo 0"
            answers = self._tools.ask_all([self._ssh(host, question) for host in self._names])
            numbers = [int(answer) if answer.strip().isdigit() else 0 for answer in answers]
            self._hosts = [host for _, host in sorted(zip(numbers, self._names, strict=True))]
        return self._hosts

    def on_all(self, script: str) -> list[str]:
        """What a script says on all hosts."""
        return self._tools.run_all([self._ssh(host, script) for host in self.hosts()])

    def on_first(self, script: str, each_line: Callable[[str], None]) -> None:
        """Give each line that a script says on the first host to a function, as it comes."""
        words = self._ssh(self.hosts()[0], script)
        self._tools.show(words)
        if not self._tools.dry_run:
            self._tools.stream(words, each_line)

    def upload(self, path: pathlib.Path) -> None:
        """Copy a file into the home folder on all hosts."""
        self._tools.run_all([[*self._scp(), str(path), f"{host}:"] for host in self.hosts()])

    def on_host(self, host: str, script: str) -> str:
        """What a script says on one host; the command is not shown."""
        return self._tools.ask(self._ssh(host, script))

    def download(self, host: str, remote: str, path: pathlib.Path) -> list[str]:
        """The command that copies a file from one host."""
        return [*self._scp(), f"{host}:{remote}", str(path)]

    def _is_ours(self, kind: str, place: list[str]) -> bool:
        found: dict[str, Any] = self._tools.ask_json([*self._verb(kind, "describe"), *place]) or {}
        labels = found.get("properties", {}).get("labels", {})
        return labels.get(LABEL) == self.name or found.get("description") == f"{LABEL}={self.name}"

    def _verb(self, kind: str, verb: str) -> list[str]:
        return ["gcloud", "compute", *kind.split(), *verb.split(), self.name, f"--project={self._project}"]

    def _ssh(self, host: str, script: str) -> list[str]:
        words = ["gcloud", "compute", "ssh", host, f"--project={self._project}", f"--zone={self._zone}"]
        return [*words, "--quiet", *(f"--ssh-flag={flag}" for flag in KEEP_ALIVE), f"--command={script}"]

    def _scp(self) -> list[str]:
        words = ["gcloud", "compute", "scp", f"--project={self._project}", f"--zone={self._zone}", "--quiet"]
        return [*words, *(f"--scp-flag={flag}" for flag in KEEP_ALIVE)]
