"""The roll call: before JAX connects the hosts of a run, each reports to the first one, which says who is missing.

JAX's own way to find together ends the process after its deadline, without saying whom it waited for, and it lets hosts
with other versions in. Here every host sends one line (its number, how many there should be, its versions) to the
coordinator's address, and gets one back: go on, or why not. Then the port is JAX's. The connections stay: the kernel
closes that of a process that dies, however it does, and whoever is at its other end knows at once.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from podracer import exits
from podracer.errors import UserError
from podracer.places import Place, split

LONGEST_LINE = 100_000  # bytes; whatever else comes to the port is turned away
RETRY_S = 0.2
SERVICE_S, SERVICE_RETRY_S = 5.0, 0.05
SAY_EVERY_S = 10.0


class HostsMissing(UserError):
    """Hosts did not come. They may have been taken away or be late, so that starting again may help."""

    exit_status = exits.PEER_LOST


class Roll(NamedTuple):
    """All hosts are here."""

    bind: str  # what the first host may bind, for JAX
    lines: dict[int, socket.socket]  # host -> an open connection: of the first host to all, of the others to the first


def call(place: Place, facts: dict[str, Any], timeout_s: float, say: Callable[[str], None]) -> Roll:
    """Wait until all hosts are here and agree on `facts`.

    Args:
      place: where the hosts meet.
      facts: what must be the same on all of them, JSON.
      timeout_s: how long to wait for the last one.
      say: gets a line now and then while the first host waits.

    Raises:
      HostsMissing: some did not come in time (which ones).
      UserError: some are there twice (which ones), or they disagree (on what). All who are here raise the same.
    """
    line = {"host": place.index, "hosts": place.count, "facts": facts}
    bind = place.address
    if place.index > 0:
        problem, lines = _report(place, line, timeout_s)
    else:
        with _listening(place) as server:
            bind = f"{_bracketed(server.getsockname()[0])}:{split(place.address)[1]}"
            problem, lines = _collect(server, place, line, timeout_s, say)
    if problem:
        for connection in lines.values():
            connection.close()
        raise problem
    return Roll(bind, lines)


def await_service(place: Place) -> None:
    """Until the port is open again after the roll call, and JAX's.

    JAX, where it asks for the port a moment too early, asks again only after a second.
    """
    until = time.monotonic() + SERVICE_S
    while time.monotonic() < until:
        time.sleep(SERVICE_RETRY_S)
        with contextlib.suppress(OSError), socket.create_connection(split(place.address), timeout=1.0):
            return


def differences(facts: list[dict[str, Any]], names: Sequence[str] | None = None) -> list[str]:
    """In words, the leaves on which `facts` [n] differ: `NAME is X on host 0 and Y on hosts 1, 2`.

    Args:
      facts: nested dicts of JSON.
      names: whose they are; None: the hosts'.
    """
    flat, found = [dict(_leaves(each)) for each in facts], []
    for name in sorted({name for each in flat for name in each}):
        hosts_of: dict[str, list[int]] = {}
        for host, each in enumerate(flat):
            hosts_of.setdefault(json.dumps(each[name]) if name in each else "absent", []).append(host)
        if len(hosts_of) > 1:
            parts = [
                f"{value} on {_hosts(places)}" if names is None else f"{value} {', '.join(names[p] for p in places)}"
                for value, places in hosts_of.items()
            ]
            found.append(f"{name} is {' and '.join(parts)}")
    return found


def disagreement(facts: list[dict[str, Any]]) -> str:
    """What to say where the facts of the hosts differ, or an empty string."""
    found = differences(facts)
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return f"the hosts disagree: {'; '.join(found[:3])}{more}. Start the same on all." if found else ""


def _collect(
    server: socket.socket, place: Place, own: dict[str, Any], timeout_s: float, say: Callable[[str], None]
) -> tuple[UserError | None, dict[int, socket.socket]]:
    """The first host: take one line of every other, and answer all; what is wrong, and the connections."""
    deadline, said = time.monotonic() + timeout_s, time.monotonic()
    there: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    problem: UserError | None = None
    callers = _Callers(server)
    with contextlib.closing(callers):
        while len(there) < place.count - 1 and not problem:
            missing = sorted(set(range(1, place.count)) - set(there))
            if time.monotonic() > deadline:
                problem = _missing(missing, place, timeout_s)
            elif time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                say(f"waiting for {_hosts(missing)} ({place.count - len(missing)} of {place.count} are here)")
            for connection, line in callers.lines():
                _leave_out_gone(there)
                problem = problem or _unfit(line, there, place)
                # One that does not fit gets its answer, too.
                there[-len(there) if problem else line["host"]] = connection, line
            _leave_out_gone(there)
        if problem is None:
            text = disagreement([own["facts"], *(there[host][1]["facts"] for host in sorted(there))])
            problem = UserError(text) if text else None
        answer = {"problem": str(problem or ""), "missing": isinstance(problem, HostsMissing)}
        for connection, _ in there.values():
            with contextlib.suppress(OSError):
                connection.settimeout(5.0)
                connection.sendall(json.dumps(answer).encode() + b"\n")
    return problem, {host: connection for host, (connection, _) in there.items()}


def _leave_out_gone(there: dict[int, tuple[socket.socket, dict[str, Any]]]) -> None:
    """A host that has ended since it sent its line is not here any more, and may come again."""
    lines = {connection: host for host, (connection, _) in there.items()}
    for connection in select.select(list(lines), [], [], 0)[0]:  # nobody says more than a line: it is the end of one
        connection.close()
        del there[lines[connection]]


class _Callers:
    """Those who have connected; one that says nothing, or rubbish, keeps nobody waiting."""

    def __init__(self, server: socket.socket):
        self._server = server
        self._said: dict[socket.socket, bytes] = {}

    def lines(self) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
        """Connections that have sent the line of a host since the last call, which waits a little."""
        for ready in select.select([self._server, *self._said], [], [], RETRY_S)[0]:
            if ready is self._server:
                connection, _ = self._server.accept()
                connection.setblocking(False)
                self._said[connection] = b""
            elif (line := self._read(ready)) is not None:
                yield ready, line

    def close(self) -> None:
        """Turn away all who have not sent their line."""
        for connection in self._said:
            connection.close()

    def _read(self, connection: socket.socket) -> dict[str, Any] | None:
        """The line, once it is whole; None before, and where it is not one of a host: then it is turned away."""
        try:
            part = connection.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        data = self._said[connection] = self._said[connection] + part
        if part and not data.endswith(b"\n") and len(data) < LONGEST_LINE:
            return None
        del self._said[connection]
        line = _parsed(data)
        if line is None:
            connection.close()
        return line


def _parsed(data: bytes) -> dict[str, Any] | None:
    """The line of a host, or None."""
    try:
        line = json.loads(data)
        fits = isinstance(line["host"], int) and isinstance(line["hosts"], int) and isinstance(line["facts"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return line if fits else None


def _unfit(line: dict[str, Any], there: dict[int, Any], place: Place) -> UserError | None:
    host = line["host"]
    if line["hosts"] != place.count:
        of = f"host {host} was started as one of {line['hosts']} hosts, host 0 as one of {place.count}"
        return UserError(f"{of}. Start the same on all.")
    if host in there or not 0 < host < place.count:
        expected = f"expected hosts 0 to {place.count - 1}, each once"
        return UserError(f"host {host} was started twice; {expected}. Give each its own --host.")
    return None


def _report(place: Place, line: dict[str, Any], timeout_s: float) -> tuple[UserError | None, dict[int, socket.socket]]:
    """Another host: send the line, and wait for the answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection(split(place.address), timeout=5.0)
            try:
                connection.sendall(json.dumps(line).encode() + b"\n")
                # The first host keeps the deadline, and may have begun to wait after this one did.
                connection.settimeout(timeout_s + 5.0)
                answer = json.loads(_line(connection))
                kind = HostsMissing if answer.get("missing") else UserError
                return kind(answer["problem"]) if answer["problem"] else None, {0: connection}
            except BaseException:
                connection.close()
                raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            if time.monotonic() > deadline:
                return _missing([0], place, timeout_s), {}
            time.sleep(RETRY_S)


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(4096)
        data += part
        if not part or len(data) > LONGEST_LINE:
            raise ValueError("not a line")
    return data


def _missing(missing: list[int], place: Place, timeout_s: float) -> HostsMissing:
    here = (
        f"got {place.count - len(missing)} of {place.count} hosts" if missing != [0] else f"this is host {place.index}"
    )
    return HostsMissing(
        f"{_hosts(missing)} did not come to {place.address} within {timeout_s:g} s ({here}). Start the same command on "
        "every host; look for an error there, or a firewall between them. --hosts-timeout sets how long to wait."
    )


def _hosts(numbers: list[int]) -> str:
    return f"host{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


@contextlib.contextmanager
def _listening(place: Place) -> Iterator[socket.socket]:
    """Listen on the address if it is one of this machine's own interfaces, and on that one only; else on all.

    A machine's own name may mean the loopback interface to itself (127.0.1.1 on Debian), and not to the others.
    """
    name, port = split(place.address)
    try:
        family, _, _, _, target = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"coordinator {place.address} has no address: {error}. Give another --coordinator.") from None
    problem = OSError()
    everywhere = ("::" if family == socket.AF_INET6 else "", port)
    own_name = ipaddress.ip_address(target[0]).is_loopback and not _is_loopback(name)
    for bound in (everywhere,) if own_name else (target[:2], everywhere):
        try:
            server = socket.create_server(bound, family=family)
        except OSError as error:
            problem = error
            if error.errno == errno.EADDRNOTAVAIL:
                continue  # an address that leads here, but is not of an interface of this machine
            break
        with server:
            yield server
        return
    raise UserError(
        f"port {port} of {name} cannot be used: {problem.strerror}. Is another run there? Give another --coordinator."
    )


def _is_loopback(name: str) -> bool:
    """Whether a name is that of the loopback interface for everybody."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.startswith("localhost.") or name.startswith("ip6-")


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts by their dotted names."""
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{name}.{key}" if name else str(key))
