"""What of a request in an OpenAI batch file this job answers: its own prompt, with the job's sampling."""

from __future__ import annotations

import json
from typing import Any, Protocol

from batchgen.records import RowFault

COLUMNS = {"url", "messages", "prompt", "parameters"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Names of OpenAI's for what the job says once for all rows ...
_SAMPLING = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "n": "n",
    "stop": "stop",
}
# ... what asks for nothing, and what an answer does not depend on
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
_IDLE = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}


class Sampling(Protocol):
    """The `sampling` section of a job."""

    @property
    def stop(self) -> list[str]: ...


def request_fault(row: dict[str, Any], is_chat: bool, sampling: Sampling) -> RowFault | None:
    """Why the request cannot be answered as it asks, or None. row: at least COLUMNS; is_chat: what the job answers."""
    url = row["url"]
    if url != (CHAT if is_chat else COMPLETIONS):
        how = "prompt.messages: messages" if is_chat else 'prompt.text: "{{ prompt }}"'
        return RowFault(
            "unsupported_url", f"url is {json.dumps(url)}; with {how} a job answers {CHAT if is_chat else COMPLETIONS}"
        )
    if not is_chat and not isinstance(row["prompt"], str):
        return RowFault("unsupported_parameter", "prompt must be one text, not a list or token ids")
    for name, value in (row["parameters"] or {}).items():
        if value is None or name in _IDLE:
            continue
        if name in _SAMPLING:
            own = getattr(sampling, _SAMPLING[name])
            if name == "stop" and isinstance(value, str):
                value = [value]
            if value != own:
                return RowFault(
                    "unsupported_parameter",
                    f"{name} is {json.dumps(value)}, and the job's sampling.{_SAMPLING[name]} is {json.dumps(own)}: a job "
                    "samples all rows alike; set it to that, and put requests that differ into a job of their own",
                )
        elif value not in _NEUTRAL.get(name, ()):
            return RowFault("unsupported_parameter", f"{name} is {json.dumps(value)}, which batchgen does not support")
    return None
