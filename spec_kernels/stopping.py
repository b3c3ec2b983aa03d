"""When a request is finished, to the token and to the character.

An accepted run may contain the end: everything behind the stop is dropped. Stop ids (EOS among
them) stay in the tokens and leave no text; a stop string stays in the tokens that spell it and is
cut from the text. It may span tokens and rounds, so text that could still become a stop string is
held back, and so are the bytes of an unfinished character.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

Detokenize = Callable[[Sequence[int]], str]
"""Turns token ids into text; bytes that form no character become U+FFFD."""

_WINDOW = 16


class Verdict(NamedTuple):
    """What became of the tokens of one round.

    Attributes:
        kept: how many of them reach the output.
        text: text that is certain now.
        stopped: whether a stop was found, in which case the last kept token completed it.
    """

    kept: int
    text: str
    stopped: bool


class IncrementalText:
    """Text of a growing sequence of tokens, each character once and only when it is complete.

    Decodes a short window instead of the whole sequence; the window begins at a finished character,
    with at least one token of context in front of the new ones.

    Example:
        >>> raw = "hé!".encode()
        >>> text = IncrementalText(lambda ids: bytes(ids).decode(errors="replace"))
        >>> [text.add(byte) for byte in raw], text.rest()
        (['h', '', 'é', '!'], '')
    """

    def __init__(self, detokenize: Detokenize) -> None:
        self._detokenize = detokenize
        self._window: tuple[int, ...] = ()
        self._finished = 0  # tokens of the window up to the last finished character
        self._taken = 0  # characters of the window that were returned

    def add(self, token: int) -> str:
        """Append a token; return the characters that it finished."""
        if self._finished == len(self._window) > _WINDOW:
            # A token without text of its own would leave the next one at the start of a text, where
            # some detokenizers drop a space.
            last = self._detokenize(self._window[-1:])
            if last:
                self._window, self._finished, self._taken = self._window[-1:], 1, len(last)
        self._window += (token,)
        whole = self._detokenize(self._window)
        certain = whole.rstrip("\N{REPLACEMENT CHARACTER}")
        if len(certain) == len(whole):
            self._finished = len(self._window)
        return self._take(certain)

    def rest(self) -> str:
        """Return what is left at the end: an unfinished character as the detokenizer shows it."""
        return self._take(self._detokenize(self._window)) if self._window else ""

    def _take(self, text: str) -> str:
        new = text[self._taken :]
        self._taken = max(self._taken, len(text))
        return new


class StopScanner:
    """Finds the first stop in the tokens of one request, round after round.

    Args:
        stop_ids: ids that end the request.
        stop_strings: strings that end it.
        detokenize: needed for text and for stop strings.

    Example:
        >>> scanner = StopScanner(stop_strings=["END"], detokenize=lambda ids: bytes(ids).decode())
        >>> scanner.feed(list(b"helloE"))
        Verdict(kept=6, text='hello', stopped=False)
        >>> scanner.feed(list(b"ND and more"))
        Verdict(kept=2, text='', stopped=True)
    """

    def __init__(
        self,
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        detokenize: Detokenize | None = None,
    ) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._stop_strings = tuple(stop_strings)
        self._text = None if detokenize is None else IncrementalText(detokenize)
        self._held = ""

    def copy(self) -> StopScanner:
        """Return an independent scanner in the same state."""
        twin = copy.copy(self)
        twin._text = copy.copy(self._text)
        return twin

    def feed(self, tokens: Sequence[int]) -> Verdict:
        """Take in the tokens of one round up to the first stop."""
        if self._text is None and self._stop_ids.isdisjoint(tokens):
            return Verdict(len(tokens), "", False)
        for kept, token in enumerate(tokens, start=1):
            if token in self._stop_ids:
                return Verdict(kept, self.flush(), True)
            if self._text is None:
                continue
            self._held += self._text.add(token)
            found = [self._held.find(stop) for stop in self._stop_strings]
            if max(found, default=-1) >= 0:
                text = self._held[: min(at for at in found if at >= 0)]
                self._held, self._text = "", None
                return Verdict(kept, text, True)
        certain = len(self._held) - self._might_become_stop()
        text, self._held = self._held[:certain], self._held[certain:]
        return Verdict(len(tokens), text, False)

    def flush(self) -> str:
        """Return all text held back: the request ends without a stop string."""
        text = self._held + ("" if self._text is None else self._text.rest())
        self._held = ""
        return text

    def _might_become_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop_strings), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop_strings):
                return length
        return 0
