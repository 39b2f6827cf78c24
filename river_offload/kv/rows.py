"""Rows of a cache rearranged, as beam search and returned sequences ask for it."""

from __future__ import annotations

from abc import abstractmethod

import torch
from transformers.cache_utils import DynamicLayer


class RowsLayer(DynamicLayer):
    """The methods of transformers that choose rows, all of them by `_replace_rows`."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes old row beam_idx[i] (beam search)."""
        self._choose(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self._choose(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self.is_initialized:
            self._choose(torch.arange(self._row_count(), device=self.device).repeat_interleave(repeats))

    def _choose(self, rows: torch.Tensor) -> None:
        if self.is_initialized:
            self._replace_rows(rows)

    @abstractmethod
    def _row_count(self) -> int:
        """Rows that are held."""

    @abstractmethod
    def _replace_rows(self, rows: torch.Tensor) -> None:
        """Row i becomes old row rows[i]; there may be more or fewer than before."""
