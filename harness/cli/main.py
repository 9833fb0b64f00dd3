"""Parses the command line and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from harness.errors import CommandError, ExitCode

#: subcommand -> (module, one-line help); a module is imported only when its command is run.
COMMANDS: dict[str, tuple[str, str]] = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="prfaas",
        description="Measures whether prefill pays in another datacenter.",
        epilog="`prfaas COMMAND --help` teaches one command.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == chosen:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return ExitCode.USAGE
    try:
        return int(options.run(options))
    except CommandError as error:
        print(f"prfaas {options.command}: {error}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        print(f"prfaas {options.command}: interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
