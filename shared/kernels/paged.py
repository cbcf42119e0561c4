"""A batch's KV as the GPU backends want it: a page table in CSR form, at a page size of one.

The page of a token is its slot; what FlashInfer calls a page table is then the list of a request's slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.executor.forward_batch import ForwardBatch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PagedKv:
    """int32, on the CPU.  Request i has the new tokens `qo_indptr[i] … qo_indptr[i + 1] - 1` of the forward and
    the slots `kv_indices[kv_indptr[i] : kv_indptr[i + 1]]`, its new tokens' last."""

    qo_indptr: Int32Array
    """[bs + 1]"""
    kv_indptr: Int32Array
    """[bs + 1]"""
    kv_indices: Int32Array
    """[kv_indptr[bs]]"""

    @property
    def last_page_len(self) -> Int32Array:
        """[bs]; tokens in each request's last page, of which there is one a page."""
        return np.ones(len(self.kv_indptr) - 1, dtype=np.int32)

    def padded(self, batch_size: int, slot: int) -> PagedKv:
        """The same with more requests, up to `batch_size`, each of one token that is its whole context in `slot`."""
        more = batch_size - len(self.last_page_len)
        ones = np.arange(1, more + 1, dtype=np.int32)
        return PagedKv(
            np.concatenate([self.qo_indptr, self.qo_indptr[-1] + ones]),
            np.concatenate([self.kv_indptr, self.kv_indptr[-1] + ones]),
            np.concatenate([self.kv_indices, np.full(more, slot, dtype=np.int32)]),
        )


def paged_kv(batch: ForwardBatch) -> PagedKv:
    """The page table of `batch`."""
    rows = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    slots = [batch.req_to_token[row, :length] for row, length in rows]
    return PagedKv(_indptr(batch.extend_lens), _indptr(batch.seq_lens), np.concatenate(slots))


def _indptr(lengths: npt.NDArray[np.int64]) -> Int32Array:
    indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return indptr
