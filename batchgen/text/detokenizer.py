"""Output ids -> text, and whether a stop string is reached. Never sees prompt ids, so a prompt cannot stop anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchgen.errors import JobFileError
from batchgen.records import FinishReason
from batchgen.text.tokenizer import Tokenizer

MAX_CHARACTER_BYTES = 4
REPLACEMENT = "\ufffd"  # what bytes decode to that are not (yet) a character


class Detokenizer:
    """For one job's stop strings and end tokens. `eos_ids` are all ids that end generation, the user's included."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], eos_ids: frozenset[int]) -> None:
        if "" in stop:
            raise JobFileError("sampling.stop: an empty stop string would stop before the first token; remove it")
        self.tokenizer, self.stop, self.eos_ids = tokenizer, list(stop), eos_ids
        self.invisible = np.array(sorted(tokenizer.control_tokens.values()), np.int64)
        # Every visible token spells a byte or more, so a match that the last token completes lies within so many of them
        self.window = max((len(text.encode()) for text in self.stop), default=0)

    def hits_stop(self, output_ids: np.ndarray) -> bool:
        """Whether the last of `output_ids` [num_output_tokens] completes a stop string.

        To be asked after each new token. Costs the decoding of as many tokens as the longest stop string has bytes, and
        a few more, however long the output is.
        """
        if not self.stop or len(output_ids) == 0:
            return False
        # One token more, as a tokenizer may drop the leading space of what it decodes first
        start = self._window_start(output_ids, self.window + 1)
        text = self.tokenizer.decode(output_ids[start:])
        # A window that begins inside a character can spoil what follows it; an earlier start is at its beginning
        for earlier in range(start - 1, max(start - MAX_CHARACTER_BYTES, -1), -1):
            if not text.startswith(REPLACEMENT):
                break
            text = self.tokenizer.decode(output_ids[earlier:])
        return any(stop in text for stop in self.stop)

    def finish(self, output_ids: np.ndarray, finish_reason: FinishReason) -> tuple[str, str | None]:
        """(text, stop_reason) of a finished request.

        The text is one decoding of all ids, without the end token, cut just before the earliest stop string. stop_reason is
        that stop string, else the id of the end token as text, else None: then it ended by its length.
        """
        ended = len(output_ids) > 0 and finish_reason == FinishReason.STOP and int(output_ids[-1]) in self.eos_ids
        text = self.tokenizer.decode(output_ids[:-1] if ended else output_ids)
        matches = [(at, -len(stop), stop) for stop in self.stop if (at := text.find(stop)) >= 0]
        if matches:
            at, _, stop = min(matches)
            return text[:at], stop
        return text, str(int(output_ids[-1])) if ended else None

    def _window_start(self, output_ids: np.ndarray, num_visible: int) -> int:
        """Where the last `num_visible` ids begin that are not special tokens, which decode to nothing."""
        size = num_visible
        while size < len(output_ids):
            tail = output_ids[-size:]
            num_hidden = int(np.isin(tail, self.invisible).sum())
            if size - num_hidden >= num_visible:
                return len(output_ids) - size
            size = num_visible + num_hidden
        return 0
