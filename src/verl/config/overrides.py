"""Command-line words to assignments, in Hydra's override grammar."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

_WORD = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[^=\s]*?)\s*(?:=(?P<value>.*))?$", re.DOTALL)
_STRUCTURE = set("'\"[]{}(),\\")


@dataclass(frozen=True)
class Assignment:
    """`key=value` as given.

    text: the value as typed when it is a bare word or number (a text option takes it as it stands), else None.
    remove: `~key`.
    """

    key: str
    value: Any
    text: str | None = None
    remove: bool = False

    def moved(self, key: str, value: Any) -> Assignment:
        """The same assignment to another key; a changed value is no longer as typed."""
        return replace(self, key=key, value=value, text=self.text if value is self.value else None)


def parse_words(words: list[str]) -> tuple[list[Assignment], list[str]]:
    """Assignments of the words that can be read, and a problem for each of the others."""
    parser = OverridesParser.create()
    assignments: list[Assignment] = []
    problems: list[str] = []
    for word in words:
        try:
            assignments.append(_parse(parser, word))
        except ValueError as error:
            problems.append(str(error))
    return assignments, problems


def _parse(parser: OverridesParser, word: str) -> Assignment:
    """One word; ValueError with the problem."""
    if not word.strip():
        raise ValueError(
            "an empty word among the overrides: in a command over several lines nothing, not even a space or a "
            "comment, may follow the backslash at the end of a line."
        )
    if word.startswith("-"):
        raise ValueError(f"{word}: not a flag of this command (see --help).")
    match = _WORD.match(word)
    key, value = (match["key"], match["value"]) if match else ("", None)
    if not match or not key:
        raise ValueError(f"{word}: not an override. Write key=value.")
    if match["sign"] == "~":
        return Assignment(key, value, remove=True)
    if value is None:
        raise ValueError(f"{word}: has no value. Write {key}=VALUE (or {key}=null).")
    if "@" in key or "/" in key:
        raise ValueError(f"{word}: config groups and packages are not used here. Write one dotted key=value.")
    return _to_assignment(_parse_value(parser, word, key, value), key, value)


def _parse_value(parser: OverridesParser, word: str, key: str, value: str) -> Override:
    try:
        parsed = parser.parse_override(word)
        if not parsed.is_sweep_override():
            # Hydra runs functions such as int(3) here, so a bad argument shows up here too.
            parsed.value()
            return parsed
    except HydraException as error:
        # A bare ~/data or a=b is not in Hydra's grammar, but can only be meant as text.
        if not _STRUCTURE & set(value):
            with contextlib.suppress(HydraException):
                return parser.parse_override(f"{key}='{value}'")
        raise ValueError(f"{word}: cannot be read. {_how_to_quote(key, value, error)}") from None
    raise ValueError(
        f'{word}: a comma separates items only inside brackets. For a list write "{key}=[{value}]", for one text with '
        f"a comma \"{key}='{value}'\"."
    )


def _how_to_quote(key: str, value: str, error: HydraException) -> str:
    if any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
        return (
            "Its brackets do not match; quote the whole word so that the shell leaves it alone, "
            f'as in "{key}=[a,b]" or "{key}={{name: value}}".'
        )
    if "'" in value or '"' in value:
        return f"For a text with quotes or other special characters, escape the inner quotes: \"{key}='it\\'s'\"."
    inner = value[1:-1]
    if value[:1] + value[-1:] in ("[]", "()") and not _STRUCTURE - {","} & set(inner):
        quoted = ",".join(f"'{item.strip()}'" for item in inner.split(","))
        return f'For a list write "{key}=[{quoted}]".'
    if "(" in value:
        return f"Brackets call a function of Hydra; for a text write \"{key}='{value}'\"."
    reason = str(error).splitlines()[0]
    return f'For a text write "{key}=\'{value}\'", for a list "{key}=[a,b]". ({reason})'


def _to_assignment(parsed: Override, key: str, text: str) -> Assignment:
    raw = parsed._value
    if raw is None or isinstance(raw, (QuotedString, list, dict)):
        return Assignment(key, parsed.value())
    return Assignment(key, parsed.value(), text=text.strip())


def expand(assignment: Assignment, keep: Any) -> list[Assignment]:
    """An assignment of a mapping as assignments of its entries.

    keep: function of a key; True where the mapping is itself the value.
    """
    value = assignment.value
    if not isinstance(value, dict) or not value or keep(assignment.key):
        return [assignment]
    return [
        leaf
        for name, item in value.items()
        for leaf in expand(Assignment(f"{assignment.key}.{name}", item, remove=assignment.remove), keep)
    ]
