import pytest

from verl.config.schema import OverlongBufferConfig, RewardConfig, RewardKwargsConfig, RewardManagerConfig
from verl.errors import RewardError
from verl.rewards import check_data_sources, find_scorer, register_scorer
from verl.rewards import registry as registry_module
from verl.rewards.registry import make_shaper
from verl.rewards.scorers import exact, gsm8k, math
from verl.rewards.types import RewardInput, RewardResult


@pytest.fixture
def own_registrations(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry_module, "_SCORERS", dict(registry_module._SCORERS))


@pytest.mark.parametrize(
    ("data_source", "function"),
    [
        ("openai/gsm8k", gsm8k.score_gsm8k),
        ("tiny/addition", exact.score_exact),
        ("lighteval/MATH", math.score_math),
        ("DigitalLearningGmbH/MATH-lighteval", math.score_math),
        ("HuggingFaceH4/MATH-500", math.score_math),
        ("math_dapo", math.score_math),
        ("aime2024", math.score_math),
        ("HuggingFaceH4/aime_2024", math.score_math),
    ],
)
def test_data_source_finds_its_scorer(data_source, function):
    assert find_scorer(data_source).function is function


def test_only_scorers_that_cannot_hang_run_in_the_trainer():
    assert find_scorer("openai/gsm8k").quick
    assert find_scorer("tiny/addition").quick
    assert not find_scorer("lighteval/MATH").quick


def test_longest_pattern_wins_and_an_exact_name_beats_it(own_registrations):
    @register_scorer("lab/*")
    def wide(**_): ...

    @register_scorer("lab/sums*")
    def narrow(**_): ...

    @register_scorer("lab/sums-hard")
    def exact_name(**_): ...

    assert find_scorer("lab/words").function is wide
    assert find_scorer("lab/sums-easy").function is narrow
    assert find_scorer("Lab/Sums-Hard").function is exact_name
    assert find_scorer("other") is None


def test_unknown_data_source_is_named_with_the_nearest():
    with pytest.raises(RewardError) as error:
        check_data_sources(["openai/gsm8k", "openai/gsm8", "foo"], has_custom=False)
    message = str(error.value)
    assert "'foo', 'openai/gsm8'" in message
    assert "lighteval/math*" in message
    assert "custom_reward_function.path" in message
    with pytest.raises(RewardError, match="Did you mean 'openai/gsm8k'"):
        check_data_sources(["openai/gsm8"], has_custom=False)


def test_a_custom_function_scores_every_data_source():
    check_data_sources(["whatever"], has_custom=True)


def test_unknown_reward_manager_names_the_known():
    with pytest.raises(RewardError, match=r"naiv is unknown. Did you mean 'naive'\? Known: dapo, naive"):
        make_shaper(RewardConfig(reward_manager=RewardManagerConfig(name="naiv")))


def dapo(buffer, **limits):
    config = RewardConfig(
        reward_manager=RewardManagerConfig(name="dapo"),
        reward_kwargs=RewardKwargsConfig(overlong_buffer_cfg=buffer, **limits),
    )
    return make_shaper(config)


def samples_of(*lengths):
    return [RewardInput("d", "s", response_length=length) for length in lengths]


def test_dapo_takes_points_off_long_responses_and_keeps_what_was_right():
    shape = dapo(OverlongBufferConfig(enable=True, len=20, penalty_factor=0.5, log=True), max_resp_len=100)
    result = shape(samples_of(80, 90, 100), RewardResult([1.0, 0.0, 1.0], {"format": [1.0, 1.0, 0.0]}, failed=[1]))
    assert result.scores == [1.0, -0.25, 0.5]
    assert result.metrics == {
        "acc": [1.0, 0.0, 1.0],
        "format": [1.0, 1.0, 0.0],
        "overlong_reward": [0.0, -0.25, -0.5],
        "overlong": [0.0, 1.0, 1.0],
    }
    assert result.failed == [1]


def test_dapo_without_the_buffer_reports_the_score_as_accuracy():
    given = RewardResult([0.5], {"acc": [1.0]})
    assert dapo(OverlongBufferConfig(), max_resp_len=10)(samples_of(10), given) == given  # an accuracy of its own stays
    assert dapo(OverlongBufferConfig(), max_resp_len=10)(samples_of(10), RewardResult([0.5])).metrics == {"acc": [0.5]}
