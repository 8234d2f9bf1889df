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
from collections.abc import Iterable
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
    parts = {"train": train, "held_out": held_out}
    manifest: dict[str, Any] = {"sources": sources}
    for part, chosen in parts.items():
        manifest[part] = {
            kind: {
                "documents": sum(d.kind == kind for d in chosen),
                "bytes": sum(len(d.text) for d in chosen if d.kind == kind),
            }
            for kind in KINDS
        }
    whole = sum(manifest["train"][kind]["bytes"] for kind in KINDS)
    manifest["prose_share"] = round(manifest["train"]["prose"]["bytes"] / max(whole, 1), 4)
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
    with tarfile.open(path, "r:xz") as archive:
        for member in archive:
            part, _, name = member.name.partition("/")
            if part in parts:
                parts[part].append((name, archive.extractfile(member).read()))
    return Corpus(path.name, tuple(parts["train"]), tuple(parts["held_out"]))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a pack, its first member."""
    with tarfile.open(path, "r:xz") as archive:
        return json.load(archive.extractfile("manifest.json"))


def _place(document: Document) -> bytes:
    return hashlib.sha256(os.fsencode(document.name)).digest()


def _add(archive: tarfile.TarFile, name: str, text: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text)
    archive.addfile(member, io.BytesIO(text))
