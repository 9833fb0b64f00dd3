"""`prfaas profile`: measure this engine on this device, as a profile that `simulate` reads."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import BadInput
from harness.places import check_file
from results.whole import write_whole

if TYPE_CHECKING:
    from engine.model.model import Model
    from engine.profiler import Measurement

EPILOG = """\
examples:
  prfaas profile --model small --out small-cpu.toml
  prfaas profile --model kimi-linear-48b --device cuda --lengths 1024,8192,32768 --out h200.toml
  prfaas profile --model small --json        # figures only
Then name the file as profile in an experiment: profiles.pd = "small-cpu.toml".
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--model",
        default="small",
        metavar="SHAPE|DIR",
        help="a shipped shape with seeded weights, or a checkpoint directory (default: small)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default: 1)")
    parser.add_argument(
        "--lengths",
        default="64,256,1024,4096",
        metavar="N,N",
        help="prompt lengths, tokens (default: 64,256,1024,4096)",
    )
    parser.add_argument(
        "--batches", default="1,8,32", metavar="N,N", help="decode batches (default: 1,8,32)"
    )
    parser.add_argument(
        "--contexts",
        default="256,2048",
        metavar="N,N",
        help="tokens of context of each sequence (default: 256,2048)",
    )
    parser.add_argument("--page-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--name", help="name of the profile (default: model and device)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile here (TOML)")
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")


def run(options: argparse.Namespace) -> int:
    lengths = _numbers("--lengths", options.lengths)
    batches = _numbers("--batches", options.batches)
    contexts = _numbers("--contexts", options.contexts)
    if len(lengths) < 2:
        raise BadInput(f"--lengths {options.lengths}: a profile needs two lengths or more")
    for flag, value in (("--threads", options.threads), ("--page-tokens", options.page_tokens)):
        if value < 1:
            raise BadInput(f"{flag} {value}: must be at least 1")
    # Before minutes of measuring, not after.
    if options.out is not None:
        check_file("--out", options.out)
    from engine.profiler import measure, profile_toml

    model, device_name = _load(options)
    measured = measure(
        model,
        lengths,
        batches,
        contexts,
        options.page_tokens,
        on_point=lambda text: print(text, file=sys.stderr),
    )
    if options.out is not None:
        name = options.name or f"{model.config.name}-{options.device}"
        date = time.strftime("%Y-%m-%d", time.gmtime())
        text = profile_toml(measured, name, device_name, _commit(), date, max(batches))
        write_whole(options.out, text)
    if options.json:
        print(json.dumps({"device": device_name, **dataclasses.asdict(measured)}, indent=2))
    else:
        print(_table(measured, device_name))
        if options.out is not None:
            print(f"\nwrote {options.out}")
    return 0


def _load(options: argparse.Namespace) -> tuple[Model, str]:
    """The model on its device, and the device's name."""
    from engine.worker.loading import load_model

    model, _ = load_model(
        options.model, 0, options.device, options.threads, drawn_on=options.device
    )
    if model.device.type == "cuda":
        import torch

        return model, torch.cuda.get_device_name(model.device)
    return model, f"{_cpu_name()}, {options.threads} thread(s)"


def _table(measured: Measurement, device: str) -> str:
    ceilings = measured.ceilings
    lines = [
        f"{measured.config.name} ({measured.dtype}) on {device}",
        f"ceilings measured here: {ceilings.flops_per_s / 1e9:.1f} GFLOP/s matrix product, "
        f"{ceilings.bytes_per_s / 1e9:.1f} GB/s copy",
        f"cache: {measured.fixed_bytes} bytes + {measured.per_token_bytes} bytes/token; "
        f"pack {measured.pack_bytes_per_s / 1e9:.2f} GB/s, "
        f"unpack {measured.unpack_bytes_per_s / 1e9:.2f} GB/s",
        "",
        f"{'prefill tokens':>16}{'ms':>10}{'tokens/s':>12}{'MFU':>8}",
    ]
    lines += [
        f"{p.tokens:>16}{p.seconds * 1e3:>10.2f}{p.tokens / p.seconds:>12.0f}{p.mfu:>8.1%}"
        for p in measured.prefill
    ]
    lines += ["", f"{'decode batch':>16}{'context':>10}{'ms':>10}{'bandwidth':>11}{'roofline':>10}"]
    lines += [
        f"{p.batch:>16}{p.context_tokens:>10}{p.seconds * 1e3:>10.2f}"
        f"{p.bandwidth:>11.1%}{p.roofline:>10.1%}"
        for p in measured.decode
    ]
    lines.append(
        "\nMFU: model FLOP/s over the ceiling. bandwidth: weights, states and latents moved a\n"
        "second over the ceiling. roofline: least possible time by both ceilings over the measured."
    )
    return "\n".join(lines)


def _numbers(flag: str, text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if len(numbers) != len(text.split(",")) or not numbers or min(numbers) < 1:
        raise BadInput(f"{flag} {text}: whole numbers >= 1 joined by commas would do")
    return sorted(set(numbers))


def _commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "cpu"
