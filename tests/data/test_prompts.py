from pathlib import Path

import pytest

from verl.config.schema import DataConfig
from verl.data.prompts import load_prompts
from verl.errors import DataError

from .conftest import BOS, row, words

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def load(files, tokenizer, split="train", require_ground_truth=True, **options):
    return load_prompts(files, DataConfig(**options), tokenizer, split=split, require_ground_truth=require_ground_truth)


def ids(dataset):
    return [r.tolist() for r in dataset.batch(range(len(dataset)))["prompt_ids"].rows()]


def test_columns_of_a_batch(write, tokenizer):
    rows = [row(words(0)), row(words(1, 2), data_source="tiny/x", extra_info={"index": 1}), row(words(3))]
    rows[1]["reward_model"]["ground_truth"] = "7"
    batch = load(write(rows), tokenizer).batch([1, 0])
    assert [r.tolist() for r in batch["prompt_ids"].rows()] == [[1, 6, 7, 3], [1, 5, 3]]
    assert batch["data_source"] == ["tiny/x", "openai/gsm8k"]
    assert batch["ground_truth"] == ["7", "42"]
    assert batch["extra_info"] == [{"index": 1}, {"index": 0}]
    assert batch["raw_prompt"][0] == [{"role": "user", "content": "w1 w2"}]


def test_parquet_and_jsonl_and_lists_give_the_same(write, tokenizer):
    first, second = [row(words(i)) for i in range(3)], [row(words(i)) for i in range(3, 5)]
    mixed = load([write(first, "a.parquet"), write(second, "b.jsonl")], tokenizer)
    whole = load(write(first + second, "c.jsonl"), tokenizer)
    assert ids(mixed) == ids(whole) == [[1, 5 + i, 3] for i in range(5)]
    assert mixed.fingerprint == whole.fingerprint
    assert mixed.notices == []


def test_uids_differ_by_draw_and_repeat_by_run(write, tokenizer):
    path = write([row(words(i)) for i in range(4)])
    dataset, again = load(path, tokenizer), load(path, tokenizer)
    drawn = [uid for step in range(3) for uid in dataset.batch([2, 0, 2], step=step)["uid"]]
    assert len(set(drawn)) == 9
    assert drawn == [uid for step in range(3) for uid in again.batch([2, 0, 2], step=step)["uid"]]
    validation = load(path, tokenizer, split="val")
    assert not set(validation.batch([2, 0, 2])["uid"]) & set(drawn)
    assert dataset.batch([1, 2], uids=["a", "b"])["uid"] == ["a", "b"]
    with pytest.raises(ValueError, match="1 different uids for 2 prompts"):
        dataset.batch([1, 2], uids=["a", "a"])


def test_long_prompts_are_cut_and_counted(write, tokenizer):
    path = write([row(words(0, 1, 2, 3)), row(words(4)), row(words(5, 6, 7))])
    dataset = load(path, tokenizer, max_prompt_length=4, truncation="left")
    assert ids(dataset) == [[6, 7, 8, 3], [1, 9, 3], [10, 11, 12, 3]]
    (notice,) = dataset.notices
    assert (
        "2 of 3 prompts are longer than data.max_prompt_length=4 tokens and were cut (data.truncation=left)" in notice
    )
    assert ids(load(path, tokenizer, max_prompt_length=4, truncation="right"))[0] == [1, 5, 6, 7]
    assert ids(load(path, tokenizer, max_prompt_length=4, truncation="middle"))[0] == [1, 5, 8, 3]


def test_a_prompt_of_exactly_the_limit_is_left_alone(write, tokenizer):
    dataset = load(write([row(words(0, 1))]), tokenizer, max_prompt_length=4, truncation="error")
    assert ids(dataset) == [[1, 5, 6, 3]]
    assert dataset.notices == []


def test_truncation_error_names_the_longest(write, tokenizer):
    path = write([row(words(0, 1)), row(words(*range(9))), row(words(0, 1, 2))])
    with pytest.raises(DataError) as error:
        load(path, tokenizer, max_prompt_length=4, truncation="error")
    assert "2 of 3 prompts are longer than data.max_prompt_length=4" in str(error.value)
    assert f"The longest has 11 tokens: {path}, row 1." in str(error.value)


def test_filter_drops_and_counts(write, tokenizer):
    path = write([row(words(0, 1, 2, 3)), row(words(4)), row(words(5, 6, 7))])
    dataset = load(path, tokenizer, max_prompt_length=4, filter_overlong_prompts=True, truncation="error")
    assert ids(dataset) == [[1, 9, 3]]
    assert "2 of 3 prompts are longer than data.max_prompt_length=4 tokens and were dropped" in dataset.notices[0]
    with pytest.raises(DataError, match=r"all 3 prompts are longer than data.max_prompt_length=2"):
        load(path, tokenizer, max_prompt_length=2, filter_overlong_prompts=True)


def test_max_samples_is_random_when_shuffled_else_the_first(write, tokenizer):
    path = write([row(words(i)) for i in range(50)])
    every = ids(load(path, tokenizer))
    first = ids(load(path, tokenizer, shuffle=False, train_max_samples=5))
    assert first == every[:5]
    drawn = {seed: ids(load(path, tokenizer, train_max_samples=5, seed=seed)) for seed in (1, 2)}
    assert drawn[1] == ids(load(path, tokenizer, train_max_samples=5, seed=1))
    assert drawn[1] != drawn[2]
    for sample in drawn.values():
        assert sample != first
        assert len(sample) == 5
        assert all(prompt in every for prompt in sample)
    assert ids(load(path, tokenizer, split="val", val_max_samples=3)) == every[:3]
    assert len(load(path, tokenizer, train_max_samples=500)) == 50
    with pytest.raises(DataError, match=r"data.val_max_samples=0 leaves no prompts"):
        load(path, tokenizer, split="val", val_max_samples=0)


def test_max_samples_counts_prompts_that_pass_the_filter(write, tokenizer):
    rows = [row(words(*range(9)) if i % 2 else words(i)) for i in range(40)]
    options = {"max_prompt_length": 4, "filter_overlong_prompts": True, "train_max_samples": 15}
    dataset = load(write(rows), tokenizer, **options)
    assert len(dataset) == 15
    assert all(len(prompt) == 3 for prompt in ids(dataset))


def test_other_columns(write, tokenizer):
    path = write([{"question": "w1", "source": "tiny/x", "reward_model": {"ground_truth": "1"}}])
    dataset = load(path, tokenizer, prompt_key="question", reward_fn_key="source")
    assert dataset.data_sources == {"tiny/x"}
    assert ids(dataset) == [[1, 6, 3]]


def test_missing_parts_are_noticed(write, tokenizer, plain_tokenizer):
    path = write([{"prompt": "w1"}, {"prompt": "w2"}], "a.jsonl")
    dataset = load(path, plain_tokenizer, require_ground_truth=False)
    assert ids(dataset) == [[BOS, 6], [BOS, 7]]
    assert dataset.data_sources == {"unknown"}
    assert "no chat template" in dataset.notices[0]
    assert "2 of 2 rows have no 'data_source'" in dataset.notices[1]
    with pytest.raises(DataError, match=r"a.jsonl, line 1, column 'reward_model': 'ground_truth' is missing"):
        load(path, tokenizer)


def test_a_source_that_a_scorer_needs_has_to_be_there(write, tokenizer):
    path = write([{"prompt": "w1", "source": "tiny/x", "reward_model": {"ground_truth": "1"}}])
    with pytest.raises(DataError, match=r"data\.reward_fn_key=data_source: .* It has prompt, source, reward_model\."):
        load_prompts(path, DataConfig(), tokenizer, split="train", require_source=True)


def test_fingerprint_tells_changed_data(write, tokenizer):
    base = [row(words(i)) for i in range(3)]
    same = load(write(base), tokenizer).fingerprint
    assert load(write(base, "b.jsonl"), tokenizer).fingerprint == same
    other_truth = [*base[:2], row(words(2), reward_model={"style": "rule", "ground_truth": "43"})]
    for changed in (base[::-1], base[:2], [*base[:2], row(words(9))], other_truth):
        assert load(write(changed), tokenizer).fingerprint != same


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the real GSM8K is not beside this checkout")
def test_real_gsm8k(tmp_path, plain_tokenizer):
    import subprocess
    import sys

    script = Path(__file__).parents[2] / "examples" / "data_preprocess" / "gsm8k.py"
    command = [sys.executable, str(script), "--local_save_dir", str(tmp_path), "--local_dataset_path", str(GSM8K)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    dataset = load(str(tmp_path / "test.parquet"), plain_tokenizer, split="val")
    assert len(dataset) == 1319
    assert dataset.batch([0])["ground_truth"] == ["18"]
    assert dataset.batch([2])["ground_truth"] == ["70000"]
