"""Philox on tensors, and dropout masks that are a function of what they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import gradients, make_batch, make_dropout, make_model, make_shape, run_loss

from redline import rng
from redline.model.random import (
    ATTENTION,
    ATTENTION_OUTPUT,
    EMBEDDING,
    MLP_OUTPUT,
    dropout_at,
    dropout_keys,
    philox,
)

WORD = st.integers(0, 2**32 - 1)
P = 0.3


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    key=st.tuples(WORD, WORD), counter=st.tuples(WORD, WORD, WORD, WORD), tensors=st.sets(st.integers(0, 5))
)
def test_philox_equals_the_reference(key, counter, tensors):
    """Any word may be a tensor or an integer."""
    words = [torch.tensor([w, 0]) if i in tensors or i == 2 else w for i, w in enumerate((*key, *counter))]
    got = philox((words[0], words[1]), (words[2], words[3], words[4], words[5]))
    assert tuple(int(word[0]) for word in got) == rng.philox(key, counter)


def test_philox_known_answers():
    """The vectors that Random123 ships for philox4x32-10."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    cases = [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones, ones), (ones,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi[4:], pi[:4], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]
    for key, counter, want in cases:
        got = philox(key, tuple(torch.tensor([word]) for word in counter))
        assert tuple(int(word) for word in got) == want


def lane_of(words: tuple[int, int, int, int], bits: int, index: int) -> int:
    """A block's words as one number of 128 bits, cut from its low end."""
    whole = sum(word << 32 * place for place, word in enumerate(words))
    return whole >> bits * index & (1 << bits) - 1


def kept_by_definition(shape_rows: int, row_size: int, state, layer: int, site: str) -> torch.Tensor:
    """The layout of rng.py, element by element in plain integers: bool [B, rows, row_size]."""
    key = rng.stream_key(5, "dropout", layer, site)
    bits = 32 if site == "attention" else 16
    threshold = round(P * 2**bits)
    samples = []
    for sample in state.sample_index_B.tolist():
        kept = []
        for element in range(shape_rows * row_size):
            block, index = divmod(element, 128 // bits)
            words = rng.philox(key, (block, 0, sample, int(state.iteration)))
            kept.append(lane_of(words, bits, index) >= threshold)
        samples.append(kept)
    return torch.tensor(samples).view(len(samples), shape_rows, row_size)


@pytest.mark.parametrize("H", [3, 4, 8, 13, 16])
def test_hidden_mask_follows_the_layout(H):
    shape, S = make_shape("gpt2"), 5
    state = make_dropout(shape, make_batch(shape, 2, S)).layer(1)
    x = torch.rand(S, 2, H, dtype=torch.float64) + 1
    got = dropout_at(state, MLP_OUTPUT, P).drop_hidden(x)
    keep = kept_by_definition(S, H, state, 1, "mlp_output").transpose(0, 1)
    applied = round(P * 2**16) / 2**16
    torch.testing.assert_close(got, torch.where(keep, x / (1 - applied), 0.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("S", [3, 4, 6])
def test_attention_mask_follows_the_layout(S):
    shape, N = make_shape("gpt2"), 2
    state = make_dropout(shape, make_batch(shape, 2, S)).layer(0)
    probs = torch.rand(2, N, S, S, dtype=torch.float64) + 1
    got = dropout_at(state, ATTENTION, P).drop_attention(probs)
    keep = kept_by_definition(N * S, S, state, 0, "attention").view(2, N, S, S)
    torch.testing.assert_close(got, torch.where(keep, probs / (1 - P), 0.0))


@pytest.mark.parametrize("H", [8, 7, 12])
def test_a_slice_of_the_sequence_has_its_rows_of_the_mask(H):
    """Sequence and context parallelism: any rank, holding any rows, drops what one device would drop."""
    shape = make_shape("gpt2")
    state = make_dropout(shape, make_batch(shape, 2, 12)).layer(1)
    x = torch.ones(12, 2, H)
    whole = dropout_at(state, ATTENTION_OUTPUT, P).drop_hidden(x)
    for rows in ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]):
        held = torch.tensor(rows)
        part = dropout_at(replace(state, positions_S=held), ATTENTION_OUTPUT, P).drop_hidden(x[held])
        assert torch.equal(part, whole[held])


def test_a_slice_of_the_heads_or_queries_has_its_part_of_the_mask():
    """Tensor parallelism splits heads, context parallelism queries; keys are whole by then."""
    shape = make_shape("gpt2")
    state = make_dropout(shape, make_batch(shape, 2, 6)).layer(1)
    probs = torch.ones(2, 4, 6, 6)
    whole = dropout_at(state, ATTENTION, P).drop_attention(probs)
    heads = dropout_at(replace(state, first_head=2), ATTENTION, P).drop_attention(probs[:, 2:])
    assert torch.equal(heads, whole[:, 2:])
    held = torch.tensor([0, 5])
    queries = dropout_at(replace(state, queries_S=held), ATTENTION, P).drop_attention(probs[:, :, held])
    assert torch.equal(queries, whole[:, :, held])


def test_places_beyond_32_bits():
    """B019: 32 heads of 8192^2 probabilities are 2^31; the block number takes two counter words."""
    shape = make_shape("gpt2")
    state = make_dropout(shape, make_batch(shape, 1, 8)).layer(0)
    key = rng.stream_key(5, "dropout", 0, "attention")
    for lanes, row, size in ((rng.ATTENTION_LANES, 2**35 // 5, 5), (rng.HIDDEN_LANES, 2**36 // 11, 11)):
        got = dropout_at(state, ATTENTION, P).keep(torch.tensor([row]), size, lanes)[0, 0]
        for column in range(size):
            block, index = divmod(row * size + column, lanes.in_block)
            words = rng.philox(key, (block & rng.MASK32, block >> 32, 100, 3))
            assert got[column] == (lane_of(words, lanes.bits, index) >= lanes.threshold(P))


def test_sites_layers_steps_and_samples_have_masks_of_their_own():
    shape = make_shape("gpt2")
    batch = make_batch(shape, 2, 16)
    x = torch.ones(16, 2, 64)

    def mask(layer: int = 0, site: int = MLP_OUTPUT, iteration: int = 3) -> torch.Tensor:
        state = make_dropout(shape, batch, iteration)
        state = state.embedding() if layer < 0 else state.layer(layer)
        return dropout_at(state, site, P).drop_hidden(x)

    masks = [mask(), mask(layer=1), mask(site=ATTENTION_OUTPUT), mask(iteration=4), mask(-1, EMBEDDING)]
    assert torch.equal(mask(), masks[0])
    rows = [row for one in masks for row in one.unbind(1)]  # the two samples of each
    for i, first in enumerate(rows):
        share = (first == 0).float().mean()
        assert abs(share - P) < 5 * (P * (1 - P) / first.numel()) ** 0.5
        for second in rows[i + 1 :]:
            agree = ((first == 0) == (second == 0)).float().mean()
            assert agree < 0.7  # independent masks agree in p^2 + (1 - p)^2 = 0.58 of the places


def test_keys_depend_on_the_seed_only():
    assert torch.equal(dropout_keys(5, 2, "cpu"), dropout_keys(5, 3, "cpu")[:3])
    assert not (dropout_keys(5, 2, "cpu") == dropout_keys(6, 2, "cpu")).any()


def test_no_dropout_without_state_or_probability():
    shape = make_shape("gpt2")
    state = make_dropout(shape, make_batch(shape)).layer(0)
    assert dropout_at(None, ATTENTION, P) is None and dropout_at(state, ATTENTION, 0.0) is None


@pytest.mark.parametrize("dropouts", [(0.2, 0.0), (0.0, 0.2), (0.2, 0.3)])
def test_the_split_into_microbatches_changes_nothing(dropouts, device):
    """A sample's masks go with its number: one batch of three equals three of one, loss and gradients."""
    hidden_dropout, attention_dropout = dropouts
    shape = make_shape("gpt2", hidden_dropout=hidden_dropout, attention_dropout=attention_dropout)
    batch = make_batch(shape, 3, 11, device)
    whole = make_model(shape, device=device)
    total = run_loss(whole, batch, make_dropout(shape, batch))
    total.backward()
    parts = make_model(shape, device=device, main_grad=torch.float64)
    losses = []
    for row in range(3):
        one = batch[row : row + 1]
        losses.append(run_loss(parts, one, make_dropout(shape, one)))
        losses[-1].backward()
    torch.testing.assert_close(sum(losses), total)
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-9, atol=1e-10)
    evaluation = run_loss(whole, batch)
    assert not torch.isclose(evaluation, total)
    assert torch.equal(evaluation, run_loss(whole, batch))


def test_masks_are_the_same_on_every_device(device):
    shape = make_shape("gpt2")
    for target in ("cpu", device):
        state = make_dropout(shape, make_batch(shape, 2, 9, target)).layer(0)
        got = dropout_at(state, MLP_OUTPUT, P).drop_hidden(torch.ones(9, 2, 10, device=target)).cpu()
        if target == "cpu":
            want = got
    assert torch.equal(got, want)
