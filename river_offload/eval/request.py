"""What a bench is asked to run: how many tokens, at which depths, with whose luck. Plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from policies.acceptance import Acceptance, verdicts
from policies.depths import Depths, ListedDepths, looks_like_file, parse_depths
from river_offload.errors import UsageError
from river_offload.trace import Trace

TOKENS = 64
PROMPT_TOKENS = 32
WARMUP_TOKENS = 1
"""Tokens after the prompt's own that are not counted: the first one runs every kernel for the first time."""


@dataclass(frozen=True)
class Request:
    """What to run."""

    tokens: int | None = None
    """Tokens to count; None for TOKENS, or as many as a trace of depths has."""
    prompt_tokens: int = PROMPT_TOKENS
    depths: Depths | None = None
    """None: the mode decides, as ever."""
    acceptance: Acceptance | None = None
    """What checks are to find, in modes that draft; None: what the model itself says."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UsageError for counts below 1."""
        for name, value in (("tokens", self.tokens), ("prompt_tokens", self.prompt_tokens)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}: expected a whole number of at least 1")

    def counted(self) -> int:
        """Tokens that are counted. Raises UsageError when a trace has too few passages to count any."""
        if self.tokens is not None:
            return self.tokens
        if not isinstance(self.depths, ListedDepths):
            return TOKENS
        count = len(self.depths.depths) - 1 - WARMUP_TOKENS
        if count < 1:
            raise UsageError(
                f"{self.depths} has {len(self.depths.depths)} passages: the prompt and a first token, which is not "
                "counted, take two, so at least 3 are needed"
            )
        return count

    def new_tokens(self) -> int:
        """Tokens that are generated, one a passage: the prompt's, the first ones, the counted ones."""
        return 1 + WARMUP_TOKENS + self.counted()


def read_depths(text: str) -> Depths:
    """`fixed:D`, `geometric:MEAN[,full=SHARE]` or the depths of a trace file. Raises UsageError."""
    if looks_like_file(text):
        trace = Trace.read_jsonl(text)
        return ListedDepths(tuple(record.depth for record in trace.records), text)
    try:
        return parse_depths(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_acceptance(path: str) -> Acceptance:
    """The verdicts of a trace of mode lossless. Raises UsageError that names the file."""
    try:
        return Acceptance(verdicts(Trace.read_jsonl(path).records), path)
    except ValueError as error:
        raise UsageError(f"acceptance {path}: {error}") from error


def forced_depths(request: Request, num_layers: int, min_exit: int) -> tuple[int, ...] | None:
    """The depth of each passage, the prompt's first; None when the mode decides.

    A rule gives those of the counted tokens; the passages before go as deep as the deepest of them, as a prompt, whose
    signal is the smallest over its tokens, does. Raises UsageError for depths that the model or the river cannot have.
    """
    if request.depths is None:
        return None
    before, counted = 1 + WARMUP_TOKENS, request.counted()
    try:
        if isinstance(request.depths, ListedDepths):
            return request.depths.draw(before + counted, num_layers, lowest=min_exit)
        drawn = request.depths.draw(counted, num_layers, lowest=min_exit, seed=request.seed)
    except ValueError as error:
        raise UsageError(f"depths: {error}") from error
    return (max(drawn),) * before + drawn
