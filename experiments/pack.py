"""The text of the experiments in one file: documents, which of them are held out, licences.

A pack is a tar.xz archive: `train/KIND/NAME` and `held_out/KIND/NAME` are documents, KIND is
'prose' or 'code'; `licences/PACKAGE` are the copyright files; `manifest.json` says what it holds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gla_ext.model.files import replacing
from gla_ext.train.data import Corpus

KINDS = ("prose", "code")
HELD_OUT_BYTES = {"prose": 2 << 20, "code": 1 << 20}
LARGEST_HELD_OUT = 512 << 10  # bytes of a document, so that many can be held out


@dataclass(frozen=True)
class Document:
    """A document: its kind, its name, and its bytes without NULs."""

    kind: str
    name: str
    text: bytes


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Documents to train on and held-out ones, in the order of a hash of their names.

    In that order one is held out if it still fits into HELD_OUT_BYTES of its kind; copies of a
    document that came before are left out.
    """
    train, held_out, left, seen = [], [], dict(HELD_OUT_BYTES), set()
    for document in sorted(documents, key=_place):
        digest = hashlib.sha256(document.text).digest()
        if digest in seen:
            continue
        seen.add(digest)
        size = len(document.text)
        if size <= min(left[document.kind], LARGEST_HELD_OUT):
            held_out.append(document)
            left[document.kind] -= size
        else:
            train.append(document)
    return train, held_out


def write_pack(
    path: Path, documents: Iterable[Document], licences: dict[str, bytes], sources: dict[str, str]
) -> dict[str, Any]:
    """Writes a pack, atomically, and returns its manifest.

    Args:
        path: the file.
        documents: the documents, which are split here.
        licences: name of a package to its copyright file.
        sources: name of a package to its version.
    """
    train, held_out = split(documents)
    return _write(path, {"train": train, "held_out": held_out}, licences, sources)


def shrink(pack: Path, path: Path, train_bytes: int) -> dict[str, Any]:
    """Writes a pack with less to train on and all that is held out, and returns its manifest.

    Of each kind, documents are taken in their order that still fit into its share of train_bytes.

    Args:
        pack: the pack that it is taken from.
        path: the file.
        train_bytes: the size of the text to train on, at most.
    """
    manifest = read_manifest(pack)
    left = {
        kind: train_bytes * manifest["train"][kind]["bytes"] // _train_bytes(manifest)
        for kind in KINDS
    }
    parts: dict[str, list[Document]] = {"train": [], "held_out": []}
    licences = {}
    for part, name, text in _members(pack):
        if part == "licences":
            licences[name] = text
            continue
        kind, _, name = name.partition("/")
        if part == "train":
            if len(text) > left[kind]:
                continue
            left[kind] -= len(text)
        parts[part].append(Document(kind, name, text))
    return _write(path, parts, licences, manifest["sources"])


def _write(
    path: Path,
    parts: dict[str, list[Document]],
    licences: dict[str, bytes],
    sources: dict[str, str],
) -> dict[str, Any]:
    manifest: dict[str, Any] = {"sources": sources}
    for part, chosen in parts.items():
        manifest[part] = {
            kind: {
                "documents": sum(d.kind == kind for d in chosen),
                "bytes": sum(len(d.text) for d in chosen if d.kind == kind),
            }
            for kind in KINDS
        }
    prose = manifest["train"]["prose"]["bytes"]
    manifest["prose_share"] = round(prose / max(_train_bytes(manifest), 1), 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, tarfile.open(file, "w:xz", preset=9) as archive:
        _add(archive, "manifest.json", json.dumps(manifest, indent=2).encode())
        for name, text in licences.items():
            _add(archive, f"licences/{name}", text)
        for part, chosen in parts.items():
            for document in chosen:
                _add(archive, f"{part}/{document.kind}/{document.name}", document.text)
    return manifest


def read_pack(path: Path) -> Corpus:
    """The documents of a pack; their names start with their kind.

    Raises:
        FileNotFoundError: no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"expected {path} to be a pack, got no file; `python -m experiments.text` makes one"
        )
    parts: dict[str, list[tuple[str, bytes]]] = {"train": [], "held_out": []}
    for part, name, text in _members(path):
        if part in parts:
            parts[part].append((name, text))
    return Corpus(path.name, tuple(parts["train"]), tuple(parts["held_out"]))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a pack, its first member."""
    with tarfile.open(path, "r:xz") as archive:
        return json.load(archive.extractfile("manifest.json"))


def _members(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Part, name and content of every file of a pack but the manifest."""
    with tarfile.open(path, "r:xz") as archive:
        for member in archive:
            part, _, name = member.name.partition("/")
            if name:
                yield part, name, archive.extractfile(member).read()


def _train_bytes(manifest: dict[str, Any]) -> int:
    return sum(manifest["train"][kind]["bytes"] for kind in KINDS)


def _place(document: Document) -> bytes:
    return hashlib.sha256(os.fsencode(document.name)).digest()


def _add(archive: tarfile.TarFile, name: str, text: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text)
    archive.addfile(member, io.BytesIO(text))
