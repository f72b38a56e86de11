"""Tokens to text as they come, and texts that end a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of the first bytes of a character


class TextStream:
    """Text of one sample.

    Text is given out when no later token can change it: characters whose bytes are spread over tokens, and whatever may be
    the beginning of a stop text, are held back. `stopped` is True when a stop text has come; it and all after it is left
    out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...] = ()):
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._context = 0  # tokens from here on are decoded anew, so that spaces at their joints come out right
        self._known = 0  # tokens whose text is known
        self._held = ""
        self.stopped = False

    def add(self, token_ids: list[int]) -> str:
        """The text that these tokens make final."""
        if self.stopped:
            return ""
        self._ids.extend(token_ids)
        before = self._decode(self._context, self._known)
        after = self._decode(self._context, len(self._ids))
        if after.endswith(UNFINISHED):
            return ""
        self._context, self._known = self._known, len(self._ids)
        return self._give(after[len(before) :])

    def end(self) -> str:
        """What was held back, when no token comes any more."""
        if self.stopped:
            return ""
        before = self._decode(self._context, self._known)
        rest = self._give(self._decode(self._context, len(self._ids))[len(before) :])
        held, self._held = self._held, ""
        return rest if self.stopped else rest + held

    def _decode(self, first: int, last: int) -> str:
        return self._tokenizer.decode(self._ids[first:last], skip_special_tokens=True)

    def _give(self, text: str) -> str:
        text = self._held + text
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins.

    >>> _overlap("so END", "ENDING"), _overlap("so", "ENDING")
    (3, 0)
    """
    return next((k for k in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:k])), 0)
