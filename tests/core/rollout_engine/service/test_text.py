"""Text that comes in pieces is the text of all tokens, cut where a stop text begins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.core.rollout_engine.service.text import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes; token 256 is special."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def pieces(text: str, *stops: str) -> tuple[list[str], bool]:
    stream = TextStream(Bytes(), stops)
    found = [stream.add([byte]) for byte in text.encode()]
    return [*found, stream.end()], stream.stopped


@settings(max_examples=50)
@given(st.text(max_size=20))
def test_pieces_join_to_the_whole_text(text):
    found, stopped = pieces(text)
    assert "".join(found) == text
    assert not stopped


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_that_completes(text, stops):
    ends = [len(text[: place + len(s)]) for s in stops for place in range(len(text)) if text.startswith(s, place)]
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(seen.find(s) for s in stops if s in seen)]
    else:
        expected = text
    found, stopped = pieces(text, *stops)
    assert "".join(found) == expected
    assert stopped == bool(ends)


def test_half_a_character_and_half_a_stop_text_are_held_back():
    found, _ = pieces("aé!", "!?")
    assert found == ["a", "", "é", "", "!"]


def test_what_follows_a_stop_text_is_left_out():
    stream = TextStream(Bytes(), ("ST",))
    assert stream.add(list(b"ab STOP")) == "ab "
    assert stream.stopped
    assert stream.add(list(b"more")) == ""
    assert stream.end() == ""


@pytest.mark.parametrize("ids", [[256], [256, 97, 256], list("é".encode())[:1]])
def test_special_tokens_have_no_text_and_an_unfinished_character_shows_at_the_end(ids):
    stream = TextStream(Bytes())
    text = "".join([*(stream.add([i]) for i in ids), stream.end()])
    assert text == ("a" if 97 in ids else "" if 256 in ids else "\N{REPLACEMENT CHARACTER}")
