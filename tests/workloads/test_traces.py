import errno
import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.errors import InputError
from workloads.request import Request
from workloads.traces import parquet_form, readers
from workloads.traces.chain import chained
from workloads.traces.readers import detect, in_order, open_trace
from workloads.traces.rows import Place, TraceError, unwritable
from workloads.traces.writers import save

REAL = Path(__file__).parents[3] / "shared" / "traces"


def mooncake_line(stamp=0, tokens=600, output=5, ids=(1, 2)):
    return json.dumps(
        {
            "timestamp": stamp,
            "input_length": tokens,
            "output_length": output,
            "hash_ids": list(ids),
        }
    )


def write(folder, name, text):
    path = folder / name
    data = text if isinstance(text, bytes) else text.encode()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".zst"):
        data = zstandard.compress(data)
    path.write_bytes(data)
    return str(path)


def test_mooncake_stamps_are_milliseconds_and_blocks_hold_512(tmp_path):
    path = write(
        tmp_path, "t.jsonl", f"{mooncake_line(0)}\n\n{mooncake_line(3000, 512, 7, (9,))}\n"
    )
    assert list(open_trace(path)) == [
        Request(0, 0.0, 600, 5, (1, 2), 512),
        Request(1, 3.0, 512, 7, (9,), 512),
    ]


def test_azure_stamps_keep_100_ns_and_crlf_is_read(tmp_path):
    rows = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:46.6879999,396,109\r\n"
    )
    first, second = open_trace(write(tmp_path, "a.csv", rows))
    assert second.arrival_s - first.arrival_s == 0.0074099
    assert (second.input_tokens, second.output_tokens) == (396, 109)


def test_azure_2024_stamps_may_have_an_offset_and_fewer_decimals(tmp_path):
    rows = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01+00:00,10,2\n"
        "2024-05-10 02:00:02.5+02:00,11,3\n"
    )
    assert [r.arrival_s for r in open_trace(write(tmp_path, "a.csv", rows))] == [
        0,
        0.99007,
        2.49007,
    ]


def test_burstgpt_leaves_out_failed_requests(tmp_path):
    rows = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,API log\n"
    )
    assert list(open_trace(write(tmp_path, "b.csv", rows))) == [
        Request(0, 0.0, 472, 18, tenant="ChatGPT"),
        Request(1, 113.0, 417, 276, tenant="GPT-4"),
    ]


def test_burstgpt_sessions(tmp_path):
    rows = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n"
        "1,abc,2.5,GPT-4,10,3\n2,,1,GPT-4,10,3\n"
    )
    assert [r.session for r in open_trace(write(tmp_path, "b.csv", rows))] == ["abc", ""]


def bailian_line(chat, parent, stamp, tokens, ids):
    return json.dumps(
        {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": stamp,
            "input_length": tokens,
            "output_length": 9,
            "type": "text",
            "turn": 1 if parent == -1 else 2,
            "hash_ids": ids,
        }
    )


def test_bailian_ids_are_chained_and_parents_make_sessions(tmp_path):
    rows = "\n".join(
        [
            bailian_line(10, -1, 1.25, 40, [1, 2, 3]),
            bailian_line(11, 10, 2.0, 48, [1, 2, 7]),
            bailian_line(12, 11, 3.0, 40, [5, 2]),
        ]
    )
    a, b, c = open_trace(write(tmp_path, "q.jsonl", rows))
    assert (a.block_tokens, a.tenant, b.arrival_s) == (16, "text", 0.75)
    assert a.block_ids[:2] == b.block_ids[:2] and a.block_ids[2] != b.block_ids[2]
    assert a.block_ids[1] != c.block_ids[1] and len(c.block_ids) == 2
    assert [r.session for r in (a, b, c)] == ["10", "10", "10"]


def sharegpt(*conversations):
    return [
        {"id": name, "conversations": [{"from": who, "value": text} for who, text in turns]}
        for name, turns in conversations
    ]


@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt_turns_grow_one_chain(tmp_path, indent):
    chat = [("human", "a" * 300), ("gpt", "b" * 90), ("human", "and?"), ("gpt", "c" * 41)]
    data = sharegpt(("x", chat), ("y", [("human", "a" * 300), ("gpt", "ok")]), ("z", []))
    path = write(tmp_path, "s.json", json.dumps(data, indent=indent))
    first, other, second = open_trace(path)
    assert [r.session for r in (first, other, second)] == ["x", "y", "x"]
    assert [r.arrival_s for r in (first, other, second)] == [0, 1, 30]
    # "human: " + 300 a + line end = 308 bytes, 4 a token; the answer is 91 bytes.
    assert (first.input_tokens, first.output_tokens) == (77, 23)
    full = first.input_tokens // 16
    assert first.block_ids[:full] == second.block_ids[:full] == other.block_ids[:full]
    assert len(second.block_ids) == -(-second.input_tokens // 16)


def test_sharegpt_lines_and_roles(tmp_path):
    messages = [{"role": "user", "content": "q" * 99}, {"role": "assistant", "content": "r"}]
    rows = "\n".join(json.dumps({"messages": messages}) for _ in range(3))
    assert len(list(open_trace(write(tmp_path, "s.jsonl.gz", rows)))) == 3


def test_chained_ids_name_all_before_them():
    a, b = chained([b"1", b"2", b"3"]), chained([b"0", b"2", b"3"])
    assert a[:2] == chained([b"1", b"2"]) and not set(a) & set(b)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compressed_files_read_alike(tmp_path, suffix):
    text = "\n".join(mooncake_line(n) for n in range(50))
    assert len(list(open_trace(write(tmp_path, f"t.jsonl{suffix}", text)))) == 50


@pytest.mark.parametrize("name", ["t.jsonl", "t.gz", "t.zst"])
@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress, bytes])
def test_compression_is_told_by_content(tmp_path, name, compress):
    path = tmp_path / name
    path.write_bytes(compress("\n".join(mooncake_line(n) for n in range(50)).encode()))
    assert detect(str(path)) == "mooncake"
    assert len(list(open_trace(path))) == 50


@pytest.mark.parametrize("format", ["auto", *readers.FORMATS])
@pytest.mark.parametrize("text", ["a\x1b[31m,\x07\x9b\u202e\n", "a\rb\x1b\n", "\x1b" * 5000])
def test_no_error_acts_on_a_terminal(tmp_path, format, text):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    with pytest.raises(InputError) as raised:
        list(open_trace(path, format))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1500


def test_unsorted_rows_are_sorted_stably(tmp_path):
    stamps = [5, 0, 5, 3, 0]
    text = "\n".join(mooncake_line(stamp, output=n + 1) for n, stamp in enumerate(stamps))
    found = list(open_trace(write(tmp_path, "t.jsonl", text)))
    assert [r.output_tokens for r in found] == [2, 5, 4, 1, 3]
    assert [r.id for r in found] == [0, 1, 2, 3, 4]
    assert [r.arrival_s for r in found] == [0, 0, 0.003, 0.005, 0.005]


def test_a_row_too_far_out_of_place_is_named():
    rows = [(Place("f", n + 1), Request(n, s, 1, 1)) for n, s in enumerate([5.0, 6.0, 7.0, 1.0])]
    with pytest.raises(TraceError, match=r"^f:4: stamp lies 5 s before"):
        list(in_order(iter(rows), window=1))
    assert [r.arrival_s for r in in_order(iter(rows), window=3)] == [1, 5, 6, 7]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 5))
def test_window_sort_is_a_stable_sort_when_it_ends(jitter, window):
    rows = [
        (Place("f", n), Request(n, float(n // 2 + extra % 3), 1, 1))
        for n, extra in enumerate(jitter)
    ]
    try:
        found = list(in_order(iter(rows), window))
    except TraceError:
        return
    assert found == sorted((r for _, r in rows), key=lambda r: r.arrival_s)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BAD = [
    ("t.jsonl", mooncake_line(tokens=20), r"t\.jsonl:1: hash_ids: found 2 ids .* needs 1"),
    ("t.jsonl", mooncake_line() + "\n" + mooncake_line(tokens=20), r"jsonl:2: hash_ids"),
    ("t.jsonl", mooncake_line() + "\n{", r"jsonl:2: is not JSON"),
    ("t.jsonl", mooncake_line() + "\n[]", r"jsonl:2: found a JSON list"),
    ("t.jsonl", mooncake_line(tokens=0, ids=()), r":1: input_length: found 0, needs .* at least 1"),
    ("t.jsonl", mooncake_line(output=2.5), r":1: output_length: found 2\.5"),
    ("t.jsonl", mooncake_line(stamp=-1), r":1: timestamp: found -1"),
    ("t.jsonl", mooncake_line(stamp="x"), r":1: timestamp: found 'x'"),
    ("t.jsonl", mooncake_line(ids=("a", "b")), r":1: hash_ids: found \['a', 'b'\]"),
    ("t.jsonl", '{"timestamp": 0, "input_length": 5}', r":1: output_length: found nothing"),
    ("a.csv", AZURE + "2023-11-16 18:15:46,374\n", r"a\.csv:2: found 2 fields, needs 3"),
    ("a.csv", AZURE + "yesterday,374,44\n", r":2: TIMESTAMP: found 'yesterday'"),
    ("a.csv", AZURE + "2023-13-16 18:15:46,374,44\n", r":2: TIMESTAMP: found"),
    ("a.csv", "TIMESTAMP,ContextTokens\n1,2\n", r":1: the header has no column GeneratedTokens"),
    ("a.csv", AZURE, r"holds no request"),
    ("e.jsonl", "", r"is empty"),
    ("u.jsonl", "hello\nworld\n", r"u\.jsonl:1: no known trace format .*mooncake"),
    ("s.json", '[{"conversations": [{"from": "human"}]}]', r"s\.json:1: a message needs text"),
    ("s.json", '[{"conversations": []},\n\n {"conversations": 3}]', r"s\.json:3: needs an object"),
    ("s.json", '[{"conversations": []},\n {"conv', r"s\.json:2: is not JSON"),
    ("q.jsonl", bailian_line(1, -1, 0, 40, [1]), r":1: hash_ids: found 1 .* needs 2 or 3"),
    ("t.jsonl", mooncake_line().encode() + b"\n\xff\xfe\n", r"t\.jsonl:2: is not UTF-8 text"),
    ("x.parquet", b"PAR1 broken", r"x\.parquet: cannot be read as Parquet"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_errors_name_file_line_field_and_remedy(tmp_path, name, text, message):
    with pytest.raises(InputError, match=message) as caught:
        list(open_trace(write(tmp_path, name, text)))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_missing_file_unknown_format_and_damaged_gzip(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read: No such file"):
        open_trace(tmp_path / "none.jsonl")
    path = write(tmp_path, "t.jsonl", mooncake_line())
    with pytest.raises(InputError, match="format: found 'csv'"):
        open_trace(path, "csv")


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)]
)
def test_a_compressed_file_cut_short_is_an_error(tmp_path, suffix, compress):
    chance = random.Random(0)
    rows = [mooncake_line(n, ids=(chance.getrandbits(60), n)) for n in range(4000)]
    data = compress("\n".join(rows).encode())
    cut = tmp_path / f"cut.jsonl{suffix}"
    for size in (len(data) // 2, len(data) - 3):
        cut.write_bytes(data[:size])
        with pytest.raises(InputError, match=r"cut\.jsonl\S+:\d+: cannot be read further"):
            list(open_trace(cut, "mooncake"))


def test_zstd_frames_in_sequence_are_one_file(tmp_path):
    path = tmp_path / "t.jsonl.zst"
    frames = [zstandard.compress(f"{mooncake_line(n)}\n".encode()) for n in range(30)]
    path.write_bytes(b"".join(frames))
    assert len(list(open_trace(path))) == 30


def some_requests(count=100):
    return [
        Request(n, n * 0.1, 600 + n % 400, 7, (n, n + 1), 512, f"s{n % 3}", "t", "gold")
        for n in range(count)
    ]


def test_parquet_round_trip_in_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_form, "ROWS_PER_GROUP", 32)
    path = str(tmp_path / "t.parquet")
    assert save(path, iter(some_requests()), ["made by a test"]) == 100
    assert list(open_trace(path)) == some_requests()
    assert parquet_form.notes(path) == ["made by a test"]
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    assert file.metadata.num_row_groups == 4
    assert file.schema_arrow.field("arrival_s").metadata[b"unit"].startswith(b"s ")


def test_parquet_of_another_version_is_refused(tmp_path, monkeypatch):
    path = str(tmp_path / "t.parquet")
    monkeypatch.setattr(parquet_form, "VERSION", 99)
    save(path, some_requests(1))
    monkeypatch.undo()
    with pytest.raises(InputError, match="found trace version 99, this program reads version 1"):
        open_trace(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_mooncake_round_trip(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    plain = [Request(n, n * 0.5, 600, 7, (n, n + 1), 512) for n in range(20)]
    save(path, plain)
    assert list(open_trace(path)) == plain


def test_a_failed_save_leaves_nothing(tmp_path):
    path = tmp_path / "t.jsonl"
    with pytest.raises(InputError, match="has blocks of 16 tokens"):
        save(path, [Request(0, 0.0, 16, 1, (1,), 16)])
    with pytest.raises(InputError, match="needs a name that ends in"):
        save(tmp_path / "t.csv", [])
    with pytest.raises(InputError, match="cannot be written"):
        save(tmp_path / "none" / "t.jsonl", [])
    assert list(tmp_path.iterdir()) == []


def test_reading_is_lazy(tmp_path, monkeypatch):
    """A bad row far down is met only when it is reached: the file is not read up front."""
    monkeypatch.setattr(readers, "WINDOW", 100)
    lines = "\n".join([*(mooncake_line(n) for n in range(5000)), "{"])
    rows = open_trace(write(tmp_path, "t.jsonl", lines))
    assert next(rows).arrival_s == 0
    with pytest.raises(TraceError, match=":5001:"):
        list(rows)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_with_one_line(data):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "g.jsonl"
        for prefix in (b"", mooncake_line().encode() + b"\n", b"[", AZURE.encode()):
            path.write_bytes(prefix + data)
            try:
                found = list(open_trace(path))
            except InputError:
                continue
            assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(found))


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real traces beside the checkout")
def test_real_traces_are_recognised():
    assert detect(str(REAL / "mooncake_conversation.jsonl")) == "mooncake"
    assert detect(str(REAL / "azure_llm_2023_conv.csv")) == "azure"


def test_a_full_disk_is_no_fault_of_the_trace(tmp_path):
    full = unwritable(tmp_path / "t.parquet", OSError(errno.ENOSPC, "[errno 28] No space left"))
    assert type(full) is OSError and full.filename == str(tmp_path / "t.parquet")
    for name in ("t.parquet", "t.jsonl", "t.jsonl.gz"):
        with pytest.raises(TraceError, match=r"cannot be written: .*No such file or directory"):
            save(tmp_path / "absent" / name, [Request(0, 0.0, 10, 1)])
