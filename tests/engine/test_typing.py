"""What a type checker and an editor see of the engine's calls."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import aiocb
from aiocb.sampling_params import _ALIASES

pytestmark = pytest.mark.slow

RIGHT = """
import aiocb

async def main(engine: aiocb.Engine) -> None:
    one: aiocb.Completion = await engine.generate("a", temperature=0.8, timeout=3)
    many: list[aiocb.Completion] = await engine.generate("a", n=2, top_p=0.9)
    all_of_them: list[aiocb.Completion] = await engine.generate_batch(["a", "b"], max_tokens=4, stop=["x"])
    async for chunk in engine.stream("a", seed=3, on_unread="cancel", n=2):
        reason: aiocb.FinishReason | None = chunk.finish_reason
    async for completion in engine.as_completed(["a"], logprobs=2):
        completion.text
"""

WRONG = {
    'await engine.generate("a", temprature=1.0)': 'Unexpected keyword argument "temprature"',
    'await engine.generate_batch(["a"], temprature=1.0)': 'Unexpected keyword argument "temprature"',
    'engine.stream("a", temprature=1.0)': 'Unexpected keyword argument "temprature"',
    'engine.stream("a", max_tokens="4")': "incompatible type",
    'engine.stream("a", on_unread="drop")': "incompatible type",
    '(await engine.generate("a"))[0]': "not indexable",
}


def test_keywords_are_the_fields_of_sampling_params() -> None:
    fields = {field.name for field in dataclasses.fields(aiocb.SamplingParams) if field.init} | set(_ALIASES)
    assert set(aiocb.StreamOptions.__annotations__) | set(aiocb.SamplingOptions.__annotations__) == fields
    assert "n" not in aiocb.SamplingOptions.__annotations__
    own = set(inspect.signature(aiocb.Engine.stream).parameters) - {
        "self",
        "prompt",
        "params",
        "request_id",
        "sampling",
    }
    assert set(aiocb.RequestOptions.__annotations__) - set(aiocb.SamplingOptions.__annotations__) == own


def test_a_type_checker_refuses_what_the_engine_would_refuse(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    body = [f"    {line}" for line in WRONG]
    snippet.write_text(RIGHT + "\nasync def wrong(engine: aiocb.Engine) -> None:\n" + "\n".join(body) + "\n")
    first = len(RIGHT.splitlines()) + 3
    # torch and transformers would be read whole, for names that these calls do not use
    (tmp_path / "mypy.ini").write_text("[mypy-torch.*,transformers.*,numpy.*]\nfollow_imports = skip\n")
    arguments = ["--strict", "--no-error-summary", "--no-incremental", str(snippet)]
    checked = subprocess.run([sys.executable, "-m", "mypy", *arguments], capture_output=True, text=True, cwd=tmp_path)
    complaints = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert checked.returncode == 1, checked.stderr
    for number, expected in enumerate(WRONG.values(), first):
        said = [line for line in complaints if f"snippet.py:{number}:" in line]
        assert said and expected in said[0], (number, checked.stdout)
    assert {int(line.split(":")[1]) for line in complaints} == set(range(first, first + len(WRONG))), checked.stdout
