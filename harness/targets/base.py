"""What the load generator asks of a target, and the settings that all targets share."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from harness.load.flight import Flight

Done = Callable[[Flight], None]


class Kind(StrEnum):
    """How a target is spoken to."""

    OPENAI = "openai"
    VLLM_PAIR = "vllm-pair"
    SGLANG_PAIR = "sglang-pair"
    DYNAMO = "dynamo"
    LLM_D = "llm-d"
    IN_PROCESS = "in-process"


class Api(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class Target(Protocol):
    """Sends flights. `send` returns at once; `done` is called once the flight has ended, with its
    status set. Problems of a request are its failure, never an exception.
    """

    def send(self, flight: Flight, done: Done) -> None: ...

    async def probe(self) -> str:
        """One cheap question to each endpoint. Returns the first model served, "" where the server
        does not say. Raises NotReady.
        """
        ...

    async def close(self) -> None: ...


class TargetSpec(BaseModel):
    """A target as configuration. Holds no secret: `api_key_env` names a variable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = Kind.OPENAI
    api: Api = Api.COMPLETIONS
    base_urls: tuple[str, ...] = Field(
        default=("http://127.0.0.1:8000",), description="one or more, taken in turn"
    )
    prefill_urls: tuple[str, ...] = ()
    decode_urls: tuple[str, ...] = ()
    endpoint: str = Field(default="", description="path instead of the API's own")
    model: str = ""
    stream: bool = True
    ignore_eos: bool = False
    temperature: float | None = 0.0
    prompt_vocab: NonNegativeInt = Field(
        default=0, description="prompts as ids below this; 0: as words"
    )
    max_tokens_field: str = Field(default="", description="instead of the API's own name for it")
    extra_body: dict[str, Any] = {}
    headers: dict[str, str] = {}
    api_key_env: str = "OPENAI_API_KEY"
    max_connections: PositiveInt | None = None
    remote_prefill_urls: tuple[str, ...] = Field(
        default=(), description="pairs: prefill servers in the other datacenter"
    )
    policy: Literal["", "homogeneous", "naive", "balanced", "prfaas"] = Field(
        default="", description="pairs: who prefills; empty: prefill servers in turn"
    )
    bootstrap_ports: tuple[PositiveInt, ...] = Field(
        default=(8998,), description="SGLang pairs: one for all prefill servers, or one for each"
    )
    threshold_tokens: NonNegativeInt = Field(
        default=0,
        description="pairs: shorter prompts stay with the decode server; under policy prfaas, "
        "with local prefill",
    )
    proxy: str = ""
    ca_file: str = ""
    verify_tls: bool = True
    worker_model: str = Field(default="tiny", description="in-process: the model to load")
