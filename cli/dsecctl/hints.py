"""What to do about an error, by its kind."""

from __future__ import annotations

from typing import Final

from dsecd.errors import DsecError

_HINTS: Final = {
    "capacity": "wait, stop some (dsecctl ps), or ask for less (dsecctl info)",
    "quota": "wait, or stop some of yours (dsecctl ps)",
    "denied": "only root and members of the group dsec may use the daemon",
    "unsupported": "dsecctl doctor says what this host can do",
    "image": "dsecctl image rm takes it away; import it again",
    "disk_full": "ask for more (--disk), or make room on the host (dsecctl image gc)",
    "oom": "ask for more memory (--memory)",
    "pids": "ask for more processes (--pids)",
    "sandbox_dead": "dsecctl inspect says why it ended; the daemon's log has more",
    "outcome_unknown": "look before trying again: it may have been done (dsecctl ps -a)",
    "network": "systemctl start dsecd starts the local one; -H URL names another",
    "shutting_down": "try again when the daemon is back",
    "internal": "the daemon's log has more: journalctl -u dsecd",
}
# These are said only where the message has this: the same kind means other things elsewhere.
_ONLY: Final = {"denied": "permission denied", "image": "image sha256:", "network": "daemon"}


def hint_for(exc: DsecError) -> str:
    """One line, or nothing where the message says it all."""
    if "errno" in exc.detail:
        return ""  # of a file or program inside: the message says it all
    if exc.kind == "not_found":
        if "sandbox" in exc.message and "image" not in exc.message:
            return "dsecctl ps -a lists sandboxes"
        return "dsecctl image list has all images" if "image" in exc.message else ""
    if exc.kind in _ONLY and _ONLY[exc.kind] not in exc.message:
        return ""
    if exc.kind == "internal" and exc.detail.get("client"):
        return "please report it; DSECCTL_DEBUG=1 shows where it happened"
    return _HINTS.get(exc.kind, "")
