"""The worker's command line. Torch-free."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from engine.disciplines import DISCIPLINES
from engine.transport.codec import CODECS, RAW
from engine.transport.security import ANY, Security
from engine.transport.sockets import is_loopback

ROLES = ("prefill", "decode", "both")
DTYPES = ("auto", "float32", "bfloat16")

EPILOG = """\
examples:
  prfaas worker --listen 127.0.0.1:8000 --model small
      an OpenAI-compatible server of one engine: POST /v1/completions with token ids as prompt
  prfaas worker --socket /tmp/p0.sock --role prefill --model tiny --pacing h200.json
      a prefill instance as `prfaas run` starts it, paced to a device profile
  curl --unix-socket /tmp/p0.sock http://worker/health

The control API is described in docs/worker.md. SIGTERM drains for --grace-s and exits 0. With
--socket the worker ends with its parent.
"""


class InputError(ValueError):
    """Bad worker arguments; one line for the user."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`pages` and `slots` are what requests can use; scratch is extra. `page_tokens` is the block
    size of paged latents, prefix keys and checkpoints, in engine tokens. `queue_ageing` and
    `slo_ttft_s` are parameters of the discipline (`engine.disciplines`), in this worker's seconds.
    """

    socket: Path | None
    listen: tuple[str, int] | None
    name: str = "worker"
    cluster: str = "local"
    role: str = "both"
    model: str = "tiny"
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    page_tokens: int = 64
    pages: int = 1024
    slots: int = 64
    max_batch: int = 32
    step_tokens: int = 2048
    pass_tokens: int = 8192
    checkpoint_interval: int = 32
    queue_discipline: str = DISCIPLINES[0]
    queue_ageing: float = 0.1
    slo_ttft_s: float = 10.0
    pacing: Path | None = None
    data_host: str = "127.0.0.1"
    data_port: int = 0
    lanes: int = 4
    staging_mib: int = 1024
    allow_plain: bool = False
    security: Security | None = None
    state_codec: str = RAW
    threads: int = 1
    grace_s: float = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path, metavar="PATH", help="serve on this unix socket")
    where.add_argument("--listen", metavar="HOST:PORT", help="serve on TCP")
    parser.add_argument("--name", default="worker", help="name of this instance (default: worker)")
    parser.add_argument("--cluster", default="local", help="cluster it stands in (default: local)")
    parser.add_argument("--role", choices=ROLES, default="both", help="default: both")
    parser.add_argument(
        "--model",
        default="tiny",
        metavar="SHAPE|DIR",
        help="a shipped shape with seeded weights, or a Hugging Face checkpoint directory",
    )
    parser.add_argument("--seed", type=int, default=0, help="of seeded weights (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and paged cache (default: auto, bfloat16 on cuda and float32 on cpu)",
    )
    parser.add_argument(
        "--page-tokens", type=int, default=64, metavar="N", help="tokens a block (default: 64)"
    )
    parser.add_argument("--pages", type=int, default=1024, metavar="N", help="default: 1024")
    parser.add_argument(
        "--slots", type=int, default=64, metavar="N", help="recurrent states (default: 64)"
    )
    parser.add_argument(
        "--max-batch", type=int, default=32, metavar="N", help="decode batch limit (default: 32)"
    )
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens a step when prefill and decode share one engine, and of a chunk where prompts "
        "may take over from each other (default: 2048)",
    )
    parser.add_argument(
        "--pass-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of one forward pass; longer prompts take several (default: 8192)",
    )
    parser.add_argument(
        "--checkpoint-interval",
        type=int,
        default=32,
        metavar="BLOCKS",
        help="keep a state every so many blocks of a prompt, 0 for none (default: 32)",
    )
    parser.add_argument(
        "--queue-discipline",
        choices=DISCIPLINES,
        default=DISCIPLINES[0],
        help="order of waiting prompts (default: fifo); the others change prompts between chunks",
    )
    parser.add_argument(
        "--queue-ageing",
        type=float,
        default=0.1,
        metavar="X",
        help="shortest-first: seconds of work a second of waiting is worth (default: 0.1)",
    )
    parser.add_argument(
        "--slo-ttft-s",
        type=float,
        default=10.0,
        metavar="S",
        help="least-slack: when a first token is due after its request's arrival (default: 10)",
    )
    parser.add_argument(
        "--pacing", default="none", metavar="FILE.json|none", help="device profile to be paced to"
    )
    parser.add_argument(
        "--data-host", default="127.0.0.1", metavar="HOST", help="address of the KV data plane"
    )
    parser.add_argument(
        "--data-port", type=int, default=0, metavar="PORT", help="0 takes a free one (default)"
    )
    parser.add_argument(
        "--lanes", type=int, default=4, metavar="N", help="TCP connections a peer (default: 4)"
    )
    parser.add_argument(
        "--staging-mib",
        type=int,
        default=1024,
        metavar="N",
        help="host memory through which caches of a GPU cross (default: 1024)",
    )
    parser.add_argument(
        "--allow-plain",
        action="store_true",
        help="no TLS on addresses other than loopback, for KV traffic and --listen",
    )
    for flag, what in (
        ("certificate", "this instance's certificate; its common name is the identity"),
        ("key", "its private key"),
        ("authority", "certificate of the authority that signed all instances'"),
    ):
        parser.add_argument(
            f"--{flag}", metavar="PEM", help=f"TLS 1.3, both sides: {what} (see prfaas certs)"
        )
    parser.add_argument(
        "--tenants",
        action="append",
        default=[],
        metavar="IDENTITY=TENANT,...",
        help="whose caches an identity may send here; repeatable, * is any (default: *=*)",
    )
    parser.add_argument(
        "--state-codec",
        choices=CODECS,
        default=RAW,
        help="how the recurrent state crosses: as it is, or rounded to bfloat16 (default: raw)",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="compute threads")
    parser.add_argument(
        "--grace-s", type=float, default=2.0, metavar="S", help="drain so long on SIGTERM"
    )


def from_namespace(parsed: argparse.Namespace) -> WorkerOptions:
    """Raises InputError for values that argparse cannot judge."""
    for name, least in (
        ("page_tokens", 1),
        ("pages", 1),
        ("slots", 1),
        ("max_batch", 1),
        ("pass_tokens", 1),
        ("threads", 1),
        ("lanes", 1),
        ("staging_mib", 1),
        ("checkpoint_interval", 0),
        ("data_port", 0),
    ):
        if getattr(parsed, name) < least:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} {getattr(parsed, name)}; {least} or more would do")
    for name in ("queue_ageing", "slo_ttft_s"):
        if not 0 < getattr(parsed, name) < math.inf:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} {getattr(parsed, name)}; a number above 0 would do")
    if parsed.step_tokens < parsed.page_tokens:
        raise InputError(
            f"--step-tokens {parsed.step_tokens} is less than a page of {parsed.page_tokens}"
        )
    listen = None if parsed.listen is None else _address(parsed.listen)
    security = _security(parsed)
    open_to_all = listen is not None and not is_loopback(listen[0])
    if open_to_all and security is None and not parsed.allow_plain:
        raise InputError(
            f"--listen {parsed.listen} without TLS: give --certificate, --key and --authority, "
            "or --allow-plain"
        )
    return WorkerOptions(
        socket=parsed.socket,
        listen=listen,
        name=parsed.name,
        cluster=parsed.cluster,
        role=parsed.role,
        model=parsed.model,
        seed=parsed.seed,
        device=parsed.device,
        dtype=parsed.dtype,
        page_tokens=parsed.page_tokens,
        pages=parsed.pages,
        slots=parsed.slots,
        max_batch=parsed.max_batch,
        step_tokens=parsed.step_tokens,
        pass_tokens=parsed.pass_tokens,
        checkpoint_interval=parsed.checkpoint_interval,
        queue_discipline=parsed.queue_discipline,
        queue_ageing=parsed.queue_ageing,
        slo_ttft_s=parsed.slo_ttft_s,
        pacing=None if parsed.pacing == "none" else Path(parsed.pacing),
        data_host=parsed.data_host,
        data_port=parsed.data_port,
        lanes=parsed.lanes,
        staging_mib=parsed.staging_mib,
        allow_plain=parsed.allow_plain,
        security=security,
        state_codec=parsed.state_codec,
        threads=parsed.threads,
        grace_s=parsed.grace_s,
    )


def _security(parsed: argparse.Namespace) -> Security | None:
    paths = (parsed.certificate, parsed.key, parsed.authority)
    if all(path is None for path in paths):
        if parsed.tenants:
            raise InputError("--tenants needs TLS: give --certificate, --key and --authority")
        return None
    if any(path is None for path in paths):
        raise InputError("--certificate, --key and --authority go together")
    tenants: dict[str, tuple[str, ...]] = {}
    for rule in parsed.tenants:
        identity, equals, names = rule.partition("=")
        if not equals or not identity:
            raise InputError(f"--tenants {rule}; IDENTITY=TENANT,... would do")
        tenants[identity] = (*tenants.get(identity, ()), *names.split(","))
    return Security(*paths, tenants or {ANY: (ANY,)})


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--listen {text}; HOST:PORT would do, for example 127.0.0.1:8000")
    return host.strip("[]"), int(port)
