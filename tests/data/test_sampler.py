import json

import pytest

from verl.data.sampler import PromptSampler
from verl.errors import DataError


def draw(sampler, batches):
    return [sampler.next_batch() for _ in range(batches)]


def test_an_epoch_draws_each_prompt_once_and_drops_the_rest():
    sampler = PromptSampler(10, 3, seed=5)
    assert sampler.batches_per_epoch == 3
    drawn = [index for batch in draw(sampler, 3) for index in batch]
    assert len(set(drawn)) == 9
    assert sampler.epoch == 0
    sampler.next_batch()
    assert sampler.epoch == 1


def test_epochs_have_orders_of_their_own_and_seeds_repeat():
    one, two, other = PromptSampler(40, 40, seed=5), PromptSampler(40, 40, seed=5), PromptSampler(40, 40, seed=6)
    epochs = draw(one, 3)
    assert draw(two, 3) == epochs
    assert len({tuple(e) for e in [*epochs, *draw(other, 3)]}) == 6
    assert all(sorted(e) == list(range(40)) for e in epochs)


def test_without_shuffle_the_order_is_the_files():
    assert draw(PromptSampler(5, 2, shuffle=False), 3) == [[0, 1], [2, 3], [0, 1]]


def test_the_order_does_not_change_between_versions():
    # A saved position means nothing once this changes.
    assert PromptSampler(8, 8, seed=1).next_batch() == [6, 3, 7, 1, 4, 0, 2, 5]


def test_fewer_prompts_than_a_batch():
    with pytest.raises(DataError, match=r"has 7 prompts, fewer than the 8 of one batch"):
        PromptSampler(7, 8)


@pytest.mark.parametrize("done", range(8))
def test_a_resumed_sampler_goes_on_as_if_unbroken(done):
    unbroken = PromptSampler(10, 3, seed=5, fingerprint="f")
    draw(unbroken, done)
    resumed = PromptSampler(10, 3, seed=5, fingerprint="f")
    assert resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict()))) == []
    assert draw(resumed, 8) == draw(unbroken, 8)


def test_another_batch_size_goes_on_at_the_same_prompt():
    whole = PromptSampler(12, 12, seed=5).next_batch()
    saved = PromptSampler(12, 4, seed=5)
    draw(saved, 1)
    resumed = PromptSampler(12, 2, seed=5)
    assert resumed.load_state_dict(saved.state_dict()) == []
    assert resumed.next_batch() == whole[4:6]


def test_another_seed_counts_from_the_next_epoch():
    saved = PromptSampler(6, 3, seed=5)
    draw(saved, 1)
    resumed = PromptSampler(6, 3, seed=9)
    (notice,) = resumed.load_state_dict(saved.state_dict())
    assert "data.seed differs" in notice
    again = PromptSampler(6, 3, seed=9)
    again.load_state_dict(resumed.state_dict())
    assert resumed.next_batch() == again.next_batch() == saved.next_batch()
    of_seed_9 = draw(PromptSampler(6, 3, seed=9), 4)
    assert draw(resumed, 2) == of_seed_9[2:]


@pytest.mark.parametrize("changed", [{"size": 8}, {"fingerprint": "other"}])
def test_changed_data_is_told_and_starts_its_own_epoch(changed):
    saved = PromptSampler(6, 2, seed=5, fingerprint="f")
    draw(saved, 2)
    resumed = PromptSampler(**{"size": 6, "fingerprint": "f", **changed}, batch_size=2, seed=5)
    (notice,) = resumed.load_state_dict(saved.state_dict())
    assert "training data differs" in notice
    assert (resumed.epoch, resumed.position) == (1, 0)


def test_prompts_drawn_are_counted_over_epochs_and_survive_a_checkpoint():
    sampler = PromptSampler(5, 2)
    counts = []
    for _ in range(5):
        sampler.next_batch()
        counts.append(sampler.drawn)
    assert counts == [2, 4, 6, 8, 10]  # the fifth prompt of an epoch is never drawn
    other = PromptSampler(5, 2)
    other.load_state_dict(sampler.state_dict())
    assert other.drawn == 10
