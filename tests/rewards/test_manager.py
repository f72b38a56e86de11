"""Batches of samples through real worker processes, with every way a reward function can misbehave."""

import asyncio
import math
import subprocess
import sys
import time

import psutil
import pytest

from verl.config.schema import CustomRewardConfig, RewardConfig
from verl.errors import RewardError
from verl.rewards import RewardInput, RewardManager, register_reward_manager
from verl.rewards import manager as manager_module
from verl.rewards import registry as registry_module
from verl.rewards.custom import CustomFunction
from verl.rewards.pool import WorkerPool

TIMEOUT = 1.0

CUSTOM = """
import asyncio, os, signal, time

class Panic(BaseException):
    pass

def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    if solution_str == "spin":
        while True:
            pass
    if solution_str == "deaf":  # swallows the time limit, so that only killing the process helps
        while True:
            try:
                time.sleep(60)
            except:
                pass
    if solution_str == "alarm":  # uses the alarm that the time limit uses
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(0)
    if solution_str.startswith("exit"):
        os._exit(int(solution_str[5:]))
    if solution_str == "sys.exit":
        raise SystemExit(3)
    if solution_str == "raise":
        raise ValueError("cannot judge this")
    if solution_str == "cancelled":
        raise asyncio.CancelledError
    if solution_str == "panic":
        raise Panic("at the disco")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "dict":
        return {"score": 0.5, "a": 1}
    if solution_str == "other dict":
        return {"score": 0.25, "b": 3, "a": 2}
    if solution_str == "slow":
        time.sleep(0.3)
    if solution_str == "pid":
        return os.getpid()
    return len(solution_str) * scale
"""

ASYNC = """
import asyncio, time

async def judge(solution_str, **rest):
    if solution_str == "wait":
        await asyncio.sleep(60)
    if solution_str == "block":
        time.sleep(60)
    if solution_str == "nap":
        time.sleep(0.2)
    if solution_str == "raise":
        raise TimeoutError("the judge's own server timed out")
    if solution_str == "cancelled":
        raise asyncio.CancelledError
    if solution_str == "cancel itself":
        asyncio.current_task().cancel()
    await asyncio.sleep(0.5)
    return {"score": len(solution_str)}
"""


def inputs(*texts):
    return [RewardInput("lab/sums", text, "42", {"index": i}) for i, text in enumerate(texts)]


def gsm8k(*texts):
    return [RewardInput("openai/gsm8k", text, "42") for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "custom.py").write_text(CUSTOM)
    (folder / "judge.py").write_text(ASYNC)
    return folder


@pytest.fixture(scope="module")
def manager(folder):
    config = RewardConfig(timeout=TIMEOUT, failure_score=-1.0)
    with RewardManager(config, CustomRewardConfig(path=str(folder / "custom.py"))) as manager:
        manager.check()
        yield manager


@pytest.fixture(scope="module")
def judge(folder):
    config = RewardConfig(timeout=TIMEOUT, num_workers=1)
    with RewardManager(config, CustomRewardConfig(path=str(folder / "judge.py"), name="judge")) as manager:
        manager.check()
        yield manager


def test_scores_keep_their_order(manager):
    texts = ["x" * (i % 37) for i in range(1000)]
    assert manager.score(inputs(*texts)).scores == [float(len(text)) for text in texts]


def test_an_empty_batch(manager):
    assert manager.score([]).scores == []


def test_a_thousand_quick_samples_cost_milliseconds(manager):
    samples = inputs(*["some reasoning " * 50] * 1000)
    manager.score(samples)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        manager.score(samples)
        best = min(best, time.perf_counter() - start)
    assert best < 0.2  # measured: 0.01 to 0.03 s; one round trip a sample would be 0.3 s and more


def test_scoring_goes_on_while_the_caller_does_something_else(manager):
    handle = manager.submit(inputs("slow", "slow"))
    time.sleep(0.9)
    start = time.perf_counter()
    assert handle.result().scores == [4.0, 4.0]
    assert time.perf_counter() - start < 0.2
    assert handle.result().scores == [4.0, 4.0]


def test_samples_that_come_in_parts_keep_their_places(manager):
    handle = manager.expect(3)
    handle.add([2, 0], inputs("abc", "abcde"))
    handle.add([1], inputs("a"))
    assert handle.result().scores == manager.score(inputs("abcde", "a", "abc")).scores


def test_quick_scorers_in_parts_and_with_failures():
    with RewardManager(RewardConfig(max_failure_ratio=0.5), CustomRewardConfig()) as manager:
        right, wrong = (RewardInput("openai/gsm8k", text, "7") for text in ("#### 7", "#### 8"))
        handle = manager.expect(3)
        handle.add([1], [right])
        handle.add([0, 2], [wrong, right])
        assert handle.result().scores == [0.0, 1.0, 1.0]


def test_slow_functions_use_all_workers(manager):
    manager.score(inputs("a"))
    start = time.perf_counter()
    assert manager.score(inputs(*["slow"] * 10)).scores == [4.0] * 10
    assert time.perf_counter() - start < 2.7  # 10 x 0.3 s on two workers: 1.5 s; on one: 3.0 s


def test_dicts_with_different_keys_stay_aligned(manager):
    result = manager.score(inputs("abc", "dict", "other dict"))
    assert result.scores == [3.0, 0.5, 0.25]
    assert result.metrics == {"a": [None, 1.0, 2.0], "b": [None, None, 3.0]}
    assert result.metric_means() == {"a": 1.5, "b": 3.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise", "raised ValueError"),
        ("nan", "returned nan"),
        ("sys.exit", "raised SystemExit"),
        ("cancelled", "raised CancelledError"),
        ("panic", "Panic: at the disco"),
        ("spin", "took longer than reward.timeout=1 s"),
        ("exit 1", "ended its worker process (exit code 1)"),
        ("exit 0", "exit code 0"),
        ("deaf", "did not react"),
    ],
)
def test_one_bad_sample_costs_itself_alone(manager, text, said):
    result = manager.score(inputs(*["abc"] * 20, text, *["de"] * 20))
    assert result.failed == [20]
    assert result.failures == 1
    assert result.scores == [3.0] * 20 + [-1.0] + [2.0] * 20
    (message,) = result.failure_messages
    assert message.startswith("sample 20: ")
    assert said in message
    assert repr(text) in message
    assert "'42'" in message


def test_the_users_traceback_is_shown(manager):
    (message,) = manager.score(inputs("abc", "raise", "abc")).failure_messages
    assert 'raise ValueError("cannot judge this")' in message
    assert "worker.py" not in message


def test_a_function_that_uses_the_alarm_itself(manager):
    start = time.perf_counter()
    assert manager.score(inputs("alarm", "spin", *["abc"] * 18)).failed == [1]  # both in one chunk
    assert time.perf_counter() - start < 3  # 1 s; a worker that has to be killed costs 4 s and a start


def test_too_many_failures_stop_the_run_and_show_the_first(manager):
    assert manager.score(inputs("raise", "raise", "abc", "abc")).failures == 2
    with pytest.raises(RewardError, match=r"(?s)3 of 4 rewards failed.*max_failure_ratio=0.5.*cannot judge this"):
        manager.score(inputs("raise", "raise", "abc", "raise"))


def test_messages_are_few_and_the_count_is_whole(manager):
    result = manager.score(inputs(*["raise"] * 9, *["abc"] * 9))
    assert result.failures == 9
    assert len(result.failure_messages) == 5


def test_workers_killed_while_idle_are_replaced(manager):
    pids = {int(pid) for pid in manager.score(inputs(*["pid"] * 8)).scores}
    for pid in pids:
        psutil.Process(pid).kill()
    time.sleep(0.3)
    assert manager.score(inputs(*["abc"] * 20)).scores == [3.0] * 20


def test_chunks_that_a_breaking_pool_forgot_are_scored_again(folder):
    custom = CustomFunction(str(folder / "custom.py"), "compute_score")
    pool = WorkerPool(1, custom)
    try:
        broken = pool._current()
        job = pool.submit(None, inputs("slow", "abc", "slow", "slow"), 60)
        broken.stop()  # it now drops the chunks that no worker has begun, and tells nobody
        assert [outcome.score for outcome in job.wait()] == [4.0, 3.0, 4.0, 4.0]
    finally:
        pool.close()
        broken.join()


def test_reward_kwargs(folder):
    custom = CustomRewardConfig(path=str(folder / "custom.py"), reward_kwargs={"scale": 0.5})
    with RewardManager(RewardConfig(num_workers=1), custom) as manager:
        assert manager.score(inputs("abcd")).scores == [2.0]


def test_close_leaves_no_process_and_fails_what_waits(folder):
    config = RewardConfig(timeout=60)
    before = set(psutil.Process().children(recursive=True))
    manager = RewardManager(config, CustomRewardConfig(path=str(folder / "custom.py")))
    assert manager.score(inputs("abc")).scores == [3.0]
    workers = set(psutil.Process().children(recursive=True)) - before
    assert len(workers) >= 2
    handle = manager.submit(inputs("deaf", "spin"))
    time.sleep(0.3)
    manager.close()
    with pytest.raises(RewardError, match="closed before these samples were scored"):
        handle.result()
    left = [p for p in workers if p.is_running() and "resource_tracker" not in " ".join(p.cmdline())]
    assert left == []
    manager.close()
    with pytest.raises(RewardError, match="are closed"):
        manager.submit(inputs("abc"))


def test_async_calls_of_a_chunk_run_together(judge):
    judge.score(inputs("a"))
    start = time.perf_counter()
    assert judge.score(inputs(*["abc"] * 100)).scores == [3.0] * 100
    assert time.perf_counter() - start < 10  # one after the other: 50 s


def test_async_failures_are_counted_each(judge):
    result = judge.score(inputs(*["abc"] * 10, "wait", "raise"))
    assert result.failed == [10, 11]
    assert result.scores == [3.0] * 10 + [0.0, 0.0]
    slow, own = result.failure_messages
    assert "took longer than reward.timeout=1 s" in slow
    assert "the judge's own server timed out" in own


@pytest.mark.parametrize("text", ["cancelled", "cancel itself"])
def test_an_async_call_that_is_cancelled_from_within_costs_itself_alone(judge, text):
    result = judge.score(inputs("abc", "abc", text, "abc"))
    assert result.failed == [2]
    assert result.scores == [3.0, 3.0, 0.0, 3.0]
    assert "CancelledError" in result.failure_messages[0]


def test_an_async_function_that_blocks_takes_nobody_with_it(judge):
    result = judge.score(inputs(*["abc"] * 6, "block", *["abc"] * 13))
    assert result.failed == [6]
    assert result.scores == [3.0] * 6 + [0.0] + [3.0] * 13


def test_async_functions_that_block_a_little_each_are_all_scored(judge):
    assert judge.score(inputs(*["nap"] * 12)).failures == 0  # 6 x 0.2 s in one chunk is over the limit of 1 s


def test_built_in_scorers_start_no_process():
    before = set(psutil.Process().children())
    with RewardManager(RewardConfig(), CustomRewardConfig()) as manager:
        manager.check({"openai/gsm8k", "tiny/add"})
        samples = [*gsm8k("#### 42.", "#### 41"), RewardInput("tiny/add", "7 ", "7")]
        result = manager.score(samples)
        assert set(psutil.Process().children()) == before
    assert result.scores == [1.0, 0.0, 1.0]
    assert result.metrics == {"acc": [1.0, 0.0, None], "format": [1.0, 1.0, None]}


def test_quick_scorers_that_fail_are_counted():
    with RewardManager(RewardConfig(), CustomRewardConfig()) as manager:
        result = manager.score([*gsm8k("#### 42"), RewardInput("openai/gsm8k", "#### 1", "no number")])
    assert result.failed == [1]
    assert "holds no number" in result.failure_messages[0]


def test_quick_and_slow_scorers_in_one_batch():
    samples = [
        RewardInput("HuggingFaceH4/MATH-500", "$\\boxed{0.5}$", "\\frac{1}{2}"),
        *gsm8k("#### 42"),
        RewardInput("HuggingFaceH4/MATH-500", "$\\boxed{3}$", "4"),
    ]
    with RewardManager(RewardConfig(num_workers=1), CustomRewardConfig()) as manager:
        assert manager.score(samples).scores == [1.0, 1.0, 0.0]


def test_check_finds_faults_before_any_sample(folder):
    with RewardManager(RewardConfig(), CustomRewardConfig()) as manager:
        with pytest.raises(RewardError, match="No scorer for data_source 'lab/sums'"):
            manager.check({"lab/sums"})
        with pytest.raises(RewardError, match="No scorer for data_source 'lab/sums'"):
            manager.submit(inputs("abc"))
    with RewardManager(RewardConfig(), CustomRewardConfig(path=str(folder / "custom.py"), name="compute")) as manager:
        with pytest.raises(RewardError, match=r"Did you mean compute_score\?"):
            manager.check({"lab/sums"})


def test_a_file_that_takes_long_to_import_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.5)\n" + CUSTOM)
    monkeypatch.setattr(manager_module, "SLOW_IMPORT_SECONDS", 0.05)
    with RewardManager(RewardConfig(), CustomRewardConfig(path=str(tmp_path / "slow.py"))) as slow:
        slow.check()
    assert "slow.py is still being imported after 0.05 s" in capsys.readouterr().err


def test_a_reward_manager_of_ones_own(monkeypatch):
    monkeypatch.setattr(registry_module, "_MANAGERS", dict(registry_module._MANAGERS))

    @register_reward_manager("short")
    def short(config):
        def shape(samples, result):
            result.scores = [s - 0.01 * len(i.solution_str) for i, s in zip(samples, result.scores)]
            return result

        return shape

    config = RewardConfig()
    config.reward_manager.name = "short"
    with RewardManager(config, CustomRewardConfig()) as manager:
        assert manager.score(gsm8k("####42")).scores == pytest.approx([0.94])


def test_rewards_import_neither_torch_nor_transformers():
    code = "import sys, verl.rewards; print([m for m in ('torch', 'transformers', 'ray', 'math_verify') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_manager_works_inside_a_running_event_loop():
    async def run():
        with RewardManager(RewardConfig(), CustomRewardConfig()) as manager:
            return manager.score(gsm8k("#### 42")).scores

    assert asyncio.run(run()) == [1.0]
