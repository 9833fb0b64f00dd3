"""Standard error while a command runs: a picture that is redrawn on a terminal, lines elsewhere.
Output on standard out stays clean either way.
"""

from __future__ import annotations

import sys
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live


class Screen:
    """The picture appears with the first `show` and goes at the end; lines stay, above it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream)
        self.terminal = self._stream.isatty() and not self._console.is_dumb_terminal
        self._live: Live | None = None

    def show(self, picture: RenderableType) -> None:
        """Only where there is a terminal."""
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()
        self._live.update(picture, refresh=True)

    def say(self, line: str) -> None:
        if self._live is not None:
            self._console.print(line, markup=False, highlight=False)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
