"""What is drawn has the distribution that transformers' filters leave, and depends on logits, seed and place alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sampling_oracle import SplitMix64, reference_uniform, transformers_probabilities

from sennit.hf import Sampling, drawing
from sennit.hf.drawing import NO_TOKEN, choose, kept_weights, uniforms

# No test here may fail by chance: seeds are fixed, and so every result is. A distribution that is right passes at this
# level for all but one in a hundred thousand choices of seeds.
SIGNIFICANCE = 1e-5


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def kept_probabilities(logits: torch.Tensor, hows: list[Sampling]) -> torch.Tensor:
    size = logits.shape[1]
    filters = [(how.temperature, how.top_k or size, how.top_p or 1.0, how.min_p or 0.0) for how in hows]
    weights = kept_weights(logits, torch.tensor(filters, dtype=torch.float64), num_ordered=len(hows)).double()
    return weights / weights.sum(-1, keepdim=True)


def p_value(statistic: float, degrees: int) -> float:
    """Probability of a chi-square statistic this large or larger."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0).double(), torch.tensor(statistic / 2).double()))


def goodness_of_fit(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of Pearson's test of counts against exact probabilities."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    assert expected.min() >= 5  # below, the statistic is not chi-square
    return p_value(float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1)


def two_sample(first: torch.Tensor, second: torch.Tensor) -> float:
    """p-value of the chi-square test that two samples of the same size have one distribution."""
    assert first.sum() == second.sum()
    seen = (both := first + second) > 0
    return p_value(float(((first - second)[seen] ** 2 / both[seen]).sum()), int(seen.sum()) - 1)


HOWS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(0.8, top_k=5),
    Sampling(1.3, top_p=0.8),
    Sampling(1.0, min_p=0.2),
    Sampling(1.5, top_k=9, top_p=0.9, min_p=0.05),
]


def test_random_numbers_are_those_of_the_published_generator() -> None:
    stream = SplitMix64(1234567)  # its first outputs as published with it
    assert [stream.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    seeds, places = [0, 1, 7, 2**53, 2**63 - 1, 7], [0, 1, 2, 3, 500, 1]
    expected = [reference_uniform(seed, place) for seed, place in zip(seeds, places, strict=True)]
    assert uniforms(seeds, places).tolist() == expected
    assert all(0 <= number < 1 for number in expected)


def test_random_numbers_of_places_and_of_seeds_side_by_side_are_independent() -> None:
    count, boxes = 40_000, 16
    by_seed = torch.from_numpy(uniforms(range(count + 1), [0] * (count + 1)))
    by_place = torch.from_numpy(uniforms([3] * (count + 1), range(count + 1)))
    for numbers in (by_seed, by_place):
        pairs = (numbers[:-1] * boxes).long() * boxes + (numbers[1:] * boxes).long()
        uniform = torch.full((boxes**2,), 1 / boxes**2).double()
        assert goodness_of_fit(pairs.bincount(minlength=boxes**2), uniform) > SIGNIFICANCE
    crossed = (by_seed * boxes).long() * boxes + (by_place * boxes).long()
    assert goodness_of_fit(crossed.bincount(minlength=boxes**2), uniform) > SIGNIFICANCE


@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
def test_filters_keep_what_those_of_transformers_keep(scale: float) -> None:
    hows = HOWS + [
        Sampling(temperature, top_k, top_p, min_p)
        for temperature in (0.4, 1.0, 1.7)
        for top_k in (None, 1, 7, 400)
        for top_p in (None, 0.01, 0.6, 0.99, 1.0)
        for min_p in (None, 0.0, 0.001, 0.1, 1.0)
    ]
    logits = torch.randn(len(hows), 700, generator=torch.Generator().manual_seed(5)) * scale
    expected = torch.cat([transformers_probabilities(row[None], how) for row, how in zip(logits, hows, strict=True)])
    found = kept_probabilities(logits, hows)
    # Weights have 52 bits here, and lose less than the last of them in every token.
    lost = logits.shape[1] * 2.0**-52
    torch.testing.assert_close(found, expected, rtol=0, atol=lost)
    assert (found > 0)[expected > lost].all()
    assert (found[expected == 0] == 0).all()


def test_tokens_as_probable_as_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    probable = logits.softmax(-1)[0].double()
    kept = [kept_probabilities(logits, [how])[0] > 0 for how in (Sampling(1.0, 2), Sampling(1.0, top_p=0.6))]
    assert probable[1] < 0.6 < probable[1] + probable[2] + probable[3]
    assert [k.nonzero()[:, 0].tolist() for k in kept] == [[1, 2, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("how", "dtype"), list(zip(HOWS, [torch.float32, torch.bfloat16, torch.float64] * 2, strict=True)), ids=str
)
def test_frequencies_are_those_of_the_distribution_and_of_multinomial(
    how: Sampling, dtype: torch.dtype, device: str
) -> None:
    seeds, places, size = 160, 160, 24
    logits = (torch.randn(size, generator=torch.Generator().manual_seed(2)) * 1.2).to(dtype)
    hows = [replace(how, seed=seed) for seed in range(seeds)]
    choices = [(one, place) for one in hows for place in range(places)]
    found = choose(logits.to(device).expand(seeds * places, size), choices)
    counts = found.cpu().bincount(minlength=size)
    exact = transformers_probabilities(logits[None], how)[0]
    other = torch.multinomial(exact, len(found), True, generator=torch.Generator().manual_seed(1))
    assert goodness_of_fit(counts, exact) > SIGNIFICANCE
    assert two_sample(counts, other.bincount(minlength=size)) > SIGNIFICANCE
    # The test can fail: another temperature does not pass.
    assert goodness_of_fit(counts, exact**0.7 / (exact**0.7).sum()) < SIGNIFICANCE


@pytest.mark.parametrize("limit", [drawing.MAX_NUMBERS, 3 * 1000, 1])
def test_a_rows_token_does_not_depend_on_the_other_rows(
    monkeypatch: pytest.MonkeyPatch, limit: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(60, 1000, generator=generator) * 2).bfloat16().to(device)
    greedy = Sampling()
    choices = [(greedy, row) if row % 4 == 3 else (replace(HOWS[row % 6], seed=row % 7), row % 5) for row in range(60)]
    alone = torch.cat([choose(logits[row : row + 1], choices[row : row + 1]) for row in range(60)])
    monkeypatch.setattr(drawing, "MAX_NUMBERS", limit)
    for _ in range(3):
        order = torch.randperm(60, generator=generator)
        found = choose(logits[order], [choices[row] for row in order.tolist()])
        assert torch.equal(found, alone[order.to(device)])
    assert torch.equal(alone[3::4], logits[3::4].argmax(-1))
    assert len(set(alone.tolist())) > 20


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_an_impossible_token_is_never_drawn(
    monkeypatch: pytest.MonkeyPatch, how: Sampling, number: float, device: str
) -> None:
    monkeypatch.setattr(drawing, "uniforms", lambda seeds, places: torch.full((len(seeds),), number).double().numpy())
    choice = [(replace(how, seed=1), 0)]
    first_and_last = torch.full((1, 5000), -torch.inf)
    first_and_last[0, 1000:4000] = torch.randn(3000, generator=torch.Generator().manual_seed(8))
    assert 1000 <= int(choose(first_and_last.to(device), choice)) < 4000
    one = torch.full((1, 50), -torch.inf)
    one[0, 7] = -1e30
    assert int(choose(one.to(device), choice)) == 7


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_temperatures_are_greedy_or_uniform(temperature: float) -> None:
    logits = torch.tensor([[0.0, 5.0, 5.1, -torch.inf, -50.0]]).expand(2000, 5)
    found = choose(logits, [(Sampling(temperature, seed=seed), 0) for seed in range(2000)])
    expected = {2} if temperature < 1 else {0, 1, 2, 4}
    assert set(found.tolist()) == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("how", [Sampling(), *(replace(how, seed=1) for how in HOWS)], ids=str)
def test_logits_that_are_no_numbers_give_no_token(how: Sampling, bad: float, device: str) -> None:
    logits = torch.zeros(3, 8, device=device)
    logits[1, 2] = bad
    found = choose(logits, [(how, 0)] * 3).tolist()
    assert found[1] == NO_TOKEN
    assert all(0 <= found[row] < 8 for row in (0, 2))
