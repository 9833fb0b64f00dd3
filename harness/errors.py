"""Errors that end a command with one clear line and a defined exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    BUG = 1
    USAGE = 2
    NOT_READY = 3
    INCOMPLETE = 4
    CLIENT_LIMITED = 5
    SLO_MISSED = 6
    REGRESSION = 7
    INTERRUPTED = 130


class CommandError(Exception):
    """Ends the command: `message` is the one line a user sees, `exit_code` the exit code."""

    exit_code: ExitCode = ExitCode.BUG


class BadInput(CommandError):
    """Bad input from a user. The message names the place, what was found and what would do."""

    exit_code = ExitCode.USAGE


class NotReady(CommandError):
    """An endpoint, worker or fleet did not come up."""

    exit_code = ExitCode.NOT_READY


class Incomplete(CommandError):
    """The run ended before its end; what there is was written and marked."""

    exit_code = ExitCode.INCOMPLETE
