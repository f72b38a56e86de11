"""The reward function of the guide that users come with, word for word."""

TUTORIAL = r'''# custom_reward.py
import re
from typing import Optional

def extract_solution(solution_str: str) -> Optional[str]:
    """从模型回答中提取最终答案"""
    # 假设答案被包含在 "####" 之后
    solution = re.search("#### (\\-?[0-9\\.\\,]+)", solution_str)
    if solution:
        return solution.group(0).split("#### ")[1].replace(",", "").replace("$", "")
    return None

def compute_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """
    veRL 要求的奖励函数签名
    """
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    # 将答案与标准答案比较
    return 1.0 if answer == ground_truth else 0.0
'''
