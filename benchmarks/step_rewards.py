"""Reward functions of grpo_step.py, in the trainer's signature; TRL calls the same ones. Only the standard library."""

import re

NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def starts_with_answer(data_source, solution_str, ground_truth, extra_info=None):
    """1 if the text begins with the answer."""
    return float(solution_str.strip().startswith(ground_truth))


def gsm8k_answer(data_source, solution_str, ground_truth, extra_info=None):
    """1 if the last number of the text is the answer."""
    numbers = NUMBER.findall(solution_str)
    return float(bool(numbers) and numbers[-1].replace(",", "").rstrip(".") == ground_truth)
