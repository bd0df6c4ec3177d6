"""Tokenizers of GGUF files: the ids are llama.cpp's (`data/gguf_ids.json` was made with it), the rest is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from aiocb.errors import ConfigError
from aiocb.model.load import gguf_tokenizer
from aiocb.model.load.gguf import find_package, join
from aiocb.model.load.gguf_file import GgufFile, read_gguf
from aiocb.model.load.gguf_tokenizer import build_tokenizer, special_ids, wrong_sample

from .gguf_files import KEYS, TOKENS, TURN

IDS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "gguf_ids.json").read_text(encoding="utf-8"))
TABLE = gguf_tokenizer._table()
ROWS = {row.names[0]: row for row in TABLE.pre.values()}
TEMPLATE = "{{ messages[0].content }}<turn>"


def said(**values: Any) -> GgufFile:
    """A file that says what the tiny one does, and `values` of the tokenizer."""
    changes = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return GgufFile(Path("tiny.gguf"), {"general.architecture": "llama", **KEYS, **changes}, {})


@functools.cache
def packaged(name: str, scratch: Path) -> GgufFile:
    parts = find_package(name)
    if not parts:
        pytest.skip(f"needs the package of {name}")
    return read_gguf(join(parts, scratch))


class TestPackagedModels:
    @pytest.mark.model
    @pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
    def test_ids_are_those_of_llama_cpp(self, name: str, tmp_path: Path) -> None:
        file = packaged(name, tmp_path)
        tokenizer = build_tokenizer(file)
        strings, expected = IDS["strings"], IDS[name]
        assert len(strings) > 600 and wrong_sample(tokenizer, file) is None
        got = [tokenizer.encode(text, add_special_tokens=False) for text in strings]
        assert [pair for pair in zip(strings, expected, got) if pair[1] != pair[2]] == []
        assert all(tokenizer.decode(ids) == text for text, ids in zip(strings, got) if "\u2581" not in text)
        # Special tokens taken as text. llama.cpp holds every "</s>" for special, Gemma's own tokenizer does not.
        for index, ids in IDS[f"{name} without special"].items():
            text = strings[int(index)]
            if text != "</s>":
                assert tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) == ids, text

    @pytest.mark.model
    def test_every_pre_tokenizer_on_one_vocabulary(self, tmp_path: Path) -> None:
        file = packaged("smollm2", tmp_path)
        backend = build_tokenizer(file).backend_tokenizer
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        assert set(IDS["pre"]) == {name for name, row in ROWS.items() if row.is_byte_level}
        for name, expected in IDS["pre"].items():
            row = ROWS[name]
            backend.pre_tokenizer = pre_tokenizers.Sequence([*gguf_tokenizer._split(row), byte_level])
            backend.model.ignore_merges = row.ignore_merges
            for index, ids in zip(IDS["pre strings"], expected):
                if ids is not None:  # None: llama.cpp's approximation of the model's own expression differs
                    text = IDS["strings"][index]
                    assert backend.encode(text, add_special_tokens=False).ids == ids, (name, text)


class TestTable:
    @pytest.mark.parametrize("name", ROWS)
    def test_the_sample_is_split_as_the_table_says(self, name: str) -> None:
        row = ROWS[name]
        splits = [pre_tokenizers.Split(Regex(TABLE.regexes[each]), behavior="isolated") for each in row.split]
        pieces = pre_tokenizers.Sequence(splits).pre_tokenize_str(TABLE.sample)
        assert [piece for piece, _ in pieces] == row.pieces
        assert "".join(row.pieces) == TABLE.sample

    def test_names_are_unique(self) -> None:
        assert len(TABLE.pre) == sum(len(row.names) for row in ROWS.values()) == 90

    @pytest.mark.parametrize(
        ("pre", "pieces"),
        [
            ("smollm", ["\n\n", "1", "2", "  ", "3"]),
            ("gpt-2", ["\n", "\n", "12", " ", " 3"]),
            ("llama-bpe", ["\n\n", "12", " ", " ", "3"]),
            ("qwen2", ["\n\n", "1", "2", " ", " ", "3"]),
        ],
    )
    def test_digits_after_spaces(self, pre: str, pieces: list[str]) -> None:
        splits = pre_tokenizers.Sequence(gguf_tokenizer._split(TABLE.pre[pre])).pre_tokenize_str("\n\n12  3")
        assert [piece for piece, _ in splits] == pieces


class TestRefusals:
    def test_an_unknown_pre_tokenizer_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"tiny\.gguf names the pre-tokenizer 'brand-new' .* token ids would be"):
            build_tokenizer(said(pre="brand-new"))

    @pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "none", None])
    def test_an_unknown_kind_of_vocabulary_is_named(self, kind: Any) -> None:
        with pytest.raises(ConfigError, match=rf"vocabulary of kind {kind!r} \(tokenizer.ggml.model\)"):
            build_tokenizer(said(model=kind))

    def test_what_cannot_be(self) -> None:
        with pytest.raises(ConfigError, match="the same token twice"):
            build_tokenizer(said(tokens=[*TOKENS, "a"]))
        without = {key: value for key, value in said().values.items() if "bos_token_id" not in key}
        with pytest.raises(ConfigError, match="add_bos_token is true, but there is no bos_token_id"):
            build_tokenizer(GgufFile(Path("x"), {**without, "tokenizer.ggml.add_bos_token": True}, {}))
        with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges"):
            build_tokenizer(GgufFile(Path("x"), {k: v for k, v in said().values.items() if "merges" not in k}, {}))

    def test_a_tokenizer_that_splits_otherwise_is_noticed(self) -> None:
        file = said(pre="qwen2")
        tokenizer = build_tokenizer(file)
        assert wrong_sample(tokenizer, file) is None
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        assert "is split into" in str(wrong_sample(tokenizer, file))


class TestFlags:
    def test_first_and_last_tokens(self) -> None:
        for file, ids in (
            (said(), [39]),
            (said(add_bos_token=True), [1, 39]),
            (said(add_eos_token=True), [39, 2]),
            (said(pre="llama-bpe"), [1, 39]),  # adds one unless the file says otherwise
            (said(pre="llama-bpe", add_bos_token=False), [39]),
        ):
            assert build_tokenizer(file)("D").input_ids == [TOKENS.index("D") if each == 39 else each for each in ids]

    def test_types_decide_how_tokens_are_matched(self) -> None:
        types = [3, 3, 3, *[1] * (len(TOKENS) - 4), 4]
        tokenizer = build_tokenizer(said(token_type=types))
        assert tokenizer.encode("<turn>") == tokenizer.encode("<turn>", split_special_tokens=True) == [TURN]
        assert tokenizer.decode([TURN, 1], skip_special_tokens=True) == "<turn>"
        tokenizer = build_tokenizer(said())
        assert tokenizer.encode("<turn>") == [TURN] != tokenizer.encode("<turn>", split_special_tokens=True)
        assert tokenizer.decode([TURN, 1], skip_special_tokens=True) == ""

    def test_sentence_piece(self) -> None:
        tokens = [
            "<unk>",
            "<s>",
            "</s>",
            *[f"<0x{byte:02X}>" for byte in range(256)],
            "\u2581",
            *"abc",
            "\u2581a",
            "ab",
        ]
        types = [2, 3, 3, *[6] * 256, *[1] * 6]
        scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
        values: dict[str, Any] = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
        index = {token: index for index, token in enumerate(tokens)}
        plain = build_tokenizer(said(**values, pre="anything", add_bos_token=False))
        assert plain.encode("ab") == [index["\u2581a"], index["b"]]  # the better score wins
        assert plain.encode(" ab") == [index["\u2581"], index["\u2581a"], index["b"]]
        assert plain.encode("\u00e9") == [index["\u2581"], index["<0xC3>"], index["<0xA9>"]]
        assert plain.decode(plain.encode("ab \u00e9c")) == "ab \u00e9c"
        bare = build_tokenizer(said(**values, add_space_prefix=False))
        assert bare.encode("ab", add_special_tokens=False) == [index["ab"]] and bare.encode("c") == [1, index["c"]]
        assert bare.decode([index["ab"]]) == "ab"

    def test_chat_templates(self) -> None:
        file = said()
        assert build_tokenizer(file).chat_template is None
        one = file._replace(values={**file.values, "tokenizer.chat_template": TEMPLATE})
        chat: Any = [{"role": "user", "content": "D"}]
        assert build_tokenizer(one).apply_chat_template(chat, tokenize=False) == "D<turn>"
        many = one._replace(
            values={**one.values, "tokenizer.chat_template.rag": "rag", "tokenizer.chat_templates": ["rag"]}
        )
        tokenizer = build_tokenizer(many)
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "D<turn>"
        assert tokenizer.apply_chat_template(chat, chat_template="rag", tokenize=False) == "rag"

    def test_end_tokens(self) -> None:
        tokens = [*TOKENS[:-1], "<|im_end|>"]
        template = {"tokenizer.chat_template": "{{ messages }}<|im_end|>"}
        assert special_ids(said()) == {"bos_token_id": 1, "pad_token_id": None, "eos_token_id": 2}
        assert special_ids(said(eot_token_id=5, eom_token_id=7))["eos_token_id"] == [2, 5, 7]
        assert special_ids(said(eot_token_id=2, padding_token_id=7)) == {**special_ids(said()), "pad_token_id": 7}
        assert special_ids(said(eos_token_id=99999, bos_token_id=99999)) == dict.fromkeys(special_ids(said()))
        # Files of before the key: the template says what ends a turn. A token that it does not write ends none.
        file = said(tokens=tokens)
        assert special_ids(file)["eos_token_id"] == 2
        file = file._replace(values={**file.values, **template})
        assert special_ids(file)["eos_token_id"] == [2, TURN]
