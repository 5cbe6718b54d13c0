"""What is rendered, against golden files, schemas, and what must never be in it.

After a change that is meant: `PODRACER_GOLDEN=update pytest tests/launch/test_rendered.py`, and read the difference.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tarfile

import pytest
import yaml

from launch import cli, jobset, manifest, project, rehearsal, slices, slurm
from podracer import exits
from podracer.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "launch"
TRAIN = "-- train sebulba --env catch --actor-cores 2 --batch-size 12"
SECRETS = {"WANDB_API_KEY": "planted-key-1234", "HF_TOKEN": "planted-token-5678"}
CASES = {
    "tpu-vm": "tpu-vm --name run1 --type v5litepod-16 --zone us-west4-a --spot --bucket gs://my-runs --dry-run "
    f"{TRAIN}",
    "tpu-vm-one-host": f"tpu-vm --name run1 --type v4-8 --zone us-central2-b --dry-run {TRAIN}",
    "tpu-vm-compute-engine": "tpu-vm --name run1 --type tpu7x-16 --zone us-central1-c --project my-project "
    f"--bucket gs://my-runs --price-per-chip-hour 12 --dry-run {TRAIN}",
    "gke": "gke --name run1 --type v5litepod-16 --image r/podracer:1 --bucket gs://my-runs --spot --apply --dry-run "
    f"{TRAIN}",
    "gke-one-host": "gke --name run1 --type v6e-8 --image r/podracer:1 --privileged --namespace lab "
    f"--service-account trainer {TRAIN}",
    "slurm": "slurm --name run1 --hosts 4 --partition gpu --time 04:00:00 --gres gpu:8 --max-restarts 5 -- "
    "train anakin --env catch --agent ppo",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that stands for the user's, with secrets in the environment and names of theirs in the paths."""
    home = tmp_path / "home" / "somebody"
    home.mkdir(parents=True)
    (home / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    (home / "constraints").mkdir()
    (home / "constraints" / "python3.11.txt").write_text("")
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "somebody")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return home


def launch(line, capfd):
    try:
        cli.main(["launch", *line.split()])
        status = 0
    except SystemExit as exit_:
        status = exit_.code or 0
    return status, *capfd.readouterr()


@pytest.mark.parametrize("name", CASES)
def test_golden(here, capfd, name):
    """Word for word; and nothing of the user's machine, whatever is in it."""
    status, out, err = launch(CASES[name], capfd)
    assert status == 0, err
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("PODRACER_GOLDEN") == "update":
        path.write_text(out)
    assert out == path.read_text()
    text = out + err
    assert not [secret for secret in SECRETS.values() if secret in text]
    assert str(here) not in text and "somebody" not in text and str(ROOT) not in text
    assert not re.search(r"/(home|root|Users|tmp/[a-z])", text.replace("/tmp\n", "\n"))


def rendered(**changes):
    values = {
        "name": "run1",
        "piece": slices.parse("v5litepod-16"),
        "image": "r/podracer:1",
        "command": ["podracer", "train"],
        "bucket": "my-runs",
        "spot": True,
        "max_restarts": 3,
        "namespace": None,
        "service_account": "trainer",
        "privileged": False,
    }
    return jobset.manifest(jobset.Job(**{**values, **changes}))


SHAPES = [
    {},
    {"bucket": None, "spot": False},
    {"privileged": True, "namespace": "lab"},
    {"piece": slices.parse("v6e-8")},
    {"piece": slices.parse("tpu7x-16"), "max_restarts": 0},
]


@pytest.mark.parametrize("changes", SHAPES)
def test_yaml_reads_back_as_what_was_written(changes):
    """By another library."""
    found = rendered(**changes)
    assert yaml.safe_load(manifest.to_yaml(found)) == found


@pytest.mark.parametrize(
    "data", [{"a": {}}, {"a": []}, {"a": [[1, 2], {"b": None}]}, {"on": "no", "1": "1", "e": "1e3"}]
)
def test_yaml_of_odd_things(data):
    assert yaml.safe_load(manifest.to_yaml(data)) == data


def check(model, data, kind, where):
    """Every field exists in the model of the Kubernetes client, and has its type."""
    listed = re.fullmatch(r"[Ll]ist\[(.+)\]", kind)
    mapped = re.fullmatch(r"[Dd]ict[(\[]str, (.+)[)\]]", kind)
    if listed:
        for number, each in enumerate(data):
            check(model, each, listed[1], f"{where}[{number}]")
    elif mapped:
        for key, each in data.items():
            check(model, each, mapped[1], f"{where}.{key}")
    elif kind in ("str", "int", "bool"):
        assert type(data).__name__ == kind, f"{where}: {data!r} is no {kind}"
    elif kind != "object":
        of = getattr(model, kind)
        names = {there: here for here, there in of.attribute_map.items()}
        assert set(data) <= set(names), f"{where}: {set(data) - set(names)} not in {kind}"
        for key, each in data.items():
            check(model, each, of.openapi_types[names[key]], f"{where}.{key}")


@pytest.mark.parametrize("changes", SHAPES)
def test_the_job_is_one_that_kubernetes_knows(changes):
    """Every field of the Job and its pods, by the models of the official client, which also demand what is required."""
    client = pytest.importorskip("kubernetes.client", reason="pip install kubernetes, or the extra dev")
    spec = rendered(**changes)["spec"]["replicatedJobs"][0]["template"]["spec"]
    check(client, spec, "V1JobSpec", "spec")
    if hasattr(client.V1JobSpec, "model_validate"):
        assert client.V1JobSpec.model_validate(spec).template.spec.containers[0].name == jobset.CONTAINER


def test_the_jobset_has_the_fields_of_its_api():
    """Those of jobset.x-k8s.io/v1alpha2 as of JobSet 0.10."""
    found = rendered()
    assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
    fields = {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "managedBy"}
    assert set(found["spec"]) <= fields | {"coordinator", "ttlSecondsAfterFinished"}
    policy = found["spec"]["failurePolicy"]
    assert set(policy) <= {"maxRestarts", "restartStrategy", "rules"}
    actions = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
    for rule in policy["rules"]:
        known = {"name", "action", "targetReplicatedJobs", "onJobFailureReasons", "onJobFailureMessagePatterns"}
        assert set(rule) <= known and rule["action"] in actions
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    (hosts,) = found["spec"]["replicatedJobs"]
    assert set(hosts) == {"name", "replicas", "template"}


def outcome(status, disrupted=False):
    """What becomes of the JobSet, as its two controllers decide it, when a pod ends so."""
    found = rendered()["spec"]
    rules = found["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    for index, rule in enumerate(rules):
        if ("onPodConditions" in rule and disrupted) or status in rule.get("onExitCodes", {}).get("values", []):
            message = (
                f"Container podracer for pod x/y failed with exit code {status} matching FailJob rule at index {index}"
            )
            for each in found["failurePolicy"]["rules"]:
                if re.search(each["onJobFailureMessagePatterns"][0], message):
                    return each["action"]
    return "RestartJobSet"  # the default: counts


@pytest.mark.parametrize(
    "status, disrupted, action",
    [
        (exits.PREEMPTED, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (exits.PREEMPTED, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (exits.BAD_INPUT, False, "FailJobSet"),
        (exits.NOT_FINITE, False, "FailJobSet"),
        (exits.PEER_LOST, False, "RestartJobSet"),
        (exits.STALLED, False, "RestartJobSet"),
        (exits.INTERNAL, False, "RestartJobSet"),
    ],
)
def test_what_starts_a_jobset_again(status, disrupted, action):
    assert outcome(status, disrupted) == action


def test_a_pod_may_do_no_more_than_it_must():
    """Unless asked for by a flag."""
    pod = rendered()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    expected = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == expected
    pod = rendered(privileged=True)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["securityContext"]["privileged"] and pod["securityContext"] == {"runAsUser": 0}


def test_one_pod_per_host_with_the_chips_of_one():
    job = rendered(piece=slices.parse("v5p-16"))["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    pod = job["template"]["spec"]
    assert pod["hostNetwork"] and pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2x2"
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": "4"}}


def test_files_are_written_with_what_to_do_next(here, capfd):
    line = f"gke --name run1 --type v4-8 --image r/podracer:1 --out rendered {TRAIN}"
    status, out, _ = launch(line, capfd)
    assert status == 0 and "docker build -f rendered/Dockerfile -t r/podracer:1 ." in out
    first = "jobset.sigs.k8s.io/jobset-name=run1,batch.kubernetes.io/job-completion-index=0"  # kubectl follows few pods
    assert f"kubectl logs -f -l {first}\n" in out
    assert {path.name for path in (here / "rendered").iterdir()} == {
        *("Dockerfile", "Dockerfile.dockerignore", "jobset.yaml")
    }
    assert launch(line, capfd)[0] == 0  # the same again
    (here / "rendered" / "Dockerfile").write_text("mine")
    status, _, err = launch(line, capfd)
    assert status == 2 and "exists, with another content" in err


def test_kubectl_and_sbatch_get_the_document_on_their_input(here, tmp_path, monkeypatch, capfd):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("kubectl", "sbatch"):
        (bin_ / name).write_text(f'#!/bin/sh\necho "{name} $*"; cat > {tmp_path}/{name}.in\n')
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    status, out, _ = launch(f"gke --name run1 --type v4-8 --image r/podracer:1 --apply {TRAIN}", capfd)
    assert status == 0 and out.endswith("kubectl create -f -\n")
    assert yaml.safe_load((tmp_path / "kubectl.in").read_text())["kind"] == "JobSet"
    there = 'Error from server (AlreadyExists): error when creating "STDIN": jobsets "run1" already exists'
    (bin_ / "kubectl").write_text(f"#!/bin/sh\necho '{there}' >&2; exit 1\n")
    status, _, err = launch(f"gke --name run1 --type v4-8 --image r/podracer:1 --apply --namespace rl {TRAIN}", capfd)
    assert (
        status == 1 and "start it again, from its newest checkpoint: kubectl delete jobset run1 --namespace rl" in err
    )
    status, out, _ = launch(f"slurm --name run1 --submit {TRAIN}", capfd)
    assert (status, out) == (0, "sbatch \n")
    assert (tmp_path / "sbatch.in").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=run1")


@pytest.mark.parametrize(
    "statuses, restarts, status, requeued",
    [
        ((75,), 0, 75, True),
        ((71, 71), 1, 71, True),
        ((73, 71), 0, 73, True),
        ((0, 134), 0, 134, True),
        ((75, 75), 2, 75, False),
        ((2,), 0, 2, False),
        ((2, 71), 0, 2, False),
        ((71, 72), 0, 72, False),
        ((72, 134), 0, 72, False),
        ((0, 0), 0, 0, False),
    ],
)
def test_the_sbatch_script_requeues_what_it_should(here, tmp_path, capfd, statuses, restarts, status, requeued):
    """Run by bash, with hosts that end so and an srun that ends with the highest of their statuses."""
    script = launch(f"slurm --name run1 --max-restarts 2 --cpus-per-task 4 {TRAIN}", capfd)[1].partition("\n")[2]
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    srun = f"""[ "$1 $2" = "--kill-on-bad-exit=0 --cpus-per-task=4" ] || exit 99
        shift 2; worst=0
        for own in {" ".join(map(str, statuses))}; do
            OWN=$own "$@"; found=$?; [ $found -gt $worst ] && worst=$found
        done; exit $worst"""
    programs = {"srun": srun, "scontrol": 'echo "$*" > requeued', "podracer": "kill -TERM $PPID; exit $OWN"}
    for name, text in programs.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_ / name).chmod(0o755)
    settings = {"PATH": f"{bin_}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash"], input=script, text=True, env=settings, cwd=tmp_path, capture_output=True)
    assert done.returncode == status, done.stderr
    assert not list(tmp_path.glob("*.final"))
    path = tmp_path / "requeued"
    assert (path.read_text() if path.exists() else "") == ("requeue 17\n" if requeued else "")


def test_slurm_starts_again_what_is_worth_it():
    """What the statuses mean is decided in one place."""
    assert all(exits.worth_restarting(status) for status in slurm.AGAIN)
    assert not set(slurm.AGAIN) & {0, exits.BAD_INPUT, exits.NOT_FINITE, exits.INTERRUPTED}


@pytest.mark.parametrize(
    "line, says",
    [
        ("", None),
        ("tpu", "unknown kind of launch 'tpu'. Did you mean 'tpu-vm'?"),
        (f"gke --name run1 --type v4-16 --image r/p:1 --apply {TRAIN}", "--bucket is missing; the 2 hosts of v4-16"),
        (f"gke --name run1 --type v2-8 --image r/p:1 {TRAIN}", "--type v2-8 is not there on GKE"),
        (f"gke --name run1 --type v5litepod-9 --image r/p:1 {TRAIN}", "Near it: v5litepod-4: 4 chips, 4 cores"),
        (f"gke --name run1 --type v4-8 --image r;p {TRAIN}", "--image is 'r;p'; expected an image, as in us-"),
        (f"gke --name run1 {TRAIN}", "--type and --image are missing; expected a value for each."),
        (f"gke --name run1 --type v4-8 --image r/p:1 --price-per-chip-hour 0 {TRAIN}", "--price-per-chip-hour is 0"),
        (f"gke --name run1 --type v4-8 --image r/p:1 --namespace a_b {TRAIN}", "--namespace is 'a_b'"),
        (f"gke --name run1 --type v4-8 --image r/p:1 --service-account A {TRAIN}", "--service-account is 'A'"),
        (f"gke --name run_1 --type v4-8 --image r/p:1 {TRAIN}", "--name is 'run_1'"),
        (
            f"gke --name run1 --type v4-8 --image r/p:1 --out pyproject.toml {TRAIN}",
            "--out pyproject.toml cannot be written",
        ),
        (f"slurm --name run1 --hosts 0 {TRAIN}", "--hosts is 0"),
        (f"slurm --name run1 --time soon {TRAIN}", "--time is 'soon'; expected minutes, HOURS:MINUTES:SECONDS or"),
        (
            f"slurm --name run1 --gres gpu;8 {TRAIN}",
            "--gres is 'gpu;8'; expected resources as Slurm",
        ),
        (f"slurm --name run1 --partition a;b {TRAIN}", "--partition is 'a;b'"),
        (f"slurm --name run1 --run a;b {TRAIN}", "--run is 'a;b'"),
        ("slurm --name run1", "after -- there is nothing"),
    ],
)
def test_mistakes_are_one_line(here, capfd, line, says):
    status, out, err = launch(line, capfd)
    if says is None:
        assert status == 0 and out.startswith("usage: podracer launch KIND")
        return
    assert status == 2 and says in err and err.startswith("podracer: ") and out == "" and err.count("\n") == 1


KINDS = {
    "tpu-vm": "tpu-vm --name run1 --type v5litepod-16 --zone us-west4-a --bucket gs://my-runs --dry-run",
    "gke": "gke --name run1 --type v5litepod-16 --image r/p:1 --bucket gs://my-runs",
    "slurm": "slurm --name run1 --hosts 4",
}
ON_TPUS = ("tpu-vm", "gke")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "command, says, only",
    [
        ("sebulba --env atari/Pnog", "unknown environment 'atari/Pnog'. Did you mean 'atari/Pong'?", None),
        ("sebulba --env catch --agent nosuch", "unknown agent 'nosuch'", None),
        ("sebulba --env catch --nosuchflag 3", "unknown flag --nosuchflag", None),
        ("sebulba --env catch --agent.nosuch 3", "unknown flag --agent.nosuch", None),
        ("anakin --env catch --env.rows 0", "rows", None),
        ("anakin --env mine.py:Env", "there is no file mine.py", None),
        ("anakin --env catch --hosts 1", "--hosts is set by the launcher", None),
        ("anakin --env catch --host=1", "--host is set by the launcher", None),
        ("anakin --env catch --coordinator 1.2.3.4:5", "--coordinator is set by the launcher", None),
        ("anakin --env catch --platform cpu", "--platform is cpu; expected tpu on v5litepod-16", ON_TPUS),
        ("sebulba --env catch --actor-cores 9", "--actor-cores is 9 of the 4 cores of a host of v5litepod-16", ON_TPUS),
        ("sebulba --env catch --actor-cores 4", "Choose --actor-cores 1 to 3", ON_TPUS),
        (
            "sebulba --env catch --batch-size 64 --actor-cores 1",
            "--batch-size is 64, for the 3 cores of a host of v5l",
            ON_TPUS,
        ),
        ("anakin --env catch --cores 5", "--cores is 5; a host of v5litepod-16 has 4", ON_TPUS),
        ("anakin --env catch --cores some", "--cores is 'some'; expected auto or a number", None),
        ("anakin --env catch --seeds 4", "--seeds and --sweep train on one host; there are 4", None),
        ("sebulba --env catch --cores 2 --learner-splits 7", "--learner-splits is 7", None),
        ("anakin --env catch --agent ppo --batch-per-core 3 --unroll-length 5", "minibatch", None),
    ],
)
def test_a_training_that_cannot_work_is_refused_where_it_is_launched(here, capfd, kind, command, says, only):
    """By one line, before anything is rendered or shown, in dry runs too; the other kinds have other cores."""
    status, out, err = launch(f"{KINDS[kind]} -- train {command}", capfd)
    if only is not None and kind not in only:
        assert status == 0
        return
    assert status == 2 and says in err and err.startswith("podracer: ") and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize("kind", KINDS)
def test_what_this_machine_cannot_know_is_not_refused(here, capfd, kind, monkeypatch):
    """A laptop may lack the library of an environment, or a file of the cluster's."""
    monkeypatch.setitem(sys.modules, "envpool", None)
    for command, lacks in (
        ("sebulba --env envpool/Acrobot-v1", "needs the package 'envpool'"),
        ("anakin --env /nowhere/mine.py:Env", "/nowhere/mine.py is not on this machine"),
    ):
        status, out, err = launch(f"{KINDS[kind]} -- train {command}", capfd)
        assert status == 0 and "run1" in out
        assert "the training command is not checked" in err and lacks in err


@pytest.mark.parametrize("name, cores", [("v3-8", 8), ("v4-8", 4), ("v5litepod-8", 8), ("v6e-256", 4), ("tpu7x-16", 8)])
def test_cores_are_counted_as_jax_does(name, cores):
    place = rehearsal.on_slice(slices.parse(name))
    command = ["podracer", "train", "sebulba", "--env", "catch", "--batch-size", "24", "--actor-cores", str(cores // 2)]
    rehearsal.check(command, place)
    with pytest.raises(UserError, match=f"of the {cores} cores of a host of {name}"):
        rehearsal.check([*command[:-1], str(cores)], place)


def test_the_commands_of_a_dry_run_make_the_file_that_they_copy(here, capfd):
    """And what comes back is put where a launch would put it."""
    (here / "mine.py").write_text("x")
    (here / ".env").write_text("x")
    (here / "runs" / "old").mkdir(parents=True)
    line = f"tpu-vm --name run1 --type v4-8 --zone us-central2-b --dry-run {TRAIN}"
    for with_git in (False, True):
        if with_git:
            subprocess.run(["git", "init", "-q", "."], check=True)
            (here / ".gitignore").write_text("runs\n*.tar.gz\n")
        _, out, _ = launch(line, capfd)
        (command,) = [each for each in out.splitlines() if "tar -czf podracer-run1.tar.gz" in each]
        subprocess.run(["bash", "-c", command], check=True)
        with tarfile.open("podracer-run1.tar.gz") as archive:
            found = {each.name.removeprefix("./") for each in archive.getmembers() if each.isfile()}
        assert found == {str(path) for path in project.files(pathlib.Path("."))} - {"podracer-run1.tar.gz"}
    (command,) = [each for each in out.splitlines() if "tar -xzf run.tar.gz" in each]
    script = "mkdir run; echo {} > run/config.json; echo done > train.log; tar -czf run.tar.gz run train.log"
    subprocess.run(["bash", "-c", f"{script}; {command}"], check=True)
    assert (here / "runs/run1/config.json").exists() and (here / "runs/run1/train-0.log").read_text() == "done\n"


@pytest.mark.parametrize("kind", ["tpu-vm", "gke", "slurm"])
def test_every_kind_explains_itself(capfd, kind):
    status, out, _ = launch(f"{kind} --help", capfd)
    assert status == 0 and out.startswith(f"usage: podracer launch {kind}") and "--max-restarts" in out
