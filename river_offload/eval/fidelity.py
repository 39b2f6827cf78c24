"""How near each mode comes to the backbone, for what: agreement and KL over backbone layers a token.

Teacher-forced, every way of running reads the backbone's own text and is asked for the next token. Free-running, it
writes its own text, and the backbone is asked at each place of that text what it would have put there.

A gate needs no run of its own when the text is given: drafted tokens, their margins and what the backbone says there
are recorded once, in blocks, and each gate is walked through the record. Layers a token count every passage that a
token needed: drafts, checks, exits; a check of many tokens runs each layer once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from policies.exit import DraftExit
from river_offload.kv.cache import SharedCache, cache_argument

Forcing = str
"""`teacher` or `free`."""


@dataclass(frozen=True)
class Point:
    """One setting, over all tokens of its prompts."""

    curve: str
    """`tau`, `gate` or `lossless`."""
    setting: float | None
    forcing: Forcing
    layers_per_token: float
    agreement: float
    kl: float
    tokens: int


@dataclass(frozen=True)
class Scored:
    """What a way of running did on one text."""

    layers: float
    """Backbone layers run for all its tokens."""
    agrees: Sequence[float]
    kl: Sequence[float]


@dataclass(frozen=True)
class Drafted:
    """One token of a block, drafted on a given text."""

    margin: float
    agrees: bool
    kl: float


def point(curve: str, setting: float | None, forcing: Forcing, scored: Sequence[Scored]) -> Point:
    """All prompts of a setting together."""
    agrees = [value for one in scored for value in one.agrees]
    kl = [value for one in scored for value in one.kl]
    tokens = len(agrees)
    layers = sum(one.layers for one in scored) / tokens
    return Point(curve, setting, forcing, layers, sum(agrees) / tokens, sum(kl) / tokens, tokens)


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The backbone's own greedy text, [1, tokens], the prompt included."""
    with model.river.using(mode="backbone"):
        text: torch.Tensor = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False)
    return text


@torch.no_grad()
def teacher_forced_exit(model: PreTrainedModel, text: torch.Tensor, prompt_tokens: int, tau: float) -> Scored:
    """Mode exit reads `text` token by token on a cache of its own, its exits as deep as tau makes them."""
    river = model.river
    theirs = backbone_logits(model, text, prompt_tokens)
    cache, mine, layers = river.new_cache(), [], 0
    with river.using(mode="exit", tau=tau):
        for end in range(prompt_tokens, text.shape[1]):
            fed = text[:, cache.get_seq_length() : end]
            mine.append(_read(model, fed, cache, 1)[0, -1])
            layers += river.trace.records[-1].depth if end > prompt_tokens else 0
    return Scored(layers, *_compared(torch.stack(mine[1:]), theirs[1:]))


@torch.no_grad()
def drafted_blocks(model: PreTrainedModel, text: torch.Tensor, prompt_tokens: int, block: int) -> list[list[Drafted]]:
    """Drafts along `text`: in each block the river reads tokens of the text, then the backbone writes them anew."""
    river, cache = model.river, model.river.new_cache()
    flow = river.flow
    rule = flow.rule
    on_river = DraftExit(rule.mode, rule.tau, rule.min_exit, rule.num_layers, river.draft_depth)
    _read(model, text[:, : prompt_tokens - 1], cache, 1)
    blocks = []
    for start in range(prompt_tokens, text.shape[1], block):
        fed = text[:, start - 1 : min(start + block, text.shape[1]) - 1]
        with flow.part("draft", on_river):
            steps = [_read(model, fed[:, i : i + 1], cache, 1)[0, -1] for i in range(fed.shape[1])]
        cache.crop(-fed.shape[1])
        with flow.part("check", rule):
            theirs = _read(model, fed, cache, fed.shape[1])[0]
        mine = torch.stack(steps)
        likely = mine.float().softmax(-1).topk(2).values
        margins = (likely[:, 0] - likely[:, 1]).tolist()
        agrees, kl = _compared(mine, theirs)
        blocks.append([Drafted(*row) for row in zip(margins, map(bool, agrees), kl, strict=True)])
    return blocks


def gated(blocks: Iterable[Sequence[Drafted]], gate: float | None, block: int, depth: int, num_layers: int) -> Scored:
    """Walk one record of drafts as mode gated would; None asks about every token, as mode lossless does.

    A wrong unsure token ends its block: the rest was drafted in vain and is drafted again. Its check gives the token
    after the last right one, too: where a block was full, the next token is the backbone's and costs no draft.
    """
    places = [place for row in blocks for place in row]
    agrees: list[float] = []
    kl: list[float] = []
    index, layers = 0, 0.0
    while index < len(places):
        drafted = places[index : index + block]
        kept = 0
        for place in drafted:
            sure = gate is not None and place.margin > gate
            agrees.append(float(place.agrees) if sure else 1.0)
            kl.append(place.kl if sure else 0.0)
            kept += 1
            if not sure and not place.agrees:
                break
        else:
            if gate != 0 and index + kept < len(places):  # the check's own token
                agrees.append(1.0)
                kl.append(0.0)
                kept += 1
        layers += depth * len(drafted) + (0 if gate == 0 else num_layers)
        index += kept
    return Scored(layers, agrees, kl)


@torch.no_grad()
def free_running(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int, **setting: Any) -> Scored:
    """A text of its own under `model.river.using(**setting)`, held against the backbone place by place."""
    river = model.river
    with river.using(**setting):
        output = model.generate(
            prompt, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    layers = sum(record.depth for record in river.account.records if record.path != "prefill")
    theirs = backbone_logits(model, output.sequences, prompt.shape[1])
    mine = torch.stack(output.logits)[:, 0]
    chosen = output.sequences[0, prompt.shape[1] :]
    agrees = (theirs.argmax(-1) == chosen).float().tolist()
    return Scored(layers, agrees[1:], _kl(mine, theirs)[1:])


@torch.no_grad()
def backbone_logits(model: PreTrainedModel, text: torch.Tensor, prompt_tokens: int) -> torch.Tensor:
    """What the backbone says before each token after the prompt: float32 [new tokens, vocabulary]."""
    keep = text.shape[1] - prompt_tokens
    with model.river.using(mode="backbone"):
        logits: torch.Tensor = model(text[:, :-1], logits_to_keep=keep, use_cache=False).logits
    return logits[0].float()


def _read(model: PreTrainedModel, tokens: torch.Tensor, cache: SharedCache, keep: int) -> torch.Tensor:
    """One passage over `tokens`, [1, tokens], after what the cache holds: the last `keep` logits."""
    logits: torch.Tensor = model(tokens, logits_to_keep=keep, **{cache_argument(model): cache}).logits
    return logits


def _compared(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[list[float], list[float]]:
    return (mine.argmax(-1) == theirs.argmax(-1)).float().tolist(), _kl(mine, theirs)


def _kl(mine: torch.Tensor, theirs: torch.Tensor) -> list[float]:
    """KL divergence of the backbone's distribution from `mine`, in nats, row by row."""
    p, q = theirs.float().log_softmax(-1), mine.float().log_softmax(-1)
    found: list[float] = (p.exp() * (p - q)).sum(-1).tolist()
    return found
