"""Logins to registries, from a containers-auth.json(5) file."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec

from dsecd.errors import DsecError


def check_authfile(authfile: str) -> None:
    """DsecError `denied` for one that is configured and cannot be used; better said than a registry's plain no."""
    if not authfile:
        return
    try:
        msgspec.json.decode(Path(authfile).read_bytes(), type=dict[str, Any])
    except OSError as exc:
        raise DsecError("denied", f"the authfile {authfile} cannot be read: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise DsecError("denied", f"the authfile {authfile} is not as containers-auth.json(5) says: {exc}") from exc


def login_of(authfile: str, host: str) -> str:
    """`auth` of a host in a containers-auth.json(5) file, as Basic wants it; "" for none."""
    if not authfile:
        return ""
    try:
        document = msgspec.json.decode(Path(authfile).read_bytes())
        text = document["auths"][host]["auth"]
        base64.b64decode(text, validate=True)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return ""
    return str(text)
