"""Why a worker did not do what it was asked; each has a kind and an HTTP status."""

from __future__ import annotations


class WorkerError(Exception):
    """Answered as {"error": kind, "message": text}."""

    kind = "internal"
    status = 500


class BadRequest(WorkerError):
    """The request's body cannot be understood."""

    kind = "bad_request"
    status = 400


class UnknownRequest(WorkerError):
    """No cache of this attempt is here: never delivered, abandoned, or decoded already."""

    kind = "unknown_request"
    status = 404


class UnknownPrefix(WorkerError):
    """The prefix is not in this worker's cache, or not whole."""

    kind = "unknown_prefix"
    status = 404


class Rejected(WorkerError):
    """This worker can never serve the request."""

    kind = "rejected"
    status = 422


class NotReady(WorkerError):
    """Draining, converting, or in the other role."""

    kind = "not_ready"
    status = 503


class TransferFailed(WorkerError):
    """The cache did not arrive whole at its destination; no part of it was exposed."""

    kind = "transfer_failed"
    status = 502


class ComputeFailed(WorkerError):
    """The engine failed on the step that this request was part of."""

    kind = "compute_failed"
    status = 500


class Cancelled(WorkerError):
    """The request was abandoned while in hand."""

    kind = "cancelled"
    status = 409
