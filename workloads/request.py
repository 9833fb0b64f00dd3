"""The request record that every reader and generator yields and every mode consumes."""

from __future__ import annotations

from dataclasses import dataclass


# Not frozen, though nothing changes one: a frozen one takes seven times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class Request:
    """One request of a workload, in the units of the modelled system (never scaled).

    `block_ids` are content ids of the prompt's blocks of `block_tokens` tokens, in order. An id
    names its block *and everything before it* (a chain), so two requests share a prefix exactly as
    long as their ids are equal. The last block may be partial. Without ids the prompt is unique.
    """

    id: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    session: str = ""
    tenant: str = ""
    slo_class: str = ""
