"""Bad input to this package: one line for the user, printed as is by the command line."""

from __future__ import annotations


class InputError(ValueError):
    """The message names the place (file:line or field), what was found, and what would do."""

    exit_code = 2
