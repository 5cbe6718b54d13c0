"""The step of a launch that brings the run back: from the bucket or from the hosts, with what every host said."""

from __future__ import annotations

import pathlib
import tempfile

from launch import patience, project, remote, steps
from launch.steps import Steps
from launch.tools import ToolFailed
from launch.words import say
from podracer.errors import UserError


class Fetching(Steps):
    """The steps, with `fetch`."""

    def fetch(self, from_hosts: bool = True) -> None:
        """Bring the run directory here, with the log of every host; with a bucket, also where the hosts are gone."""
        self._tell("fetch the run")
        out, dry = self._plan.out, self._tools.dry_run
        if self._plan.bucket:
            if from_hosts:  # first: they say why there is nothing in the bucket
                self._fetch_logs(out)
            self._fetch_from_bucket(out)
        elif from_hosts:
            self._fetch_from_hosts(out)
        else:
            raise UserError("the run is lost with the slice, without --bucket. Give --bucket the next time.")
        if not dry:
            say(f"the run is in {out}")

    def _fetch_from_bucket(self, out: pathlib.Path) -> None:
        if self._tools.dry_run:
            self._tools.show(["mkdir", "-p", str(out)])
        else:
            out.mkdir(parents=True, exist_ok=True)
        words = ["gcloud", "storage", "rsync", "--recursive", f"gs://{self._plan.bucket}/{self._name}", str(out)]
        missing = lambda error: error.says_not_found
        patience.keep_trying(lambda: self._tools.run(words), steps.HOSTS_S, final=missing)

    def _fetch_logs(self, out: pathlib.Path) -> None:
        """What every host said, which is not in the bucket."""
        if not self._tools.dry_run:
            out.mkdir(parents=True, exist_ok=True)
        try:
            hosts = enumerate(self._slice.hosts())
            log = remote.log(self._name)
            self._tools.run_all([self._slice.download(host, log, out / f"train-{n}.log") for n, host in hosts])
        except ToolFailed as error:
            say(f"without the logs of all hosts: {error}")

    def _fetch_from_hosts(self, out: pathlib.Path) -> None:
        """The run directories of all hosts, the first one's files last."""
        self._persist(lambda: self._slice.on_all(remote.pack(self._name)), steps.HOSTS_S)
        with tempfile.TemporaryDirectory() as folder:
            for number, host in reversed(list(enumerate(self._slice.hosts()))):
                path = pathlib.Path("run.tar.gz" if self._tools.dry_run else f"{folder}/run.tar.gz")
                words = self._slice.download(host, f"{remote.folder(self._name)}/run.tar.gz", path)
                self._persist(lambda words=words: self._tools.run(words), steps.HOSTS_S)
                if self._tools.dry_run:
                    print(project.unpacking(path, out, number))
                else:
                    project.unpack(path, out, number)
