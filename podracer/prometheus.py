"""The newest numbers of a run as Prometheus text, on this machine's loopback interface only.

`curl 127.0.0.1:PORT/metrics`. From elsewhere: `ssh -L PORT:127.0.0.1:PORT HOST`.
"""

from __future__ import annotations

import errno
import http.server
import re
import socketserver
from collections.abc import Mapping
from typing import Any

from podracer import hosts
from podracer.errors import UserError, check_number
from podracer.sinks import Row
from podracer.watchdog import beside

ADDRESS = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
POLL_S = 0.1  # how soon it sees that it should stop
REQUEST_S = 5.0  # a client that says nothing for longer is hung up on


def check_port(port: int | None) -> None:
    """Refuse a port that cannot be listened on, before a run is started.

    Raises:
      UserError: it is taken, not allowed, or no port.
    """
    check_number("metrics_port", port, minimum=1, maximum=65_535, whole=True)
    if port is not None and hosts.is_first():  # the only one that will listen
        _listen(port, http.server.BaseHTTPRequestHandler).server_close()


class Prometheus:
    """A sink that serves the newest value of every number under `/metrics`, from a thread of its own.

    Args:
      port: to listen on.
      labels: of `podracer_run_info`, which says what is trained.

    Raises:
      UserError: the port cannot be listened on.
    """

    def __init__(self, port: int, labels: Mapping[str, str]):
        # Replaced as a whole and never changed: the other thread reads it without a lock.
        self._values: dict[tuple[str, Any], float] = {}
        self._labels = dict(labels)
        sink = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "expected /metrics")
                    return
                body = sink.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the terminal belongs to the run."""

        self._server = server = _listen(port, Handler)
        beside(lambda: server.serve_forever(POLL_S), "metrics")

    def write(self, row: Row) -> None:
        member = row.get("member")
        numbers = {
            (name, member): float(value)
            for name, value in row.items()
            if name != "member" and isinstance(value, int | float)
        }
        self._values = self._values | numbers

    def close(self) -> None:
        self._server.shutdown()  # returns when the thread has left its loop
        self._server.server_close()

    def text(self) -> str:
        """What is served: one gauge per number, named `podracer_...`, with a label for each of many runs in one."""
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in self._labels.items())
        lines = ["# TYPE podracer_run_info gauge", f"podracer_run_info{{{labels}}} 1"]
        last = ""
        for (name, member), value in sorted(self._values.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
            full = f"podracer_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            if full != last:
                lines.append(f"# TYPE {full} gauge")
                last = full
            where = "" if member is None else f'{{member="{member}"}}'
            lines.append(f"{full}{where} {_number(value)}")
        return "\n".join(lines) + "\n"


class _Server(socketserver.TCPServer):
    allow_reuse_address = True  # a run that goes on takes the port of the one before, at once


def _listen(port: int, handler: Any) -> _Server:
    try:
        return _Server((ADDRESS, port), handler)
    except OSError as error:
        reason = {errno.EADDRINUSE: "something else listens there", errno.EACCES: "that is not allowed"}
        text = reason.get(error.errno or 0, error.strerror or str(error))
        raise UserError(
            f"metrics_port is {port}, but {text}; expected a free port of {ADDRESS}. Choose another metrics_port."
        ) from error


def _number(value: float) -> str:
    special = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
    return special.get(repr(value), repr(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
