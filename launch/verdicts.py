"""What the statuses of many hosts come to."""

from __future__ import annotations

from podracer import exits

# One status stands for the run: the first of these that a host has. What starting again cannot mend comes first, that
# another host is gone last: it only counts where no host says more.
ORDER = (exits.BAD_INPUT, exits.NOT_FINITE, exits.STALLED, exits.INTERNAL, exits.PREEMPTED, exits.PEER_LOST)
FINE = ("0", "running", str(exits.PREEMPTED), str(exits.INTERRUPTED))  # nothing has failed
CONSEQUENCES = (exits.PEER_LOST, exits.ABORTED)  # of another host's failure


def verdict(found: dict[str, str]) -> int:
    """One status for the run; success only where all had it. The abort that JAX makes of a lost host comes last."""
    numbers = [_number(status) for status in found.values()]
    for status in ORDER:
        if status in numbers:
            return status
    return max(numbers)


def failed(found: dict[str, str]) -> list[str]:
    """The hosts that failed, those last whose failure may have made the others fail."""

    def rank(host: str) -> int:
        number = _number(found[host])
        if number in CONSEQUENCES:
            return 0
        return 1 if number == exits.STALLED else 2  # a host that waits for a failed one may call it a stall

    by_number = lambda host: int(host) if host.isdigit() else -1
    return sorted((host for host in found if found[host] not in FINE), key=lambda host: (rank(host), by_number(host)))


def _number(status: str) -> int:
    return int(status) if status.isdigit() else exits.PEER_LOST
