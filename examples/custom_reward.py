"""A reward function of your own: right or wrong by the number after "####".

    python3 -m verl.trainer.main_ppo ... \\
        custom_reward_function.path=examples/custom_reward.py custom_reward_function.name=compute_reward

It is called with keyword arguments, once a response, in worker processes. It may be async, and it may return a dict with
"score" and further numbers, which are then logged beside the score.
"""

import re
from decimal import Decimal

MARKED_NUMBER = re.compile(r"####\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)")


def final_number(text: str) -> Decimal | None:
    """The last number that follows "####", as in "#### -1,250.50"; None if there is none."""
    found = MARKED_NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def compute_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """1.0 if the response's final number equals the ground truth, else 0.0.

    data_source and extra_info are the columns of the sample's row, ground_truth its reward_model.ground_truth;
    solution_str is the response as text, without special tokens.
    """
    given = final_number(solution_str)
    return float(given is not None and given == Decimal(str(ground_truth).replace(",", "")))
