"""Batches keep what they were made from, and text is read as it is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sennit import AttentionSpec, Batch, BatchAttention

EMPTY = {
    "csr": lambda: Batch.csr(qo_indptr=[0], kv_lens=[], kv_indptr=[0], kv_indices=[]),
    "padded": lambda: Batch.padded(query_start_loc=[0], seq_lens=[], block_table=[]),
    "padded array": lambda: Batch.padded(query_start_loc=[0], seq_lens=[], block_table=np.zeros((0, 5), np.int32)),
    "parsed": lambda: Batch.parse("", page_size=16),
}


def batches() -> dict[str, Batch]:
    return {
        "csr": Batch.csr(qo_indptr=[0, 2, 3], kv_lens=[5, 9], kv_indptr=[0, 2, 5], kv_indices=[3, 1, 0, 2, 4]),
        "padded": Batch.padded(query_start_loc=[0, 2, 3], seq_lens=[5, 9], block_table=[[3, 1, 0], [0, 2, 4]]),
        "ragged": Batch.ragged(qo_indptr=[0, 2, 3], kv_indptr=[0, 5, 14]),
        "ragged with starts": Batch.ragged(
            qo_indptr=[0, 2, 3], kv_indptr=[0, 5, 14], kv_lens=[4, 9], qo_starts=[4, 0], kv_starts=[2, 0]
        ),
    }


@pytest.mark.parametrize("form", EMPTY)
def test_an_empty_batch_can_be_made_in_every_form_and_runs(form):
    batch = EMPTY[form]()
    assert (batch.num_requests, batch.num_tokens, str(batch)) == (0, 0, "(empty)")
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    attn = BatchAttention(spec, page_size=4, device="cpu")
    pages = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8)
    assert attn.run(attn.plan(batch), torch.zeros(0, 4, 8), pages, sm_scale=1.0).shape == (0, 4, 8)


@pytest.mark.parametrize("form", batches())
def test_starts_and_lengths_of_a_batch_are_read_only(form):
    batch = batches()[form]
    arrays = [batch.q_starts, batch.q_lens, batch.kv_lens, batch.kv_starts]
    if batch.pages is not None:
        arrays += [batch.pages.starts, batch.pages.widths]
    for array in arrays:
        if array is not None:
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


def test_a_batch_keeps_its_lengths_when_the_callers_array_changes():
    lens, indptr = np.array([5, 9]), np.array([0, 2, 3])
    batch = Batch.padded(query_start_loc=indptr, seq_lens=lens, block_table=[[3, 1, 0], [0, 2, 4]])
    lens[:], indptr[:] = 1, 0  # the caller's own arrays stay writable
    assert (batch.q_lens.tolist(), batch.kv_lens.tolist()) == ([2, 1], [5, 9])


@pytest.mark.filterwarnings("error")
def test_planning_and_appending_warn_of_nothing():
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    attn = BatchAttention(spec, page_size=4, device="cpu")
    batch = Batch.csr(
        qo_indptr=[0, 2], kv_lens=[5], kv_indptr=[0, 2], kv_indices=np.array([3, 1], np.int32), slot_mapping=[0, 1]
    )
    new = torch.zeros(2, 2, 8)
    attn.append(attn.plan(batch), new, new, (torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2, 8)))


@pytest.mark.parametrize("text", ["2*1@100+7@7", " 2 * 1 @ 100\n+\t7 @ 7 ", "02*001@0100 + 7@7"])
def test_text_may_have_spaces_around_signs_and_leading_zeros(text):
    batch = Batch.parse(text, page_size=np.int64(16))
    assert (batch.q_lens.tolist(), batch.kv_lens.tolist()) == ([1, 1, 7], [100, 100, 7])
    assert batch.pages is not None
    assert batch.pages.widths.tolist() == [7, 7, 1]


def test_requests_without_keys_need_no_columns_in_the_table():
    batch = Batch.padded(query_start_loc=[0, 1, 3], seq_lens=[0, 0], block_table=[[], []])
    assert str(batch) == "1@0 + 2@0"


def test_nor_do_they_where_the_table_is_on_a_device(monkeypatch):
    monkeypatch.setattr("sennit.plan.batch.on_device", lambda value: isinstance(value, torch.Tensor))
    table = torch.zeros(3, 0, dtype=torch.int32)  # a view of its rows end to end would reach past its memory
    batch = Batch.padded(query_start_loc=[0, 1, 3, 4], seq_lens=[0, 0, 0], block_table=table)
    assert str(batch) == "1@0 + 2@0 + 1@0"


def test_page_tables_of_a_device_are_read_without_their_gaps(monkeypatch):
    monkeypatch.setattr("sennit.plan.batch.on_device", lambda value: isinstance(value, torch.Tensor))
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    csr = Batch.csr(qo_indptr=[0, 1], kv_lens=[1], kv_indptr=[0, 4], kv_indices=table.view(-1)[::2])
    padded = Batch.padded(query_start_loc=[0, 1, 2], seq_lens=[9, 9], block_table=table[:, ::2])
    sliced = Batch.padded(query_start_loc=[0, 1, 2], seq_lens=[9, 9], block_table=table[:, :4])
    for batch in (csr, padded, sliced):
        assert batch.pages.entries.is_contiguous()
    assert csr.pages.entries[:4].tolist() == [0, 2, 4, 6]
    assert padded.pages.entries.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [sliced.pages.entries[start : start + 4].tolist() for start in sliced.pages.starts] == [
        [0, 1, 2, 3], [8, 9, 10, 11]
    ]  # fmt: skip
    assert sliced.pages.entries.data_ptr() == table.data_ptr()  # an engine may rewrite it
