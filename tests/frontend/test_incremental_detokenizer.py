"""Text of a stream: the same as one decode, and never part of a stop string."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shared.detokenizer import DetokenizedRequest, Detokenizer
from shared.incremental_detokenizer import StopFinder, TextDecoder
from shared.messages import BatchTokenIDOut, FinishReason, SamplingParams
from tests.frontend.tokenizers_for_tests import byte_level, metaspace, sentencepiece_like

TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece_like(), "metaspace": metaspace()}
DECODERS = {name: TextDecoder(tokenizer.backend_tokenizer) for name, tokenizer in TOKENIZERS.items()}
EMOJI = "Grüße, 世界 🦙👩‍👩‍👧 ا"

kinds = st.sampled_from(sorted(TOKENIZERS))
id_lists = st.lists(st.integers(0, 280), max_size=30)


def one_decode(tokenizer: PreTrainedTokenizerFast, ids: list[int], skip: bool) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def streamed(kind: str, ids: list[int], params: SamplingParams, reason: FinishReason, cuts: list[int]) -> list[str]:
    """The deltas when the ids come in pieces that end at `cuts`."""
    request = DetokenizedRequest(DECODERS[kind], params)
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    pieces = [ids[start:end] for start, end in pairwise(bounds)]
    reasons = [None] * (len(pieces) - 1) + [reason]
    return [request.push(piece, end) for piece, end in zip(pieces, reasons, strict=True)]


@settings(max_examples=400, deadline=None)
@example(kind="sentencepiece", ids=[132, 270, 4], skip=True, cuts=[1, 2])  # 270 is beyond the tokenizer
@given(kind=kinds, ids=id_lists, skip=st.booleans(), cuts=st.lists(st.integers(1, 30)))
def test_joined_deltas_are_one_decode(kind: str, ids: list[int], skip: bool, cuts: list[int]) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    deltas = streamed(kind, ids, params, FinishReason("length"), cuts)
    assert "".join(deltas) == one_decode(TOKENIZERS[kind], ids, skip)


@settings(max_examples=400, deadline=None)
@given(raw=st.binary(max_size=12))
def test_broken_utf8_reads_as_the_tokenizer_reads_it(raw: bytes) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    alphabet = {DECODERS["byte-level"].token_bytes(token_id): token_id for token_id in range(4, 260)}
    ids = [alphabet[bytes([byte])] for byte in raw]
    deltas = streamed("byte-level", ids, SamplingParams(), FinishReason("length"), list(range(len(ids))))
    assert "".join(deltas) == one_decode(tokenizer, ids, True) == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_characters_of_many_tokens_come_whole(kind: str) -> None:
    ids = TOKENIZERS[kind].encode(EMOJI, add_special_tokens=False)
    deltas = streamed(kind, ids, SamplingParams(), FinishReason("length"), list(range(len(ids))))
    assert "".join(deltas) == EMOJI
    assert "\ufffd" not in "".join(deltas)


def test_a_leading_space_is_kept_where_the_tokenizer_keeps_it() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    for text in (" a", "  a a", "a  a"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        cuts = list(range(len(ids)))
        deltas = streamed("sentencepiece", ids, SamplingParams(), FinishReason("length"), cuts)
        assert "".join(deltas) == text


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("interval", [1, 5])
def test_a_stop_string_across_tokens_is_never_shown(kind: str, interval: int) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("the lo the a, 世界 ab lob 🦙 the loa, b", add_special_tokens=False)
    text = one_decode(tokenizer, ids, True)
    for border in range(1, len(text)):
        for before in range(1, 4):
            for after in range(1, 4):
                stop = text[max(0, border - before) : border + after]
                check_stop(kind, ids, (stop,), interval)


@settings(max_examples=300, deadline=None)
@given(
    kind=kinds,
    ids=id_lists,
    stops=st.lists(st.text(alphabet=" athelo世<", min_size=1, max_size=4), min_size=1, max_size=3),
    interval=st.integers(1, 7),
)
def test_any_stop_strings_cut_at_the_first_occurrence(
    kind: str, ids: list[int], stops: list[str], interval: int
) -> None:
    check_stop(kind, ids, tuple(stops), interval)


def check_stop(kind: str, ids: list[int], stops: tuple[str, ...], interval: int) -> None:
    """The scheduler stops at the first token whose text so far holds a stop; the deltas end before it."""
    tokenizer = TOKENIZERS[kind]
    finder = StopFinder(DECODERS[kind], stops, skip_special_tokens=True)
    found: str | None = None
    length = 0
    for length in range(1, len(ids) + 1):
        found = finder.push(ids[length - 1])
        assert (found is not None) == any(stop in one_decode(tokenizer, ids[:length], True) for stop in stops)
        if found is not None:
            break
    reason = FinishReason("stop", matched=found) if found is not None else FinishReason("length")
    params = SamplingParams(stop=stops)
    cuts = list(range(interval, length, interval))
    deltas = streamed(kind, ids[:length], params, reason, cuts)
    text = one_decode(tokenizer, ids[:length], True)
    ends = [text.find(stop) for stop in stops if stop in text]
    assert "".join(deltas) == (text[: min(ends)] if ends else text)


def test_of_two_stops_the_earlier_one_cuts() -> None:
    ids = TOKENIZERS["byte-level"].encode("a lob", add_special_tokens=False)
    for stops in (("lo", "lob"), ("lob", "lo"), ("b", "lo")):
        params = SamplingParams(stop=stops)
        deltas = streamed("byte-level", ids, params, FinishReason("stop", "lo"), [1, 2, 3])
        assert "".join(deltas) == "a "


def test_no_stop_trim_keeps_stop_strings_and_stop_tokens() -> None:
    ids = [*TOKENIZERS["byte-level"].encode("a lob", add_special_tokens=False), 1]
    for skip, text in ((True, "a lob"), (False, "a lob<eos>")):
        params = SamplingParams(stop=("lo",), no_stop_trim=True, skip_special_tokens=skip)
        assert "".join(streamed("byte-level", ids, params, FinishReason("stop", 1), [2])) == text


@pytest.mark.parametrize("skip", [True, False])
def test_the_stop_token_is_not_in_the_text(skip: bool) -> None:
    ids = [2, *TOKENIZERS["byte-level"].encode("ab", add_special_tokens=False), 1]
    params = SamplingParams(skip_special_tokens=skip)
    text = "".join(streamed("byte-level", ids, params, FinishReason("stop", matched=1), [1, 2, 3]))
    assert text == ("ab" if skip else "<user>ab")


def test_a_finished_or_aborted_request_leaves_nothing() -> None:
    detokenizer = Detokenizer(DECODERS["byte-level"])
    for reason in (FinishReason("length"), FinishReason("abort")):
        texts = []
        for ids, end in (([110], None), ([], reason)):
            batch = BatchTokenIDOut(["x"], [ids], [end], [1], [1], [0], [SamplingParams()], [None])
            texts += detokenizer.process(batch).texts
        assert "".join(texts) == one_decode(TOKENIZERS["byte-level"], [110], True)
        assert len(detokenizer) == 0


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    decoder = DECODERS[kind]
    ids = [*TOKENIZERS[kind].encode("the a a", add_special_tokens=False), 9999]
    text = one_decode(TOKENIZERS[kind], ids, False)
    assert b"".join(map(decoder.token_bytes, ids)).decode().strip() == text.strip()
