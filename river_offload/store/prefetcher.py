"""Asks the policy what the link should do, and does it: at every acquire, and when a passage leaves the backbone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.forecast import Forecast, Known, Oracle
from policies.prefetch import Decision, Kind, Snapshot, decide
from river_offload.errors import UsageError
from river_offload.store.pace import Pace
from river_offload.store.transfers import Transfers


class Prefetcher:
    """The mechanism between `policies.prefetch` and the link. Decisions can cost time, never correctness.

    Args:
        kind: of prefetch.
        forecast_for: makes the forecast for an exit threshold; what is learned under one does not hold under another.
            None stands for drafts and checks in turn, where a pass through all layers is always next.
        tau: the threshold in force.
        pace: learns what things take.

    Attributes:
        forecast: what is believed under the threshold in force.
    """

    def __init__(
        self,
        kind: Kind,
        forecast_for: Callable[[float | None], Forecast],
        *,
        tau: float = 0.5,
        pace: Pace | None = None,
    ) -> None:
        self.kind = kind
        self.pace = pace or Pace()
        self._forecast_for = forecast_for
        self.forecast = forecast_for(tau)
        self._forecasts: dict[float | None, Forecast] = {tau: self.forecast}
        self._foretold: Oracle | None = None

    def foretell(self, depths: Sequence[int] | None) -> None:
        """The depths of the coming passages, where they are forced; None when they no longer are. Kind `oracle` alone
        looks at them: to the others a forced exit comes as a surprise, as any other does."""
        self._foretold = None if depths is None else Oracle(self.forecast.num_layers, depths)

    def opened(self, new_tokens: int, margin: float | None, known_depth: int | None, tau: float | None) -> None:
        """A passage begins (see `Forecast.begin`). Raises UsageError for an oracle that was told nothing."""
        self.forecast = self._oracle(known_depth) if self.kind == "oracle" and tau is not None else self._learned(tau)
        self.forecast.begin(new_tokens, margin, known_depth)
        self.pace.opened(new_tokens)

    def acquiring(self, depth: int, transfers: Transfers) -> None:
        """A backbone layer, resident or not, is about to be used; the one before it was released."""
        self.pace.computed()
        self._act(depth, transfers, self.pace.backbone_s)

    def acquired(self) -> None:
        """It is there."""
        self.pace.computing()

    def observed(self, layers_run: int, signal: float) -> None:
        """The exit signal after `layers_run` layers."""
        self.forecast.observe_signal(layers_run, signal)

    def left(self, depth: int, transfers: Transfers, *, censored: bool) -> None:
        """The passage has left the backbone after `depth` layers (see `Forecast.end`); the river begins."""
        self.pace.computed()
        self.forecast.end(depth, censored=censored)
        layers = self.forecast.num_layers
        self._act(layers, transfers, self.pace.rest_s(layers - depth))
        self.pace.left()

    def closed(self, river_layers: int) -> None:
        """The passage is over."""
        self.pace.closed(river_layers)

    def broken_off(self) -> None:
        """The passage failed or was interrupted."""
        self.pace.broken_off()

    def _learned(self, tau: float | None) -> Forecast:
        if tau not in self._forecasts:
            self._forecasts[tau] = self._forecast_for(tau)
        return self._forecasts[tau]

    def _oracle(self, known_depth: int | None) -> Forecast:
        if self._foretold is not None:
            return self._foretold
        if known_depth is None:
            raise UsageError(
                "prefetch=oracle knows no exits but forced ones: force them (bench --depths, river.using(depths=...)) "
                "or use prefetch=predicted"
            )
        return Known(self.forecast.num_layers, known_depth)

    def _act(self, depth: int, transfers: Transfers, until_next_s: float) -> None:
        transfers.poll()
        missing = depth in transfers.streamed and depth not in transfers.holds
        if self.kind == "none" and not missing:
            return
        self.pace.linked(*transfers.link.moved())
        decision = decide(self._snapshot(depth, transfers, until_next_s), self.kind)
        _carry_out(decision, transfers, urgent=depth if missing else None)

    def _snapshot(self, depth: int, transfers: Transfers, until_next_s: float) -> Snapshot:
        queue, link = transfers.queue, transfers.link
        started = sum(link.progress(fetch.slot) > 0 for fetch in queue) if not link.abortable else 0
        # A link works on the first of its queue, whether or not the first byte is there yet.
        started = max(started, min(len(queue), 1))
        left = sum(1 - link.progress(fetch.slot) for fetch in queue[:started])
        return Snapshot(
            depth=depth,
            streamed=tuple(transfers.streamed),
            holds=tuple(transfers.holds),
            rows=self.forecast.rows(),
            link_s=self.pace.link_s,
            compute_s=self.pace.backbone_s,
            until_next_s=until_next_s,
            queue=tuple((fetch.layer, fetch.slot) for fetch in queue),
            started=started,
            abortable=link.abortable,
            busy_s=left * self.pace.link_s,
            in_use=frozenset(transfers.in_use),
        )


def _carry_out(decision: Decision, transfers: Transfers, *, urgent: int | None) -> None:
    """Cancels first, from the end of the queue. The layer that computation waits for overtakes what may go on later."""
    for layer, slot in reversed(decision.cancels):
        transfers.cancel(layer, slot)
    for layer, slot in decision.fetches:
        if not transfers.has(layer):  # what was to be called off may just have arrived
            transfers.fetch(layer, slot, urgent=layer == urgent)
