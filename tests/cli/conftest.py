"""A stand-in for a loaded model with a real tokenizer: the command line is tested without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from policies.types import Mode, Placement
from river_offload.cli import runtime
from river_offload.config import RiverConfig
from river_offload.errors import ContextError

MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, so that characters beyond ASCII span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(MARKS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", extra_special_tokens=MARKS[:-1])
    fast.chat_template = template
    return fast


class StubCache:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def get_seq_length(self) -> int:
        return len(self.ids)


class StubTrace:
    def write_jsonl(self, path: str | Path) -> None:
        Path(path).write_text('{"version": 1}\n')


class StubModel:
    """Answers with the scripted texts in turn, one token at a time, and keeps an account of how it was called."""

    def __init__(self, answers: list[str], **arguments: Any) -> None:
        self.answers = list(answers)
        self.calls: list[dict[str, Any]] = []
        self.fed: list[int] = []
        self.prompts: list[str] = []
        self.closed = 0
        self.on_token: Callable[[int], None] = lambda index: None
        self.device = "cpu"
        self.generation_config = SimpleNamespace(pad_token_id=None, eos_token_id=[self._end(), 5])
        arguments.pop("progress", None)
        self.river = self
        self.config = RiverConfig.from_options(model="stub", **arguments)
        self.mode, self.tau, self.num_layers = self.config.mode, self.config.tau, 30
        self.tokenizer = make_tokenizer()
        self.trace = StubTrace()
        self.notes: list[str] = []
        self.progress: Any = None
        self.placement = Placement(
            mode=Mode.parse(self.mode), min_exit=1, resident_layers=(0, 1), streamed_layers=tuple(range(2, 30)),
            river_layers=tuple(range(1, 30)), slots=2, slot_bytes=1000, embed_tier="device",
            budget_bytes=200 * 2**20, terms={"kv": 100 * 2**20},
        )  # fmt: skip
        self.held_kv_bytes = 20 * 2**20
        self._new_tokens = self._prompt_tokens = 0

    @staticmethod
    def _end() -> int:
        return make_tokenizer().convert_tokens_to_ids("<|end|>")

    def new_cache(self) -> StubCache:
        return StubCache()

    def close(self) -> None:
        self.closed += 1

    def generate(self, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.calls.append(arguments)
        prompt = input_ids[0].tolist()
        self.prompts.append(self.tokenizer.decode(prompt))
        if len(prompt) + arguments["max_new_tokens"] > self.config.context:
            raise ContextError(f"{len(prompt)} + {arguments['max_new_tokens']} tokens: more than the context")
        cache = arguments.get("past_key_values") or StubCache()
        assert prompt[: len(cache.ids)] == cache.ids, "the cache is not the beginning of the prompt"
        self.fed.append(len(prompt) - len(cache.ids))
        streamer = arguments["streamer"]
        streamer.put(input_ids)
        answer = self.tokenizer(self.answers.pop(0), add_special_tokens=False)["input_ids"] + [self._end()]
        sequence = list(prompt)
        for index, token in enumerate(answer[: arguments["max_new_tokens"]]):
            self.on_token(index)
            cache.ids = list(sequence)
            sequence.append(token)
            streamer.put(torch.tensor([token]))
            done = [bool(stop(torch.tensor([sequence]), None).all()) for stop in arguments.get("stopping_criteria", [])]
            if any(done):
                break
        streamer.end()
        self._prompt_tokens, self._new_tokens = len(prompt), len(sequence) - len(prompt)
        return torch.tensor([sequence])

    def held(self) -> dict[str, int]:
        return {"backbone": 70 * 2**20, "kv": self.held_kv_bytes, "logits": 0}

    def held_at_most(self):
        return {}

    def report(self) -> dict[str, Any]:
        return {
            "new_tokens": self._new_tokens,
            "prompt_tokens": self._prompt_tokens,
            "mean_depth": 4.25,
            "depths": [4] * self._new_tokens,
            "prefill_depth": 6,
            "prefill": {"policy": "exit", "backbone_from_tokens": None, "mode": "exit"},
            "bytes_streamed": 3 * 2**30,
            "peak_device_bytes": 190 * 2**20,
            "budget_bytes": 200 * 2**20,
            "kernel": "torch int4",
            "seconds": {"load": 1.5, "prefill": 0.5, "decode": float("nan")},
            "tokens_per_s": 23.06,
            "placement": {
                "resident_layers": (0, 1), "streamed_layers": (2, 3), "slots": 2, "embed_tier": "device",
                "prefill_chunk": 512, "states_tier": "device", "more": 1,
            },
        }  # fmt: skip


class Stub:
    """What a test sets before it runs a command, and what it finds afterwards."""

    def __init__(self) -> None:
        self.answers = ["Blue light scatters."]
        self.prepare: Callable[[StubModel], None] = lambda model: None
        self.loads: list[dict[str, Any]] = []
        self.model: StubModel | None = None

    def load(self, model: str, **arguments: Any) -> StubModel:
        self.loads.append({"model": model, **arguments})
        self.model = StubModel(self.answers, **arguments)
        self.prepare(self.model)
        return self.model


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Every command of the test loads this stub."""
    stub = Stub()
    monkeypatch.setattr(runtime, "load", stub.load)
    return stub


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()
