"""The nearest right word for a wrong one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def nearest_words(word: str, words: Iterable[str], *, limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """Up to `limit` of `words` that look like `word`, the likest first."""
    scored = sorted(((_ratio(word.lower(), w.lower()), w) for w in words), key=lambda pair: -pair[0])
    return [w for score, w in scored if score >= cutoff][:limit]


def nearest_keys(key: str, keys: Iterable[str], *, limit: int = 3) -> list[str]:
    """Up to `limit` dotted `keys` that `key` may have meant, the likest first.

    The last component counts most, so that a right name in the wrong section finds its section; the sections before it
    decide between equal names.

    >>> nearest_keys("actor.clip_ratio", ["actor_rollout_ref.actor.clip_ratio", "trainer.seed"])
    ['actor_rollout_ref.actor.clip_ratio']
    """
    path, _, last = key.lower().rpartition(".")
    scored: list[tuple[float, str]] = []
    exact = False
    for candidate in keys:
        other_path, _, other_last = candidate.lower().rpartition(".")
        name_score = _ratio(last, other_last)
        if len(last) > 3 and last in other_last:
            name_score = max(name_score, 0.85)
        score = 0.7 * name_score + 0.3 * _ratio(path, other_path)
        exact = exact or last == other_last
        if name_score >= 0.7 or score >= 0.8:
            scored.append((score, candidate))
    if exact:
        scored = [pair for pair in scored if pair[1].lower().rpartition(".")[2] == last]
    scored.sort(key=lambda pair: -pair[0])
    return [candidate for score, candidate in scored if score >= scored[0][0] - 0.12][:limit]


def did_you_mean(words: list[str]) -> str:
    """ " Did you mean a, b or c?", or "" for no words."""
    if not words:
        return ""
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    return f" Did you mean {listed}?"
