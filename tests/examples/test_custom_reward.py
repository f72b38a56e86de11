"""The example reward function, and that it is loaded by the keys that its docstring names."""

from pathlib import Path

from verl.config.schema import CustomRewardConfig, RewardConfig
from verl.rewards.manager import RewardManager
from verl.rewards.types import RewardInput

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward.py"
CASES = [
    ("9 + 9 = 18\n#### 18", "18", 1.0),
    ("#### 18.0 eggs", "18", 1.0),
    ("####$1,250.", "1250", 1.0),
    ("#### 3 no, #### -4", "-4", 1.0),
    ("#### 3 no, #### 4", "3", 0.0),
    ("18", "18", 0.0),
    ("#### none", "18", 0.0),
    ("", "70,000", 0.0),
    ("#### 70000", "70,000", 1.0),
]


def test_scores():
    custom = CustomRewardConfig(path=str(EXAMPLE), name="compute_reward")
    manager = RewardManager(RewardConfig(num_workers=1), custom)
    try:
        manager.check(["openai/gsm8k"])
        result = manager.score([RewardInput("openai/gsm8k", text, truth, {}) for text, truth, _ in CASES])
    finally:
        manager.close()
    assert result.failures == 0
    assert result.scores == [score for _, _, score in CASES]
