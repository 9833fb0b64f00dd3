"""Our client against OpenAI-compatible servers that nobody here wrote."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from harness.cli.main import main
from harness.load.words import WORDS

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


def load(out: Path, *options: str) -> tuple[int, Path, dict[str, Any]]:
    """(exit code, run directory, its counts)."""
    code = main(["load", "--out", str(out), "--quiet", *options])
    (run,) = out.iterdir()
    said = json.loads((run / "summary.json").read_text())
    assert said["extra"]["failures"] == {}
    return code, run, said["configurations"][0]["phases"][0]["counts"]


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("form", ["--stream", "--no-stream"])
def test_guidellm_mock_server(
    serve: Callable[..., str], tmp_path: Path, api: str, form: str
) -> None:
    url = serve(
        "guidellm", "guidellm", "mock-server", "--host", "127.0.0.1", "--port", "{port}",
        "--ttft-ms", "20", "--itl-ms", "2", "--output-tokens", "16",
    )  # fmt: skip
    code, run, counts = load(
        tmp_path / "runs", "--base-url", url, "--model", "mock", "--backend", api, form,
        "--num-prompts", "40", "--max-concurrency", "8", "--input-len", "32", "--output-len", "16",
        "--ignore-eos",
    )  # fmt: skip
    assert code in (0, 5)
    assert (counts["offered"], counts["succeeded"]) == (40, 40)
    rows = pq.read_table(run / "client.parquet").to_pylist()
    assert {row["token_source"] for row in rows} == {"server"}


SEEDED_MODEL = """
import sys, torch
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: at for at, letter in enumerate([*letters, "<eos>"])}
made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\\n{% endfor %}"
torch.manual_seed(3)
config = LlamaConfig(vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64,
                     num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                     max_position_embeddings=2048, eos_token_id=256, pad_token_id=256)
model = LlamaForCausalLM(config)
model.save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""


def test_transformers_serve(
    serve: Callable[..., str], environment_of: Callable[[str], Path], tmp_path: Path
) -> None:
    python = environment_of("transformers") / "python"
    model = tmp_path / "model"
    subprocess.run([str(python), "-c", SEEDED_MODEL, str(model)], check=True)
    url = serve(
        "transformers", "transformers", "serve", "--host", "127.0.0.1", "--port", "{port}",
        "--device", "cpu",
    )  # fmt: skip
    code, run, counts = load(
        tmp_path / "runs", "--base-url", url, "--model", str(model), "--backend", "chat",
        "--max-tokens-field", "max_tokens", "--num-prompts", "6", "--max-concurrency", "2",
        "--input-len", "8", "--output-len", "12",
    )  # fmt: skip
    assert code in (0, 4, 5)
    assert (counts["offered"], counts["succeeded"]) == (6, 6)
    requests = pq.read_table(run / "requests.parquet").to_pylist()
    assert all(row["tokens_received"] >= 1 for row in requests)
    assert all(row["first_token_us"] <= row["last_token_us"] for row in requests)


#: A tokenizer whose every token is a word, and as much of a model as a simulated one needs.
WORD_MODEL = """
import json, sys
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
folder, words = Path(sys.argv[1]), json.loads(sys.argv[2])
folder.mkdir()
words += [f"w{at}" for at in range(8192 - len(words))]
vocabulary = {word: at for at, word in enumerate(words)}
made = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="w0"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
made.save(str(folder / "tokenizer.json"))
template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
for name, content in {
    "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1",
                         "chat_template": template},
    "config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8192,
               "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
               "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 257,
               "eos_token_id": 257, "max_position_embeddings": 4096},
}.items():
    (folder / f"{name}.json").write_text(json.dumps(content))
"""


def served(url: str, timeout_s: float = 240.0) -> list[str]:
    """The models at `url`, once there is one."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with urllib.request.urlopen(url + "/v1/models", timeout=10.0) as answer:
            models = [each["id"] for each in json.load(answer)["data"]]
        if models:
            return models
        time.sleep(0.5)
    return []


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_dynamo_with_a_prefill_and_a_decode_worker(
    serve: Callable[..., str], environment_of: Callable[[str], Path], tmp_path: Path, api: str
) -> None:
    """Dynamo's own front end and router before two of its simulated workers, without etcd or NATS
    (file discovery)."""
    python = environment_of("dynamo") / "python"
    model = tmp_path / "model"
    subprocess.run([str(python), "-c", WORD_MODEL, str(model), json.dumps(WORDS)], check=True)
    here = {"DYN_FILE_KV": str(tmp_path / "store"), "DYN_TCP_RPC_HOST": "127.0.0.1"}
    url = serve(
        "dynamo", "python", "-m", "dynamo.frontend", "--http-host", "127.0.0.1",
        "--http-port", "{port}", "--discovery-backend", "file", variables=here,
    )  # fmt: skip
    for mode in ("prefill", "decode"):
        serve(
            "dynamo", "python", "-m", "dynamo.mocker", "--model-path", str(model),
            "--model-name", "mock", "--discovery-backend", "file", "--disaggregation-mode", mode,
            "--speedup-ratio", "10", variables=here,
        )  # fmt: skip
    assert served(url) == ["mock"]
    code, run, counts = load(
        tmp_path / "runs", "--target", "dynamo", "--base-url", url, "--backend", api,
        "--num-prompts", "40", "--max-concurrency", "8", "--input-len", "32", "--output-len", "16",
        "--ignore-eos",
    )  # fmt: skip
    assert code in (0, 5)
    assert (counts["offered"], counts["succeeded"]) == (40, 40)
    requests = pq.read_table(run / "requests.parquet").to_pylist()
    assert {row["tokens_received"] for row in requests} == {16}
    # Each half was another worker, and Dynamo said which.
    prefill, decode = (
        {row[f"{half}_instance"] for row in requests} for half in ("prefill", "decode")
    )
    assert (len(prefill), len(decode)) == (1, 1) and prefill != decode
    rows = pq.read_table(run / "client.parquet").to_pylist()
    assert {row["token_source"] for row in rows} == {"server"}
    if api == "completions":
        assert {row["prompt_tokens"] for row in rows} == {32}
