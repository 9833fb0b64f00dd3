"""Parses the command line and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from harness.errors import ExitCode

#: subcommand -> (module, one-line help); a module is imported only when its command is run.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("harness.cli.run", "run an experiment: compare configurations end to end"),
    "plan": ("harness.cli.plan", "search threshold and split with the throughput model"),
    "doctor": ("harness.cli.doctor", "say what this host offers and which backends will be used"),
    "trace": ("harness.cli.trace", "describe, convert, slice, scale or synthesize traces"),
    "worker": ("harness.cli.worker", "serve prefill or decode as one instance"),
    "load": ("harness.cli.load", "drive any OpenAI-compatible deployment and measure it"),
    "sweep": ("harness.cli.sweep", "simulate many variations of an experiment"),
    "fidelity": ("harness.cli.fidelity", "run emulate and simulate side by side"),
    "ablate": ("harness.cli.ablate", "measure what each part of a policy is worth"),
    "explain": ("harness.cli.explain", "tell one request's story"),
    "link": ("harness.cli.link", "set up, show, probe or remove a shaped link"),
    "transport": ("harness.cli.transport", "measure the KV transport"),
    "certs": ("harness.cli.certs", "make a test certificate authority and certificates"),
    "profile": ("harness.cli.profile", "measure a device profile with this engine"),
    "results": ("harness.cli.results", "describe, query or export a run's results"),
    "report": ("harness.cli.report", "write the HTML report of runs"),
    "compare": ("harness.cli.compare", "compare runs with statistics"),
    "noise": ("harness.cli.noise", "measure this machine's own noise floor"),
    "runs": ("harness.cli.runs", "list, prune or diff run directories"),
    "nightly": ("harness.cli.nightly", "run and judge the nightly suite"),
    "chaos": ("harness.cli.chaos", "inject faults and check invariants"),
}


#: What a file system refuses that a user can mend, and the exit code: where something cannot be
#: written at all, or there was no room for the rest.
_REFUSED = {
    errno.EACCES: ExitCode.USAGE,
    errno.EPERM: ExitCode.USAGE,
    errno.EROFS: ExitCode.USAGE,
    errno.EISDIR: ExitCode.USAGE,
    errno.ENOTDIR: ExitCode.USAGE,
    errno.ENOSPC: ExitCode.INCOMPLETE,
    errno.EDQUOT: ExitCode.INCOMPLETE,
}

#: As a shell reports a program that SIGPIPE ended: whoever read the output has read enough.
_NOBODY_READS = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    with _ended_at_once(f"prfaas {chosen}"):
        options = _options(arguments, chosen)
    return _run(options) if options.command is not None else int(ExitCode.USAGE)


@contextmanager
def _ended_at_once(program: str) -> Iterator[None]:
    """Ctrl-C in the block ends the process there. What is imported may take an exception for one of
    its own, and go on or tell of another; and there is nothing yet to be written."""

    def end(number: int, frame: object) -> None:
        os.write(sys.stderr.fileno(), f"{program}: interrupted\n".encode())
        os._exit(ExitCode.INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, say
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _options(arguments: Sequence[str], chosen: str | None) -> argparse.Namespace:
    """Imports the `chosen` subcommand, which may take a second."""
    parser = argparse.ArgumentParser(
        prog="prfaas",
        description="Measures whether prefill pays in another datacenter.",
        epilog="`prfaas COMMAND --help` teaches one command.",
    )
    parser.add_argument("--version", action="version", version=f"prfaas {version('prfaas-bench')}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
    return options


def _run(options: argparse.Namespace) -> int:
    # A termination request, or a terminal that closes, ends like Ctrl-C: what there is gets
    # written. Commands with a drain of their own replace this; nohup keeps a hangup ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except (BrokenPipeError, SystemExit) as error:
        # Rich makes an exit of it.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # The interpreter flushes once more at its end, to where that cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS
    except KeyboardInterrupt:
        print(f"prfaas {options.command}: interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except Exception as error:
        # A class with an `exit_code` is written for the user, in whichever package it is defined.
        exit_code = getattr(error, "exit_code", None)
        said = str(error)
        if exit_code is None and isinstance(error, OSError):
            exit_code = _REFUSED.get(error.errno or 0)
            where = f"{error.filename}: " if error.filename else ""
            said = f"{where}{os.strerror(error.errno or 0)}"
        if isinstance(error, MemoryError):
            exit_code, said = ExitCode.INCOMPLETE, "no memory left"
        if exit_code is None:
            raise
        print(f"prfaas {options.command}: {said}", file=sys.stderr)
        return int(exit_code)
