from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer

from aiocb.errors import InvalidRequest
from aiocb.text.processor import TextProcessor

from .conftest import TRAINED, byte_level, llama_like, metaspace, rendered, word_level

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smol(smollm2: Any) -> TextProcessor:
    processor = TextProcessor(smollm2)
    processor.prepare()
    return processor


@pytest.mark.parametrize("is_prepared", [True, False])
def test_encode_is_the_tokenizers_own(tokenizer: Any, is_prepared: bool) -> None:
    processor = TextProcessor(tokenizer)
    if is_prepared:
        processor.prepare()
    for text in ("Hello, world!", "", "日本語 👩‍👩‍👧‍👦", " leading", "<s>x", "long " * 1000):
        assert processor.encode(text) == tokenizer.encode(text)
        assert processor.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)


def decode(processor: TextProcessor, ids: list[int], *, skip_special_tokens: bool = True) -> str:
    detokenizer = processor.token_text.detokenizer(skip_special_tokens=skip_special_tokens)
    return detokenizer.push(ids) + detokenizer.flush()


def test_decode_is_the_tokenizers_own(smol: TextProcessor, smollm2: Any) -> None:
    ids = smollm2.encode("<|im_start|>Hello 😀")
    assert decode(smol, ids) == smollm2.decode(ids, skip_special_tokens=True) == "Hello 😀"
    assert decode(smol, ids, skip_special_tokens=False) == "<|im_start|>Hello 😀"


def test_chat(smol: TextProcessor, smollm2: Any) -> None:
    wanted = smollm2.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert smol.encode_chat(MESSAGES) == wanted
    assert smol.normalize_prompt(MESSAGES, vocab_size=len(smollm2)) == wanted
    assert smol.normalize_prompt(tuple(MESSAGES), vocab_size=len(smollm2)) == wanted
    assert smol.normalize_prompt(MESSAGES[0], vocab_size=len(smollm2)) == wanted
    assert rendered(smol, MESSAGES).endswith("<|im_start|>assistant\n")
    bare = rendered(smol, MESSAGES, chat_template_kwargs={"add_generation_prompt": False})
    assert not bare.endswith("<|im_start|>assistant\n")
    begun = [*MESSAGES, {"role": "assistant", "content": "The capital"}]
    assert rendered(smol, begun, chat_template_kwargs={"continue_final_message": True}).endswith("The capital")


def test_tools_and_template_arguments_reach_the_template(smol: TextProcessor) -> None:
    template = "{{ tools[0].function.name if tools else 'none' }}|{{ extra }}|{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}]
    arguments = {"chat_template": template, "extra": 7}
    text = rendered(smol, MESSAGES, tools=tools, chat_template_kwargs=arguments)
    assert text == f"weather|7|{MESSAGES[0]['content']}"
    assert rendered(smol, MESSAGES, chat_template_kwargs=arguments).startswith("none|7|")
    with pytest.raises(InvalidRequest, match="chat messages"):
        smol.normalize_prompt("text", vocab_size=10, tools=tools)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty"),
        ([{"content": "x"}], "'role'"),
        ([{"role": 1, "content": "x"}], "'role'"),
        (["x"], "several prompts"),
        ("x", "no chat messages"),
    ],
)
def test_malformed_messages_are_refused(smol: TextProcessor, messages: list[Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        smol.encode_chat(messages)


def test_a_refusal_of_the_template_is_told(smol: TextProcessor) -> None:
    arguments = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        smol.encode_chat(MESSAGES, chat_template_kwargs=arguments)
    assert caught.value.__cause__ is not None


def test_without_a_chat_template(gemma3: Any) -> None:
    processor = TextProcessor(gemma3)
    with pytest.raises(InvalidRequest, match="no chat template.*give the prompt as text"):
        processor.encode_chat(MESSAGES)
    template = {"chat_template": "{{ messages[0].content }}"}
    assert rendered(processor, MESSAGES, chat_template_kwargs=template) == MESSAGES[0]["content"]


def test_without_a_tokenizer() -> None:
    processor = TextProcessor(None)
    processor.prepare()
    assert not processor.has_tokenizer
    assert processor.tokenizer is None
    assert decode(processor, [1, 2]) == ""
    assert processor.normalize_prompt([1, 2], vocab_size=3) == [1, 2]
    for prompt in ("text", MESSAGES):
        with pytest.raises(InvalidRequest, match="no tokenizer.*token ids"):
            processor.normalize_prompt(prompt, vocab_size=3)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        processor.bad_words_ids(["x"])


def test_every_kind_of_ids(smol: TextProcessor, smollm2: Any) -> None:
    ids = smollm2.encode("What is the capital of France?")
    padded = smollm2(["What is the capital of France?"], padding="max_length", max_length=20, return_tensors="pt")
    kinds = [
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, dtype=np.uint16),
        [np.int64(value) for value in ids],
        torch.tensor(ids),
        torch.tensor([ids], dtype=torch.int32),
        smollm2("What is the capital of France?"),
        smollm2(["What is the capital of France?"]),
        smollm2("What is the capital of France?", return_tensors="pt"),
        smollm2("What is the capital of France?", return_tensors="np"),
        padded,
        {"input_ids": ids},
        smollm2.backend_tokenizer.encode("What is the capital of France?"),
    ]
    for kind in kinds:
        result = smol.normalize_prompt(kind, vocab_size=len(smollm2))
        assert result == ids
        assert result is not kind
        assert set(map(type, result)) == {int}
    smollm2.backend_tokenizer.no_padding()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([1, -1], "-1"),
        ([100], "100"),
        ([101], "101"),
        ([2**63], str(2**63)),
        ([1, True], "True"),
        ([1, None], "None"),
        ([1.0], r"1\.0"),
        (torch.tensor([1.5]), r"1\.5"),
        (torch.tensor([[1], [2]]), "one dimension"),
        (torch.tensor(1), "one dimension"),
        (["a", "b"], "generate_batch"),
        ([[1, 2]], "generate_batch"),
        (b"bytes", "bytes"),
        (None, "NoneType"),
        (7, "int"),
        ({"x": 1}, "input_ids"),
    ],
)
def test_bad_prompts_are_refused(prompt: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        TextProcessor(None).normalize_prompt(prompt, vocab_size=100)


def test_a_text_that_is_no_unicode_is_refused(smol: TextProcessor) -> None:
    with pytest.raises(InvalidRequest, match="cannot encode"):
        smol.encode("half a pair: \ud83d")


@pytest.mark.parametrize(
    ("make", "word"), [(byte_level, "hello"), (llama_like, "hello"), (metaspace, "fox"), (TRAINED["word_piece"], "fox")]
)
def test_bad_words_cover_every_spelling(make: Any, word: str) -> None:
    tokenizer = make()
    processor = TextProcessor(tokenizer)
    found = processor.bad_words_ids([word])
    texts = {b"".join(processor.token_text.piece(token_id) for token_id in ids) for ids in found}
    assert texts <= {word.encode(), b" " + word.encode()}
    assert tuple(tokenizer.encode(word, add_special_tokens=False)) in found
    assert len(set(found)) == len(found)


def test_bad_words_of_a_real_tokenizer(smol: TextProcessor, smollm2: Any) -> None:
    (bare,) = smollm2.encode("Paris")
    (spaced,) = smollm2.encode(" Paris")
    assert set(smol.bad_words_ids(["Paris"])) == {(bare,), (spaced,)}
    assert TextProcessor(word_level()).bad_words_ids(["Zanzibar"]) == ()
    assert smol.bad_words_ids([" Paris"]) == smol.bad_words_ids(["Paris"])
    with pytest.raises(InvalidRequest):
        smol.bad_words_ids([" "])


@pytest.mark.parametrize("kind", ["fast", "python"])
def test_sixteen_threads(kind: str, smollm2: Any) -> None:
    tokenizer = smollm2 if kind == "fast" else ByT5Tokenizer()
    processor = TextProcessor(tokenizer)
    processor.prepare()
    texts = [f"Text number {index} 😀 " * (1 + index * 7) for index in range(16)]
    wanted = [tokenizer.encode(text) for text in texts]

    def work(index: int) -> bool:
        for _ in range(20):
            ids = processor.encode(texts[index])
            if ids != wanted[index] or decode(processor, ids) != tokenizer.decode(ids, skip_special_tokens=True):
                return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_truncation_by_another_thread_does_no_harm() -> None:
    tokenizer = byte_level()  # its own: the state is about to be shaken
    processor = TextProcessor(tokenizer)
    processor.prepare()
    text = "The quick brown fox " * 5
    wanted = tokenizer.encode(text)
    is_done = threading.Event()

    def shake() -> None:
        while not is_done.is_set():
            tokenizer.backend_tokenizer.enable_truncation(3)
            tokenizer.backend_tokenizer.no_truncation()

    shaker = threading.Thread(target=shake)
    shaker.start()
    try:
        assert all(processor.encode(text) == wanted for _ in range(2000))
    finally:
        is_done.set()
        shaker.join()


def test_state_left_on_by_the_user_is_neither_used_nor_changed() -> None:
    tokenizer = byte_level()
    text = "The quick brown fox " * 5
    wanted = tokenizer.encode(text)
    processor = TextProcessor(tokenizer)
    processor.prepare()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    assert processor.encode(text) == wanted
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 3
    assert tokenizer.backend_tokenizer.padding["length"] == 500


def test_a_long_prompt_leaves_the_other_threads_alone(smol: TextProcessor) -> None:
    text = "Hello world, this is a long prompt. " * 14_000  # 500 kB
    gaps: list[float] = []
    is_done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not is_done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    ids = smol.encode(text)
    is_done.set()
    ticker.join()
    assert len(ids) > 100_000
    assert max(gaps) < 0.1  # holding the GIL, it was 0.3 s; the rest is for a busy machine


def test_a_tokenizer_is_not_changed(smollm2: Any) -> None:
    before = smollm2.backend_tokenizer.to_str()
    processor = TextProcessor(smollm2)
    processor.prepare()
    processor.normalize_prompt(MESSAGES, vocab_size=len(smollm2))
    processor.bad_words_ids(["x"])
    assert smollm2.backend_tokenizer.to_str() == before
