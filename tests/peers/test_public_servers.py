"""Our client against OpenAI-compatible servers that nobody here wrote."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from harness.cli.main import main

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
