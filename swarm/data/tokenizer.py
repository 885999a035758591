"""Bytes, or a byte-level BPE trained once: both round-trip any text, both load in Hugging Face.

Why this way: bytes need no training and no file, and a swarm on bytes runs anywhere at once. The
BPE is Hugging Face's own ByteLevel BPE, so what is exported is what was trained with. Bytes are
exported as such a BPE without merges whose ids are the byte values. The two files AutoTokenizer
reads are written here, not by `transformers`, which takes seconds to import. A run that starts from
a pretrained model can use that model's own tokenizer; its files are taken and exported as they
are, with its chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm.errors import DataError
from swarm.spec import token_dtype

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
EOS_ID = 0  # ends every document: the byte 0, or END_OF_TEXT, which the BPE learns first
TOKENIZER_FILE = "tokenizer.json"
_PRETRAINED_FILES = (
    TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
)  # fmt: skip
_RULES = "added_tokens", "normalizer", "pre_tokenizer", "model"  # of a tokenizer.json
_MAX_TRAINING_BYTES = 64 * 2**20  # of text that the BPE learns from
_MAX_RUN_CHARS = 2048  # of one word, or gap, that it learns from as a whole


class Tokenizer:
    """`encode`, `decode`, and the files that AutoTokenizer loads."""

    def __init__(
        self,
        kind: str,
        vocab_size: int,
        backend: tokenizers.Tokenizer | None,
        *,
        eos_id: int = EOS_ID,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.kind, self.vocab_size, self.eos_id = kind, vocab_size, eos_id
        self.files = dict(files or {})  # as they were read, where they are somebody else's
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        """Text that looks like a special token is encoded as text."""
        if self._backend is None:
            return list(text.encode("utf-8", "replace"))
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Inverse of `encode`; bytes that are not UTF-8 become U+FFFD, END_OF_TEXT is dropped."""
        if self._backend is None:
            return bytes(ids).decode("utf-8", "replace")
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def encode_blocks(self, blocks: Sequence[bytes]) -> list[np.ndarray]:
        """Tokens of raw UTF-8, in the dtype of the shards."""
        dtype = np.dtype(token_dtype(self.vocab_size)).newbyteorder("<")
        if self._backend is None:
            return [np.frombuffer(block, dtype=dtype) for block in blocks]
        texts = [block.decode("utf-8", "replace") for block in blocks]
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=dtype) for each in encoded]

    def encodes_as(self, other: Tokenizer) -> bool:
        """Whether both give any text the same ids, whoever wrote their files."""
        return self._rules() == other._rules()

    def _rules(self) -> dict[str, Any]:
        """All that encoding goes by: the vocabulary, its merges, and what is done to text before;
        as this version of the library writes it, which need not be how a file has it."""
        backend = self._backend if self._backend is not None else _byte_backend()
        rules = json.loads(backend.to_str())
        return {name: rules[name] for name in _RULES}

    def save_tokenizer(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as AutoTokenizer reads them."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self.files:
            for name, data in self.files.items():
                (directory / name).write_bytes(data)
            return
        backend = self._backend if self._backend is not None else _byte_backend()
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if self.kind == "bpe":
            config["eos_token"] = END_OF_TEXT
        (directory / "tokenizer.json").write_text(backend.to_str(pretty=False), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def byte_tokenizer() -> Tokenizer:
    return Tokenizer("bytes", 256, None)


def train_bpe(texts: Iterator[bytes], vocab_size: int) -> Tokenizer:
    """A BPE of at most `vocab_size` tokens, learned from the first 64 MiB of `texts`."""
    import tokenizers

    if vocab_size <= 256:
        raise DataError(
            f"a BPE of {vocab_size} tokens cannot hold the 256 bytes and the end of text",
            'set data.vocab_size above 256, or data.tokenizer = "bytes"',
        )
    backend = _empty_backend(tokenizers.models.BPE(), use_regex=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(_byte_symbols().values()),
        show_progress=False,
    )
    backend.train_from_iterator(_first_bytes(texts), trainer=trainer)
    return _bpe(backend, vocab_size)


def load_tokenizer_file(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer saved at `path` (a tokenizer.json). Raises OSError or ValueError."""
    import tokenizers

    text = path.read_text(encoding="utf-8")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} holds no tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return _bpe(backend, vocab_size)


def load_pretrained(directory: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a local Hugging Face directory: its tokenizer.json, whatever its kind.

    Documents end with the directory's end-of-text token; none else is added. Raises DataError.
    """
    import tokenizers

    directory = Path(directory)
    try:
        files = {
            name: (directory / name).read_bytes()
            for name in _PRETRAINED_FILES
            if name == TOKENIZER_FILE or (directory / name).is_file()
        }
    except OSError as error:
        raise DataError(
            f"cannot read {directory / TOKENIZER_FILE}: {(error.strerror or str(error)).lower()}",
            'save it with AutoTokenizer(...).save_pretrained, or use data.tokenizer = "bytes"',
        ) from None
    try:
        backend = tokenizers.Tokenizer.from_str(files[TOKENIZER_FILE].decode())
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"{directory / TOKENIZER_FILE} is no tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # a document cannot end itself by naming the token
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer of {directory} has {largest + 1} tokens but data.vocab_size is "
            f"{vocab_size}",
            f"set data.vocab_size = {largest + 1}",
        )
    eos_id = _end_of_text(directory, files, backend)
    return Tokenizer("pretrained", vocab_size, backend, eos_id=eos_id, files=files)


def _end_of_text(directory: Path, files: Mapping[str, bytes], backend: tokenizers.Tokenizer) -> int:
    """As the tokenizer's own settings name it, else as the model's do."""
    settings = _json_object(files.get("tokenizer_config.json", b""))
    token = settings.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    found = backend.token_to_id(token) if isinstance(token, str) else None
    if found is None:
        try:
            found = _json_object((directory / "config.json").read_bytes()).get("eos_token_id")
        except OSError:
            found = None
        found = found[0] if isinstance(found, list) and found else found
    # Of one that is no 32-bit number the library makes an OverflowError.
    is_id = type(found) is int and 0 <= found < 2**32
    if found is not None and is_id and backend.id_to_token(found) is not None:
        return found
    raise DataError(
        f"the tokenizer of {directory} names no end of text",
        "give eos_token in its tokenizer_config.json",
    )


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _bpe(backend: tokenizers.Tokenizer, vocab_size: int) -> Tokenizer:
    backend.encode_special_tokens = True  # a document cannot end itself by naming END_OF_TEXT
    return Tokenizer("bpe", vocab_size, backend)


def _first_bytes(texts: Iterator[bytes]) -> Iterator[str]:
    left = _MAX_TRAINING_BYTES
    for text in texts:
        yield from _pieces(text.decode("utf-8", "replace"))
        left -= len(text)
        if left <= 0:
            return


def _pieces(text: str, most: int = _MAX_RUN_CHARS) -> Iterator[str]:
    """The text, cut only inside of what is unbroken for long: learning takes the square of that."""
    begin = 0
    for run in re.finditer(rf"(?<!\S)\S{{{most},}}|(?<!\s)\s{{{most},}}", text):
        for cut in range(run.start() + most, run.end(), most):
            yield text[begin:cut]
            begin = cut
    yield text[begin:]


def _empty_backend(model: Any, use_regex: bool) -> tokenizers.Tokenizer:
    import tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=use_regex
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _byte_backend() -> tokenizers.Tokenizer:
    import tokenizers

    vocabulary = {symbol: byte for byte, symbol in _byte_symbols().items()}
    return _empty_backend(tokenizers.models.BPE(vocab=vocabulary, merges=[]), use_regex=False)


def _byte_symbols() -> dict[int, str]:
    """The printable character that ByteLevel writes for each byte: itself in Latin-1 where that is
    visible, else the next free one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in visible}
    hidden = (byte for byte in range(256) if byte not in symbols)
    return symbols | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}
