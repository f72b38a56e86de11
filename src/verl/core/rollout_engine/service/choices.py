"""The choices of a completion or a chat, as they grow, and the forms in which OpenAI's API tells of them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from verl.core.rollout_engine.api import Completion
from verl.core.rollout_engine.service.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Choice:
    """One sample as text. `token_ids` and `log_probs` are those up to the stop text, if one came."""

    def __init__(self, index: int, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...]):
        self.index, self.text = index, ""
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.finish_reason: str | None = None
        self.told = self.told_characters = 0  # tokens whose log-probs have been sent, and their text's length
        self._decoded = TextStream(tokenizer, stops)

    def add(self, token_ids: list[int], log_probs: list[float]) -> str:
        """Take tokens; their text as far as it is final. The tokens after a stop text are left out."""
        piece = ""
        for token, log_prob in zip(token_ids, log_probs):
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            self.log_probs.append(log_prob)
            piece += self._decoded.add([token])
            if self._decoded.stopped:
                self.finish_reason = "stop"
        self.text += piece
        return piece

    def finish(self, completion: Completion) -> str:
        """Take the whole sample, of which some tokens may have come already; the rest of its text."""
        come = len(self.token_ids)
        piece = self.add(completion.token_ids[come:], completion.log_probs[come:])
        if self.finish_reason is None:
            rest = self._decoded.end()
            self.text += rest
            piece += rest
            self.finish_reason = "stop" if self._decoded.stopped else completion.finish_reason
        return piece


class Form:
    """An answer's frame. tokenizer: names the tokens when their log-probs are asked for."""

    kind = piece_kind = prefix = ""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, with_log_probs: bool):
        self._tokenizer, self._with_log_probs = tokenizer, with_log_probs
        self._frame = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """The answer at once."""
        told = [{**self._content(choice), "finish_reason": choice.finish_reason} for choice in choices]
        return {**self._frame, "object": self.kind, "choices": told, "usage": _usage(choices, prompt_tokens)}

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """What is sent of a choice before its text."""
        return None

    def piece(self, choice: Choice, text: str) -> dict[str, Any] | None:
        """New text of a choice; None when there is nothing to tell."""
        if not text and choice.finish_reason is None and not self._with_log_probs:
            return None
        told = {**self._new_content(choice, text), "finish_reason": choice.finish_reason}
        choice.told = len(choice.token_ids)
        return self._piece([told])

    def usage_piece(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        return {**self._piece([]), "usage": _usage(choices, prompt_tokens)}

    @staticmethod
    def event(piece: dict[str, Any]) -> str:
        """A server-sent event."""
        return f"data: {json.dumps(piece)}\n\n"

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._frame, "object": self.piece_kind, "choices": choices}

    def _content(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _new_content(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _token_texts(self, ids: list[int]) -> list[str]:
        return [self._tokenizer.decode([token]) for token in ids]


class CompletionForm(Form):
    """Of /v1/completions."""

    kind = piece_kind = "text_completion"
    prefix = "cmpl"

    def _content(self, choice: Choice) -> dict[str, Any]:
        return self._new_content(choice, choice.text)

    def _new_content(self, choice: Choice, text: str) -> dict[str, Any]:
        log_probs = None
        if self._with_log_probs:
            texts = self._token_texts(choice.token_ids[choice.told :])
            offsets = list(accumulate(map(len, texts), initial=choice.told_characters))
            choice.told_characters = offsets.pop()
            log_probs = {
                "tokens": texts,
                "token_logprobs": choice.log_probs[choice.told :],
                "top_logprobs": None,
                "text_offset": offsets,
            }
        return {"index": choice.index, "text": text, "logprobs": log_probs}


class ChatForm(Form):
    """Of /v1/chat/completions."""

    kind, piece_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self, choice: Choice) -> dict[str, Any]:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        return self._piece([{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _content(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": self._log_probs(choice)}

    def _new_content(self, choice: Choice, text: str) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": choice.index, "delta": delta, "logprobs": self._log_probs(choice)}

    def _log_probs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._with_log_probs:
            return None
        texts = self._token_texts(choice.token_ids[choice.told :])
        entries = [
            {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, log_prob in zip(texts, choice.log_probs[choice.told :])
        ]
        return {"content": entries, "refusal": None}


def _usage(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, int]:
    drawn = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn}
