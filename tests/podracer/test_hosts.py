"""The roll call of several hosts, in threads of one process; and what a single host makes of it all."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from podracer import exits, hosts, places, rollcall
from podracer.errors import UserError, brief
from podracer.places import Place
from tests.launch.hosts import environment, free_port

FACTS = {"version of jax": "1.0", "settings": {"seed": 0}}


def call(count, hosts_there, facts=None, timeout_s=10.0, said=None, status=exits.BAD_INPUT):
    """What `rollcall.call` returns or refuses, by host."""
    address = f"127.0.0.1:{free_port()}"
    say = (lambda text: None) if said is None else said.append

    def one(host):
        try:
            roll = rollcall.call(Place(address, count, host), (facts or {}).get(host, FACTS), timeout_s, say)
            assert set(roll.lines) == (set(range(1, count)) if host == 0 else {0})
            return roll
        except UserError as error:
            assert error.exit_status == status
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(hosts_there)) as pool:
        return dict(zip(hosts_there, pool.map(one, hosts_there))), address


def test_all_are_there():
    """In any order; the first host gets what JAX's service may be bound to: the loopback interface alone."""
    answers, address = call(3, [2, 1, 0])
    assert [answer.bind for answer in answers.values()] == [address] * 3
    rollcall.call(Place(address, 1, 0), FACTS, 1.0, print)  # the port is free at once
    for connection in answers[2].lines.values():
        connection.close()
    assert answers[0].lines[2].recv(1) == b""  # and who is gone is known at once
    for answer in answers.values():
        for connection in answer.lines.values():
            connection.close()


def test_a_host_that_ends_during_the_roll_call_is_missing_and_may_come_again():
    """The first one hears of its end, and does not take it for one that is here, nor for one that is there twice."""
    address, answers = f"127.0.0.1:{free_port()}", []

    def first():
        try:
            answers.append(rollcall.call(Place(address, 3, 0), FACTS, 4.0, print))
        except UserError as error:
            answers.append(error)

    def report(host):
        connection = connected(address)
        connection.sendall(json.dumps({"host": host, "hosts": 3, "facts": FACTS}).encode() + b"\n")
        return connection

    for again in (False, True):
        answers.clear()
        thread = threading.Thread(target=first)
        thread.start()
        report(1).close()
        time.sleep(0.5)
        lines = [report(2)] + ([report(1)] if again else [])
        thread.join(20)
        if again:
            assert set(answers[0].lines) == {1, 2}
        else:
            assert isinstance(answers[0], rollcall.HostsMissing) and "host 1 did not come" in str(answers[0])
        for line in (*lines, *(answers[0].lines.values() if again else ())):
            line.close()


def test_a_machines_own_name_may_be_one_for_itself_alone(monkeypatch):
    """Debian gives it 127.0.1.1, where no other machine can come: then the first host listens everywhere."""
    real = socket.getaddrinfo
    here = lambda name, *rest, **more: real("127.0.0.1" if name == "node1" else name, *rest, **more)
    monkeypatch.setattr(socket, "getaddrinfo", here)
    for name, everywhere in (("node1", True), ("localhost", False), ("127.0.0.1", False)):
        with rollcall._listening(Place(f"{name}:{free_port()}", 2, 0)) as server:
            assert (server.getsockname()[0] in ("0.0.0.0", "::")) == everywhere


def test_the_others_wait_for_the_service_of_the_first(monkeypatch):
    """The port is closed between the roll call and JAX: who asks for it then asks again only a second later."""
    place = Place(f"127.0.0.1:{free_port()}", 2, 1)
    opened = []

    def open_later():
        time.sleep(0.3)
        opened.append(time.monotonic())
        server.append(socket.create_server(places.split(place.address)))

    server, opener = [], threading.Thread(target=open_later)
    opener.start()
    rollcall.await_service(place)
    assert opened and time.monotonic() - opened[0] < 5
    opener.join()
    server[0].close()
    monkeypatch.setattr(rollcall, "SERVICE_S", 0.2)
    rollcall.await_service(place)  # not for ever: JAX has its own deadline


def test_who_is_missing_is_named_to_all_that_came(monkeypatch):
    monkeypatch.setattr(rollcall, "SAY_EVERY_S", 0.3)
    said, began = [], time.monotonic()
    answers, address = call(4, [0, 2], timeout_s=1.0, said=said, status=exits.PEER_LOST)
    assert time.monotonic() - began < 60
    for answer in answers.values():  # 71 on all: they may be late, or have been taken away
        assert f"hosts 1, 3 did not come to {address} within 1 s (got 2 of 4 hosts)" in answer
    assert said[-1] == "waiting for hosts 1, 3 (2 of 4 are here)"
    answers, _ = call(3, [1, 2], timeout_s=1.0, status=exits.PEER_LOST)
    assert all("host 0 did not come to" in answer for answer in answers.values())


def test_hosts_that_differ_name_the_field_the_values_and_the_hosts():
    other = {**FACTS, "version of jax": "2.0", "settings": {"seed": 0, "new": 1}}
    answers, _ = call(3, [0, 1, 2], {1: other, 2: other})
    assert set(answers.values()) == {
        "the hosts disagree: settings.new is absent on host 0 and 1 on hosts 1, 2; "
        'version of jax is "1.0" on host 0 and "2.0" on hosts 1, 2. Start the same on all.'
    }


def test_versions_of_all_that_trains_are_compared(monkeypatch):
    """What is nowhere installed is no difference; what is on one host only is."""
    monkeypatch.setattr(hosts.importlib.metadata, "version", lambda name: installed(name, envpool="1.2.5"))
    ours = hosts._versions()
    assert {"version of libtpu", "version of optax", "version of orbax-checkpoint"} < set(ours)
    assert ours["version of libtpu"] == "not installed" and ours["version of envpool"] == "1.2.5"
    answers, _ = call(2, [0, 1], {0: ours, 1: ours})
    assert all(isinstance(answer, rollcall.Roll) for answer in answers.values())
    for answer in answers.values():
        for connection in answer.lines.values():
            connection.close()
    monkeypatch.setattr(hosts.importlib.metadata, "version", lambda name: installed(name, flax="0.1"))
    answers, _ = call(2, [0, 1], {0: ours, 1: hosts._versions()})
    assert set(answers.values()) == {
        'the hosts disagree: version of envpool is "1.2.5" on host 0 and "not installed" on host 1; '
        'version of flax is "1.0" on host 0 and "0.1" on host 1. Start the same on all.'
    }


def installed(name, **versions):
    """In place of `importlib.metadata.version`, on a host without libtpu and, where none is given, envpool."""
    if name in ("libtpu", "envpool") and name not in versions:
        raise hosts.importlib.metadata.PackageNotFoundError(name)
    return versions.get(name, "1.0")


def test_a_host_that_is_twice_there_or_of_another_run_is_refused():
    address = f"127.0.0.1:{free_port()}"
    refused = []

    def one(place):
        try:
            rollcall.call(place, FACTS, 2.0, print)
        except UserError as error:
            refused.append(str(error))

    for those, says in (
        ([(3, 0), (3, 1), (3, 1)], "host 1 was started twice; expected hosts 0 to 2"),
        ([(3, 0), (2, 1)], "host 1 was started as one of 2 hosts, host 0 as one of 3"),
    ):
        refused.clear()
        threads = [threading.Thread(target=one, args=(Place(address, *place),)) for place in those]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert any(says in text for text in refused), refused


def test_a_stranger_at_the_port_disturbs_nothing():
    """Silence, some other protocol, rubbish, an endless line."""
    address, answers = f"127.0.0.1:{free_port()}", []
    first = threading.Thread(target=lambda: answers.append(rollcall.call(Place(address, 2, 0), FACTS, 20.0, print)))
    first.start()
    rubbish = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b"[1]\n",
        b'{"host": "1", "hosts": 2, "facts": {}}\n',
        b"x" * 200_000,
    ]
    silent = connected(address)
    for data in rubbish:
        with connected(address) as stranger:
            try:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                stranger.recv(1)
            except OSError:
                pass
    answers.append(rollcall.call(Place(address, 2, 1), FACTS, 20.0, print))
    first.join(10)
    silent.close()
    assert [answer.bind for answer in answers] == [address] * 2
    for answer in answers:
        for connection in answer.lines.values():
            connection.close()


def connected(address):
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(places.split(address), timeout=10)
        except OSError:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("address", ["", "10.0.0.2", "10.0.0.2:", ":80", "host:0", "host:65536", "host:port"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UserError, match="expected HOST:PORT"):
        places.split(address)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"coordinator": "127.0.0.1:8476"}, "--hosts is missing; expected --coordinator HOST:PORT, --hosts N and"),
        ({"hosts": 2}, "--coordinator is missing"),
        ({"coordinator": "127.0.0.1:8476", "hosts": 2, "host": 2}, "host is 2; expected a finite number >= 0 and <= 1"),
        ({"coordinator": "nowhere", "hosts": 2, "host": 0}, "coordinator is 'nowhere'"),
        ({"coordinator": "127.0.0.1:8476", "hosts": 2, "host": 0, "timeout_s": -1}, "hosts-timeout is -1"),
    ],
)
def test_flags_that_cannot_work_are_refused_at_once(given, says, monkeypatch):
    for name in (places.COORDINATOR, places.COUNT, places.INDEX):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        hosts.connect(**given)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 cannot be used: Address already in use"):
            hosts.connect(f"127.0.0.1:{port}", 2, 0, timeout_s=1.0)


def test_a_single_host_asks_nobody():
    assert (hosts.count(), hosts.index(), hosts.is_first()) == (1, 0, True)
    assert hosts.gather("x", {"a": 1}) == hosts.to_first("x", {"a": 1}) == [{"a": 1}]
    assert hosts.on_first(lambda: 5) == 5 and hosts.from_first("y", 6) == 6
    hosts.agree({"a": object()})
    assert not hosts.preempted()
    hosts.connect(hosts=1)
    hosts.disconnect()
    assert not hosts.is_lost_peer(RuntimeError("Gloo"))


def test_where_nothing_speaks_of_other_hosts_nobody_is_looked_for(monkeypatch):
    """Not even on a machine with libtpu, where JAX would ask Google's metadata server."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "TPU", "MEGASCALE", "OMPI", "PODRACER")):
            monkeypatch.delenv(name)
    began = time.monotonic()
    hosts.connect()
    assert hosts.count() == 1 and time.monotonic() - began < 30


def test_slurm_tells_where_the_hosts_meet(monkeypatch):
    """As JAX reads it; an ordinary shell within an allocation is one host."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[003,005]", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    for name, value in {**slurm, "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert places.find(None, None, None) == Place("node003:61447", 2, 1)
    assert places.find(None, 1, None) is None


def test_a_status_is_worth_a_restart_or_not():
    assert [status for status in range(256) if exits.worth_restarting(status)] == [
        70,
        71,
        73,
        75,
        129,
        *range(131, 256),
    ]


def test_a_program_that_hangs_is_ended_with_the_stacks_of_its_threads():
    """Pauses do not count, and nothing before the first beat. Telling the others may hang, too."""
    code = """
import time
from podracer.watchdog import Watchdog
def leave(status, why):
    print(status, why, flush=True)
    time.sleep(60)
with Watchdog(0.5, leave) as watchdog:
    time.sleep(1)
    watchdog.beat()
    with watchdog.paused():
        time.sleep(1)
    for _ in range(10):
        time.sleep(0.1)
        watchdog.beat()
    print("alive", flush=True)
    def hangs():
        time.sleep(30)
    hangs()
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    told = "alive\n73 no call has finished for 0.5 s (--stall-timeout)\n"
    assert (done.returncode, done.stdout) == (exits.STALLED, told), done.stderr
    assert "in hangs" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("podracer: no call has finished for 0.5 s (--stall-timeout)")


def test_the_last_place_of_a_launchers_environment_is_taken(monkeypatch):
    monkeypatch.setenv(places.COORDINATOR, "10.0.0.2:8476")
    monkeypatch.setenv(places.COUNT, "4")
    monkeypatch.setenv(places.INDEX, "3")
    assert places.find(None, None, None) == Place("10.0.0.2:8476", 4, 3)
    monkeypatch.setenv(places.COUNT, "many")
    with pytest.raises(UserError, match="hosts is 'many'; expected a number"):
        places.find(None, None, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a first line\nand more", "ValueError: a first line"),
        ("", "ValueError: no message"),
        (
            "JAX says:\nTraceback (most recent call last):\n  File x\nKeyError: 'the cause'\n\n",
            "ValueError: KeyError: 'the cause'",
        ),
        ("x" * 500, f"ValueError: {'x' * 288}"),
    ],
)
def test_an_error_in_one_line(text, said):
    """Of what a callback raised, which comes with its traceback as text, the last line."""
    assert brief(ValueError(text)) == said
