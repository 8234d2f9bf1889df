"""The weights of another model that a run starts with: of ours, of FLA's, or of a run's folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gla_ext.model.checkpoint import CONFIG_FILE, read_metadata, read_tensors
from gla_ext.model.config import GLAConfig
from gla_ext.model.files import unexpected_values
from gla_ext.model.tensors import read_model
from gla_ext.train.data import Corpus
from gla_ext.train.flags import flag_of
from gla_ext.train.parallel import Tensors, read_whole, under
from gla_ext.train.run_folder import CHECKPOINT, TOKENIZER
from gla_ext.train.tokens.corpus import TokenCorpus
from gla_ext.train.tokens.tokenizer import read_tokenizer


def _checkpoint_of(folder: Path) -> Path | None:
    """The checkpoint of a run that has not ended, which therefore has no model beside it."""
    path = folder / CHECKPOINT
    return path if path.exists() and not (folder / CONFIG_FILE).exists() else None


def initial_config(folder: Path) -> GLAConfig:
    """The configuration; raises the errors of `gla_ext.model.checkpoint.load_model`."""
    if checkpoint := _checkpoint_of(folder):
        with unexpected_values(checkpoint):
            return GLAConfig.from_dict(read_metadata(checkpoint)["config"])
    if not folder.is_dir() or not (folder / CONFIG_FILE).exists():
        raise FileNotFoundError(
            f"expected --init-from to be a folder with {CONFIG_FILE} or {CHECKPOINT}, got {folder}"
        )
    return GLAConfig.load(folder / CONFIG_FILE)


def initial_tensors(folder: Path) -> Tensors:
    """The weights, under the names of `model_tensors`."""
    checkpoint = _checkpoint_of(folder)
    if checkpoint is None:
        return read_model(folder)[1]
    tensors, metadata = read_tensors(checkpoint)
    if metadata.get("sharded"):
        tensors |= read_whole(folder / metadata["sharded"])
    return under("model.", tensors)


def with_sizes(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The options given, with the sizes of the model in a folder.

    Raises:
        ValueError: for another size that was given.
    """
    config = initial_config(folder)
    sizes = {
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_heads,
        "use_short_conv": config.use_short_conv,
    }
    for name, size in sizes.items():
        if given.get(name, size) != size:
            raise ValueError(
                f"expected {flag_of(name)} to be {size}, as in {folder}, got {given[name]}"
            )
    return given | sizes


def config_for(config: GLAConfig, folder: Path, corpus: Corpus | TokenCorpus) -> GLAConfig:
    """The configuration of the model in a folder, for a corpus.

    Raises:
        ValueError: if the corpus has more tokens, or the folder another tokenizer.
    """
    if corpus.vocab_size > config.vocab_size:
        raise ValueError(
            f"expected the text to have at most the {config.vocab_size} tokens of the model in "
            f"{folder}, got {corpus.vocab_size}"
        )
    if (folder / TOKENIZER[-1]).exists():
        digest = corpus.tokenizer.digest
        if read_tokenizer(folder, corpus.tokenizer.start).digest != digest:
            raise ValueError(
                f"expected the text to have the tokenizer of {folder}, got another one "
                f"({digest[:12]}); prepare it with --tokenizer {folder}"
            )
    start = corpus.document_start
    return replace(config, bos_token_id=start, eos_token_id=start)
