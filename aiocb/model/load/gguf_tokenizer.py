"""The tokenizer of a GGUF file, built from what the file says.

transformers makes one from the same keys but knows a third of llama.cpp's pre-tokenizers and drops the others in
silence, which changes the ids of digits, spaces and line ends. `gguf_tokenizers.json` has them all; what is not there
is refused by name. Three kinds of vocabulary are built here: byte-level BPE (`gpt2`), BPE with byte tokens
(`gemma4`), and SentencePiece's BPE (`llama`), whose merges follow from the scores.

A token's type (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte) decides how text is matched: control
tokens are special, user-defined ones are matched in any text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from aiocb.errors import ConfigError
from aiocb.model.load.gguf_file import GgufFile

__all__ = ["build_tokenizer", "special_ids", "wrong_sample"]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"


class _Pre(NamedTuple):
    """A row of the table of pre-tokenizers."""

    names: list[str]
    split: list[str]
    pieces: list[str]
    ignore_merges: bool = False
    add_bos: bool = False
    is_byte_level: bool = True


class _Table(NamedTuple):
    regexes: Mapping[str, str]
    pre: Mapping[str, _Pre]
    sample: str
    round_trips: list[str]
    named: Mapping[str, str]
    llama_defaults: Mapping[str, int]
    control: list[str]
    end_of_turn: list[str]


@functools.cache
def _table() -> _Table:
    values = json.loads(Path(__file__).with_name("gguf_tokenizers.json").read_text(encoding="utf-8"))
    rows = [_Pre(**row) for row in values.pop("pre")]
    return _Table(pre={name: row for row in rows for name in row.names}, **values)


def build_tokenizer(file: GgufFile) -> Any:
    """Build a fast transformers tokenizer.

    Raises:
        ConfigError: the file has no vocabulary, or one of a kind or with a pre-tokenizer that is not known.
    """
    from transformers import PreTrainedTokenizerFast

    said = _said(file)
    kind, tokens = said.get("model"), said.get("tokens")
    builders = {"gpt2": _byte_level, "gemma4": _raw_bpe, "llama": _sentence_piece}
    if kind not in builders or not tokens:
        raise ConfigError(
            f"{file.path} has a vocabulary of kind {kind!r} (tokenizer.ggml.model); {', '.join(builders)} can be read. "
            "Name the original model instead"
        )
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        raise ConfigError(f"{file.path} has the same token twice; convert the model again")
    pre = _pre(file, said)
    backend = builders[kind](tokens, said, pre)
    _add_tokens(backend, tokens, said, str(file.values.get("general.name", "")))
    named = {name: tokens[index] for name, index in _named_ids(said).items()}
    adds = {
        "add_bos_token": said.get("add_bos_token", kind == "llama" or pre.add_bos),
        "add_eos_token": said.get("add_eos_token", False),
    }
    for flag, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        if adds[flag] and name not in named:
            raise ConfigError(f"{file.path}: tokenizer.ggml.{flag} is true, but there is no {name}_id")
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=_chat_template(file.values),
        **named,
        **adds,
    )


def special_ids(file: GgufFile) -> dict[str, int | list[int] | None]:
    """The ids that a configuration names; None where the file has none, lest a class fills in those of some model."""
    ids, ends = _named_ids(_said(file)), _end_tokens(file)
    return {
        "bos_token_id": ids.get("bos_token"),
        "pad_token_id": ids.get("pad_token"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
    }


def _named_ids(said: Mapping[str, Any]) -> dict[str, int]:
    """The special tokens that the file has, by transformers' names."""
    size = len(said.get("tokens", ()))
    return {name: said[key] for name, key in _table().named.items() if 0 <= said.get(key, -1) < size}


def _end_tokens(file: GgufFile) -> list[int]:
    """Ids that end a reply: the ends of a text, a turn and a message, and what the chat template ends turns with."""
    said = _said(file)
    tokens = said.get("tokens", [])
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [said[key] for key in keys if key in said]
    if "eot_token_id" not in said:
        # Files of before that key have the end of a turn in their template only.
        template = str(file.values.get("tokenizer.chat_template", ""))
        names = _table().end_of_turn
        ends += [index for index, token in enumerate(tokens) if token in names and token in template]
    return [each for each in dict.fromkeys(ends) if 0 <= each < len(tokens)]


def wrong_sample(tokenizer: Any, file: GgufFile) -> str | None:
    """Compare how a loaded tokenizer treats samples with what must hold for its kind; None when all is well."""
    said = _said(file)
    sample = _table().sample
    pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    letters: set[str] = set()
    if pre_tokenizer is not None:
        pre = _pre(file, said)
        pieces = [sample[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(sample)]
        if pieces != pre.pieces:
            return f"{sample!r} is split into {pieces}, not into {pre.pieces}"
        letters = {
            letter
            for text in _table().round_trips
            for piece, _ in pre_tokenizer.pre_tokenize_str(text)
            for letter in piece
        }
    if letters <= {*said["tokens"], " "}:  # else a vocabulary without some bytes, as tests have
        for text in _table().round_trips:
            ids = tokenizer.encode(text, add_special_tokens=False)
            back = tokenizer.decode(ids)
            if back != text and tokenizer.unk_token_id not in ids:
                return f"{text!r} comes back as {back!r}"
    return None


def _said(file: GgufFile) -> dict[str, Any]:
    """What the file says of its tokenizer, by the last part of the keys."""
    defaults = _table().llama_defaults if file.values.get("tokenizer.ggml.model") == "llama" else {}
    prefix = "tokenizer.ggml."
    return {**defaults, **{key.removeprefix(prefix): v for key, v in file.values.items() if key.startswith(prefix)}}


def _pre(file: GgufFile, said: Mapping[str, Any]) -> _Pre:
    if said["model"] == "llama":
        return _Pre([], [], [])
    name = "gemma4" if said["model"] == "gemma4" else said.get("pre", "default")
    row = _table().pre.get(name)
    if row is None:
        raise ConfigError(
            f"{file.path} names the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not known here: token ids "
            "would be wrong. Name the original model, or a file of it that was converted with a known one"
        )
    return row


def _split(pre: _Pre) -> list[Any]:
    regexes = _table().regexes
    return [pre_tokenizers.Split(Regex(regexes[name]), behavior="isolated") for name in pre.split]


def _merges(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "merges" not in said:
        raise ConfigError("the file has no tokenizer.ggml.merges: without it texts cannot be encoded")
    # The left part may begin with a space, which is why the first letter is no separator.
    cuts = [(merge, merge.index(" ", 1)) for merge in said["merges"]]
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]


def _byte_level(tokens: Sequence[str], said: Mapping[str, Any], pre: _Pre) -> Tokenizer:
    if not pre.is_byte_level:
        return _raw_bpe(tokens, said, pre)
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_merges(said), ignore_merges=pre.ignore_merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*_split(pre), byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _raw_bpe(tokens: Sequence[str], said: Mapping[str, Any], pre: _Pre) -> Tokenizer:
    backend = _with_bytes(tokens, _merges(said), said)
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Sequence(_split(pre))
    return backend


def _sentence_piece(tokens: Sequence[str], said: Mapping[str, Any], pre: _Pre) -> Tokenizer:
    scores = said.get("scores") or [0.0] * len(tokens)
    backend = _with_bytes(tokens, _merges_of_scores(tokens, scores), said)
    escape = normalizers.Replace(" ", _SPACE)
    if said.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape])
        backend.decoder = decoders.Sequence([*_DECODERS, decoders.Strip(content=" ", left=1)])
    else:
        backend.normalizer = escape
    return backend


_DECODERS = (decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse())


def _with_bytes(tokens: Sequence[str], merges: list[tuple[str, str]], said: Mapping[str, Any]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = said.get("unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(list(_DECODERS))
    return backend


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a token together of two, the best token first; the longer left part first."""
    vocab = set(tokens)
    order = sorted(range(len(tokens)), key=lambda index: -scores[index])
    return [
        (token[:cut], token[cut:])
        for token in map(tokens.__getitem__, order)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], said: Mapping[str, Any], model_name: str) -> None:
    types = said.get("token_type", [])
    control = set(_table().control)
    # Phi 3 takes spaces away behind its markers; the file does not say so.
    strips = "phi-3" in model_name.lower() or "phi3" in model_name.lower()
    special, plain = [], []
    for token, kind in zip(tokens, types):
        if kind in (_UNKNOWN, _CONTROL) or token in control:
            rstrip = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
            special.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _chat_template(values: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template, or all by name where the file has named ones."""
    prefix = "tokenizer.chat_template."
    default = values.get("tokenizer.chat_template")
    named = {key.removeprefix(prefix): str(value) for key, value in values.items() if key.startswith(prefix)}
    if named and default is not None:
        named = {"default": str(default), **named}
    return named or default
