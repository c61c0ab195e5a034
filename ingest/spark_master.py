"""A standalone Spark master, looked at before Spark does: it tries for a minute one that is not there."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ingest.errors import Invalid, Unavailable

STANDALONE = "spark://"
ANSWERS_WITHIN = 5.0
"""Seconds that a master has to take a connection."""


def check_master(conf: Mapping[str, str]) -> None:
    """Refuse a Spark whose masters do not answer, one of them is enough. Raises: Invalid, Unavailable."""
    master = conf.get("spark.master", "")
    if not master.startswith(STANDALONE):
        return
    problems = [_problem_of(address, master) for address in master.removeprefix(STANDALONE).split(",")]
    if all(problems):
        raise Unavailable(
            f"Spark's master does not answer at {master} ({problems[-1]}); start it, or correct spark.master in "
            "[source.spark]"
        )


def standing_of(conf: Mapping[str, str]) -> str:
    """What else to look at where Spark does not start or ends, of a standalone master."""
    from pyspark import __version__

    master = conf.get("spark.master", "")
    if not master.startswith(STANDALONE):
        return ""
    return f", and see that a master of Spark {__version__} listens at {master}: its page has another port"


def _problem_of(address: str, master: str) -> str:
    """Why a master does not answer, "" where it does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise Invalid(f"source.spark: spark.master is {master}; write {STANDALONE}host:port, the port is mostly 7077")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""
