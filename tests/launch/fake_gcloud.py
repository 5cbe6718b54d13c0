"""Stands for `gcloud` in tests: one slice in the folder $FAKE_CLOUD, whose hosts are folders of this machine.

`calls.jsonl` gets every call. `state` is the state of the queued resource or, one a line, what the next questions get
to see; `hosts/N` is the home folder of a host, in which `ssh --command` runs for real; `fail` holds a word: calls
that contain it fail. `flaky` says of words how many of the next calls with them fail, as without a network; of
`after-WORD`, when the hosts have done all; `flaky-once-created` becomes that file. It imports little, since every test
starts it a dozen times.
"""

import json
import os
import sys

CLOUD = os.environ["FAKE_CLOUD"]


def path(*names):
    return os.path.join(CLOUD, *names)


def read(name, default=None):
    try:
        with open(path(name)) as file:
            return file.read()
    except FileNotFoundError:
        return default


def write(name, text):
    with open(path(name), "w") as file:
        file.write(text)


def end(text, status=1):
    print(text, file=sys.stderr)
    sys.exit(status)


def flag(words, name, default=None):
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), default)


def size():
    return int(read("size"))


def exists():
    return read("state") is not None


def next_state():
    """The state now; each question moves one word on."""
    words = read("state").split()
    if len(words) > 1:
        write("state", " ".join(words[1:]))
    return words[0]


def create(words):
    label = flag(words, "labels") or flag(words, "description")
    write("labels", json.dumps(dict([label.split("=")])))
    write("state", read("states") or read("always", "ACTIVE"))
    if read("flaky-once-created"):
        write("flaky", read("flaky-once-created"))
    for number in range(size()):
        os.makedirs(path("hosts", str(number)), exist_ok=True)


def delete():
    if not exists():
        end("ERROR: (gcloud.compute) NOT_FOUND: no such resource")
    for name in ("state", "states"):
        if read(name) is not None:
            os.remove(path(name))
    # With the hosts, what runs on them ends.
    script = 'for pid in hosts/*/podracer/*/pid; do kill -s KILL -- "-$(cat "$pid")"; done; rm -r hosts'
    os.system(f"cd '{CLOUD}' && ({script}) 2> /dev/null")


def describe():
    if not exists():
        end("ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource was not found")
    state = {"state": next_state()}
    if state["state"] == "FAILED":
        state["failedData"] = {"error": {"code": 8, "message": "There is no more capacity in the zone"}}
    node = {"acceleratorType": "v5litepod-16", "labels": json.loads(read("labels"))}
    name = "projects/p/locations/us-west4-a/queuedResources/run1"
    print(json.dumps({"name": name, "state": state, "tpu": {"nodeSpec": [{"node": node}]}}))


def describe_node():
    print(json.dumps({"state": "READY", "networkEndpoints": [{"ipAddress": f"10.0.0.{n}"} for n in range(size())]}))


def describe_group():
    if not exists():
        end("ERROR: (gcloud.compute.instance-groups.managed.describe) The resource 'run1' was not found")
    labels = json.loads(read("labels"))
    found = {"targetSize": size(), "description": "=".join(*labels.items()), "properties": {"labels": labels}}
    print(json.dumps(found))


def list_instances():
    if not exists():
        end("ERROR: (gcloud.compute.instance-groups.managed.list-instances) The resource 'run1' was not found")
    status = next_state()
    # In another order than JAX's: worker 0 comes last.
    names = [f"https://www.googleapis.com/compute/v1/zones/z/instances/run1-{n}" for n in reversed(range(size()))]
    print(json.dumps([{"instance": name, "instanceStatus": status, "currentAction": "NONE"} for name in names]))


def reachable():
    if not exists() or read("state").split()[0] not in ("ACTIVE", "RUNNING"):
        end("ERROR: (gcloud.compute.tpus.tpu-vm.ssh) cannot connect: Connection refused", 255)


def on_host(number, script):
    """The script, in the home folder of a host."""
    home = path("hosts", number)
    environment = {"FAKE_CLOUD": CLOUD, "PATH": f"{path('hostbin')}:/usr/bin:/bin", "WORKER": number, "HOME": home}
    os.chdir(home)
    return os.spawnve(os.P_WAIT, "/bin/sh", ["sh", "-c", script], environment)


def ssh(words, hosts):
    reachable()
    sys.exit(max(on_host(host, flag(words, "command")) for host in hosts))


def scp(words, hosts):
    reachable()
    source, target = [word for word in words if not word.startswith("--")][-2:]
    copies = [(source, path("hosts", host)) for host in hosts]
    if ":" in source:
        copies = [(path("hosts", hosts[0], source.partition(":")[2]), target)]
    for origin, copy in copies:
        os.spawnv(os.P_WAIT, "/bin/cp", ["cp", origin, copy])


def lose_connection(words):
    """Fail as without a network; `after-ssh` is a connection that is lost when the host has done all."""
    flaky = json.loads(read("flaky", "{}"))
    for word, left in flaky.items():
        if left > 0 and word.removeprefix("after-") in " ".join(words):
            write("flaky", json.dumps({**flaky, word: left - 1}))
            if word.startswith("after-"):
                for host in workers(words):
                    on_host(host, flag(words, "command"))
            end("ERROR: (gcloud) Unable to find the server: Name or service not known. Host not found.", 255)


def workers(words):
    wanted = flag(words, "worker", "0")
    return [str(n) for n in range(size())] if wanted == "all" else [wanted]


def main(words):
    with open(path("calls.jsonl"), "a") as file:
        file.write(json.dumps(words) + "\n")
    if read("fail", "nothing") in words:
        end("WARNING: something else\nERROR: (gcloud) PERMISSION_DENIED: you may not do this")
    lose_connection(words)
    text = " ".join(words)
    if "rsync" in words:
        source, target = words[-2:]
        if not os.path.isdir(path("buckets", source.removeprefix("gs://"))):
            end(f"ERROR: (gcloud.storage.rsync) Did not find existing container at: {source}")
        sys.exit(
            os.spawnv(os.P_WAIT, "/bin/cp", ["cp", "-r", path("buckets", source.removeprefix("gs://"), "."), target])
        )
    if "queued-resources create" in text or "managed create" in text:
        create(words)
    elif "delete" in words:
        if "queued-resources" in words or "instance-groups" in words:
            delete()
    elif "queued-resources describe" in text:
        describe()
    elif "tpu-vm describe" in text:
        describe_node()
    elif "list-instances" in words:
        list_instances()
    elif "describe" in words:
        describe_group()
    elif "tpu-vm ssh" in text:
        ssh(words, workers(words))
    elif "tpu-vm scp" in text:
        scp(words, workers(words))
    elif "compute ssh" in text:
        ssh(words, [words[2].rpartition("-")[2]])
    elif "compute scp" in text:
        host = next(word for word in words if ":" in word and not word.startswith("--")).partition(":")[0]
        scp(words, [host.rpartition("-")[2]])


main(sys.argv[1:])
