"""The `prfaas` command. Each subcommand is a module with `add_arguments` and `run`.

Exit codes: 0 ok, 1 bug, 2 usage or bad input, 3 endpoint or fleet not ready, 4 incomplete,
5 client-limited, 6 SLO missed, 7 regression, 130 interrupted.
"""

from harness.cli.main import main

__all__ = ["main"]
