"""What can go wrong between two data planes, and whether another attempt may help."""

from __future__ import annotations


class FrameError(ValueError):
    """Bytes from the network that are not a valid frame; the connection that brought them ends."""


class TransportError(Exception):
    """A transfer or a plane failed. `retryable` says whether another attempt may help."""

    retryable = True


class TransferFailed(TransportError):
    """The transfer ended without commit; the receiver exposed no part of it.

    Of a receiver that is not heard any more nobody here can tell whether it admits the whole: its
    application must hear of the failure by another way, and let go.
    """

    def __init__(self, reason: str, retryable: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable


class TransferRefused(TransferFailed):
    """The receiver did not grant the transfer (no blocks, not authorised, layout differs)."""


class PlaneLost(TransportError):
    """The local data plane process ended or did not start."""
