"""`podracer launch tpu-vm` against a gcloud that is a script: what is called, in which order, whatever happens.

The scripts for the hosts run for real, in folders of this machine.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from launch import cli, following, patience, steps, verdicts

FAKE = pathlib.Path(__file__).with_name("fake_gcloud.py")
WHERE = ["--name", "run1", "--zone", "us-west4-a"]
ONE, POD = ["--type", "v5litepod-8"], ["--type", "v5litepod-16", "--bucket", "gs://my-runs"]
TRAIN = ["--", "train", "sebulba", "--env", "catch", "--actor-cores", "2", "--batch-size", "12"]
COMMAND = f"podracer {' '.join(TRAIN[1:])}"
SECRET = "planted-secret-4711"


def executable(path, text):
    path.write_text(textwrap.dedent(text).lstrip())
    path.chmod(0o755)


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """An empty cloud, in a project folder of two files; what the hosts have in their PATH."""
    folder, bin_, host = tmp_path / "cloud", tmp_path / "bin", tmp_path / "cloud" / "hostbin"
    for each in (folder, bin_, host):
        each.mkdir()
    executable(bin_ / "gcloud", f"#!{sys.executable} -S\n" + FAKE.read_text())
    (folder / "size").write_text("1")
    # pip and uv: only the environment that they would make, with a training that the tests write.
    executable(
        host / "python3",
        """
        #!/bin/sh
        case "$*" in *"uv venv"*) mkdir -p .venv/bin; cp "$FAKE_CLOUD/podracer" .venv/bin/podracer;; esac
        """,
    )
    # A bucket is a folder that all hosts see.
    executable(
        host / "gcsfuse",
        """
        #!/bin/sh
        for bucket; do [ "$bucket" = bucket ] || name=$bucket; done
        mkdir -p "$FAKE_CLOUD/buckets/$name"
        rmdir bucket && ln -s "$FAKE_CLOUD/buckets/$name" bucket
        """,
    )
    executable(host / "mountpoint", "#!/bin/sh\n[ -L bucket ]\n")
    executable(host / "curl", '#!/bin/sh\nprintf "%s" "$WORKER"\n')
    # As `tail --pid=PID -n +LINE -F train.log`, which notices the end only when the process here is reaped.
    executable(
        host / "tail",
        """
        #!/bin/sh
        case $1 in --pid=*) ;; *) exec /usr/bin/tail "$@";; esac
        next=${3#+}
        while :; do
          [ -e "$FAKE_CLOUD/drop" ] && rm "$FAKE_CLOUD/drop" && exit 255
          ended=$([ -f status ] && echo yes)
          last=$(wc -l < train.log) || exit 1
          [ "$last" -ge "$next" ] && sed -n "${next},${last}p" train.log
          next=$((last + 1))
          [ -n "$ended" ] && exit 0
          sleep 0.05
        done
        """,
    )
    executable(host / "sleep", "#!/bin/sh\ncase $1 in 1) exec /usr/bin/sleep 0.05;; *) exec /usr/bin/sleep $1;; esac\n")
    executable(
        folder / "podracer",
        """
        #!/bin/sh
        count="$FAKE_CLOUD/count-$WORKER"
        n=$(cat "$count" 2> /dev/null || echo 0)
        echo $((n + 1)) > "$count"
        echo "$JAX_PLATFORMS $JAX_COORDINATOR_PORT podracer $*" >> "$FAKE_CLOUD/started-$WORKER"
        run=$(echo "$*" | sed 's/.*--run \\([^ ]*\\).*/\\1/')
        mkdir -p "$run"
        [ "$WORKER" != 0 ] || echo "from host 0" > "$run/config.json"
        echo "part" > "$run/part-$WORKER"
        . "$FAKE_CLOUD/attempt-$n"
        """,
    )
    project = tmp_path / "project"
    (project / "runs").mkdir(parents=True)
    (project / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    (project / ".env").write_text(f"TOKEN={SECRET}\n")
    monkeypatch.chdir(project)
    monkeypatch.setenv("FAKE_CLOUD", str(folder))
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    monkeypatch.setattr(following, "ASK_S", 0.05)
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(patience, "LONGEST_WAIT_S", 0.02)
    monkeypatch.setattr(patience, "PATIENCE_S", 30.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}  # the command takes them
    yield folder
    for number, handler in before.items():
        signal.signal(number, handler)


def attempts(cloud, *scripts):
    for number, script in enumerate(scripts):
        (cloud / f"attempt-{number}").write_text(script + "\n")


def launch(*arguments):
    """The exit status."""
    try:
        cli.main(["launch", "tpu-vm", *map(str, arguments)])
    except SystemExit as exit_:
        return exit_.code or 0
    return 0


def calls(cloud):
    path = cloud / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def verbs(cloud):
    """What was done, without the questions: create, ssh, scp, delete, rsync."""
    known = ("create", "delete", "ssh", "scp", "rsync")
    return [next(word for word in call if word in known) for call in calls(cloud) if set(call) & set(known)]


def test_all_steps_in_a_row(cloud, capfd):
    """Created, waited for, installed, started on both hosts, followed, fetched from the bucket, deleted."""
    (cloud / "size").write_text("2")
    (cloud / "states").write_text("WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    attempts(cloud, 'echo "1,000 steps"; sleep 0.3; echo "2,000 steps"')
    assert launch(*WHERE, *POD, "--spot", *TRAIN) == 0
    out, err = capfd.readouterr()
    assert out == "1,000 steps\n2,000 steps\n"  # of the first host alone
    assert "$7.68 per hour" in err and "run1: PROVISIONING" in err
    assert verbs(cloud) == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "scp", "scp", "rsync", "delete"]
    create = next(call for call in calls(cloud) if "create" in call)
    assert create[:5] == ["compute", "tpus", "queued-resources", "create", "run1"]
    flags = {"--zone=us-west4-a", "--accelerator-type=v5litepod-16", "--labels=podracer-launch=run1", "--spot"}
    assert flags < set(create)
    assert "my-runs" in {path.name for path in (cloud / "buckets").iterdir()}
    for worker in "01":
        started = (cloud / f"started-{worker}").read_text()
        assert started == f"tpu 8476 {COMMAND} --run bucket/run1 --or-resume\n"
    run = pathlib.Path("runs/run1")
    assert (run / "config.json").read_text() == "from host 0\n"
    assert {"part-0", "part-1"} <= {path.name for path in run.iterdir()}
    assert [(run / f"train-{n}.log").read_text() for n in (0, 1)] == ["1,000 steps\n2,000 steps\n"] * 2
    assert not (cloud / "state").exists()
    assert SECRET not in out + err + (cloud / "calls.jsonl").read_text()


@pytest.mark.parametrize(
    "first",
    ["exit 75", 'trap "exit 75" TERM; if [ "$WORKER" = 0 ]; then exit 70; fi; while :; do /usr/bin/sleep 0.1; done'],
    ids=["pre-empted", "one host failed, the other one hangs"],
)
def test_some_statuses_are_started_again_on_the_same_slice(cloud, monkeypatch, first):
    """What still runs on other hosts is told to end first."""
    monkeypatch.setattr(following, "GRACE_S", 0.2)
    (cloud / "size").write_text("2")
    attempts(cloud, first, "exit 0")
    assert launch(*WHERE, *POD, "--max-restarts", "1", *TRAIN) == 0
    assert verbs(cloud).count("create") == 1
    assert (cloud / "count-0").read_text() == (cloud / "count-1").read_text() == "2\n"


@pytest.mark.parametrize("status", [2, 72])
def test_other_statuses_end_the_launch(cloud, status):
    """The worst of the hosts counts; the slice is deleted, the run is fetched."""
    (cloud / "size").write_text("2")
    attempts(cloud, f'if [ "$WORKER" = 1 ]; then exit {status}; fi; exit 71')
    assert launch(*WHERE, *POD, "--max-restarts", "3", *TRAIN) == status
    assert (cloud / "count-0").read_text() == "1\n"
    assert verbs(cloud)[-1] == "delete" and pathlib.Path("runs/run1/config.json").exists()


def test_restarts_are_counted(cloud):
    attempts(cloud, *["exit 75"] * 2)
    assert launch(*WHERE, *ONE, "--max-restarts", "1", *TRAIN) == 75
    assert (cloud / "count-0").read_text() == "2\n"


def test_a_slice_that_is_taken_away_is_replaced(cloud, capfd):
    """Its remains are deleted before the new one is asked for."""
    attempts(cloud, 'echo one; sleep 0.6; echo SUSPENDED > "$FAKE_CLOUD/state"; exit 1', "echo two")
    assert launch(*WHERE, *ONE, "--spot", "--max-restarts", "2", *TRAIN) == 0
    assert [verb for verb in verbs(cloud) if verb in ("create", "delete")] == ["create", "delete", "create", "delete"]
    out, err = capfd.readouterr()
    assert out.splitlines() == ["one", "two"] and "taken away" in err
    assert (cloud / "count-0").read_text() == "2\n"


def test_a_slice_that_is_taken_away_once_too_often(cloud):
    attempts(cloud, 'echo SUSPENDED > "$FAKE_CLOUD/state"')
    assert launch(*WHERE, *ONE, "--spot", *TRAIN) == 75
    assert verbs(cloud)[-1] == "delete" and not (cloud / "state").exists()


@pytest.mark.parametrize("left", ["FAILED", "SUSPENDED"])
def test_what_an_earlier_launch_left_is_deleted_first(cloud, left):
    (cloud / "state").write_text(left)
    (cloud / "labels").write_text('{"podracer-launch": "run1"}')
    attempts(cloud, "true")
    assert launch(*WHERE, *ONE, *TRAIN) == 0
    assert verbs(cloud)[:2] == ["delete", "create"]


def test_a_request_that_fails_says_why_and_is_deleted(cloud, capfd):
    (cloud / "states").write_text("WAITING_FOR_RESOURCES FAILED")
    assert launch(*WHERE, *ONE, *TRAIN) == 1
    assert "There is no more capacity in the zone" in capfd.readouterr().err
    assert verbs(cloud) == ["create", "delete"]


def test_a_command_that_fails_is_one_line_and_leaves_nothing(cloud, capfd, monkeypatch):
    monkeypatch.setattr(steps, "HOSTS_S", 0.2)
    (cloud / "fail").write_text("scp")
    assert launch(*WHERE, *ONE, *TRAIN) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("podracer: gcloud compute tpus tpu-vm scp") and "PERMISSION_DENIED" in last
    assert verbs(cloud)[-1] == "delete" and not (cloud / "state").exists()


def test_a_question_without_an_answer_is_asked_again_while_waiting(cloud, capfd):
    """As when a name cannot be resolved for a moment."""
    (cloud / "states").write_text("WAITING_FOR_RESOURCES ACTIVE")
    attempts(cloud, "true")
    (cloud / "flaky-once-created").write_text('{"describe": 2}')
    assert launch(*WHERE, *ONE, *TRAIN) == 0
    assert [verb for verb in verbs(cloud) if verb in ("create", "delete")] == ["create", "delete"]
    assert "no answer, trying again in 0.01 s" in capfd.readouterr().err


COMPUTE = ["--type", "v6e-8", "--api", "compute-engine", "--project", "my-project"]


@pytest.mark.parametrize("shape", [POD, COMPUTE], ids=["queued resource", "instance group"])
def test_a_slice_that_trains_survives_a_network_that_does_not(cloud, capfd, shape):
    """The connection drops, and nobody can be asked for a while: it is followed from where it was."""
    (cloud / "always").write_text("RUNNING" if shape == COMPUTE else "ACTIVE")
    cut = """printf '{"ssh": 2, "describe": 2}' > "$FAKE_CLOUD/flaky"; touch "$FAKE_CLOUD/drop" """
    attempts(cloud, f"echo one; sleep 0.3; {cut}; sleep 1; echo two")
    assert launch(*WHERE, *shape, "--max-restarts", "5", *TRAIN) == 0
    out, err = capfd.readouterr()
    assert out == "one\ntwo\n" and "output broke off" in err and "taken away" not in err
    assert (cloud / "count-0").read_text() == "1\n"
    made = [verb for verb in verbs(cloud) if verb in ("create", "delete")]
    assert made == sorted(made)  # an instance group is more than one resource, made and deleted once


@pytest.mark.parametrize("broken", [{"ssh": 10**6}, {"ssh": 10**6, "describe": 10**6}], ids=["ssh", "everything"])
def test_a_slice_that_cannot_be_asked_is_left_alone(cloud, capfd, monkeypatch, broken):
    """Whether the cloud calls it ready or says nothing; with its price, and what to do."""
    monkeypatch.setattr(patience, "PATIENCE_S", 1.0)
    cut = f"""printf '{json.dumps(broken)}' > "$FAKE_CLOUD/flaky"; touch "$FAKE_CLOUD/drop" """
    attempts(cloud, f"sleep 0.3; {cut}; sleep 30")
    assert launch(*WHERE, *POD, "--max-restarts", "5", *TRAIN) == 1
    assert "delete" not in verbs(cloud) and "rsync" not in verbs(cloud) and (cloud / "state").exists()
    *_, said, first, second = capfd.readouterr().err.splitlines()
    assert said.startswith("podracer: run1 IS LEFT AS IT IS, AND COSTS MONEY (price: $19.20 per hour")
    assert "it may still train" in said and "Name or service not known" in said
    assert first.strip() == "podracer launch tpu-vm logs --name run1 --zone us-west4-a"
    assert second.strip() == "podracer launch tpu-vm delete --name run1 --zone us-west4-a"
    (cloud / "flaky").unlink()
    assert launch("delete", *WHERE) == 0 and not (cloud / "state").exists()


def test_a_request_that_cannot_be_asked_about_is_left_alone(cloud, capfd, monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE_S", 0.3)
    (cloud / "flaky-once-created").write_text('{"describe": 1000}')
    assert launch(*WHERE, *ONE, *TRAIN) == 1
    assert verbs(cloud) == ["create"] and "IS LEFT AS IT IS" in capfd.readouterr().err


def test_install_and_start_are_tried_again(cloud):
    """Also where the hosts had done all when the connection was lost: nothing is started twice."""
    (cloud / "size").write_text("2")
    (cloud / "flaky-once-created").write_text('{"after-uv venv": 1, "after-nohup": 2}')
    attempts(cloud, "true")
    assert launch(*WHERE, *POD, *TRAIN) == 0
    assert (cloud / "count-0").read_text() == (cloud / "count-1").read_text() == "1\n"
    assert verbs(cloud).count("create") == 1


def test_what_a_host_itself_cannot_do_is_not_tried_again(cloud, capfd):
    """But by the host itself, a few times: a registry may be out of reach for a moment."""
    executable(cloud / "hostbin" / "python3", "#!/bin/sh\necho 'No matching distribution' >&2\nexit 1\n")
    executable(cloud / "hostbin" / "sleep", f'#!/bin/sh\necho "$@" >> {cloud}/waits\n')
    assert launch(*WHERE, *ONE, *TRAIN) == 1
    assert verbs(cloud) == ["create", "scp", "ssh", "delete"]
    assert (cloud / "waits").read_text().split() == ["5", "20", "60"]
    assert capfd.readouterr().err.splitlines()[-1].endswith("status 1: No matching distribution")


def test_a_run_that_is_only_on_its_hosts_is_not_deleted_with_them(cloud, capfd, monkeypatch):
    monkeypatch.setattr(steps, "HOSTS_S", 0.3)
    attempts(cloud, """printf '{"scp": 1000}' > "$FAKE_CLOUD/flaky" """)
    assert launch(*WHERE, *ONE, *TRAIN) == 1
    assert "delete" not in verbs(cloud)
    assert "its run is only on its hosts, and could not be fetched" in capfd.readouterr().err


def test_a_deletion_is_tried_again(cloud):
    attempts(cloud, """printf '{"delete": 2}' > "$FAKE_CLOUD/flaky" """)
    assert launch(*WHERE, *ONE, *TRAIN) == 0
    assert verbs(cloud).count("delete") == 3 and not (cloud / "state").exists()


def test_the_log_of_a_host_that_failed_is_shown_and_kept(cloud, capfd):
    """The first failure last on the screen, without those who only saw it; before the restart and before the end."""
    (cloud / "size").write_text("3")
    (cloud / "states").write_text("ACTIVE")
    failing = 'for n in $(seq 50); do echo "line $n of $WORKER"; done; case $WORKER in 1) exit 70;; *) exit 71;; esac'
    attempts(cloud, failing, failing)
    assert launch(*WHERE, *POD, "--max-restarts", "1", *TRAIN) == 70
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("host ")]
    hosts = [line.partition(":")[0] for line in said]
    assert hosts == 2 * [f"host {host}" for host in (0, 2, 1) for _ in range(40)]
    assert said[0] == "host 0: line 11 of 0" and said[-1] == "host 1: line 50 of 1"
    assert (pathlib.Path("runs/run1") / "train-1.log").read_text().count("line 50 of 1") == 2


def test_logs_of_no_slice_and_of_one_that_was_taken_away(cloud, capfd):
    for left, status, says in (
        (None, 2, "run1 is not there (no such queued resource); expected a slice that is ready."),
        ("SUSPENDED", 75, "run1 was taken away (SUSPENDED)"),
        ("WAITING_FOR_RESOURCES", 2, "run1 is not there (WAITING_FOR_RESOURCES)"),
        ("ACTIVE", 2, "run1 has nothing installed"),
    ):
        if left:
            (cloud / "state").write_text(left)
            (cloud / "labels").write_text('{"podracer-launch": "run1"}')
            (cloud / "hosts" / "0").mkdir(parents=True, exist_ok=True)
        assert launch("logs", *WHERE) == status
        err = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("+ ")]
        assert [line for line in err if line.startswith("podracer: ")] == [err[-1]] and says in err[-1]


def test_logs_of_a_slice_that_is_taken_away_meanwhile(cloud, capfd):
    attempts(cloud, 'sleep 1; echo SUSPENDED > "$FAKE_CLOUD/state"')
    for step in ("create", "copy", "install", "start"):
        assert launch(step, *WHERE, *(ONE if step == "create" else []), *(TRAIN if step == "start" else [])) == 0
    assert launch("logs", *WHERE) == 75
    assert capfd.readouterr().err.splitlines()[-1].startswith("podracer: run1 was taken away (SUSPENDED)")


def test_what_others_made_is_neither_used_nor_deleted(cloud, capfd):
    (cloud / "state").write_text("ACTIVE")
    (cloud / "labels").write_text('{"owner": "somebody"}')
    for arguments in ([*WHERE, *ONE, *TRAIN], ["delete", *WHERE]):
        assert launch(*arguments) == 2
        assert "podracer-launch=run1" in capfd.readouterr().err
    assert verbs(cloud) == []


def test_a_name_that_is_in_use_is_refused(cloud, capfd):
    (cloud / "state").write_text("ACTIVE")
    (cloud / "labels").write_text('{"podracer-launch": "run1"}')
    assert launch(*WHERE, *ONE, *TRAIN) == 2
    assert "exists (ACTIVE, node READY)" in capfd.readouterr().err
    assert verbs(cloud) == []


def test_each_step_on_its_own(cloud, capfd):
    (cloud / "size").write_text("2")
    attempts(cloud, "echo working; exit 75")
    assert launch("create", *WHERE, *POD) == 0
    assert launch("copy", *WHERE) == launch("install", *WHERE, *POD) == launch("start", *WHERE, *POD, *TRAIN) == 0
    copied = {path.name for path in (cloud / "hosts/0/podracer/run1").iterdir()}
    assert "pyproject.toml" in copied and ".env" not in copied  # what may hold secrets stays here
    assert launch("logs", *WHERE) == 75
    assert launch("status", *WHERE) == 0
    out = capfd.readouterr().out
    assert out == "working\nrun1: ACTIVE, node READY\nhost 0: 75\nhost 1: 75\n"
    assert launch("fetch", *WHERE, *POD, "--out", "here") == 0 and pathlib.Path("here/config.json").exists()
    assert launch("delete", *WHERE) == 0 and not (cloud / "state").exists()


def test_nothing_is_started_twice(cloud, capfd):
    attempts(cloud, "sleep 5")
    launch("create", *WHERE, *ONE)
    launch("copy", *WHERE)
    launch("install", *WHERE)
    assert launch("start", *WHERE, *TRAIN) == 0
    assert launch("start", *WHERE, *TRAIN) == 1
    assert "running already" in capfd.readouterr().err
    assert launch("status", *WHERE) == 0
    assert "host 0: running" in capfd.readouterr().out
    assert launch("delete", *WHERE) == 0


def test_an_ssh_agent_without_gclouds_key_is_refused_before_anything_costs_money(cloud, monkeypatch, tmp_path, capfd):
    """gcloud says so once the slice is there; without an agent, and on one host, it goes on."""
    bin_, key = tmp_path / "bin", tmp_path / ".ssh" / "google_compute_engine"
    monkeypatch.setenv("HOME", str(tmp_path))
    executable(bin_ / "ssh-keygen", '#!/bin/sh\n[ -e "$2" ] && echo "3072 SHA256:mine me@here (RSA)"\n')
    for held, there, says in (
        (
            "echo '256 SHA256:other me@here (ED25519)'",
            False,
            "First: ssh-keygen -t rsa -N '' -f ~/.ssh/google_",
        ),
        ("echo '256 SHA256:other me@here (ED25519)'", True, "First: ssh-add ~/.ssh/google_compute_engine"),
        ("echo '3072 SHA256:mine me@here (RSA)'", True, None),
        ("echo 'The agent has no identities.'; exit 1", True, None),
    ):
        executable(bin_ / "ssh-add", f"#!/bin/sh\n{held}\n")
        key.parent.mkdir(exist_ok=True)
        if there:
            key.write_text("")
        status = launch("create", *WHERE, *POD)
        assert status == (2 if says else 0) and (says or "") in capfd.readouterr().err
        assert (cloud / "state").exists() == (says is None)
        launch("delete", *WHERE)


def test_one_host_needs_no_bucket(cloud):
    """Its run comes back as one file, with the log."""
    attempts(cloud, "echo 1,000 steps")
    assert launch(*WHERE, *ONE, *TRAIN) == 0
    assert "--run run --or-resume" in (cloud / "started-0").read_text()
    run = pathlib.Path("runs/run1")
    assert (run / "train-0.log").read_text() == "1,000 steps\n" and (run / "config.json").exists()


def test_several_hosts_need_one_before_they_cost_anything(cloud, capfd):
    line = [*WHERE, "--type", "v5litepod-16"]
    assert launch(*line, *TRAIN) == 2
    assert "the 4 hosts of v5litepod-16 need a run directory that all of them see" in capfd.readouterr().err
    assert launch(*line, "--dry-run", *TRAIN) == 0 and calls(cloud) == []
    assert "# --bucket is missing" in capfd.readouterr().out


def test_compute_engine_makes_policy_template_and_group_and_follows_jaxs_first_host(cloud, capfd):
    (cloud / "size").write_text("2")
    (cloud / "states").write_text("PROVISIONING RUNNING")
    attempts(cloud, 'echo "host $WORKER"')
    shape = ["--type", "tpu7x-16", "--project", "my-project", "--spot", "--bucket", "gs://my-runs"]
    assert launch(*WHERE, *shape, *TRAIN) == 0
    out, err = capfd.readouterr()
    assert out == "host 0\n" and "price of tpu7x-16: unknown" in err
    made = [call for call in calls(cloud) if "create" in call]
    assert [call[1] for call in made] == ["resource-policies", "instance-templates", "instance-groups"]
    assert "--accelerator-topology=2x2x2" in made[0] and "--labels=podracer-launch=run1" in made[1]
    assert {"--machine-type=tpu7x-standard-4t", "--provisioning-model=SPOT"} < set(made[1])
    assert "--size=2" in made[2]
    gone = [call[1] for call in calls(cloud) if "delete" in call]
    assert gone == ["instance-groups", "instance-templates", "resource-policies"]
    assert (pathlib.Path("runs/run1") / "config.json").read_text() == "from host 0\n"


def test_an_instance_group_that_is_stopped_is_replaced(cloud):
    attempts(cloud, 'echo STOPPED > "$FAKE_CLOUD/state"; exit 1', "exit 0")
    shape = ["--type", "v6e-8", "--api", "compute-engine", "--project", "my-project", "--max-restarts", "1"]
    (cloud / "always").write_text("RUNNING")
    assert launch(*WHERE, *shape, *TRAIN) == 0
    assert (cloud / "count-0").read_text() == "2\n"


@pytest.mark.parametrize("broken", [False, True])
def test_ctrl_c_stops_the_run_fetches_it_and_deletes(cloud, broken):
    """In a process of its own, in the middle of following; a run that is nowhere else and cannot be fetched stays."""
    saves = "trap 'sleep 0.3; echo saved > \"$run/saved\"; exit 75' TERM; echo working; while :; do sleep 0.1; done"
    broke = """printf '{"tpu-vm scp": 1000}' > "$FAKE_CLOUD/flaky"; """
    attempts(cloud, (broke if broken else "") + saves)
    quick = "following.ASK_S = 0.05; steps.HOSTS_S = 2; patience.FIRST_WAIT_S = 0.1"
    script = f"import sys; from launch import cli, following, patience, steps; {quick}; cli.main(sys.argv[1:])"
    root = str(pathlib.Path(__file__).parents[2])
    words = [sys.executable, "-c", script, "launch", "tpu-vm", *WHERE, *ONE, *TRAIN]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert process.stdout is not None and process.stdout.readline() == "working\n"
    time.sleep(0.5)  # the follower may be quicker to say so than its starter to wait for it
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "ending early" in err and "Traceback" not in err
    if broken:
        assert (cloud / "hosts/0/podracer/run1/status").read_text() == "75\n"
        assert process.returncode == 1 and "IS LEFT AS IT IS, AND COSTS MONEY" in err
        assert "delete" not in verbs(cloud) and (cloud / "state").exists()
        (cloud / "flaky").unlink()  # the connection is mended
        assert launch("fetch", *WHERE) == 0
    else:
        assert process.returncode == 130, err
        assert verbs(cloud)[-1] == "delete" and not (cloud / "state").exists()
    assert pathlib.Path("runs/run1/saved").read_text() == "saved\n"


def test_a_run_that_ends_before_it_has_a_directory_keeps_its_status_and_its_logs(cloud, capfd, monkeypatch):
    """A library is missing on the hosts, say: nothing is in the bucket, now or later."""
    monkeypatch.setattr(steps, "HOSTS_S", 20)
    (cloud / "size").write_text("2")
    attempts(cloud, 'rm -rf "$run"; echo "podracer: envpool is not installed"; exit 2')
    began = time.monotonic()
    assert launch(*WHERE, *POD, *TRAIN) == 2
    assert time.monotonic() - began < 20 and verbs(cloud).count("rsync") == 1 and verbs(cloud)[-1] == "delete"
    assert "not all of the run could be fetched" in capfd.readouterr().err
    for host in (0, 1):
        assert (pathlib.Path("runs/run1") / f"train-{host}.log").read_text() == "podracer: envpool is not installed\n"


def test_a_slice_that_was_taken_away_is_asked_for_again_and_again(cloud):
    """The cloud does not answer, or its answer is lost when all is done."""
    away = 'echo SUSPENDED > "$FAKE_CLOUD/state"; printf \'{"queued-resources create": 2}\' > "$FAKE_CLOUD/flaky"'
    attempts(cloud, away, "exit 0")
    (cloud / "always").write_text("ACTIVE")
    assert launch(*WHERE, *POD, "--max-restarts", "1", *TRAIN) == 0
    assert verbs(cloud).count("create") == 4


def test_without_gcloud_a_dry_run_works_and_nothing_else(cloud, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(cloud))
    assert launch(*WHERE, *ONE, *TRAIN) == 2
    assert "gcloud is not installed. Install the Google Cloud CLI" in capfd.readouterr().err
    assert launch(*WHERE, *ONE, "--dry-run", *TRAIN) == 0
    assert capfd.readouterr().out.startswith("# v5litepod-8: 8 chips")


@pytest.mark.parametrize(
    "line, says",
    [
        ("--name run1;id --zone us-west4-a --type v4-8", "--name is 'run1;id'; expected small letters"),
        ("--name $(id) --zone us-west4-a --type v4-8", "--name is '$(id)'"),
        ("--name Run --zone us-west4-a --type v4-8", "--name is 'Run'"),
        (
            "--name run1 --zone us-west4-a|id --type v4-8",
            "--zone is 'us-west4-a|id'; expected a zone, as in us-west4-a.",
        ),
        ("--name run1 --type v4-8", "--zone is missing; expected a value. Zone, such as us-west4-a. See"),
        ("--type v4-8", "--name and --zone are missing; expected a value for each. See"),
        (
            "--name run1 --zone us-west4-a --type v4-9",
            "unknown TPU type 'v4-9'; the number counts cores. Near it: v4-8",
        ),
        ("--name run1 --zone us-west4-a", "--type is missing"),
        ("--name run1 --zone us-west4-a --type v4-8 --bucket my-runs", "--bucket is 'my-runs'; expected gs://NAME"),
        ("--name run1 --zone us-west4-a --type v4-8 --bucket gs://a;b", "--bucket is 'gs://a;b'"),
        ("--name run1 --zone us-west4-a --type v4-8 --project a;b", "--project is 'a;b'; expected the ID of a project"),
        ("--name run1 --zone us-west4-a --type tpu7x-8", "--project is missing"),
        (
            "--name run1 --zone us-west4-a --type v4-8 --api compute-engine",
            "--api is compute-engine, which has no v4-8",
        ),
        ("--name run1 --zone us-west4-a --type v4-8 --max-restarts -1", "--max-restarts is -1"),
        ("--name run1 --zone us-west4-a --type v4-8 --wait-hours 0", "--wait-hours is 0"),
        ("--name run1 --zone us-west4-a --type v4-8 --source nowhere", "--source nowhere has no pyproject.toml"),
        ("--name run1 --zone us-west4-a --type v4-8 --out runs", "runs exists; expected a new folder"),
        ("--name run1 --zone us-west4-a --type v4-8 --price-per-chip-hour 0", "--price-per-chip-hour is 0"),
        ("creat --name run1 --zone us-west4-a", "unknown step 'creat'. Did you mean 'create'?"),
        ("--name run1 --zone us-west4-a --type v4-8 --spott", "unknown flag --spott. Did you mean '--spot'?"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_done(cloud, capfd, line, says):
    words = line.split()
    assert launch(*words, *([] if words[0] == "creat" else TRAIN)) == 2
    out, err = capfd.readouterr()
    assert out == "" and says in err and err.startswith("podracer: ") and err.count("\n") == 1
    assert calls(cloud) == []


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "after -- there is nothing; expected train anakin or train sebulba"),
        (["eval", "runs/x"], "after -- there is 'eval runs/x'"),
        (["train", "sebulbo"], "after -- there is 'train sebulbo'"),
        (["train", "sebulba", "--run", "x"], "--run is set by the launcher"),
        (["train", "sebulba", "--or-resume"], "--or-resume is set by the launcher"),
        (["train", "sebulba", "--env", "a\nb"], "control character"),
    ],
)
def test_only_training_is_launched(cloud, capfd, words, says):
    assert launch(*WHERE, "--type", "v4-8", "--", *words) == 2
    assert says in capfd.readouterr().err and calls(cloud) == []


def test_words_with_shell_characters_reach_the_training_as_they_are(cloud):
    attempts(cloud, "true")
    words = [*TRAIN, "--checkpoint-dir", "$(touch hacked); `id` it's"]
    assert launch(*WHERE, "--type", "v5litepod-8", *words) == 0
    assert "--checkpoint-dir $(touch hacked); `id` it's --run" in (cloud / "started-0").read_text()
    assert not list(cloud.rglob("hacked")) and not pathlib.Path("hacked").exists()


def test_the_clouds_of_tests_are_not_the_users(cloud):
    """What these tests call is the script, not a gcloud that may be installed."""
    assert shutil.which("gcloud") == str(cloud.parent / "bin" / "gcloud")


@pytest.mark.parametrize(
    "found, status",
    [
        ({"0": "0", "1": "0"}, 0),
        ({"0": "134", "1": "70"}, 70),
        ({"0": "lost", "1": "0"}, 71),
        ({"0": "75", "1": "71"}, 75),
        ({"0": "75", "1": "2"}, 2),
        ({"0": "0", "1": "137"}, 137),
        ({"0": "0", "1": "running"}, 71),
        ({"0": "73", "1": "71"}, 73),
    ],
)
def test_one_status_of_many_hosts(found, status):
    assert verdicts.verdict(found) == status


def test_the_wait_for_a_slice_ends(cloud, capfd, monkeypatch):
    (cloud / "states").write_text("WAITING_FOR_RESOURCES")
    began = time.monotonic()
    assert launch(*WHERE, "--type", "v4-8", "--wait-hours", "0.0001", *TRAIN) == 1
    assert time.monotonic() - began < 10
    assert "no slice after 0.0001 hours: WAITING_FOR_RESOURCES" in capfd.readouterr().err
    assert verbs(cloud) == ["create", "delete"]
