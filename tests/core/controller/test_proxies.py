"""Which rank gets which samples, and whose results count."""

from types import SimpleNamespace

import pytest
import torch

from verl.core.controller.dispatch import pack, unpack
from verl.core.controller.proxies import GroupModelEngine, GroupRolloutEngine
from verl.data.batch import Ragged, SampleBatch


class Group:
    """Four workers whose "log-probs" are ten times the response tokens, plus the rank's number."""

    size = 4

    def __init__(self):
        self.sent, self.shared = [], 0

    def share(self, value):
        self.shared += 1
        return value

    def scatter(self, method, arguments, ranks=None):
        self.sent = [unpack(packed)["response_ids"].values.tolist() for _, packed, *_ in arguments]
        if method == "train_batch":
            return [{"loss": 1.0, "mfu": 0.1 * rank} for rank in range(self.size)]
        results = []
        for rank, (_, packed, *_) in enumerate(arguments):
            tokens = unpack(packed)["response_ids"]
            column = tokens.with_values(tokens.values * 10.0 + rank)
            names = ("log_probs", "entropy", "sum_pi_squared") if method == "statistics" else ("log_probs",)
            results.append(pack(SampleBatch(dict.fromkeys(names, column))))
        return results


def batch(rows):
    return SampleBatch(
        {"prompt_ids": Ragged.from_rows([[i] for i, _ in enumerate(rows)]), "response_ids": Ragged.from_rows(rows)}
    )


ROWS = [[1, 2, 3], [4], [5], [6, 7, 8]]


def test_each_rank_has_samples_of_its_own():
    group = Group()
    log_probs, _ = GroupModelEngine(group, "actor").log_probs(batch(ROWS), 1.0)
    assert sorted(group.sent) == [[1, 2, 3], [4], [5], [6, 7, 8]]
    assert group.shared == 4
    assert [int(v) // 10 for v in log_probs.values.tolist()] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_statistics_come_back_by_name_in_order():
    found = GroupModelEngine(Group(), "actor").statistics(batch(ROWS), 1.0)
    assert list(found) == ["log_probs", "entropy", "sum_pi_squared"]
    assert [int(v) // 10 for v in found["sum_pi_squared"].values.tolist()] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_neighbours_that_share_tokens_get_the_same_samples_and_the_first_ones_results_count():
    group = Group()
    log_probs, _ = GroupModelEngine(group, "actor", sequence_ranks=2).log_probs(batch(ROWS), 1.0)
    assert group.sent[0] == group.sent[1]
    assert group.sent[2] == group.sent[3]
    assert sorted(group.sent[0] + group.sent[2]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [len(s) for s in group.sent] == [4, 4, 4, 4]  # even in tokens
    assert group.shared == 2  # each pair's samples travel once
    assert {int(v) % 10 for v in log_probs.values.tolist()} == {0, 2}
    assert log_probs.lengths.tolist() == [3, 1, 1, 3]


def test_an_update_of_two_samples_on_two_pairs():
    group = Group()
    engine = GroupModelEngine(group, "actor", sequence_ranks=2)
    metrics = engine.train_batch(batch(ROWS[:2]), loss=None)
    assert sorted(map(tuple, group.sent)) == [(1, 2, 3), (1, 2, 3), (4,), (4,)]
    assert metrics["mfu"] == torch.tensor([0.0, 0.1, 0.2, 0.3]).mean()


@pytest.mark.parametrize(
    ("shared", "ranks", "expected"),
    [(True, [0], ["give_back_unused", "wake", "sleep"]), (True, [0, 1], ["wake", "sleep"]), (False, [0], [])],
)
def test_every_rank_gives_memory_back_before_an_engine_over_several_wakes(shared, ranks, expected):
    calls = []
    group = SimpleNamespace(call=calls.append, size=2)
    engine = GroupRolloutEngine(group, ranks, dtype=None, shared=shared)
    engine.wake()
    engine.sleep()
    assert calls == expected
