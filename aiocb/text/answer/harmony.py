"""The messages of gpt-oss: every one has a header, which says for whom it is, and a body.

```
<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{...}<|call|>
```

A header that nobody expects makes its body content: nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from aiocb.text.answer.calls import Calls
from aiocb.text.answer.json_text import scan_value
from aiocb.text.answer.reader import Markers, Reader, Steps

__all__ = ["read_harmony"]

_MAX_HEADER = 256
_ROLE = re.compile(r"\s*(assistant)?\s*")
_CLOSERS = ("<|end|>", "<|call|>", "<|return|>")
_ENDS = Markers((*_CLOSERS, "<|start|>", "<|channel|>"))


def read_harmony(reader: Reader, calls: Calls, think: Callable[[bool], None]) -> Steps[None]:
    """Read messages until the text ends.

    Args:
        reader: of the answer, which begins behind `<|start|>assistant`.
        calls: what may be called.
        think: told when reasoning begins and ends.
    """
    yield
    while (yield from reader.peek()):
        header = yield from _header(reader)
        recipient = re.search(r"to=functions\.(\S+)", header)
        if recipient is not None and recipient[1] in calls.names and (yield from reader.skip_space()) == "{":
            reader.begin_call(recipient[1])
            if (yield from scan_value(reader, reader.add_arguments)):
                reader.end_call()
                yield from reader.skip_space()
                reader.commit()
            yield from _body(reader, reader.add_arguments)
            continue
        is_thought = header.lstrip().startswith("analysis") and recipient is None
        think(is_thought)
        if is_thought:
            yield from _body(reader, reader.add_reasoning)
        else:
            yield from _body(reader, reader.add_content)
        if reader.at < len(reader.text):
            think(False)


def _header(reader: Reader) -> Steps[str]:
    """Go behind a header and return it; "" where there is none, so that what follows is a body."""
    parts: list[str] = []
    has_marker = False
    while True:
        end, marker = reader.markers.find(reader)
        text = reader.text[reader.at : end]
        if len(text) > _MAX_HEADER or not (has_marker or "assistant".startswith(text.strip())):
            reader.commit()
            return ""
        if marker is None:
            if reader.has_ended:
                if has_marker:
                    reader.at = end  # a header that was cut
                reader.commit()
                return ""
            yield
            continue
        reader.at = end + len(marker)
        has_marker = True
        parts += text, " "
        if marker == "<|message|>":
            reader.commit()
            return _ROLE.sub("", "".join(parts), count=1)
        if marker in _CLOSERS:
            parts.clear()


def _body(reader: Reader, add: Callable[[str], None]) -> Steps[None]:
    """Pass a body on, up to the marker that ends it."""
    while True:
        end, marker = _ENDS.find(reader)
        text = reader.text[reader.at : end]
        reader.at = end
        if text:
            add(text)
        if marker is not None:
            if marker in _CLOSERS:
                reader.at += len(marker)
            reader.commit()
            return
        if reader.has_ended:
            return
        yield
