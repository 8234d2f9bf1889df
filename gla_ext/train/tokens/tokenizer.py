"""The tokenizer of a corpus, as a folder that transformers' AutoTokenizer loads too."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gla_ext.model.files import write_text

if TYPE_CHECKING:
    import tokenizers

DOCUMENT_START_TOKEN = "<|endoftext|>"  # of the tokenizers that are made here
_MODEL, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_BESIDE = (_CONFIG, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of Hugging Face's `tokenizers`.

    files: names and texts of the files that are it, with tokenizer.json and tokenizer_config.json.
    start: the token before each document of a corpus, which text itself never becomes.
    """

    files: dict[str, str]
    start: str

    @functools.cached_property
    def model(self) -> tokenizers.Tokenizer:
        """Without truncation and padding; the names of special tokens in a text are text."""
        from tokenizers import Tokenizer

        model = Tokenizer.from_str(self.files[_MODEL])
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = True
        return model

    @property
    def document_start(self) -> int:
        """The number of the token `start`."""
        return self.model.token_to_id(self.start)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return 1 + max(self.model.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def digest(self) -> str:
        """Hex digest of all that decides how text becomes tokens."""
        content = json.loads(self.files[_MODEL]) | {"truncation": None, "padding": None}
        text = json.dumps([content, self.start], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, without special ones."""
        return [x.ids for x in self.model.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without special ones."""
        return self.model.decode(tokens, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Writes the files into a folder, tokenizer.json last; makes the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in sorted(self.files, key=lambda name: name == _MODEL):
            write_text(folder / name, self.files[name])


def read_tokenizer(path: str | Path, start: str | None = None) -> Tokenizer:
    """Reads a tokenizer.

    Args:
        path: tokenizer.json, or a folder that holds it.
        start: the token before each document. Default: the bos_token of tokenizer_config.json, else
            its eos_token, else the only special token there is.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is no tokenizer, or has no such token.
    """
    path = Path(path)
    if path.is_dir() and not (path / _MODEL).exists():
        raise ValueError(
            f"expected {path} to hold {_MODEL}, got none; transformers writes it: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained(FOLDER)"
        )
    folder, path = (path, path / _MODEL) if path.is_dir() else (None, path)
    try:
        files = {_MODEL: path.read_text(encoding="utf-8")}
        for name in _BESIDE:
            if folder and (folder / name).exists():
                files[name] = (folder / name).read_text(encoding="utf-8")
        if start is None:
            start = _start_of(json.loads(files.get(_CONFIG, "{}")), json.loads(files[_MODEL]))
        made = Tokenizer({_CONFIG: _config(start)} | files, start)
        number = made.document_start
    except OSError:
        raise
    except BaseException as error:  # tokenizers raises nothing narrower, and Rust's panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"expected {path} to be a tokenizer, got {error}") from error
    if number is None:
        raise ValueError(f"expected {path} to have the token {start!r}, got none of that name")
    return made


def byte_tokenizer() -> Tokenizer:
    """UTF-8 bytes as tokens of the bytes' numbers. 0, which text does not contain, starts a
    document; with special tokens it precedes a text.
    """
    from tokenizers import Tokenizer as Made
    from tokenizers import models

    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # a letter is itself, as in GPT-2
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    letters |= {chr(256 + place): byte for place, byte in enumerate(hidden)}
    names = [DOCUMENT_START_TOKEN, *sorted(letters, key=letters.get)[1:]]
    vocabulary = {name: number for number, name in enumerate(names)}
    return finished(Made(models.BPE(vocab=vocabulary, merges=[])), is_bytes=True)


def finished(model: tokenizers.Tokenizer, is_bytes: bool = False) -> Tokenizer:
    """A byte-level BPE with all around it: one special token, which starts each document.

    is_bytes: there are no merges, so text is not first split into words. Default: False.
    """
    from tokenizers import decoders, pre_tokenizers, processors

    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_bytes)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([DOCUMENT_START_TOKEN])
    start = (DOCUMENT_START_TOKEN, model.token_to_id(DOCUMENT_START_TOKEN))
    model.post_processor = processors.TemplateProcessing(
        single=f"{start[0]} $A", pair=f"{start[0]} $A {start[0]} $B", special_tokens=[start]
    )
    return Tokenizer({_CONFIG: _config(start[0], is_bytes), _MODEL: model.to_str()}, start[0])


def _start_of(config: dict[str, Any], model: dict[str, Any]) -> str:
    """The token that starts a document, as documented for `read_tokenizer`."""
    for role in ("bos_token", "eos_token"):
        token = config.get(role)
        if token is not None:
            return token if isinstance(token, str) else token["content"]
    special = [token["content"] for token in model.get("added_tokens", ()) if token["special"]]
    if len(special) != 1:
        raise ValueError(
            f"no bos_token or eos_token and {len(special)} special tokens; --document-start TOKEN "
            "names the one that starts a document"
        )
    return special[0]


def _config(start: str, is_bytes: bool = False) -> str:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": start,
        "eos_token": start,
        "clean_up_tokenization_spaces": False,
    }
    if is_bytes:
        config["gla_ext_bytes"] = True  # gla_ext.serve then needs no transformers
    return json.dumps(config, indent=2) + "\n"
