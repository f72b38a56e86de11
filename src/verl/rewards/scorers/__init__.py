"""The built-in scorers. Importing this package registers them."""

from verl.rewards.scorers import exact, gsm8k, math

__all__ = ["exact", "gsm8k", "math"]
