"""Bodies of the requests, as pydantic models: an unknown field, a wrong type or a value out of range is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl.config.schema.options import LARGEST_SEED

MOST_SAMPLES = 1024
MOST_PROMPTS = 1024
MOST_STOPS = 16

TokenId = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=-LARGEST_SEED - 1, le=LARGEST_SEED)]

# Fields of OpenAI's API that only their neutral value is taken of: what it stands for is not done here.
NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
}
# Fields that say nothing about what is generated.
IGNORED = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class OpenAIBody(Body):
    """What completions and chat have in common.

    Beyond OpenAI's: top_k, stop_token_ids (in addition to the model's end tokens) and ignore_eos.
    """

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    seed: Seed | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def take_neutral(cls, data: Any) -> Any:
        """Leave out fields that ask for nothing; name those that ask for what is not done."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None or name in IGNORED:
                continue
            if name in NEUTRAL and name not in cls.model_fields:
                if value not in NEUTRAL[name]:
                    raise ValueError(f"{name}={value!r} is not supported; leave it out")
                continue
            kept[name] = value
        return kept

    @property
    def stops(self) -> tuple[str, ...]:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)


class CompletionBody(OpenAIBody):
    """POST /v1/completions. logprobs: 0 reports those of the tokens drawn; alternatives are not known here."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


class ContentPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        content = self.content or ""
        return {
            "role": self.role,
            "content": content if isinstance(content, str) else "".join(part.text for part in content),
        }


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class GenerateBody(Body):
    """POST /generate: token ids in, token ids and log-probs out.

    random_stream: with seed, selects the samples' random streams. stop_token_ids: all tokens that end a sample. name: by
    which /abort can stop it. weights: label of the weights it has to be drawn with. stream: "samples" gives a line as each
    sample finishes, "tokens" also as its tokens are drawn.
    """

    prompt_ids: Annotated[list[TokenId], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    first: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    seed: Seed = 0
    random_stream: Annotated[int, Field(ge=0)] = 0
    name: str = ""
    weights: str | None = None
    stream: Literal["no", "samples", "tokens"] = "no"


class DrainBody(Body):
    """POST /pause and /sleep. mode: whether what runs goes on to its end, or ends with what it has."""

    mode: Literal["wait", "abort"] = "wait"


class AbortBody(Body):
    """POST /abort. names: of requests to /generate; null: every request there is."""

    names: list[str] | None


class FolderBody(Body):
    """POST /update_weights with a folder of safetensors files that this server can read."""

    path: str
    version: Annotated[int, Field(ge=0)]
    label: Annotated[str, Field(min_length=1)]
    mode: Literal["wait", "abort"] = "wait"


class PartQuery(Body):
    """The query of POST /update_weights with a part of the weights as its body.

    update: the same word for all parts. part: 0, 1, ...; last: whether it is the last one.
    """

    model_config = ConfigDict(extra="forbid", strict=False)  # a query has nothing but texts

    update: Annotated[str, Field(min_length=1)]
    part: Annotated[int, Field(ge=0)]
    last: bool = False
    version: Annotated[int, Field(ge=0)]
    label: Annotated[str, Field(min_length=1)]
    mode: Literal["wait", "abort"] = "wait"
