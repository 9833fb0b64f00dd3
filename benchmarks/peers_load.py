"""The load generator beside public ones: same stub server, same machine, in turn, in one run.

`make bench-peers` installs AIPerf and guidellm into virtual environments of their own (they are no
dependencies of this project) and measures each tool as a user runs it, by its command. Each is run
short and long; the CPU of the whole process tree is taken, and the difference of the two runs
leaves starting, importing and reporting out. Rounds interleave the tools, so that what else the
machine does falls on all. Ratios of CPU-seconds, not of wall time, are the result.

Every tool streams the same 32-chunk answers at 32 in flight. AIPerf is told to use the server's
token counts, which spares it its tokenizer. Offline it takes a small tokenizer laid out as a
Hugging Face cache directory, which is made here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import CHUNKS, IN_FLIGHT, PROMPT_TOKENS, stub

ROOT = Path(__file__).parents[1]
PACKAGES = {"aiperf": ("aiperf==0.13.0",), "guidellm": ("torch==2.13.0", "guidellm==0.8.1")}
_PR_SET_CHILD_SUBREAPER = 36
_PATH = "/v1/completions"
_LEAST_SHARE = 0.80

#: Run inside a peer's environment: a byte-level tokenizer as the hub's cache would hold it.
TOKENIZER = """
import json, sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
revision = "0" * 40
repository = Path(sys.argv[1]) / "hub" / "models--bench--bytes"
snapshot = repository / "snapshots" / revision
snapshot.mkdir(parents=True)
(repository / "refs").mkdir()
(repository / "refs" / "main").write_text(revision)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: at for at, letter in enumerate([*letters, "<eos>"])}
made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.save(str(snapshot / "tokenizer.json"))
settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
(snapshot / "tokenizer_config.json").write_text(json.dumps(settings))
(snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
"""


@dataclass(frozen=True, slots=True)
class Tool:
    """`command(url, requests, directory)` runs it; `finished(directory)` says how many requests it
    reports as succeeded. `short` and `long` are its two runs.
    """

    name: str
    command: Callable[[str, int, Path], list[str]]
    finished: Callable[[Path], int]
    short: int
    long: int


def environment(name: str) -> Path:
    """The peer's virtual environment, made and filled when it is missing."""
    path = ROOT / f".venv-peers-{name}"
    if not (path / "bin" / name).exists():
        print(f"installing {' '.join(PACKAGES[name])} into {path.name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
        subprocess.run(
            [str(path / "bin" / "pip"), "install", "--quiet", *PACKAGES[name]], check=True
        )
    return path


def ours() -> Tool:
    def command(url: str, requests: int, directory: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "harness", "load", "--base-url", url, "--quiet"),
            *("--num-prompts", str(requests), "--max-concurrency", str(IN_FLIGHT)),
            *("--input-len", str(PROMPT_TOKENS), "--output-len", str(CHUNKS)),
            *("--ignore-eos", "--out", str(directory)),
        ]

    def finished(directory: Path) -> int:
        (run,) = directory.iterdir()
        said = json.loads((run / "summary.json").read_text())
        return int(said["configurations"][0]["phases"][0]["counts"]["succeeded"])

    return Tool("prfaas load", command, finished, 1_000, 11_000)


def aiperf(short: int, long: int) -> Tool:
    path = environment("aiperf")

    def command(url: str, requests: int, directory: Path) -> list[str]:
        return [
            *(str(path / "bin" / "aiperf"), "profile", "--model", "stub", "--url", url),
            *("--endpoint-type", "completions", "--streaming", "--tokenizer", "bench/bytes"),
            *("--concurrency", str(IN_FLIGHT), "--request-count", str(requests)),
            *("--isl", str(PROMPT_TOKENS), "--osl", str(CHUNKS), "--use-server-token-count"),
            *("--extra-inputs", "ignore_eos:true", "--ui", "none"),
            *("--artifact-dir", str(directory)),
        ]

    def finished(directory: Path) -> int:
        said = json.loads((directory / "profile_export_aiperf.json").read_text())
        return int(said["request_count"]["avg"])

    return Tool("AIPerf 0.13.0", command, finished, short, long)


def guidellm(short: int, long: int) -> Tool:
    path = environment("guidellm")

    def command(url: str, requests: int, directory: Path) -> list[str]:
        return [
            *(str(path / "bin" / "guidellm"), "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={url},model=stub,request_format={_PATH}"),
            *("--profile", f"kind=concurrent,streams={IN_FLIGHT}"),
            *("--constraint", f"kind=max_requests,count={requests}"),
            *("--tokenizer", "kind=hf_auto,model=bench/bytes"),
            *(
                "--data",
                f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={CHUNKS}",
            ),
            *("--output", f"kind=json,path={directory / 'benchmarks.json'}"),
        ]

    def finished(directory: Path) -> int:
        said = json.loads((directory / "benchmarks.json").read_text())
        return int(said["benchmarks"][0]["metrics"]["request_totals"]["successful"])

    return Tool("guidellm 0.8.1", command, finished, short, long)


def tree_cpu_s(command: list[str], variables: dict[str, str], log: Path) -> float:
    """CPU of `command` and all that it started, s. Raises CalledProcessError."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=output, stderr=output, cwd=ROOT
        )
        code = process.wait()
    # What ended without the tool waiting for it falls to this process (a subreaper).
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    if code not in (0, 5):
        raise subprocess.CalledProcessError(code, command, log.read_bytes()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(tool: Tool, url: str, home: Path) -> float:
    """Requests per CPU-second of one short and one long run of `tool`."""
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    spent: list[float] = []
    done: list[int] = []
    for requests in (tool.short, tool.long):
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "out"
            out.mkdir()
            log = Path(directory) / "log"
            spent.append(tree_cpu_s(tool.command(url, requests, out), offline, log))
            done.append(tool.finished(out))
            # Some tools cut off their last requests; a tool that fails many is not measured.
            if done[-1] < _LEAST_SHARE * requests:
                raise RuntimeError(f"{tool.name}: {done[-1]} of {requests} requests succeeded")
    return (done[1] - done[0]) / (spent[1] - spent[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=tuple(PACKAGES), help="beside this one")
    parser.add_argument("--requests", type=int, default=2_000, help="a peer's long run, more")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    made = {"aiperf": aiperf, "guidellm": guidellm}
    short = 200
    tools = [ours()] + [
        make(short, short + options.requests)
        for name, make in made.items()
        if options.only in (None, name)
    ]
    rates: dict[str, list[float]] = {tool.name: [] for tool in tools}
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "hub-home"
        first = options.only or "aiperf"
        python = environment(first) / "bin" / "python"
        subprocess.run([str(python), "-c", TOKENIZER, str(home)], check=True)
        for number in range(options.rounds):
            for tool in tools:
                with stub() as url:
                    rates[tool.name].append(measure(tool, url, home))
                print(
                    f"round {number + 1}: {tool.name} {rates[tool.name][-1]:,.0f} requests per "
                    "CPU-second",
                    file=sys.stderr,
                    flush=True,
                )
    own = rates[tools[0].name]
    report = {
        tool.name: {
            "requests_per_cpu_s": statistics.median(rates[tool.name]),
            "chunks_per_cpu_s": CHUNKS * statistics.median(rates[tool.name]),
            "ours_times": statistics.median(
                [mine / theirs for mine, theirs in zip(own, rates[tool.name], strict=True)]
            ),
        }
        for tool in tools
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{'':<16}{'requests/CPU-s':>16}{'chunks/CPU-s':>16}{'ours / this':>14}")
    for name, figures in report.items():
        print(
            f"{name:<16}{figures['requests_per_cpu_s']:>16,.0f}"
            f"{figures['chunks_per_cpu_s']:>16,.0f}{figures['ours_times']:>14.1f}"
        )


if __name__ == "__main__":
    main()
