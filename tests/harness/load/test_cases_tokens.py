"""Measurement cases 1 to 10: tokens, times and endings, each with neighbours of its kind."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripted import JSON, SSE, batch, chat, event, play, text, usage

from harness.load.figures import ClientFigures, PhaseFigures, remarks
from harness.load.flight import Flight
from harness.load.spec import LoadSpec
from harness.load.sse import SseParser
from harness.load.tables import TABLES, client_table, requests_table, tokens_table
from harness.targets.base import TargetSpec
from results import metrics
from results.metrics import Slo
from results.records import Status
from results.summary import Counts, PhaseSummary
from results.tokens import gaps, times_us

DONE = b"data: [DONE]\n\n"


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else round((seconds - 100.0) * 1e3, 6)


def ttft_ms(flight: Flight) -> float:
    return float(metrics.ttft_s(batch(flight).requests())[0]) * 1e3


def tpot_ms(flight: Flight) -> float:
    return float(metrics.tpot_s(batch(flight).requests())[0]) * 1e3


def gaps_ms(flight: Flight) -> list[float]:
    return [round(each * 1e3, 6) for each in np.diff(flight.chunk_s).tolist()]


# 1. Empty first chunk


def test_a_role_or_an_empty_string_is_no_token() -> None:
    flight = play(
        [
            (10, chat("", role="assistant")),
            (500, chat("Hel")),
            (520, chat("lo", "stop")),
            (520, usage(2)),
            (520, DONE),
        ],
        asked=2,
    )
    assert ms(flight.first_byte_s) == 10
    assert ttft_ms(flight) == pytest.approx(500)
    assert gaps_ms(flight) == [20]
    assert tpot_ms(flight) == pytest.approx(20)
    assert flight.status is Status.SUCCEEDED


@pytest.mark.parametrize(
    "empty",
    [
        chat(role="assistant"),
        {"choices": [{"delta": {"role": "assistant", "content": None}, "finish_reason": None}]},
        chat(""),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": None}]},
        {"choices": []},
        {"choices": [], "usage": None},
        text(""),
        {"id": "x", "object": "chat.completion.chunk"},
    ],
)
def test_chunks_that_carry_no_token(empty: dict[str, object]) -> None:
    flight = play([(10, empty), (500, chat("a")), (520, chat("b", "stop")), (520, DONE)])
    assert ms(flight.first_byte_s) == 10
    assert [ms(each) for each in flight.chunk_s] == [500, 520]


def test_an_empty_text_with_a_token_id_is_a_token() -> None:
    flight = play(
        [(10, text("", token_ids=[7])), (20, text("a", "stop", token_ids=[8])), (20, DONE)]
    )
    assert [ms(each) for each in flight.chunk_s] == [10, 20]
    assert flight.client_tokens == 2


def test_a_tool_call_is_a_token() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": ""}}]
    flight = play(
        [(10, chat("", role="assistant")), (30, chat(None, "tool_calls", tool_calls=call))]
    )
    assert ttft_ms(flight) == pytest.approx(30)
    assert flight.status is Status.SUCCEEDED


# 2. Reasoning before the answer


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_counts_for_ttft_and_not_for_the_answer(name: str) -> None:
    thinking = [(at, chat(None, **{name: "hm"})) for at in range(100, 881, 60)]
    flight = play([*thinking, (900, chat("42", "stop")), (900, DONE)])
    assert ttft_ms(flight) == pytest.approx(100)
    assert ms(flight.first_answer_s) == 900


def test_a_stream_that_ends_in_reasoning_has_no_answer() -> None:
    thinking = [(at, chat(None, reasoning_content="hm")) for at in range(100, 881, 60)]
    flight = play([*thinking, (900, chat(None, "length")), (900, DONE)])
    assert ttft_ms(flight) == pytest.approx(100)
    assert flight.first_answer_s is None
    assert flight.status is Status.SUCCEEDED


# 3. Several tokens a chunk


def several_a_chunk() -> Flight:
    return play(
        [
            (100, text("a b c d")),
            (140, text("e f g h")),
            (180, text("i j", "length")),
            (180, usage(10)),
            (180, DONE),
        ],
        asked=10,
    )


def test_tpot_is_by_tokens_and_gaps_are_of_chunks() -> None:
    flight = several_a_chunk()
    assert gaps_ms(flight) == [40, 40]
    assert tpot_ms(flight) == pytest.approx(80 / 9)


def test_a_chunk_gap_is_never_called_itl() -> None:
    found = gaps(tokens_table(batch(several_a_chunk()), "c", TABLES["tokens"]))
    assert found.chunked
    assert found.values_s[found.values_s > 0].tolist() == [0.04, 0.04]


def test_counts_by_id_say_how_tokens_fall_on_chunks() -> None:
    flight = play(
        [
            (100, text("abcd", token_ids=[1, 2, 3, 4])),
            (140, text("efgh", token_ids=[5, 6, 7, 8])),
            (180, text("ij", "length", token_ids=[9, 10])),
            (180, usage(10)),
        ],
        asked=10,
    )
    row = tokens_table(batch(flight), "c", TABLES["tokens"]).to_pylist()[0]
    assert [run["n"] for run in row["runs"]] == [4, 4, 2]
    assert times_us(row) == [100_000] * 4 + [140_000] * 4 + [180_000] * 2
    assert flight.server_tokens == flight.client_tokens == 10


def test_one_token_a_chunk_is_itl() -> None:
    flight = play([(100, text("a")), (140, text("b")), (190, text("c", "length")), (190, usage(3))])
    table = tokens_table(batch(flight), "c", TABLES["tokens"])
    assert not gaps(table).chunked
    assert times_us(table.to_pylist()[0]) == [100_000, 140_000, 190_000]


# 4. Framing of a stream (the boundaries of reads are searched in test_load_sse)


def test_reads_that_cut_lines_and_characters() -> None:
    parser = SseParser()
    reads = [b"data: A\n", b"\ndata:B\r\n\r\ndata: {C", b"}\n\n: ping\n\n", b"data: [DONE]"]
    found = [payload for read in reads for payload in parser.feed(read)]
    assert found == [b"A", b"B", b"{C}"]
    assert parser.finish() == [b"[DONE]"]


def test_a_character_cut_in_two_is_whole() -> None:
    data = event(chat("€", "stop")).replace(b"\\u20ac", "€".encode())
    cut = data.index("€".encode()) + 1
    flight = play([(10, data[:cut]), (20, data[cut:])])
    assert flight.failure == ""
    assert [ms(each) for each in flight.chunk_s] == [20]


def test_what_is_not_json_fails_with_what_was_found() -> None:
    flight = play([(10, b"data: {oops\n\n"), (20, chat("a", "stop"))])
    assert flight.status is Status.FAILED
    assert "{oops" in flight.failure


@pytest.mark.parametrize("odd", [b"[1]", b"3", b'"text"', b'{"choices": 3}', b'{"choices": [3]}'])
def test_json_of_another_form_fails_and_nothing_breaks(odd: bytes) -> None:
    flight = play([(10, event(odd)), (20, chat("a", "stop"))])
    assert flight.status is Status.FAILED


# 5. Usage-only last chunk


def test_usage_is_no_token_and_ends_nothing() -> None:
    flight = play([(100, chat("a")), (120, chat("b", "stop")), (150, usage(2)), (150, DONE)])
    assert ttft_ms(flight) == pytest.approx(100)
    assert [ms(each) for each in flight.chunk_s][-1] == 120
    assert ms(flight.ended_s) == 150
    assert float(metrics.e2e_s(batch(flight).requests())[0]) == pytest.approx(0.120)


def test_usage_with_every_chunk_ends_with_the_total() -> None:
    def counted(content: str, tokens: int, finish: str | None = None) -> dict[str, object]:
        return chat(content, finish) | {"usage": {"completion_tokens": tokens, "prompt_tokens": 9}}

    flight = play([(1, counted("a", 1)), (2, counted("b", 2)), (3, counted("c", 3, "stop"))])
    assert (flight.server_tokens, flight.prompt_tokens) == (3, 9)


# 6. Answer in one chunk


def test_an_answer_in_one_chunk_has_no_tpot() -> None:
    flight = play([(200, text("x" * 64, "length")), (200, usage(64)), (200, DONE)], asked=64)
    requests = batch(flight).requests()
    assert ttft_ms(flight) == pytest.approx(200)
    assert np.isnan(metrics.tpot_s(requests)).all()
    assert metrics.percentile(metrics.tpot_s(requests), 0.5) is None


def test_it_is_left_out_of_the_percentiles_and_counted() -> None:
    from results.summarise import counts

    whole = [(200, text("x" * 64, "length")), (200, usage(64)), (200, DONE)]
    streamed = [(10 * k, text("a")) for k in range(1, 11)]
    flights = [play(whole, asked=64)] * 7
    flights += [play([*streamed, (110, text("b", "stop")), (110, DONE)], asked=11)] * 10
    requests = batch(*flights).requests()
    assert metrics.percentile(metrics.tpot_s(requests), 0.9) == pytest.approx(0.010)
    assert (counts(requests).one_chunk, counts(requests).succeeded) == (7, 17)


@pytest.mark.parametrize(("ttft_s", "met"), [(0.3, True), (0.1, False)])
def test_a_tpot_limit_does_not_apply_and_the_rest_is_judged(ttft_s: float, met: bool) -> None:
    flight = play([(200, text("x" * 64, "length")), (200, usage(64))], asked=64)
    slo = Slo(ttft_s=ttft_s, tpot_s=0.001)
    assert metrics.met_slo(batch(flight).requests(), slo).tolist() == [met]


def test_an_answer_that_is_not_streamed_comes_in_one_instant() -> None:
    answer = {**text("a b", "stop"), "usage": {"completion_tokens": 2}}
    body = json.dumps(answer).encode()
    flight = play([(200, body[:20]), (210, body[20:])], headers=JSON)
    assert flight.status is Status.SUCCEEDED
    assert (flight.tokens_received, ms(flight.first_byte_s)) == (2, 200)
    assert ttft_ms(flight) == pytest.approx(210)
    assert np.isnan(tpot_ms(flight))


# 7. Token count


def test_the_servers_count_is_used_and_ours_stands_apart() -> None:
    flight = play([(100, text(" " * 100, "length")), (100, usage(100))], asked=100)
    assert flight.tokens_received == 100
    assert flight.client_tokens == 1
    row = requests_table(batch(flight), "c", TABLES["requests"]).to_pylist()[0]
    assert row["tokens_received"] == 100
    row = client_table(batch(flight), "c", TABLES["client"]).to_pylist()[0]
    assert (row["token_source"], row["client_tokens"], row["mismatch"]) == ("server", 1, True)


def test_without_usage_chunks_are_counted() -> None:
    flight = play([(100, text("a")), (110, text("b", "stop"))])
    assert (flight.server_tokens, flight.tokens_received) == (None, 2)


def test_a_server_that_counts_less_than_arrived_is_believed_and_flagged() -> None:
    flight = play([(1, text("a")), (2, text("b")), (3, text("c", "stop")), (3, usage(2))])
    row = client_table(batch(flight), "c", TABLES["client"]).to_pylist()[0]
    assert (row["server_tokens"], row["client_tokens"], row["mismatch"]) == (2, 3, True)
    assert row["token_source"] == "server"


# 8. Error inside a 200 stream


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "out of memory", "type": "server_error"}},
        {"error": "out of memory"},
        {"error": {"detail": "out of memory"}},
        {"choices": [], "error": {"message": {"error": "out of memory"}}},
    ],
)
def test_an_error_in_the_stream_fails_the_request(error: dict[str, object]) -> None:
    tokens = [(at, chat("a")) for at in (10, 20, 30)]
    flight = play([*tokens, (40, error), (40, DONE)])
    assert flight.status is Status.FAILED
    assert "out of memory" in flight.failure
    requests = batch(flight).requests()
    assert np.isnan(metrics.ttft_s(requests)).all()
    assert metrics.achieved_rate(requests) is None
    assert batch(flight).chunk_gaps_s().tolist() == []


def test_an_error_after_the_finish_reason_fails_too() -> None:
    flight = play([(10, chat("a", "stop")), (20, {"error": {"message": "late"}}), (20, DONE)])
    assert (flight.status, flight.failure) == (Status.FAILED, "error in the stream: late")


def test_the_finish_reason_error_fails() -> None:
    assert play([(10, chat("a")), (20, chat("", "error"))]).status is Status.FAILED


# 9. Truncated


@pytest.mark.parametrize("tail", [[], [(30, DONE)]])
def test_an_end_without_a_finish_reason_is_truncated(tail: list[tuple[float, bytes]]) -> None:
    flight = play([(10, chat("a")), (20, chat("b")), *tail])
    assert flight.status is Status.FAILED
    assert flight.failure.startswith("truncated")
    assert (
        requests_table(batch(flight), "c", TABLES["requests"]).to_pylist()[0]["tokens_received"]
        == 2
    )


def test_a_connection_that_breaks_is_truncated() -> None:
    flight = play([(10, chat("a"))], ends="truncated: closed before the response's end")
    assert flight.failure == "truncated: closed before the response's end"


def test_nothing_at_all_is_truncated() -> None:
    assert play([]).failure.startswith("truncated")


def test_fewer_tokens_than_asked_is_completed_and_short() -> None:
    from results.summarise import counts

    tokens = [(10 * at, chat("a")) for at in range(1, 10)]
    flight = play([*tokens, (100, chat("a", "stop")), (100, usage(10)), (100, DONE)], asked=1024)
    assert flight.status is Status.SUCCEEDED
    assert counts(batch(flight).requests()).short == 1


@pytest.mark.parametrize(
    ("ignore_eos", "short", "warned"), [(True, 3, True), (False, 3, False), (True, 0, False)]
)
def test_a_run_warns_of_short_answers_that_could_not_be(
    ignore_eos: bool, short: int, warned: bool
) -> None:
    counted = Counts(offered=9, succeeded=9, short=short)
    phase = PhaseFigures(
        PhaseSummary("load", counts=counted),
        None,
        ClientFigures(0, 0, 0, 0, 0, 0, None, None, None),
    )
    spec = LoadSpec(target=TargetSpec(ignore_eos=ignore_eos))
    said = [each for each in remarks(spec, [phase]) if "shorter than asked" in each]
    assert bool(said) == warned
    assert all(each.startswith(f"{short} answers") for each in said)


def test_answers_without_text_and_with_reasoning_only_are_told_apart() -> None:
    phase = PhaseFigures(
        PhaseSummary("load"), None, ClientFigures(0, 0, 0, 0, 3, 2, None, None, None)
    )
    said = remarks(LoadSpec(), [phase])
    assert len(said) == 2
    assert said[0].startswith("2 answers ended well and carried no text")
    assert said[1].startswith("3 answers ended before anything but reasoning")


# 10. A server that refuses looks fast


def refused(status: int, body: bytes) -> Flight:
    return play([(1, body)], status=status, headers=JSON)


def test_latency_is_of_what_succeeded_and_goodput_of_what_was_offered() -> None:
    answer = [(1000, text("a", "stop")), (1000, DONE)]
    flights = [play(answer) for _ in range(50)]
    flights += [refused(503, b'{"error": {"message": "busy"}}') for _ in range(50)]
    requests = batch(*flights).requests()
    assert metrics.mean(metrics.e2e_s(requests)) == pytest.approx(1.0)
    assert metrics.percentile(metrics.ttft_s(requests), 0.5) == pytest.approx(1.0)
    assert metrics.goodput(requests, Slo(ttft_s=2.0)) == 0.5
    assert flights[-1].failure == "HTTP 503: busy"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (429, b'{"message": "slow down"}', "HTTP 429: slow down"),
        (500, b"Internal Server Error", "HTTP 500: Internal Server Error"),
        (404, b"", "HTTP 404"),
        (400, b'{"detail": [{"msg": "bad"}]}', "HTTP 400: [{'msg': 'bad'}]"),
    ],
)
def test_a_refusal_keeps_what_the_server_said(status: int, body: bytes, said: str) -> None:
    assert refused(status, body).failure == said


def test_a_refusal_that_is_streamed_is_a_refusal() -> None:
    flight = play([(1, chat("a", "stop"))], status=503, headers=SSE)
    assert flight.status is Status.FAILED


def test_retries_are_counted() -> None:
    from results.summarise import counts

    flight = play([(10, chat("a", "stop"))])
    flight.attempts = 2
    assert counts(batch(flight).requests()).retried == 1
