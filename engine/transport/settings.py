"""Everything a data plane is started with, as one value that crosses to its process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from engine.transport.codec import CODECS
from engine.transport.security import Security
from engine.transport.sockets import TcpOptions
from engine.transport.timing import Deadlines, Limits


@dataclass(frozen=True, slots=True)
class Settings:
    """host, port: where to listen (port 0: any free one). lanes: data connections per peer.

    layout: see `messages.Hello`. incarnation: unique to this life of the instance, not 0.
    allow_plain: TCP without TLS on addresses other than loopback; say so by name. sample_s: how
    often TCP_INFO is read while transfers are active (0.01 to 0.05).
    """

    incarnation: int
    layout: str
    host: str = "127.0.0.1"
    port: int = 0
    lanes: int = 4
    codecs: tuple[str, ...] = CODECS
    sample_s: float = 0.025
    allow_plain: bool = False
    security: Security | None = None
    tcp: TcpOptions = field(default_factory=TcpOptions)
    deadlines: Deadlines = field(default_factory=Deadlines)
    limits: Limits = field(default_factory=Limits)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Settings:
        security = value["security"]
        return cls(
            **{
                **value,
                "codecs": tuple(value["codecs"]),
                "security": None if security is None else Security.from_json(security),
                "tcp": TcpOptions(**value["tcp"]),
                "deadlines": Deadlines(**value["deadlines"]),
                "limits": Limits(**value["limits"]),
            }
        )
