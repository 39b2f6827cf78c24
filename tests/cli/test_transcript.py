from __future__ import annotations

import pytest

from river_offload.cli.transcript import Transcript, encode_chat, encode_prompt, encode_text
from river_offload.errors import UsageError

BAD = "h\udcff"


@pytest.mark.parametrize(
    "encode",
    [
        lambda tokenizer: encode_text(tokenizer, BAD),
        lambda tokenizer: encode_chat(tokenizer, [{"role": "user", "content": BAD}]),
        lambda tokenizer: encode_prompt(tokenizer, BAD, system=None, raw=True),
        lambda tokenizer: encode_prompt(tokenizer, "a", system=BAD, raw=False),
        lambda tokenizer: Transcript(tokenizer, object, system=None, raw=False).ask(BAD),
        lambda tokenizer: Transcript(tokenizer, object, system=None, raw=True).ask(BAD),
        lambda tokenizer: Transcript(tokenizer, object, system=BAD, raw=False).ask("a"),
    ],
)
def test_every_way_of_text_to_a_model_refuses_what_is_not_text(byte_tokenizer, encode):
    with pytest.raises(UsageError, match="not UTF-8"):
        encode(byte_tokenizer)
