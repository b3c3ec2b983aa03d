"""The committed prompts of the demo, the tests and the benchmark: tasks that the demo model can do.

Kinds: "copy" (the answer repeats most of the prompt), "code" (regular code is continued, without
the chat template), "free" (an answer in the model's own words).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Prompt(NamedTuple):
    """A prompt with its name.

    Attributes:
        name: identifies it in reports.
        kind: "copy", "code" or "free".
        text: what the user says, or the text to continue.
    """

    name: str
    kind: str
    text: str

    def encode(self, tokenizer: Any) -> list[int]:
        """Return the token ids; every kind but "code" goes through the chat template."""
        return encode_prompt(tokenizer, self.text, chat=self.kind != "code")


def encode_prompt(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """Return token ids of a text, as a user's turn of the tokenizer's chat template if `chat`."""
    if not chat:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


_SPELLING = "Fix the spelling mistakes in this paragraph and repeat it:\n\n"

_LIBRARY = (
    "The libary was built in 1902 by the citizens of the town, who wanted a quiet place to read. "
    "It has two floors, a garden with old trees, and a large collection of maps. Every saturday "
    "morning the librarian reads storys to the children, and in the evening a small group meets "
    "to discuss a new book."
)
_GARDEN = (
    "Before you plant tomatos, dig the soil well and mix in some compost. Put the plants half a "
    "metre apart, water them every morning, and tie them to a stick when they are tall. After "
    "about ten weeks the first tomatos turn red, and you can pick them until the autum comes."
)
_HARBOUR = (
    "The harbour lies on the north side of the iland, behind a long wall of grey stone. Fishing "
    "boats leave before sunrise and come back at noon, when the market opens on the square. In "
    "winter the sea is too ruff for the small boats, and the fishermen mend their nets at home."
)
_RAILWAY = (
    "The first railway in the valley was opend in 1857 and carried coal from the mines to the "
    "river. Twenty years later the line was extended to the capital, and passenger trains began "
    "to run three times a day. The old station is now a museum with a small cafe."
)

_ACCOUNT = """class Account:
    def __init__(self, owner, balance, currency, limit):
        self._owner = owner
        self._balance = balance
        self._currency = currency
        self._limit = limit

    def get_owner(self):
        return self._owner

    def set_owner(self, owner):
        self._owner = owner

    def get_balance(self):
        return self._balance

    def set_balance(self, balance):
        self._balance = balance

    def get_currency(self):"""

_POINT = """class Point:
    @property
    def x(self):
        return self._x

    @x.setter
    def x(self, value):
        self._x = value

    @property
    def y(self):
        return self._y

    @y.setter
    def y(self, value):
        self._y = value

    @property
    def z(self):"""

_TESTS = """def test_add_small():
    assert add(1, 2) == 3


def test_add_zero():
    assert add(0, 0) == 0


def test_add_negative():
    assert add(-1, -2) == -3


def test_add_large():"""

SPELLING_LIBRARY: Final = Prompt("spelling-library", "copy", _SPELLING + _LIBRARY)
GETTERS: Final = Prompt("getters-and-setters", "code", _ACCOUNT)
SKY: Final = Prompt("why-is-the-sky-blue", "free", "Why is the sky blue?")

PROMPTS: Final = (
    SPELLING_LIBRARY,
    Prompt("spelling-garden", "copy", _SPELLING + _GARDEN),
    Prompt("spelling-harbour", "copy", _SPELLING + _HARBOUR),
    Prompt("spelling-railway", "copy", _SPELLING + _RAILWAY),
    GETTERS,
    Prompt("properties", "code", _POINT),
    Prompt("test-functions", "code", _TESTS),
    SKY,
    Prompt("capital-of-france", "free", "What is the capital of France?"),
    Prompt("letter", "free", "Write a short letter to a friend about a walk in the mountains."),
    Prompt("bread", "free", "How do I bake bread at home?"),
    Prompt("story", "free", "Tell me a story about a lighthouse keeper and a cat."),
)
"""The set of 12 that the equality of plain and speculative decoding is tested on."""

DEMO_PROMPTS: Final = (SPELLING_LIBRARY, GETTERS, SKY)
"""The three tasks of `python -m spec_kernels demo`."""
