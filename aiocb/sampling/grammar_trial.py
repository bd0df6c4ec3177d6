"""Trying a grammar in a process of its own first: llguidance's limits do not bound all that compiling it can take.

Chains of a few thousand references overflow the stack and take the process along; intersected patterns, or multiples of
a large number, take minutes and gigabytes, without a way to call it off. A child can be called off. It has the library
only, a tokenizer of single bytes, less stack than any thread here, and limits on processor time and memory.

What cannot be like that is not tried: it would cost a hundred milliseconds for one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from aiocb.errors import InvalidRequest, explain
from aiocb.structure import Structure

__all__ = ["try_out"]

_CPU_S = 3
_WAIT_S = 30.0  # where the processor is busy with other things
_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 2 << 20
_MAX_HARMLESS = 4096
_HARMFUL_KEYWORDS = ("pattern", "multipleOf", "allOf", "format", "x-guidance")  # patternProperties, too
_CHILD = """
import resource, sys, threading
path, seconds, memory, stack = sys.argv[1], *map(int, sys.argv[2:])
sys.path.insert(0, path)
import llguidance
def limit(what, value):
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
limit(resource.RLIMIT_CORE, 0)
limit(resource.RLIMIT_CPU, seconds)
if sys.platform == "linux":
    limit(resource.RLIMIT_AS, memory)
source = sys.stdin.buffer.read().decode()
tokenizer = llguidance.LLTokenizer("byte", slices=llguidance.LLTokenizer.json_slices())
def run():
    llguidance.LLMatcher(tokenizer, source, log_level=0).compute_bitmask()
    print("done", flush=True)
threading.stack_size(stack)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def try_out(library: Any, structure: Structure, source: str) -> None:
    """Compile a grammar elsewhere, where that may be more than can be had.

    Args:
        library: llguidance.
        structure: what is compiled.
        source: as the library takes it.

    Raises:
        InvalidRequest: it takes too much, or cannot be tried. Whether the grammar is right is not asked.
    """
    if _is_harmless(structure):
        return
    path = str(Path(library.__file__).parents[1])
    limits = (str(each) for each in (_CPU_S, _MEMORY_BYTES, _STACK_BYTES))
    command = [sys.executable, "-I", "-S", "-c", _CHILD, path, *limits]
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=_WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _too_complex(structure) from None
    except OSError as error:
        raise InvalidRequest(f"{structure.kind} cannot be tried in a process of its own: {explain(error)}") from error
    if done.returncode < 0:
        raise _too_complex(structure)
    if not done.stdout.startswith(b"done"):
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["nothing was said"])[-1]
        raise InvalidRequest(f"{structure.kind} is too complex, or cannot be tried: {last[:200]}")


def _too_complex(structure: Structure) -> InvalidRequest:
    return InvalidRequest(
        f"{structure.kind} is too complex: compiling it takes more than {_CPU_S} s, {_MEMORY_BYTES >> 20} MiB or the "
        "stack that it may have; shorten chains of references or rules, combine fewer patterns, bound its numbers"
    )


def _is_harmless(structure: Structure) -> bool:
    if structure.kind == "choice":
        return True
    text = structure.text
    if structure.kind != "json_schema" or len(text) > _MAX_HARMLESS:
        return False
    # An escape could spell any of them.
    return "\\" not in text and not any(word in text for word in _HARMFUL_KEYWORDS)
