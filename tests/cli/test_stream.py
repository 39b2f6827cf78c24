from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from river_offload.cli.turn import TextStream


def stream(tokenizer, ids):
    pieces = []
    stream = TextStream(tokenizer, pieces.append)
    stream.put(torch.tensor([[1, 2, 3]]))
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert stream.text == "".join(pieces)
    return pieces


def test_characters_are_never_shown_in_halves(byte_tokenizer):
    pieces = stream(byte_tokenizer, byte_tokenizer("a☁é")["input_ids"])
    assert pieces == ["a", "☁", "é"]


def test_half_a_character_at_the_end_is_shown_and_special_tokens_never(byte_tokenizer):
    ids = [*byte_tokenizer("a☁")["input_ids"][:-1], byte_tokenizer.eos_token_id]
    assert stream(byte_tokenizer, ids)[0] == "a"
    assert "".join(stream(byte_tokenizer, ids)) == "a\ufffd"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(max_size=12))
def test_pieces_add_up_to_the_whole(byte_tokenizer, text):
    ids = byte_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(stream(byte_tokenizer, ids)) == text
