"""Prepares the text: manuals, books and dictionaries of Debian's packages, and source code.

`python -m experiments.text --out runs/text` downloads the packages by `apt-get download`, as any
user may, unpacks them there (nothing is installed) and writes `text.tar.xz`, which is all that a
machine without network needs. Run `apt-get update` before. No text is kept in this repository.
With `--train-megabytes` it also writes a smaller pack, from the whole one if that is there.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.pack import Document, shrink, write_pack
from experiments.plain_text import plain_text
from gla_ext.train.data import load_corpus

PACK = Path("runs/text/text.tar.xz")
SMALL_PACK = PACK.with_name("text-small.tar.xz")
CODE_BYTES = 40 << 20  # of the kernel's sources; Python's come on top
DICTIONARY_BYTES = 256 << 10


@dataclass(frozen=True)
class Source:
    """Prose of a package.

    package: its name.
    pattern: which of its files, as `Path.glob` knows it.
    joined: the files of a folder are one document, as of a manual in many pages; else each is one.
    skipped: parts of paths that are left out, such as translations.
    """

    package: str
    pattern: str
    joined: bool = True
    skipped: tuple[str, ...] = ()


SOURCES = (
    Source("anarchism", "**/html/*.html", joined=False),
    Source("apache2-doc", "**/manual/en/**/*.html"),
    Source("bash-doc", "usr/share/doc/bash/*.html", joined=False),
    Source("cmake-doc", "**/_sources/**/*.txt"),
    Source("debian-handbook", "**/en-US/*.html"),
    Source("debian-policy", "**/_sources/**/*.txt"),
    Source("debian-reference-en", "**/*.en.html"),
    Source("developers-reference", "**/_sources/**/*.txt"),
    Source("dict-foldoc", "**/*.dict.dz"),
    Source("dict-gcide", "**/*.dict.dz"),
    Source("dict-jargon", "**/*.dict.dz"),
    Source("dict-wn", "**/*.dict.dz"),
    Source("erlang-doc", "**/*.html"),
    Source("exim4-doc-html", "**/*.html"),
    Source("fortunes", "usr/share/games/fortunes/*", joined=False, skipped=(".dat", ".u8")),
    Source("git-doc", "**/*.txt", skipped=("RelNotes",)),
    Source("installation-guide-amd64", "**/installation-guide-amd64/en/**/*.html"),
    Source("libreoffice-help-en-us", "**/text/**/*.html"),
    Source("linux-doc-6.1", "**/_sources/**/*.txt", skipped=("translations",)),
    Source("manpages", "**/man/man*/*.gz"),
    Source("manpages-dev", "**/man/man*/*.gz"),
    Source("octave-doc", "**/octave.html/*.html"),
    Source("perl-doc", "**/*.pod", joined=False),
    Source("postgresql-doc-15", "**/html/*.html"),
    Source("python-django-doc", "**/html/**/*.html", skipped=("genindex", "_modules", "py-mod")),
    Source("python3.11-doc", "**/_sources/**/*.txt"),
    Source("r-doc-html", "usr/share/R/doc/manual/*.html", joined=False),
    Source("racket-doc", "**/*.html"),
    Source("sqlite3-doc", "**/*.html", joined=False),
    Source("vim-runtime", "**/doc/*.txt", joined=False),
)
KERNEL = "linux-source-6.1"
_KERNEL_FOLDERS = ("block", "crypto", "fs", "ipc", "kernel", "lib", "mm", "net", "security")


def prepare(folder: Path, report: Callable[[str], None] = print) -> Path:
    """Downloads, unpacks and packs; what lies there already is not downloaded again."""
    packages = [source.package for source in SOURCES] + [KERNEL]
    archives = _download(folder / "packages", packages, report)
    documents = []
    for source in SOURCES:
        root = _unpack(folder / "unpacked", archives[source.package])
        found = list(prose(source, root))
        if not found:
            raise ValueError(
                f"expected {source.package} to hold {source.pattern}, got no such file"
            )
        documents += found
        size = sum(len(document.text) for document in found)
        report(f"{source.package}: {len(found)} documents, {size:,} bytes")
    code = list(kernel(_unpack(folder / "unpacked", archives[KERNEL])))
    documents += code
    library = load_corpus()
    documents += [
        Document("code", f"python/{name}", text) for name, text in library.train + library.held_out
    ]
    sources = {package: archive.name.split("_")[1] for package, archive in archives.items()}
    sources["python"] = library.name
    licences = {package: debian_copyright(package, folder, report) for package in archives}
    licences["python"] = python_licence()
    pack = folder / PACK.name
    report("packing, which takes some minutes")
    manifest = write_pack(pack, documents, licences, sources)
    _report_pack(pack, manifest, report)
    return pack


def prepare_small(folder: Path, megabytes: int, report: Callable[[str], None] = print) -> Path:
    """Packs as many megabytes of the text to train on, and all that is held out."""
    whole, small = folder / PACK.name, folder / SMALL_PACK.name
    if not whole.is_file():
        prepare(folder, report)
    report(f"packing a part of {whole}, which takes some minutes")
    _report_pack(small, shrink(whole, small, megabytes * 10**6), report)
    return small


def _report_pack(pack: Path, manifest: dict[str, Any], report: Callable[[str], None]) -> None:
    report(json.dumps({key: manifest[key] for key in manifest if key != "sources"}, indent=2))
    report(f"wrote {pack}, {pack.stat().st_size / 2**20:.1f} MiB")


def prose(source: Source, root: Path) -> Iterator[Document]:
    """The documents of an unpacked package."""
    files = sorted(
        file
        for file in root.glob(source.pattern)
        if file.is_file()
        and not file.is_symlink()
        and not any(part in str(file.relative_to(root)) for part in source.skipped)
    )
    folders: dict[Path, list[bytes]] = {}
    for file in files:
        text = _read(file)
        if b"\0" in text or not text.strip():
            continue
        name = file.relative_to(root).as_posix()
        if file.name.endswith(".dict.dz"):
            for number, piece in enumerate(_pieces(text)):
                yield Document("prose", f"{source.package}/{name}/{number:04}", piece)
        elif source.joined:
            folders.setdefault(file.parent, []).append(text)
        else:
            yield Document("prose", f"{source.package}/{name}", text)
    for folder, texts in folders.items():
        name = folder.relative_to(root).as_posix()
        yield Document("prose", f"{source.package}/{name}", b"\n".join(texts))


def kernel(root: Path) -> Iterator[Document]:
    """C files of the kernel, in the order of a hash of their names, up to CODE_BYTES."""
    (archive,) = root.glob("usr/src/linux-source-*.tar.xz")
    files = {}
    with tarfile.open(archive, "r:xz") as members:
        for member in members:
            _, _, name = member.name.partition("/")
            if name.endswith(".c") and name.split("/")[0] in _KERNEL_FOLDERS and member.isreg():
                files[name] = members.extractfile(member).read()
    left = CODE_BYTES
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = files[name]
        if 0 < len(text) <= left and b"\0" not in text:
            left -= len(text)
            yield Document("code", f"linux/{name}", text)


def debian_copyright(package: str, folder: Path, report: Callable[[str], None] = print) -> bytes:
    """The copyright file of a package. Where its documentation is a link to another package's, as
    of manpages-dev to manpages, the file is there; that package is downloaded if need be.
    """
    archive = _download(folder / "packages", [package], report)[package]
    documentation = _unpack(folder / "unpacked", archive) / "usr/share/doc" / package
    if documentation.is_symlink():
        return debian_copyright(documentation.readlink().name, folder, report)
    file = documentation / "copyright"
    if not file.is_file():
        raise ValueError(f"expected {package} to hold usr/share/doc/{package}/copyright, got none")
    return file.read_bytes()


def python_licence() -> bytes:
    """The licence of this Python's standard library, where Python or Debian keeps it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = (
        Path(os.__file__).with_name("LICENSE.txt"),
        Path("/usr/share/doc", version, "copyright"),
    )
    for file in places:
        if file.is_file():
            return file.read_bytes()
    raise ValueError(f"expected Python's licence as {places[0]} or {places[1]}, got neither")


def _read(file: Path) -> bytes:
    text = file.read_bytes()
    if file.suffix in (".gz", ".dz"):
        text = gzip.decompress(text)
    if file.suffix == ".html":
        text = plain_text(text.decode("utf-8", errors="replace")).encode()
    return text


def _pieces(text: bytes) -> Iterator[bytes]:
    """A dictionary in pieces of about DICTIONARY_BYTES; a headword, at the start of a line, starts
    each.
    """
    start = 0
    while start < len(text):
        headword = re.compile(rb"\n(?=\S)").search(text, start + DICTIONARY_BYTES)
        end = headword.end() if headword else len(text)
        yield text[start:end]
        start = end


def _download(folder: Path, packages: list[str], report: Callable[[str], None]) -> dict[str, Path]:
    """The archive of each package, downloaded if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)

    def there() -> dict[str, Path]:
        return {file.name.split("_")[0]: file for file in sorted(folder.glob("*.deb"))}

    missing = [package for package in packages if package not in there()]
    if missing:
        report(f"downloading {', '.join(missing)}")
        subprocess.run(["apt-get", "--quiet", "download", *missing], cwd=folder, check=True)
    archives = there()
    return {package: archives[package] for package in packages}


def _unpack(folder: Path, archive: Path) -> Path:
    root = folder / archive.name.split("_")[0]
    if not root.exists():
        partial = root.with_name(f"{root.name}.partial-{os.getpid()}")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg-deb", "--extract", archive, partial], check=True)
        partial.rename(root)
    return root


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.text", description="prepares the text of the experiments."
    )
    text = "folder for the packages (400 MB), unpacked (2 GB), and for text.tar.xz"
    parser.add_argument("--out", type=Path, default=PACK.parent, help=f"{text}: {PACK.parent}")
    small = (
        f"also write {SMALL_PACK.name}, with so many MB to train on; text.tar.xz is made if needed"
    )
    parser.add_argument("--train-megabytes", type=int, metavar="MB", help=small)
    options = parser.parse_args(argv)
    try:
        if options.train_megabytes is None:
            prepare(options.out)
        elif options.train_megabytes < 1:
            raise ValueError(
                f"expected --train-megabytes to be at least 1, got {options.train_megabytes}"
            )
        else:
            prepare_small(options.out, options.train_megabytes)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"experiments.text: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
